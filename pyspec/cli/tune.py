"""`pyspec tune`: measure what drafting brings on the user's own machine, models and prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import click

from pyspec import chat
from pyspec.cli.options import debug_option, pair_options
from pyspec.cli.pair import resolve_pair
from pyspec.cli.progress import step_bars
from pyspec.cli.prompt_files import measurement_options, read_prompts
from pyspec.errors import UsageError
from pyspec.llama import Model
from pyspec.sampling import Rule, SamplingParams
from pyspec.tune import PROMPTS, Report, Setup, Speed, tune


@click.command(name="tune")
@pair_options
@measurement_options
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Draw the costs and the speed-up into a PNG (needs matplotlib).",
)
@debug_option
def command(
    model: str | None,
    draft: str | None,
    rule: str,
    ctx: int | None,
    threads: int | None,
    draft_threads: int | None,
    prompts: Sequence[Path],
    temperature: float,
    tokens: int,
    seed: int,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Measure how fast a pair writes at several draft lengths, and why.

    Timed are passes of the target over one token and more, a step of the draft, both with other numbers
    of threads, and texts at several draft lengths; from the costs and from how many drafted tokens are
    accepted follows the speed that one should expect. It takes a minute or two and says whether
    drafting pays.
    """
    if plot is not None:
        # Said before the measurement and not after it.
        from pyspec.tune.plot import check_matplotlib

        check_matplotlib()
    texts = read_prompts(prompts) or PROMPTS
    target_path, draft_path = resolve_pair(model, draft, no_draft=False)
    if draft_path is None:
        raise UsageError("there is no draft to measure: name one with --draft")
    with ExitStack() as stack:
        target_model = stack.enter_context(closing(Model(target_path)))
        draft_model = stack.enter_context(closing(Model(draft_path)))
        setup = Setup(
            target=target_model,
            draft=draft_model,
            prompts=[chat.message_ids(target_model, text) for text in texts],
            params=SamplingParams(temperature=temperature, seed=seed),
            tokens=tokens,
            rule=Rule(rule),
            n_ctx=ctx,
            threads=threads,
            draft_threads=draft_threads,
            progress=stack.enter_context(step_bars()),
        )
        report = tune(setup)
    if as_json:
        about = {"target": target_path.name, "draft": draft_path.name, "temperature": temperature}
        about |= {"seed": seed, "prompts": len(texts), "tokens": tokens}
        click.echo(json.dumps({**about, **report.as_dict()}))
    else:
        _print(report)
    if plot is not None:
        from pyspec.tune.plot import draw

        draw(report, f"{target_path.name} with {draft_path.name}", plot)


class _Table(NamedTuple):
    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def _tables(report: Report) -> Iterator[_Table]:
    costs, acceptance = report.costs, report.acceptance
    yield _Table(
        "What passes cost",
        ("pass", "ms", "of a plain pass"),
        [
            *(
                (
                    f"target, {width} token{'s' * (width > 1)}",
                    _ms(seconds),
                    f"{seconds / costs.target(1):.2f}",
                )
                for width, seconds in zip(costs.target.widths, costs.target.seconds, strict=True)
            ),
            ("draft, a step", _ms(costs.draft), f"{costs.c:.2f}"),
        ],
    )
    yield _Table(
        "With other threads, ms",
        ("threads", "target, 1 token", "target, 5 tokens", "draft, a step"),
        [
            (f"{t.threads}", _ms(t.target_one), _ms(t.target_several), _ms(t.draft))
            for t in report.by_threads
        ],
    )
    yield _Table(
        "How drafted tokens fare",
        ("position", "decided on", "accepted", "share"),
        [
            (f"{position}", f"{examined}", f"{accepted}", f"{share:.2f}")
            for position, (examined, accepted, share) in enumerate(
                zip(acceptance.examined, acceptance.accepted, acceptance.by_position, strict=True),
                start=1,
            )
        ],
    )
    yield _Table(
        "What draft lengths bring",
        ("gamma", "tokens a round", "tokens/s", "speed-up", "predicted", "paper's formula"),
        [
            *(
                (*_measured(speed), f"{speed.predicted:.2f}", f"{speed.paper:.2f}")
                for speed in report.speeds
            ),
            (*_measured(report.auto), "", ""),
        ],
    )


def _measured(speed: Speed) -> tuple[str, ...]:
    return (
        f"{speed.gamma}",
        f"{speed.tokens_per_round:.2f}",
        f"{speed.tokens_per_second:.1f}",
        f"{speed.speedup:.2f}",
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _print(report: Report) -> None:
    """Tables on a terminal, tab-separated lines otherwise, and the conclusion."""
    a, c = report.acceptance.rate, report.costs.c
    formula = f"a = {a:.3f} accepted, c = {c:.3f} of a plain pass for a draft step"
    if not sys.stdout.isatty():
        for table in _tables(report):
            click.echo(table.title)
            for row in (table.header, *table.rows):
                click.echo("\t".join(row))
            click.echo()
    else:
        from rich.console import Console
        from rich.table import Table

        for table in _tables(report):
            shown = Table(title=table.title, title_justify="left", box=None, padding=(0, 2, 0, 0))
            for name in table.header:
                shown.add_column(name, justify="right")
            for row in table.rows:
                shown.add_row(*row)
            Console().print(shown)
            click.echo()
    click.echo(formula)
    click.echo(report.conclusion)
