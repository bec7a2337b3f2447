"""Markdown on a terminal while it is being written.

Every character is shown once and nothing is shown over: there is no flicker, what has scrolled away is right,
and a terminal may change its size at any time. So a piece of text is shown as soon as more text cannot change
its look: a word when it ends, an emphasis when it closes, a line of code when it is complete, a table when
it is over. What turns out not to be Markdown is shown as it is.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

# The beginnings of lines that may yet become a list, a heading, a rule, a table or a fence.
_UNDECIDED = re.compile(r"[\s\-*+#>_=~`|.)0-9]*|\s*(```|~~~|\|).*")
_FENCE = re.compile(r"\s*(?P<marker>`{3,}|~{3,})\s*(?P<language>[^\s`]*)[^`]*")
_RULE = re.compile(r"\s*([-*_])(\s*\1){2,}\s*")
_HEADING = re.compile(r"(?P<level>#{1,6})\s+")
_QUOTE = re.compile(r"(?:> ?)+")
_ITEM = re.compile(r"(?P<marker>[-*+]|\d{1,9}[.)])\s+(?=\S)")
_TABLE_BORDER = re.compile(r"\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*")
_CELL_END = re.compile(r"(?<!\\)\|")

# Not every space: a line is not to be broken at a no-break space.
_SPACE = re.compile(r"([ \t]+)")
_JOINER = "\u200d"  # what emoji are joined with
_DELIMITER = re.compile(r"\\(?:[\\`*_~|]|\Z)|`+|\*+|_+|~+")
_EMPHASES = {"*": "italic", "_": "italic", "**": "bold", "__": "bold", "~~": "strike"}
_EMPHASES |= {"***": "bold italic", "___": "bold italic"}
_CODE = "cyan"
_HEADINGS = {1: "bold magenta", 2: "bold magenta"}
_MARKUP = "dim"
# A table needs this many columns of the terminal for each of its own; otherwise its source is shown.
_NARROWEST_CELL = 6


class MarkdownStream:
    """Shows one text in Markdown as it comes.

    Args:
        console: Where to. Its width is asked anew for each word.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._out = Text(end="")
        self._words = _Words(console, self._out)
        self._table: list[str] = []
        # The open fence: what closes it, what colours it, and its lines so far.
        self._fence = ""
        self._syntax = Syntax("", "text")
        self._code: list[str] = []
        self._begin_line()

    def _begin_line(self) -> None:
        self._source = ""  # as far as it is not shown
        self._before = ""  # the character before that
        self._is_text = False  # whether the line is known to be neither code nor of a table
        self._style = ""

    def write(self, text: str) -> None:
        """Take more text, without control characters, and show what can be shown."""
        first, *others = text.split("\n")
        self._source += first
        for line in others:
            self._end_line()
            self._source = line
        if not self._fence and (self._is_text or not _UNDECIDED.fullmatch(self._source)):
            self._text(is_whole=False)
        self._flush()

    def finish(self) -> None:
        """Show what is left, down to the end of its line."""
        if self._source or self._is_text:
            self._end_line()
        self._end_table()
        self._flush()

    def _flush(self) -> None:
        if self._out:
            self._console.print(self._out, end="", soft_wrap=True, highlight=False)
            self._console.file.flush()
            self._out = Text(end="")
            self._words.out = self._out

    def _end_line(self) -> None:
        line = self._source
        if self._fence:
            self._code_line(line)
        elif self._is_text:
            self._text(is_whole=True)
        elif line.lstrip().startswith("|"):
            self._table.append(line)
        elif fence := _FENCE.fullmatch(line):
            self._begin_code(fence)
        elif _RULE.fullmatch(line):
            self._end_table()
            self._out.append("─" * min(self._console.width, 40) + "\n", _MARKUP)
        else:
            self._text(is_whole=True)
        self._begin_line()

    # ---- lines of text -------------------------------------------------------------------------------------

    def _text(self, *, is_whole: bool) -> None:
        """Show what is certain of a line, which is over or not."""
        if not self._is_text:
            self._end_table()
            self._begin_text()
        shown = _show_inline(
            self._source, self._style, self._words.put, before=self._before, is_whole=is_whole
        )
        self._before = self._source[:shown][-1:] or self._before
        self._source = self._source[shown:]
        if is_whole:
            self._words.end_line()

    def _begin_text(self) -> None:
        """Show the mark that a line begins with, and learn how the rest looks."""
        self._is_text = True
        text = self._source.lstrip(" \t")
        mark = self._source[: len(self._source) - len(text)].expandtabs(4)
        if len(mark) < 4 and (heading := _HEADING.match(text)):
            self._style = _HEADINGS.get(len(heading["level"]), "bold")
            text = text[heading.end() :]
        elif quote := _QUOTE.match(text):
            mark += "▌ " * quote[0].count(">")
            self._style = "italic"
            text = text[quote.end() :]
        elif item := _ITEM.match(text):
            mark += ("•" if item["marker"] in "-*+" else item["marker"]) + " "
            text = text[item.end() :]
        self._source = text
        self._words.begin_line(mark)

    # ---- code ----------------------------------------------------------------------------------------------

    def _begin_code(self, fence: re.Match[str]) -> None:
        self._end_table()
        self._fence, self._code = fence["marker"], []
        self._syntax = Syntax(
            "", fence["language"] or "text", theme="ansi_dark", background_color="default"
        )
        self._out.append(fence[0] + "\n", _MARKUP)

    def _code_line(self, line: str) -> None:
        stripped = line.strip()
        if stripped.startswith(self._fence) and not stripped.strip(self._fence[0]):
            self._fence = ""
            self._out.append(line + "\n", _MARKUP)
            return
        line = line.expandtabs(8)
        self._code.append(line)
        # From the fence on, so that comments and strings of several lines are known as such.
        lines = self._syntax.highlight("\n".join(self._code)).split("\n", allow_blank=True)
        at = len(self._code) - 1
        is_there = at < len(lines) and lines[at].plain == line
        self._out.append_text(lines[at] if is_there else Text(line)).append("\n")

    # ---- tables --------------------------------------------------------------------------------------------

    def _end_table(self) -> None:
        """Show the lines that were kept because they look like a table's."""
        lines, self._table = self._table, []
        rows = [_cells(line) for line in lines]
        n_columns = max(map(len, rows), default=0)
        if (
            len(lines) < 2
            or not _TABLE_BORDER.fullmatch(lines[1])
            or n_columns * _NARROWEST_CELL > self._console.width
        ):
            self._out.append("".join(line + "\n" for line in lines))
            return
        header, border, *rows = (row + [""] * (n_columns - len(row)) for row in rows)
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for cell, sides in zip(header, border, strict=True):
            table.add_column(_cell(cell), justify=_justify(sides), overflow="fold")
        for row in rows:
            table.add_row(*map(_cell, row))
        self._flush()
        self._console.print(table)


