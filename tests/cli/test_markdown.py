"""Markdown as it comes: nothing lost, nothing twice, and the same however the text is cut."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from pyspec.cli.markdown import MarkdownStream

SAMPLE = '''# Sorting in **Python**

Some *short* words on `sorted()`, with **bold `code` inside**, 2*3*4, **kwargs and snake_case_name.

1. First item with some long text that does not fit on a line of this width
   - nested `item`

```python
def f(x: int) -> str:
    """Text
    of two lines."""
\treturn f"{x!r}"
```

| name | value |
|:-----|------:|
| `a`  | **1** |
| b \\| c | 22 |

> A quote.

---
中文没有**空格**、所以每个字都可以换行。😀👩\u200d💻 End.
An unclosed **bold and `code'''


def shown(parts: Sequence[str], *, width: int = 40, styled: bool = False) -> str:
    """What a terminal would get; with styles, its escape sequences as well."""
    file = io.StringIO()
    console = Console(
        file=file, width=width, force_terminal=styled, color_system="standard" if styled else None
    )
    stream = MarkdownStream(console)
    for part in parts:
        stream.write(part)
    stream.finish()
    return file.getvalue()


def joined_styles(text: str) -> list[tuple[str, str]]:
    """Characters, each with the last sequence before it."""
    style, characters = "", []
    for sequence, character in re.findall(r"(\x1b\[[\d;]*m)|(.)", text, re.DOTALL):
        style = sequence or style
        if character:
            characters.append((style if not character.isspace() else "", character))
    return characters


# Text that is made of what has a meaning in Markdown, and some that has none.
PARTS = (
    *("*", "**", "***", "_", "__", "`", "``", "```", "~~", "~~~", "\\", "|", "|-|", "(", ")"),
    *("# ", "- ", "1. ", "> ", "---", "\n", "\n\n", " ", "   ", "\t"),
    *("a", "word", "x1", "é", "中", "、", "👩\u200d💻", "https://example.org/a_b"),
    *("```python\n", "\n```\n", "| a | b |\n", "|---|:-:|\n"),
)
MARKDOWN = st.lists(st.sampled_from(PARTS), max_size=40).map("".join)


@settings(deadline=None)
@given(MARKDOWN, st.data(), st.integers(1, 60))
@example(SAMPLE, None, 40)
def test_the_same_is_shown_however_the_text_is_cut(
    text: str, data: st.DataObject | None, width: int
) -> None:
    whole = joined_styles(shown([text], width=width, styled=True))
    assert joined_styles(shown(list(text), width=width, styled=True)) == whole
    if data is not None:
        cut = data.draw(st.integers(0, len(text)))
        assert joined_styles(shown([text[:cut], text[cut:]], width=width, styled=True)) == whole


@settings(deadline=None)
@given(MARKDOWN, st.integers(1, 60))
@example(SAMPLE, 40)
@example(SAMPLE, 14)
def test_no_word_is_lost_or_shown_twice(text: str, width: int) -> None:
    def letters(text: str) -> Counter[str]:
        return Counter(character for character in text if character.isalpha())

    assert letters(shown(list(text), width=width)) == letters(text)


@settings(deadline=None)
@given(MARKDOWN.filter(lambda text: "|" not in text), st.integers(1, 60))
def test_words_stay_in_order(text: str, width: int) -> None:
    def letters(text: str) -> list[str]:
        return [character for character in text if character.isalpha()]

    assert letters(shown(list(text), width=width)) == letters(text)


@settings(deadline=None)
@given(st.text("ab (,.中文、é", max_size=200).map(str.strip), st.integers(4, 60))
def test_lines_are_broken_between_words_where_they_fit(text: str, width: int) -> None:
    words = set(re.findall(r"[^ 中文]+", text))
    lines = shown(list(text), width=width).splitlines()
    for line in lines:
        if cell_len(line) > width:
            assert any(cell_len(word) + 2 >= width for word in words), line
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_each_word_is_shown_when_it_ends() -> None:
    file = io.StringIO()
    stream = MarkdownStream(Console(file=file, width=40))
    for text, so_far in (
        ("One wo", "One"),
        ("rd, **tw", "One word,"),
        ("o** three", "One word, two"),
        ("\n- fo", "One word, two three\n• "),
        ("ur\n```c\nint", "One word, two three\n• four\n```c\n"),
        (" x;\n", "One word, two three\n• four\n```c\nint x;\n"),
    ):
        stream.write(text)
        assert file.getvalue() == so_far


def test_the_look_of_the_sample() -> None:
    assert [line.rstrip() for line in shown([SAMPLE]).splitlines()] == [
        "Sorting in Python",
        "",
        "Some short words on sorted(), with bold",
        "code inside, 2*3*4, **kwargs and",
        "snake_case_name.",
        "",
        "1. First item with some long text that",
        "   does not fit on a line of this width",
        "   • nested item",
        "",
        "```python",
        "def f(x: int) -> str:",
        '    """Text',
        '    of two lines."""',
        '        return f"{x!r}"',
        "```",
        "",
        "name    value",
        "─────────────",
        "a           1",
        "b | c      22",
        "",
        "▌ A quote.",
        "",
        "─" * 40,
        "中文没有空格、所以每个字都可以换行。😀👩\u200d💻",
        "End.",
        "An unclosed **bold and `code",
    ]


@pytest.mark.parametrize(
    ("text", "styles"),
    [
        ("**a** b", {"a": "1", "b": "0"}),
        ("*a* _b_ __c__ ~~d~~", {"a": "3", "b": "3", "c": "1", "d": "9"}),
        ("`a` ***b***", {"a": "36", "b": "1;3"}),
        ("**a `b`**", {"a": "1", "b": "1;36"}),
        ("a*b*c \\*d\\*", {"a": "", "b": "", "c": "", "d": ""}),
        ("```python\nx\n'''\ny\n'''\n```", {"y": "33"}),
    ],
)
def test_emphases_and_code_have_their_styles(text: str, styles: dict[str, str]) -> None:
    found = {
        character: re.sub(r"\x1b\[|;49|m", "", style)
        for style, character in joined_styles(shown([text], styled=True))
    }
    assert {character: found[character] for character in styles} == styles


def test_a_terminal_may_change_its_width() -> None:
    file = io.StringIO()
    console = Console(file=file, width=20)
    stream = MarkdownStream(console)
    stream.write("one two three four five ")
    console.width = 10
    stream.write("six seven eight nine ")
    stream.finish()
    assert file.getvalue() == "one two three four\nfive six\nseven\neight nine\n"
