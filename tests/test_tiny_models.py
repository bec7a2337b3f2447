"""The tiny models are what the other tests take them for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from tests.models import (
    Reference,
    Vocabulary,
    all_bytes,
    byte_level,
    empty,
    foreign,
    misshapen,
    sentence_piece,
    softmax,
    truncated,
    write_gemma3,
    write_jamba,
    write_lfm2,
    write_llama,
    write_mamba,
    write_qwen35,
)

OTHER_MEMORIES = [write_mamba, write_jamba, write_lfm2, write_qwen35, write_gemma3]


def sample(model: Reference, count: int = 150, seed: int = 0) -> tuple[list[int], np.ndarray]:
    """Tokens drawn from the model after its first token, and the distributions they came from."""
    random = np.random.default_rng(seed)
    tokens, rows = [0], []
    for position in range(count):
        rows.append(softmax(model.decode([tokens[-1]], position))[0])
        tokens.append(int(random.choice(model.size, p=rows[-1])))
    return tokens, np.stack(rows)


def acceptance(target: Path, draft: Path) -> float:
    """The mean overlap of the two models' distributions along a text of the target's."""
    with Reference(target) as model:
        tokens, p = sample(model)
    with Reference(draft) as model:
        q = softmax(model.evaluate(tokens[:-1]))
    return float(np.minimum(p, q).sum(axis=1).mean())


def dependence(tokens: list[int], rows: np.ndarray) -> float:
    """How far the distributions after one last token differ between its occurrences, 0 to 1."""
    distances = []
    for token in set(tokens):
        places = [i for i in range(len(rows)) if tokens[i] == token]
        distances += [np.abs(rows[i] - rows[j]).sum() / 2 for i, j in pairwise(places)]
    return float(np.mean(distances))


# ---- distributions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [write_llama, *OTHER_MEMORIES])
def test_distributions_are_neither_flat_nor_certain_and_depend_on_the_context(
    write: Callable[..., Path], tmp_path: Path, vocabulary: Vocabulary
) -> None:
    for seed in (1, 2):
        with Reference(write(tmp_path / "model.gguf", vocabulary, seed=seed)) as model:
            tokens, rows = sample(model)
        top = rows.max(axis=1)
        assert 0.25 < top.mean() < 0.55
        assert np.quantile(top, 0.1) > 2 / len(vocabulary)
        assert np.quantile(top, 0.9) < 0.85
        assert dependence(tokens, rows) > 0.15
        assert len(set(tokens)) > 15


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_draft_is_accepted_about_every_second_time(
    seed: int, tmp_path: Path, vocabulary: Vocabulary
) -> None:
    target = write_llama(tmp_path / "target.gguf", vocabulary, seed=seed)
    draft = write_llama(tmp_path / "draft.gguf", vocabulary, seed=seed, width=32, layers=1)
    assert 0.45 < acceptance(target, draft) < 0.7


def test_noise_lowers_acceptance_and_another_seed_lowers_it_most(
    tiny_target: Path, tmp_path: Path, vocabulary: Vocabulary
) -> None:
    drafts = [
        write_llama(tmp_path / "near.gguf", vocabulary, noise=0.01),
        write_llama(tmp_path / "far.gguf", vocabulary, noise=0.1),
        write_llama(tmp_path / "unrelated.gguf", vocabulary, seed=2),
    ]
    near, far, unrelated = (acceptance(tiny_target, draft) for draft in drafts)
    assert 0.85 > near > far + 0.1
    assert far > unrelated + 0.1


def test_a_negated_draft_has_exactly_the_opposite_logits(tmp_path: Path) -> None:
    vocabulary = byte_level(16)
    target = write_llama(tmp_path / "target.gguf", vocabulary, biases={})
    draft = write_llama(tmp_path / "draft.gguf", vocabulary, biases={}, negated=True)
    tokens = [0, *range(3, 16)]
    with Reference(target) as plain, Reference(draft) as negated:
        assert plain.size == 16
        np.testing.assert_array_equal(negated.evaluate(tokens), -plain.evaluate(tokens))
    assert acceptance(target, draft) < 0.2


def test_biases_choose_how_soon_a_text_ends(tmp_path: Path, vocabulary: Vocabulary) -> None:
    def end(biases: dict[int, float] | None) -> float:
        path = write_llama(tmp_path / "model.gguf", vocabulary, biases=biases)
        with Reference(path) as model:
            return float(sample(model)[1][:, vocabulary.ends].sum(axis=1).mean())

    assert end(None) < 0.005
    assert 0.03 < end({}) < 0.2
    assert end({vocabulary.eos: 6.0}) > 0.4


def test_the_logit_of_one_token_may_be_nan(tmp_path: Path, vocabulary: Vocabulary) -> None:
    with Reference(write_llama(tmp_path / "nan.gguf", vocabulary, nan_token=5)) as model:
        logits = model.evaluate([0, 3])
    assert np.isnan(logits[:, 5]).all()
    assert np.isfinite(np.delete(logits, 5, axis=1)).all()


@pytest.mark.parametrize("weight_type", ["F16", "Q8_0", "Q4_0"])
def test_quantised_weights_give_nearly_the_same_model(
    weight_type: str, tiny_target: Path, tmp_path: Path, vocabulary: Vocabulary
) -> None:
    kind = GGMLQuantizationType[weight_type]
    quantised = write_llama(tmp_path / "quantised.gguf", vocabulary, weight_type=kind)
    assert quantised.stat().st_size < tiny_target.stat().st_size * 0.6
    assert acceptance(tiny_target, quantised) > 0.7
    narrow = tmp_path / "narrow.gguf"
    write_llama(narrow, vocabulary, width=32, layers=1, weight_type=kind)
    assert acceptance(tiny_target, narrow) > 0.45


def test_the_same_arguments_write_the_same_bytes(tmp_path: Path, vocabulary: Vocabulary) -> None:
    for write in (write_llama, *OTHER_MEMORIES):
        first = write(tmp_path / "first.gguf", vocabulary, seed=3).read_bytes()
        assert write(tmp_path / "second.gguf", vocabulary, seed=3).read_bytes() == first
        assert write(tmp_path / "third.gguf", vocabulary, seed=4).read_bytes() != first


# ---- vocabularies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (byte_level, "ab cd a\né😀.e"),
        (all_bytes, "Hello, the world:\n\té ü 😀 ✓ \0"),
        (sentence_piece, " ab cd a\né😀."),
    ],
)
def test_texts_survive_tokenisation(
    make: Callable[[], Vocabulary], text: str, tmp_path: Path
) -> None:
    vocabulary = make()
    with Reference(write_llama(tmp_path / "model.gguf", vocabulary)) as model:
        assert model.size == len(vocabulary)
        tokens = model.tokenize(text.lstrip(" "))
        assert b"".join(map(model.piece, tokens)) == text.encode()
        assert model.tokenize("", bos=True) == [vocabulary.bos]
        assert [i for i in range(model.size) if llama_cpp.llama_vocab_is_eog(model.vocab, i)] == [
            *vocabulary.ends
        ]


def test_characters_are_split_over_tokens(tiny_target: Path) -> None:
    with Reference(tiny_target) as model:
        pieces = [model.piece(token) for token in model.tokenize("é😀")]
        assert pieces == [b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98\x80"]
        assert b"\xff" in [model.piece(token) for token in range(model.size)]
        assert len(model.tokenize("aZb")) == 2  # no token spells "Z"


def test_controls_have_a_text_only_when_asked(tiny_target: Path, vocabulary: Vocabulary) -> None:
    with Reference(tiny_target) as model:
        for token in vocabulary.controls:
            assert model.piece(token) == b""
            assert model.piece(token, special=True).decode() == vocabulary.texts[token]
        assert model.tokenize("</s>a", special=True) == [vocabulary.eos, 3]


def test_a_chat_template_is_read_back(chat_target: Path) -> None:
    with Reference(chat_target) as model:
        template = llama_cpp.llama_model_chat_template(model.model, None)
        assert template is not None
        assert template.decode() == all_bytes().chat_template
        assert model.tokenize("<|im_start|>a<|im_end|>", special=True) == [3, 101, 1]


def test_variants_of_a_vocabulary_load(tmp_path: Path, vocabulary: Vocabulary) -> None:
    padded = vocabulary.padded(32)
    with Reference(write_llama(tmp_path / "padded.gguf", padded)) as model:
        assert model.evaluate([0, 3]).shape == (2, 32)
        assert llama_cpp.llama_vocab_get_text(model.vocab, 24) == b"[PAD24]"
        assert model.piece(24, special=True) == b""  # llama.cpp never writes an unused token
        assert model.tokenize("ab cd") == [10, 7, 23]
    with Reference(write_llama(tmp_path / "other.gguf", vocabulary.spelled(5, "x"))) as model:
        assert model.piece(5) == b"x"
    swapped = replace(vocabulary, bos=vocabulary.eos, eos=vocabulary.bos)
    with Reference(write_llama(tmp_path / "swapped.gguf", swapped)) as model:
        assert llama_cpp.llama_vocab_bos(model.vocab) == vocabulary.eos
        assert llama_cpp.llama_vocab_eos(model.vocab) == vocabulary.bos
        assert llama_cpp.llama_vocab_eot(model.vocab) == vocabulary.eot


def test_padding_leaves_the_other_tokens_logits(tmp_path: Path, vocabulary: Vocabulary) -> None:
    plain = write_llama(tmp_path / "plain.gguf", vocabulary)
    padded = write_llama(tmp_path / "padded.gguf", vocabulary.padded(40))
    with Reference(plain) as few, Reference(padded) as many:
        tokens = [0, 3, 4, 10, 7]
        np.testing.assert_array_equal(many.evaluate(tokens)[:, :24], few.evaluate(tokens))


# ---- files that are not models -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda path, model: truncated(path, model),
        lambda path, model: truncated(path, model, share=0.002),
        lambda path, _: empty(path),
        lambda path, _: foreign(path),
        lambda path, model: misshapen(path, model),
    ],
    ids=["tensors cut off", "header cut off", "empty", "foreign", "misshapen"],
)
def test_llama_cpp_refuses_damaged_files(
    damage: Callable[[Path, Path], Path], tiny_target: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="does not load"):
        Reference(damage(tmp_path / "damaged.gguf", tiny_target))