def _cells(row: str) -> list[str]:
    row = row.strip().removeprefix("|")
    cells = [cell.strip() for cell in _CELL_END.split(row)]
    return cells[:-1] if len(cells) > 1 and not cells[-1] else cells


def _cell(source: str) -> Text:
    """A cell's text with its emphases."""
    text = Text()
    _show_inline(source, "", lambda part, style: text.append(part, style), is_whole=True)
    return text


def _justify(border: str) -> Literal["left", "center", "right"]:
    if border.endswith(":"):
        return "center" if border.startswith(":") else "right"
    return "left"


# ---- words -------------------------------------------------------------------------------------------


class _Words:
    """Fills lines with words; those after the first line of a list item stand under its text.

    Attributes:
        out: What is to be shown next.
    """

    def __init__(self, console: Console, out: Text) -> None:
        self._console = console
        self.out = out
        self._column = self._hang = 0
        self._space, self._word = "", Text()

    def begin_line(self, mark: str) -> None:
        """Begin a line with a mark, such as a list's bullet."""
        self.out.append(mark, _MARKUP)
        self._column = cell_len(mark)
        self._hang = self._column if self._column <= self._console.width // 2 else 0

    def put(self, text: str, style: str) -> None:
        """Add to the word that is being written, and show those that end."""
        for part in _SPACE.split(text):
            if part[:1] in (" ", "\t"):
                self._end_word()
                self._space += " " * len(part)
                continue
            begin = 0
            for at, character in enumerate(part):
                before = part[at - 1] if at else self._word.plain[-1:]
                if _may_begin_line(character) and before != _JOINER:
                    self._word.append(part[begin:at], style)
                    self._end_word()
                    begin = at
            self._word.append(part[begin:], style)

    def end_line(self) -> None:
        """Show the last word and go to the next line."""
        self._end_word()
        self._space = ""
        self.out.append("\n")

    def _end_word(self) -> None:
        """Show a word, on the next line if it does not fit on this one."""
        if not self._word:
            return
        width, space = self._console.width, self._space
        n_cells = self._word.cell_len
        if self._column > self._hang and self._column + len(space) + n_cells > width:
            self.out.append("\n" + " " * self._hang)
            self._column, space = self._hang, ""
        self.out.append(space).append_text(self._word)
        self._column += len(space) + n_cells
        if self._column > width:
            self._column %= width  # the terminal broke a word that is longer than a line
        self._space, self._word = "", Text()


