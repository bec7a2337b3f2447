"""What two vocabularies share, and spelling a text in one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import TokenType
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspec.errors import VocabularyMismatchError
from pyspec.llama import Model
from pyspec.vocab import SharedTokens, Speller, difference, shared_tokens
from tests.models import Vocabulary, all_bytes, byte_level, sentence_piece, write_llama

Load = Callable[[Vocabulary], Model]


@pytest.fixture(scope="module")
def load(models: Path) -> Iterator[Load]:
    """Writes and loads a model of a vocabulary."""
    loaded: list[Model] = []

    def write_and_load(vocabulary: Vocabulary) -> Model:
        path = models / f"vocabulary-{len(loaded)}.gguf"
        loaded.append(Model(write_llama(path, vocabulary, width=32, layers=1)))
        return loaded[-1]

    yield write_and_load
    for model in loaded:
        model.close()


# ---- one vocabulary or two ----------------------------------------------------------------------------

TINY = byte_level()


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (TINY, None),
        (TINY.padded(40), None),
        (TINY.spelled(9, "x"), "token 9 is '.' in the target and 'x' in the draft"),
        (
            sentence_piece(),
            "their tokenizers are of different kinds (2 and 1 in llama.cpp's numbering)",
        ),
        (
            TINY.padded(300).of_type(TokenType.NORMAL, range(24, 300)),
            "its vocabulary has 300 tokens, the target's 24",
        ),
        (replace(TINY, bos=2), "the target adds BOS (id 0), the draft adds it (id 2)"),
    ],
    ids=["same", "padded", "text", "kind", "size", "BOS"],
)
def test_the_first_difference_is_named(load: Load, draft: Vocabulary, reason: str | None) -> None:
    target, other = load(TINY), load(draft)
    assert difference(target, other) == reason
    assert (shared_tokens(target, other) is None) == (reason is None)


# ---- twins ---------------------------------------------------------------------------------------------


def controls(vocabulary: Vocabulary, *names: str) -> Vocabulary:
    """The first tokens named anew."""
    return replace(vocabulary, texts=(*names, *vocabulary.texts[len(names) :]))


def text_twins(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    """Draft's id of each target's that adds the same bytes, worked out from the files' spelling."""
    ids, twins = target.ids_of_meanings(), draft.ids_of_meanings()
    return {ids[text]: twins[text] for text in ids if isinstance(text, bytes) and text in twins}


@st.composite
def vocabularies(draw: st.DrawFn) -> Vocabulary:
    """Some of the tokens of a small vocabulary, in any order; with those that llama.cpp needs."""
    whole = draw(st.sampled_from([byte_level(), sentence_piece()]))
    needed = {*whole.controls, *(i for i, kind in enumerate(whole.types) if kind == TokenType.BYTE)}
    if draw(st.booleans()):
        needed.add(whole.texts.index("a"))
    others = [i for i in range(len(whole)) if i not in needed]
    kept = draw(st.lists(st.sampled_from(others), unique=True))
    return whole.reordered(draw(st.permutations([*needed, *kept])))


@settings(max_examples=30, deadline=None)
@given(pair=st.tuples(vocabularies(), vocabularies()))
def test_twins_add_the_same_bytes_or_are_controls_of_one_name(
    load: Load, pair: tuple[Vocabulary, Vocabulary]
) -> None:
    target, draft = pair
    try:
        shared = SharedTokens(load(target), load(draft))
    except VocabularyMismatchError:
        assert len(text_twins(target, draft)) < 0.1 * min(len(target), len(draft))
        return
    twins = dict(zip(shared.target_ids.tolist(), shared.draft_ids.tolist(), strict=True))
    assert len(set(twins.values())) == len(twins) == len(shared), "one to one"
    assert list(twins) == sorted(twins)
    assert shared.to_draft.tolist() == [twins.get(token, -1) for token in range(len(target))]
    expected = text_twins(target, draft)
    of_controls = {token: twin for token, twin in twins.items() if token in target.controls}
    assert {t: d for t, d in twins.items() if t not in of_controls} == expected
    assert all(target.texts[t] == draft.texts[d] for t, d in of_controls.items())
    assert all(d in draft.controls for d in of_controls.values())


def test_the_token_of_a_byte_is_no_twin_where_a_character_is_one(load: Load) -> None:
    target, draft = byte_level(), sentence_piece()
    shared = SharedTokens(load(target), load(draft))
    assert shared.to_draft[target.texts.index("a")] == draft.texts.index("a")
    assert shared.to_draft[target.texts.index("Ġa")] == draft.texts.index("▁a")
    # "é" is whole in the draft, and two bytes in the target.
    assert shared.to_draft[target.texts.index("Ã")] == draft.texts.index("<0xC3>")
    assert shared.to_draft[target.texts.index("Ċ")] == draft.texts.index("<0x0A>")


