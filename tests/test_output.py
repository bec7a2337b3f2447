"""The cut: stop strings and end-of-generation over tokens and rounds, and characters over tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspec.llama import Model
from pyspec.output import Output, Source, StopStrings, Token
from pyspec.vocab import TokenDecoder
from tests.models import byte_level, spell, write_llama


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Iterator[Model]:
    loaded = Model(tiny_target)
    yield loaded
    loaded.close()


def token_of(text: str | bytes) -> int:
    return byte_level().texts.index(spell(text))


def emitted(token: int) -> Token:
    return Token(token, "", Source.TARGET)


def push_all(output: Output, ids: list[int], per_round: int) -> list[Token]:
    shown: list[Token] = []
    for start in range(0, len(ids), per_round):
        if output.finish_reason:
            break
        shown += output.push([emitted(i) for i in ids[start : start + per_round]])
    return shown + output.finish("length")


# ---- stop strings ------------------------------------------------------------------------------------

pieces_and_stops = st.tuples(
    st.lists(st.text("ab.", max_size=3), max_size=12),
    st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
)


def cut_by_search(pieces: list[str], stops: list[str]) -> str:
    """The oracle: of the whole text, what precedes the stop string that is complete first.

    Text is looked at after each token, as a generation would, and the earliest beginning wins.
    """
    text = ""
    for piece in pieces:
        text += piece
        found = [text.find(stop) for stop in stops if stop in text]
        if found:
            return text[: min(found)]
    return text


@given(pieces_and_stops)
def test_a_stop_string_is_found_wherever_it_is_split_and_none_of_it_is_shown(
    case: tuple[list[str], list[str]],
) -> None:
    pieces, stops = case
    cutter, shown, stopped = StopStrings(stops), list[Token](), False
    for i, piece in enumerate(pieces):
        released, stopped = cutter.push(Token(i, piece, Source.TARGET))
        shown += released
        so_far = "".join(token.text for token in shown)
        assert cut_by_search(pieces, stops).startswith(so_far), "shown text was never taken back"
        if stopped:
            break
    if not stopped:
        shown += cutter.flush()
    assert "".join(token.text for token in shown) == cut_by_search(pieces, stops)
    assert [token.id for token in shown] == list(range(len(shown)))


def test_text_that_cannot_begin_a_stop_string_is_not_held_back() -> None:
    cutter = StopStrings(["ab."])
    assert [t.text for t in cutter.push(Token(0, "xb", Source.TARGET))[0]] == ["xb"]
    assert cutter.push(Token(1, "xa", Source.TARGET)) == ([], False)
    released, stopped = cutter.push(Token(2, "c", Source.TARGET))
    assert ([t.text for t in released], stopped) == (["xa", "c"], False)


def test_a_token_in_whose_middle_the_stop_string_begins_is_cut() -> None:
    cutter = StopStrings(["b."])
    cutter.push(Token(0, "ab", Source.DRAFT))
    released, stopped = cutter.push(Token(1, ".d", Source.TARGET))
    assert stopped
    assert released == [Token(0, "a", Source.DRAFT)]


@pytest.mark.parametrize("per_round", [1, 2, 5])
def test_the_token_count_agrees_with_the_cut_in_any_grouping_into_rounds(
    model: Model, per_round: int
) -> None:
    ids = [token_of(t) for t in ("a", "ab", "c", "d", "cd", "a")]
    output = Output(model, ["bcdc"])
    shown = push_all(output, ids, per_round)
    assert "".join(t.text for t in shown) == "aa"
    assert output.finish_reason == "stop"
    assert output.n_tokens == len(shown) == 2


# ---- end of generation -------------------------------------------------------------------------------


@pytest.mark.parametrize("per_round", [1, 2, 5])
def test_nothing_follows_an_end_of_generation_token(model: Model, per_round: int) -> None:
    eos = byte_level().eos
    output = Output(model, [])
    shown = push_all(output, [token_of("a"), token_of("b"), eos, token_of("c")], per_round)
    assert [t.text for t in shown] == ["a", "b"]
    assert (output.finish_reason, output.n_tokens) == ("stop", 2)


def test_the_end_lets_go_of_what_a_stop_string_held_back(model: Model) -> None:
    output = Output(model, ["ab."])
    assert output.push([emitted(token_of("ab"))]) == []
    assert [t.text for t in output.finish("length")] == ["ab"]
    assert output.finish_reason == "length"


# ---- characters --------------------------------------------------------------------------------------

SMILE = "😀".encode()


@pytest.mark.parametrize("per_round", [1, 2, 4])
def test_a_character_over_tokens_is_held_back_until_it_is_whole(
    model: Model, per_round: int
) -> None:
    ids = [token_of("a"), *(token_of(SMILE[i : i + 1]) for i in range(4)), token_of("b")]
    output = Output(model, [])
    shown = push_all(output, ids, per_round)
    assert "".join(t.text for t in shown) == "a😀b"
    assert [t.id for t in shown] == ids
    assert [t.text for t in shown] == ["a", "", "", "", "😀", "b"]


def test_bytes_that_are_no_character_become_replacement_characters(model: Model) -> None:
    # 0xFF begins nothing; 0xC3 begins a character that "a" does not go on with.
    output = Output(model, [])
    shown = push_all(output, [token_of(b"\xff"), token_of(b"\xc3"), token_of("a")], 1)
    assert "".join(t.text for t in shown) == "��a"


def test_an_incomplete_character_at_the_end_becomes_one_replacement_character(
    model: Model,
) -> None:
    output = Output(model, [])
    shown = push_all(output, [token_of("a"), token_of(SMILE[:2])], 1)
    assert [t.text for t in shown] == ["a", "�"]
    assert output.n_tokens == 2


@given(st.lists(st.sampled_from(range(3, 24)), max_size=12), st.integers(1, 5))
def test_the_text_is_what_python_decodes_from_the_whole_bytes(
    model: Model, ids: list[int], per_round: int
) -> None:
    whole = b"".join(model.piece(i) for i in ids).decode("utf-8", "replace")
    output = Output(model, [])
    assert "".join(t.text for t in push_all(output, ids, per_round)) == whole
    assert output.n_tokens == len(ids)


def test_control_tokens_have_no_text(model: Model) -> None:
    decoder = TokenDecoder(model)
    assert decoder.text(byte_level().bos) == ""


def test_the_output_of_a_model_that_ends_at_once_is_empty(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", byte_level())
    ending = Model(path)
    output = Output(ending, [])
    assert output.push([emitted(byte_level().eos)]) == []
    assert (output.finish_reason, output.n_tokens) == ("stop", 0)
    ending.close()