def _may_begin_line(character: str) -> bool:
    """Whether a line may be broken before it, as between the characters of Chinese and Japanese."""
    return (
        character >= "\u1100"
        and cell_len(character) == 2
        and not unicodedata.category(character).startswith("P")
    )


# ---- emphases and code inside of a line --------------------------------------------------------------


def _show_inline(
    source: str, style: str, put: Callable[[str, str], object], *, before: str = "", is_whole: bool
) -> int:
    """Show text without the delimiters that make parts of it emphases or code.

    Args:
        source: The text.
        style: What it is besides.
        put: Shows a part with a style.
        before: The character before it.
        is_whole: Nothing will follow; otherwise what may yet be the beginning of an emphasis is left.

    Returns:
        How much of the source was shown.
    """
    at = 0
    while delimiter := _DELIMITER.search(source, at):
        begin, end = delimiter.span()
        put(source[at:begin], style)
        if not is_whole and end == len(source):
            return begin
        mark = delimiter[0]
        close = _closing(source, delimiter, source[:begin][-1:] or before, is_whole)
        if close == _UNKNOWN:
            return begin
        if mark[0] == "\\":
            put(mark[1:] or mark, style)
            at = end
        elif close is None:
            put(mark, style)
            at = end
        elif mark[0] == "`":
            put(source[end:close], f"{style} {_CODE}")
            at = close + len(mark)
        else:
            _show_inline(
                source[end:close], f"{style} {_EMPHASES[mark]}", put, before=mark, is_whole=True
            )
            at = close + len(mark)
    put(source[at:], style)
    return len(source)


_UNKNOWN = -1


def _closing(source: str, opening: re.Match[str], before: str, is_whole: bool) -> int | None:
    """Where what a delimiter opens is closed: None if it opens nothing, _UNKNOWN if more text decides."""
    mark, at = opening[0], opening.end()
    undecided = None if is_whole else _UNKNOWN
    if mark[0] == "`":
        closing = re.compile(f"(?<!`){mark}(?!`)").search(source, at)
        if closing is None or (closing.end() == len(source) and not is_whole):
            return undecided
        return closing.start()
    if mark not in _EMPHASES or _is_glued(before, ")]}") or not source[at : at + 1].strip():
        return None
    while delimiter := _DELIMITER.search(source, at):
        begin, at = delimiter.span()
        if at == len(source) and not is_whole:
            return _UNKNOWN
        if delimiter[0][0] == "`":
            close = _closing(source, delimiter, "", is_whole)
            if close == _UNKNOWN:
                return _UNKNOWN
            at = at if close is None else close + len(delimiter[0])
        elif (
            delimiter[0] == mark
            and not source[begin - 1].isspace()
            and not _is_glued(source[at : at + 1])
        ):
            return begin
    return undecided


def _is_glued(character: str, also: str = "") -> bool:
    """Whether no emphasis begins after this character or ends before it: there an asterisk is a product."""
    return bool(character) and ((character.isascii() and character.isalnum()) or character in also)
