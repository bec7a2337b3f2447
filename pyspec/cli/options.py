"""Options that several commands share."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar, cast

import click

from pyspec.cli.models import complete_model
from pyspec.cli.pair import ModelChoice
from pyspec.engine import AUTO, DEFAULT_CONTEXT, Gamma
from pyspec.sampling import Rule, SamplingParams

_Command = TypeVar("_Command", bound=Callable[..., Any])
_DEFAULTS = SamplingParams()


class _GammaType(click.ParamType):  # type: ignore[type-arg]
    name = "N|auto"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Gamma:
        if value == AUTO:
            return AUTO
        return int(click.INT.convert(value, param, ctx))


def _decorated(function: _Command, options: Sequence[Callable[[_Command], _Command]]) -> _Command:
    for option in reversed(options):
        function = option(function)
    return function


def _enable_debug(_ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        logging.getLogger().setLevel(logging.DEBUG)


def debug_option(function: _Command) -> _Command:
    """--debug, where a user would add it: after the command."""
    return click.option(
        "--debug",
        is_flag=True,
        expose_value=False,
        callback=_enable_debug,
        help="Show log lines and the traceback of an error.",
    )(function)


def _draft_option(*, several: bool) -> Callable[[_Command], _Command]:
    text = "Draft model. Without it, the one that goes with the target, if it has a name."
    also = " ngram copies from the text itself. Can be given several times."
    return click.option(
        "-d",
        "--draft",
        metavar="MODEL",
        multiple=several,
        shell_complete=complete_model,
        help=text + also if several else text,
    )


def pair_options(function: _Command) -> _Command:
    """Which target and draft, and what they may use."""
    return _models(function, several_drafts=False)


def _models(function: _Command, *, several_drafts: bool) -> _Command:
    return _decorated(
        function,
        [
            click.option(
                "-m",
                "--model",
                metavar="MODEL",
                shell_complete=complete_model,
                help="Target: a GGUF file, a name of `pyspec models list`, or ORG/REPO:FILE. "
                "Without it, the default pair.",
            ),
            _draft_option(several=several_drafts),
            click.option(
                "--rule",
                type=click.Choice([rule.value for rule in Rule]),
                default=Rule.BLOCK.value,
                show_default=True,
                help="How drafted tokens are verified. With coupled, a seed writes the same text with "
                "any draft or none.",
            ),
            click.option(
                "--ctx",
                type=int,
                metavar="N",
                help="Tokens of context, prompt and output together.  "
                f"[default: {DEFAULT_CONTEXT}, or what the model was trained for]",
            ),
            click.option(
                "--threads", type=int, metavar="N", help="Threads.  [default: physical cores]"
            ),
            click.option(
                "--draft-threads",
                type=int,
                metavar="N",
                help="Threads of the draft.  [default: as --threads]",
            ),
        ],
    )


def model_options(function: _Command) -> _Command:
    """Which models and what they may use, and whether and how far to draft: a ModelChoice, as `models`."""

    @functools.wraps(function)
    def with_choice(**values: Any) -> Any:
        choice = ModelChoice(
            **{field.name: values.pop(field.name) for field in fields(ModelChoice)}
        )
        return function(models=choice, **values)

    drafting = [
        click.option("--no-draft", is_flag=True, help="Decode with the target alone."),
        click.option(
            "--gamma",
            type=_GammaType(),
            default=AUTO,
            show_default=True,
            help="Tokens drafted a round; auto chooses anew in each, by what passes cost on this machine and "
            "what has been accepted.",
        ),
    ]
    return _models(cast(_Command, _decorated(with_choice, drafting)), several_drafts=True)


def sampling_options(function: _Command) -> _Command:
    """How tokens are drawn."""

    def number(name: str, field: str, type_: type, text: str) -> Callable[[_Command], _Command]:
        return click.option(
            name,
            field,
            type=type_,
            default=getattr(_DEFAULTS, field),
            show_default=True,
            help=text,
        )

    return _decorated(
        function,
        [
            click.option(
                "-n",
                "--max-tokens",
                type=int,
                metavar="N",
                help="Most tokens to write.  [default: until the model ends]",
            ),
            number("--temp", "temperature", float, "Temperature; 0 is greedy."),
            number("--top-k", "top_k", int, "Keep the K likeliest tokens; 0 keeps all."),
            number("--top-p", "top_p", float, "Keep the likeliest tokens that reach P together."),
            number("--min-p", "min_p", float, "Keep tokens P times as likely as the likeliest."),
            number("--repeat-penalty", "repeat_penalty", float, "Penalise repeated tokens."),
            number(
                "--frequency-penalty",
                "frequency_penalty",
                float,
                "Penalty for each past occurrence.",
            ),
            number("--presence-penalty", "presence_penalty", float, "Penalty of having occurred."),
            number("--repeat-last-n", "repeat_last_n", int, "Tokens that penalties look back on."),
            click.option("--seed", type=int, help="The same seed writes the same text."),
            click.option(
                "--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable."
            ),
        ],
    )
