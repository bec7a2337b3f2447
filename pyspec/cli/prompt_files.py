"""Prompts that a measurement takes from files of the user."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import click

from pyspec.errors import UsageError

prompts_option = click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    multiple=True,
    help="Prompts to use instead of the built-in ones, separated by blank lines; repeatable.",
)


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