@pytest.mark.parametrize(
    ("target", "draft", "twins"),
    [
        # The tokens are BOS, EOS, the end of a turn.
        (["<s>", "</s>", "<|eot_id|>"], ["<s>", "</s>", "<|eot_id|>"], {0: 0, 1: 1, 2: 2}),
        (["<s>", "</s>", "<|eot_id|>"], ["<x>", "<end>", "<|im_end|>"], {1: 1, 2: 2}),
        # What means the end to the draft is a mark that the target has and never writes.
        (["</t>", "<end>", "<|im_end|>"], ["<s>", "<e>", "</t>"], {1: 1, 2: 2}),
        # As before, but the draft has a mark of the target's real end, which goes before.
        (["</t>", "<end>", "<|im_end|>"], ["<|im_end|>", "<e>", "</t>"], {0: 2, 1: 1, 2: 0}),
        (["a", "</s>", "<|im_end|>"], ["<s>", "</s>", "<|im_end|>"], {1: 1, 2: 2}),
    ],
    ids=[
        "same names",
        "other names",
        "never written",
        "never written, and the real one",
        "named like text",
    ],
)
def test_controls_are_twins_by_what_they_mean(
    load: Load, target: list[str], draft: list[str], twins: dict[int, int]
) -> None:
    # The target's token "a" is then among its controls.
    renamed = controls(byte_level(), *target)
    if target[0] == "a":
        renamed = renamed.spelled(3, "z")
    shared = SharedTokens(load(renamed), load(controls(byte_level(), *draft)))
    assert {t: d for t in range(3) if (d := int(shared.to_draft[t])) >= 0} == twins


def test_padding_and_unknown_tokens_have_no_twin(load: Load) -> None:
    target, draft = byte_level().padded(30), sentence_piece().padded(280)
    shared = SharedTokens(load(target), load(draft))
    assert shared.target_ids.max() < 24
    assert draft.texts.index("<unk>") not in shared.draft_ids
    shared = SharedTokens(load(target), load(target))
    assert shared.target_ids.tolist() == list(range(24))


def test_a_draft_that_shares_next_to_nothing_is_refused_with_the_count(load: Load) -> None:
    other = byte_level()
    for token in range(3, 24):
        other = other.spelled(token, chr(ord("A") + token))
    target, draft = load(byte_level()), load(other.spelled(7, "a").spelled(8, "b"))
    message = "only 2 of its 21 tokens of text are also among the target's 21"
    with pytest.raises(VocabularyMismatchError, match=message):
        SharedTokens(target, draft)
    assert (
        len(SharedTokens(target, load(other.spelled(7, "a").spelled(8, "b").spelled(9, "c")))) == 6
    )


# ---- spelling ------------------------------------------------------------------------------------------

TEXTS = st.one_of(
    st.binary(max_size=12),
    st.text(max_size=12).map(str.encode),
    st.text("ab cdé😀.\n the", max_size=20).map(str.encode),
    st.tuples(st.text("ab ", max_size=4).map(str.encode), st.binary(max_size=3)).map(b"".join),
)


@settings(max_examples=100, deadline=None)
@given(text=TEXTS, begins=st.booleans())
@pytest.mark.parametrize("kind", [byte_level, all_bytes, sentence_piece])
def test_tokens_spell_any_bytes_that_have_tokens(
    spellers: dict[str, Speller], kind: Callable[[], Vocabulary], text: bytes, begins: bool
) -> None:
    vocabulary = kind()
    ids, ends = spellers[kind.__name__].spell(text, begins=begins)
    pieces = [vocabulary.meaning(token) for token in ids]
    spelled = b"".join(piece for piece in pieces if isinstance(piece, bytes))
    meanings = set(map(vocabulary.meaning, range(len(vocabulary))))
    expected = bytes(byte for byte in text if bytes([byte]) in meanings)
    if vocabulary.model == "llama" and begins and is_character(text[:4]):
        expected = b" " + expected
    assert spelled == expected
    assert not set(ids) & set(vocabulary.controls)
    assert ends == sorted(ends)
    if len(expected) == len(text):
        lengths = [len(piece) for piece in pieces]
        assert ends == [sum(lengths[: i + 1]) for i in range(len(lengths))]


def is_character(start: bytes) -> bool:
    """Whether some bytes begin with a character."""
    for length in range(1, len(start) + 1):
        try:
            start[:length].decode()
        except UnicodeDecodeError:
            continue
        return True
    return False


@pytest.fixture(scope="module")
def spellers(load: Load) -> dict[str, Speller]:
    kinds = byte_level, all_bytes, sentence_piece
    return {kind.__name__: Speller(load(kind())) for kind in kinds}


@pytest.mark.parametrize("kind", [all_bytes, sentence_piece])
@pytest.mark.parametrize("text", ["the inner theatre on a hen", "ab cd ab. abé  cab\n\n abab"])
def test_a_part_from_where_a_word_begins_has_the_tokens_of_the_whole(
    load: Load, kind: Callable[[], Vocabulary], text: str
) -> None:
    """The right tokens are those of llama.cpp's tokenizer for the whole text."""
    model = load(kind())
    whole = model.tokenize(text, add_special=False)
    speller = Speller(model)
    assert speller.spell(text.encode(), begins=True)[0] == whole
    first, second = text[: text.index(" ")], text[text.index(" ") :]
    parts = [speller.spell(part.encode(), begins=part is first)[0] for part in (first, second)]
    assert [*parts[0], *parts[1]] == whole
