"""What measurements of a pair write: the user's prompts from files, and settings of the texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from pyspec.errors import UsageError
from pyspec.sampling import SamplingParams

_Command = TypeVar("_Command", bound=Callable[..., Any])

prompts_option = click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    multiple=True,
    help="Prompts to use instead of the built-in ones, separated by blank lines; repeatable.",
)


def measurement_options(function: _Command) -> _Command:
    """What texts a measurement writes, and how its result is shown."""
    for option in (
        click.option(
            "--json", "as_json", is_flag=True, help="Print one JSON object with all figures."
        ),
        click.option(
            "--seed",
            type=click.IntRange(0, 2**64 - 1),
            default=0,
            show_default=True,
            help="What all random numbers are made from.",
        ),
        click.option(
            "-n",
            "--tokens",
            type=click.IntRange(2),
            default=64,
            show_default=True,
            help="Length of a text.",
        ),
        click.option(
            "--temp",
            "temperature",
            type=float,
            default=SamplingParams().temperature,
            show_default=True,
            help="Temperature of the texts; 0 is greedy.",
        ),
        prompts_option,
    ):
        function = option(function)
    return function


def read_prompts(paths: Iterable[Path]) -> list[str]:
    """The prompts of all files; bytes that are no text are kept for the tokenizer.

    Raises:
        UsageError: A file cannot be read, or has no prompts.
    """
    return [prompt for path in paths for prompt in _prompts_of(path)]


def _prompts_of(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    prompts = [prompt for prompt in re.split(r"\n\s*\n", text.strip()) if prompt]
    if not prompts:
        raise UsageError(f"{path} has no prompts: write some, separated by blank lines")
    return prompts
