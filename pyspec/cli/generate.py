"""`pyspec generate`: write a continuation or an answer to standard output."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pyspec import bridge, chat
from pyspec.cli.answer import coloured, has_colours
from pyspec.cli.grammar_files import grammar_options, read_grammar
from pyspec.cli.options import debug_option, model_options, sampling_options
from pyspec.cli.pair import ModelChoice
from pyspec.cli.progress import prefill_progress
from pyspec.errors import UsageError
from pyspec.metrics import Statistics
from pyspec.output import Piece
from pyspec.sampling import SamplingParams


class _StatsCommand(click.Command):
    """Lets --stats stand alone as well as before its value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args = list(args)
        options_end = args.index("--") if "--" in args else len(args)
        for index in range(options_end):
            if args[index] == "--stats":
                if index + 1 < options_end and args[index + 1] == "json":
                    args[index : index + 2] = ["--stats=json"]
                    options_end -= 1
                else:
                    args[index] = "--stats=text"
            if index + 1 >= options_end:
                break
        return super().parse_args(ctx, args)


@click.command(name="generate", cls=_StatsCommand)
@click.argument("prompt", required=False)
@click.option(
    "-f",
    "--file",
    type=click.Path(path_type=Path),
    help="Read the prompt from a file (- is stdin).",
)
@model_options
@sampling_options
@grammar_options
@click.option("--system", metavar="TEXT", help="A system message before the prompt.")
@click.option(
    "--raw", is_flag=True, help="Continue the prompt as it is, without the chat template."
)
@click.option(
    "--stats",
    metavar="[json]",
    help="Show statistics on stderr; with json, as one line.",
)
@click.option("--show-drafts", is_flag=True, help="Colour accepted draft tokens on a terminal.")
@debug_option
def command(
    prompt: str | None,
    file: Path | None,
    models: ModelChoice,
    system: str | None,
    raw: bool,
    stats: str | None,
    show_drafts: bool,
    json_schema: Path | None,
    grammar: Path | None,
    **sampling: Any,
) -> None:
    """Write an answer to PROMPT, or to --file, or to what comes on standard input.

    The text streams to standard output and nothing else goes there.
    """
    if stats not in (None, *_STATS):
        raise UsageError(f"--stats takes json or nothing, not {stats}")
    if system is not None and raw:
        raise UsageError("--system needs the chat template, which --raw turns off")
    params = SamplingParams(**sampling, grammar=read_grammar(json_schema, grammar))
    text = _read_prompt(prompt, file)
    target_path, drafts = models.resolve()
    console = Console(stderr=True)
    with console.status(f"loading {target_path.name}"):
        engine = models.engine(target_path, drafts)
    if notice := bridge.notice():
        click.echo(f"pyspec: {notice}", err=True)
    with engine:
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        ids = text if raw else chat.prompt_ids(engine.target, messages)
        with prefill_progress(console) as on_prefill:
            pieces = engine.generate(ids, params, rule=models.rule, on_prefill=on_prefill)
            first = next(pieces)
        statistics = _stream(chain([first], pieces), show_drafts)
    if stats:
        click.echo(_STATS[stats](statistics), err=True)


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise UsageError("give the prompt as an argument or with --file, not both")
    if prompt is not None:
        text = prompt
    elif file is not None and str(file) != "-":
        try:
            text = file.read_bytes().decode("utf-8", "replace")
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror}") from error
    elif file is None and sys.stdin.isatty():
        raise UsageError("no prompt: give it as an argument, with --file, or on standard input")
    else:
        text = sys.stdin.buffer.read().decode("utf-8", "replace")
    # The newline with which files and echo end is no part of what was said.
    text = text.removesuffix("\n")
    if not text:
        raise UsageError("the prompt is empty: there is nothing to continue")
    return text


def _stream(pieces: Iterable[Piece], show_drafts: bool) -> Statistics:
    """Print each piece as it comes, and return the statistics, which the last one brings."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        # A terminal that cannot show a character shows a replacement, and the text goes on.
        out.reconfigure(errors="replace")
    terminal = out.isatty()
    drafts_in_colour = show_drafts and has_colours(out)
    ends_line, statistics = True, Statistics()
    for piece in pieces:
        if piece.text:
            out.write(coloured(piece) if drafts_in_colour else piece.text)
            out.flush()
            ends_line = piece.text.endswith("\n")
        statistics = piece.statistics or statistics
    if terminal and not ends_line:
        out.write("\n")
        out.flush()
    return statistics


def _as_text(statistics: Statistics) -> str:
    """A few lines for a person."""
    s = statistics
    lines = [
        f"{s.completion_tokens} tokens at {_figure(s.tokens_per_second)} tokens/s after a prompt of "
        f"{s.prompt_tokens} (first text after {_figure(s.ttft_s)} s), finish: {s.finish_reason}"
    ]
    if s.drafted:
        rate = 100 * s.acceptance_rate if s.acceptance_rate is not None else None
        lines.append(
            f"{s.rounds} rounds of {_figure(s.tokens_per_round)} tokens; {s.accepted} of {s.verified} "
            f"verified draft tokens accepted ({_figure(rate)} %), {s.drafted} drafted; "
            f"rounds by accepted tokens: {' '.join(map(str, s.accepted_histogram))}"
        )
    if len(s.sources) > 1:
        lines += [
            f"  {name}: {c.accepted} of {c.verified} accepted in {c.rounds} rounds"
            for name, c in s.sources.items()
        ]
    if s.predicted_tokens_per_second is not None:
        lines.append(f"planned for {_figure(s.predicted_tokens_per_second)} tokens/s")
    lines.append(
        f"prefill {s.prefill_s:.2f} s, draft {s.draft_s:.2f} s, verify {s.verify_s:.2f} s, "
        f"sample {s.sample_s:.2f} s; seed {s.seed}"
    )
    lines.append("bit-exact: " + ("yes" if s.bit_exact else f"no ({s.bit_exact_reason})"))
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _as_json(statistics: Statistics) -> str:
    return json.dumps(statistics.as_dict())


_STATS: dict[str, Callable[[Statistics], str]] = {"text": _as_text, "json": _as_json}
