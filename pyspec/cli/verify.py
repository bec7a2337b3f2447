"""`pyspec verify`: check on the user's own models and machine that speculation changes nothing."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from importlib import metadata
from pathlib import Path

import click

from pyspec import llama
from pyspec.cli.options import debug_option, model_options
from pyspec.cli.pair import ModelChoice, resolve_pair
from pyspec.cli.progress import step_bars
from pyspec.cli.prompt_files import prompts_option, read_prompts
from pyspec.errors import UsageError
from pyspec.llama import Model
from pyspec.sampling import Rule
from pyspec.verify import QUICK, THOROUGH, Result, Setup, verify

_OUTCOMES = {True: "ok", False: "FAILED", None: "skipped"}
_COLOURS = {True: "green", False: "bold red", None: "yellow"}
_HEADER = ("check", "what", "result", "detail")


@click.command(name="verify")
@model_options
@click.option(
    "--quick/--thorough",
    default=True,
    show_default=True,
    help="A minute or two, or many: more positions, widths, texts and samples.",
)
@prompts_option
@click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    default=0,
    show_default=True,
    help="What all random numbers of the checks are made from.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with all figures.")
@debug_option
def command(
    models: ModelChoice,
    quick: bool,
    prompts: Sequence[Path],
    seed: int,
    as_json: bool,
) -> None:
    """Check that target and draft together write what the target alone would.

    Three kinds of checks: logits are the same bits in wide passes and after rollbacks; greedy and
    coupled texts are the same with any draft; drawn tokens have the target's distribution, by a test
    that catches samplers which are known to be broken. Exit status 1 if any fails.
    """
    texts = read_prompts(prompts)
    if len(models.draft) > 1:
        raise UsageError("drafts are checked one at a time: name one with --draft")
    paths = resolve_pair(models.model, next(iter(models.draft), None), no_draft=models.no_draft)
    start = time.perf_counter()
    with ExitStack() as stack:
        target_model, draft_model = (
            None if path is None else stack.enter_context(closing(Model(path))) for path in paths
        )
        assert target_model is not None
        setup = Setup(
            target=target_model,
            draft=draft_model,
            effort=QUICK if quick else THOROUGH,
            prompts=texts,
            gamma=models.gamma,
            rule=Rule(models.rule),
            n_ctx=models.ctx,
            threads=models.threads,
            draft_threads=models.draft_threads,
            seed=seed,
            progress=stack.enter_context(step_bars()),
        )
        results = []
        for result in verify(setup):
            results.append(result)
            if not as_json and not sys.stdout.isatty():
                click.echo("\t".join(_cells(result)))
    seconds = time.perf_counter() - start
    if as_json:
        click.echo(json.dumps(_report(setup, quick, results, seconds)))
    else:
        if sys.stdout.isatty():
            _print_table(results)
        click.echo(_conclusion(results, seconds))
    if any(result.passed is False for result in results):
        sys.exit(1)


def _cells(result: Result) -> tuple[str, str, str, str]:
    return result.check, result.subject, _OUTCOMES[result.passed], result.detail


def _print_table(results: Iterable[Result]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*_HEADER, box=None, padding=(0, 1, 0, 0))
    for result in results:
        check, subject, outcome, detail = map(Text, _cells(result))
        outcome.stylize(_COLOURS[result.passed])
        table.add_row(check, subject, outcome, detail)
    Console().print(table)


def _conclusion(results: Sequence[Result], seconds: float) -> str:
    """The one line that says it all."""
    skipped = [result for result in results if result.passed is None]
    failed = [result for result in results if result.passed is False]
    run = len(results) - len(skipped)
    also = f", {len(skipped)} skipped" if skipped else ""
    if failed:
        names = "; ".join(f"{result.check} ({result.subject})" for result in failed)
        return f"FAILED: {len(failed)} of {run} checks{also}, in {seconds:.0f} s: {names}"
    return f"All {run} checks passed{also}, in {seconds:.0f} s"


def _report(
    setup: Setup, quick: bool, results: Sequence[Result], seconds: float
) -> dict[str, object]:
    return {
        "passed": all(result.passed is not False for result in results),
        "target": setup.target.name,
        "draft": None if setup.draft is None else setup.draft.name,
        "effort": "quick" if quick else "thorough",
        "gamma": setup.gamma,
        "rule": setup.rule.value,
        "seed": setup.seed,
        "seconds": round(seconds, 3),
        "versions": {
            "pyspec": metadata.version("pyspec"),
            "llama-cpp-python": llama.version(),
            "llama.cpp": llama.llama_cpp_version(),
        },
        "results": [
            {
                **{
                    name: value
                    for name, value in dataclasses.asdict(result).items()
                    if name != "figures"
                },
                **result.figures,
            }
            for result in results
        ],
    }
