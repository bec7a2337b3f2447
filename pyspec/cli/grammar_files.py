"""Grammars that a command is given in files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from pyspec.errors import UsageError
from pyspec.grammar import Grammar

_Command = TypeVar("_Command", bound=Callable[..., Any])


def grammar_options(function: _Command) -> _Command:
    """--json-schema and --grammar, for read_grammar."""
    for name, text in (
        ("--grammar", "Write a text of this grammar: GBNF (from its rule root) or Lark (start)."),
        ("--json-schema", "Write JSON that this schema describes."),
    ):
        option = click.option(name, type=click.Path(path_type=Path), metavar="FILE", help=text)
        function = option(function)
    return function


def read_grammar(json_schema: Path | None, grammar: Path | None) -> Grammar | None:
    """The grammar of the one file that is given, if any.

    Raises:
        UsageError: Both are, or the file cannot be read, or what is in it is wrong.
    """
    if json_schema is not None and grammar is not None:
        raise UsageError("--json-schema and --grammar exclude each other")
    path = json_schema or grammar
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason}") from error
    try:
        if json_schema is not None:
            return Grammar.json_schema(json.loads(text))
        is_gbnf = re.search(r"^\s*root\s*::=", text, re.MULTILINE)
        return Grammar.gbnf(text) if is_gbnf else Grammar.lark(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{path} is nested too deeply") from error
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
