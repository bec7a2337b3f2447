"""How text shows as it is written: plainly, with accepted draft tokens in colour, or as Markdown."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Protocol, TextIO

import click

from pyspec.output import Piece, Source

# ESC and its like would be commands to a terminal: it shows their pictures instead.
_PICTURES: dict[int, int | None] = {code: 0x2400 + code for code in range(0x20)}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
_PICTURES |= {ord("\n"): ord("\n"), ord("\t"): ord("\t"), ord("\r"): None}


def printable(text: str) -> str:
    """Text without what a terminal would take as a command."""
    return text.translate(_PICTURES)


def has_colours(out: TextIO) -> bool:
    """Whether what is written there may be coloured."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return out.isatty() and not plain


def coloured(piece: Piece) -> str:
    """The piece's text, its accepted draft tokens in green."""
    return "".join(
        click.style(token.text, fg="green") if token.source is Source.DRAFT else token.text
        for token in piece.tokens
    )


class AnswerStream(Protocol):
    """Shows one answer as it comes."""

    def show(self, piece: Piece) -> None:
        """Take more of the answer."""

    def finish(self) -> None:
        """Show what is left, down to the end of its line."""


def answer_stream(*, drafts: bool) -> AnswerStream:
    """Show an answer on stdout in the best way that it is able to.

    Args:
        drafts: Show accepted draft tokens rather than Markdown, where there are colours.
    """
    if has_colours(sys.stdout) and not drafts:
        return _RenderedStream(sys.stdout)
    return _PlainStream(sys.stdout, drafts=drafts)


class _PlainStream:
    def __init__(self, out: TextIO, *, drafts: bool) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._drafts = drafts and has_colours(out)
        # A terminal needs no line for an answer that never came.
        self._ends_line = self._is_terminal

    def show(self, piece: Piece) -> None:
        if self._is_terminal:
            tokens = (replace(token, text=printable(token.text)) for token in piece.tokens)
            piece = replace(piece, tokens=tuple(tokens))
        if piece.text:
            self._out.write(coloured(piece) if self._drafts else piece.text)
            self._out.flush()
            self._ends_line = piece.text.endswith("\n")

    def finish(self) -> None:
        if not self._ends_line:
            self._out.write("\n")
            self._out.flush()


class _RenderedStream:
    def __init__(self, out: TextIO) -> None:
        from rich.console import Console

        from pyspec.cli.markdown import MarkdownStream

        self._markdown = MarkdownStream(Console(file=out))

    def show(self, piece: Piece) -> None:
        self._markdown.write(printable(piece.text))

    def finish(self) -> None:
        self._markdown.finish()
