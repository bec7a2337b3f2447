"""The round's invariants, on tiny models in real llama.cpp."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from gguf import TokenType

from pyspec.engine import MAX_WIDTH, Engine
from pyspec.errors import (
    ContextOverflowError,
    LogitsError,
    ModelError,
    PyspecError,
    UsageError,
    VocabularyMismatchError,
)
from pyspec.llama import Context, Model
from pyspec.metrics import Statistics
from pyspec.output import Piece, Source
from pyspec.sampling import Rule, SamplingParams
from tests.models import (
    Reference,
    Vocabulary,
    byte_level,
    sentence_piece,
    softmax,
    write_gemma3,
    write_jamba,
    write_lfm2,
    write_llama,
    write_mamba,
    write_qwen35,
)

PROMPT = [0, 3, 5, 7, 4]
GREEDY = SamplingParams(temperature=0, max_tokens=60)
# The whole distribution, nothing cut off.
SAMPLED = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, seed=11, max_tokens=60)


def with_params(params: SamplingParams, **changes: object) -> SamplingParams:
    return SamplingParams(**{**vars(params), **changes})  # type: ignore[arg-type]


def finish(pieces: Iterator[Piece]) -> tuple[list[int], str, Statistics]:
    """Ids, text and statistics of a whole request."""
    whole = list(pieces)
    assert [piece.statistics is not None for piece in whole] == [False] * (len(whole) - 1) + [True]
    statistics = whole[-1].statistics
    assert statistics is not None
    ids = [token.id for piece in whole for token in piece.tokens]
    assert statistics.completion_tokens == len(ids)
    return ids, "".join(piece.text for piece in whole), statistics


@pytest.fixture(scope="module")
def other_draft(models: Path) -> Path:
    """A draft that has nothing to do with the target."""
    return write_llama(models / "other-draft.gguf", byte_level(), seed=99, width=32, layers=1)


@pytest.fixture(scope="module")
def pair(tiny_target: Path, tiny_draft: Path) -> Iterator[Engine]:
    with Engine(tiny_target, tiny_draft, gamma=4, n_ctx=512, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def ending_pair(models: Path) -> Iterator[Engine]:
    """A pair in which the end of generation is as frequent as any other token."""
    vocabulary = byte_level()
    target = write_llama(models / "ending.gguf", vocabulary, biases={})
    draft = write_llama(models / "ending-draft.gguf", vocabulary, width=32, layers=1, biases={})
    with Engine(target, draft, gamma=4, n_ctx=512, threads=1) as engine:
        yield engine


# ---- the same text with and without a draft -----------------------------------------------------------


@pytest.mark.parametrize("gamma", [1, 2, 4, 6])
def test_greedy_text_is_the_same_at_every_gamma(pair: Engine, gamma: int) -> None:
    plain = finish(pair.generate(PROMPT, GREEDY, gamma=0))
    drafted = finish(pair.generate(PROMPT, GREEDY, gamma=gamma))
    assert drafted[:2] == plain[:2]
    assert drafted[2].accepted > 0
    assert drafted[2].accepted < drafted[2].verified, "some rejections must have been rolled back"


def test_greedy_text_is_the_same_with_a_useless_draft(
    pair: Engine, tiny_target: Path, other_draft: Path
) -> None:
    plain = finish(pair.generate(PROMPT, GREEDY, gamma=0))
    with Engine(tiny_target, other_draft, gamma=4, n_ctx=512, threads=1) as engine:
        assert finish(engine.generate(PROMPT, GREEDY))[:2] == plain[:2]


def test_greedy_text_is_the_same_without_any_draft(pair: Engine, tiny_target: Path) -> None:
    plain = finish(pair.generate(PROMPT, GREEDY, gamma=0))
    with Engine(tiny_target, n_ctx=512, threads=1) as engine:
        ids, text, statistics = finish(engine.generate(PROMPT, GREEDY))
    assert (ids, text) == plain[:2]
    assert (statistics.drafted, statistics.acceptance_rate) == (0, None)


def test_greedy_text_is_what_the_largest_logits_say(pair: Engine, tiny_target: Path) -> None:
    ids, _, _ = finish(pair.generate(PROMPT, GREEDY))
    model = Model(tiny_target)
    context = Context(model, n_ctx=512, threads=1)
    context.evaluate(PROMPT, n_logits=1)
    expected = []
    for _ in ids:
        expected.append(int(np.argmax(context.logits(-1))))
        context.evaluate(expected[-1:], n_logits=1)
    context.close()
    model.close()
    assert ids == expected


@pytest.mark.parametrize(
    "penalties",
    [
        {"frequency_penalty": 0.7},
        {"presence_penalty": 0.9, "repeat_last_n": 8},
        {"repeat_penalty": 1.4},
        {"frequency_penalty": 0.3, "repeat_last_n": -1},
    ],
    ids=str,
)
def test_greedy_text_with_penalties_is_the_same(pair: Engine, penalties: dict[str, float]) -> None:
    params = with_params(GREEDY, **penalties)
    plain = finish(pair.generate(PROMPT, params, gamma=0))
    assert plain[0] != finish(pair.generate(PROMPT, GREEDY, gamma=0))[0], "penalties must matter"
    for gamma in (1, 3, 6):
        assert finish(pair.generate(PROMPT, params, gamma=gamma))[:2] == plain[:2]


@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_coupled_text_depends_on_the_seed_alone(
    pair: Engine, tiny_target: Path, other_draft: Path, gamma: int
) -> None:
    plain = finish(pair.generate(PROMPT, SAMPLED, gamma=0, rule=Rule.COUPLED))
    assert finish(pair.generate(PROMPT, SAMPLED, gamma=gamma, rule=Rule.COUPLED))[:2] == plain[:2]
    with Engine(tiny_target, other_draft, gamma=4, n_ctx=512, threads=1) as engine:
        other = finish(engine.generate(PROMPT, SAMPLED, gamma=gamma, rule=Rule.COUPLED))
    assert other[:2] == plain[:2]


# ---- seeds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", list(Rule))
def test_a_seed_writes_the_same_text_twice_and_another_seed_another(
    pair: Engine, rule: Rule
) -> None:
    first = finish(pair.generate(PROMPT, SAMPLED, rule=rule))
    assert finish(pair.generate(PROMPT, SAMPLED, rule=rule))[:2] == first[:2]
    other = finish(pair.generate(PROMPT, with_params(SAMPLED, seed=12), rule=rule))
    assert other[0] != first[0]


def test_a_seed_that_was_drawn_is_reported_and_writes_the_text_again(pair: Engine) -> None:
    first = finish(pair.generate(PROMPT, with_params(SAMPLED, seed=None)))
    again = finish(pair.generate(PROMPT, with_params(SAMPLED, seed=first[2].seed)))
    assert again[:2] == first[:2]
    assert finish(pair.generate(PROMPT, with_params(SAMPLED, seed=None)))[2].seed != first[2].seed


def test_nothing_of_a_request_leaks_into_the_next(
    pair: Engine, tiny_target: Path, tiny_draft: Path
) -> None:
    finish(pair.generate([0, 9, 9, 9, 8], with_params(SAMPLED, seed=5), gamma=7))
    after = finish(pair.generate(PROMPT, SAMPLED, gamma=2))
    with Engine(tiny_target, tiny_draft, gamma=4, n_ctx=512, threads=1) as fresh:
        assert finish(fresh.generate(PROMPT, SAMPLED, gamma=2))[:2] == after[:2]
    assert max(i for i, n in enumerate(after[2].accepted_histogram) if n or i <= 2) == 2


# ---- counts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
@pytest.mark.parametrize("gamma", [0, 1, 16])
def test_max_tokens_is_exact(pair: Engine, max_tokens: int, gamma: int) -> None:
    params = with_params(SAMPLED, max_tokens=max_tokens, logit_bias={1: -math.inf, 2: -math.inf})
    ids, _, statistics = finish(pair.generate(PROMPT, params, gamma=gamma))
    assert len(ids) == statistics.completion_tokens == max_tokens
    assert statistics.finish_reason == "length"
    assert statistics.accepted + statistics.rounds == max_tokens


@pytest.mark.parametrize("gamma", [1, 3])
def test_the_statistics_agree_with_the_tokens(pair: Engine, gamma: int) -> None:
    params = with_params(SAMPLED, logit_bias={1: -math.inf, 2: -math.inf})
    finish(pair.generate([0], params))  # so that little of the prompt is in the cache
    pieces = list(pair.generate(PROMPT, params, gamma=gamma))
    s = pieces[-1].statistics
    assert s is not None
    tokens = [token for piece in pieces for token in piece.tokens]
    assert s.accepted == sum(token.source is Source.DRAFT for token in tokens)
    assert s.rounds == sum(token.source is Source.TARGET for token in tokens) == len(pieces)
    assert sum(s.accepted_histogram) == s.rounds
    assert sum(t * n for t, n in enumerate(s.accepted_histogram)) == s.accepted
    assert s.accepted <= s.verified <= s.drafted
    full_rounds = s.accepted_histogram[gamma]
    # The last round may have drafted less than gamma, and all of it may have been accepted.
    assert 0 <= s.accepted + s.rounds - full_rounds - s.verified <= 1
    assert s.acceptance_rate == s.accepted / s.verified
    assert s.decode_s >= s.draft_s + s.verify_s + s.sample_s > 0
    assert s.ttft_s is not None
    assert s.ttft_s > s.prefill_s > 0


def test_a_full_context_ends_the_text(tiny_target: Path, tiny_draft: Path) -> None:
    params = with_params(SAMPLED, max_tokens=None, logit_bias={1: -math.inf, 2: -math.inf})
    for gamma in (0, 5):
        with Engine(tiny_target, tiny_draft, gamma=4, n_ctx=32, threads=1) as engine:
            ids, _, statistics = finish(engine.generate(PROMPT, params, gamma=gamma))
        # The last token needs no cell: it is written and never evaluated.
        assert len(PROMPT) + len(ids) == 33
        assert statistics.finish_reason == "length"


# ---- ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("gamma", [0, 2, 6])
def test_nothing_follows_the_end_of_generation(ending_pair: Engine, gamma: int, rule: Rule) -> None:
    ends_inside_a_block = 0
    for seed in range(60):
        params = with_params(SAMPLED, seed=seed, max_tokens=None)
        ids, _, statistics = finish(ending_pair.generate(PROMPT, params, gamma=gamma, rule=rule))
        assert statistics.finish_reason == "stop"
        assert not set(ids) & set(byte_level().ends)
        emitted = statistics.accepted + statistics.rounds
        assert emitted > len(ids)
        ends_inside_a_block += emitted > len(ids) + 1
        assert ending_pair._slots[0].context.length <= len(PROMPT) + len(ids)
    assert (ends_inside_a_block > 0) == (gamma > 0)


@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_stop_strings_cut_alike_with_and_without_a_draft(pair: Engine, gamma: int) -> None:
    _, whole, _ = finish(pair.generate(PROMPT, GREEDY, gamma=0))
    for length in (1, 2, 3):
        stop = whole[20 : 20 + length]
        params = with_params(GREEDY, stop=[stop])
        plain = finish(pair.generate(PROMPT, params, gamma=0))
        drafted = finish(pair.generate(PROMPT, params, gamma=gamma))
        assert drafted[:2] == plain[:2]
        assert plain[1] == whole[: whole.index(stop)]
        assert plain[2].finish_reason == drafted[2].finish_reason == "stop"


# ---- log probabilities --------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0, 3])
def test_logprobs_are_those_of_the_raw_logits_and_aligned_with_the_cut(
    pair: Engine, tiny_target: Path, gamma: int
) -> None:
    whole = finish(pair.generate(PROMPT, SAMPLED, gamma=gamma))[1]
    params = with_params(
        SAMPLED, logprobs=3, temperature=0.7, top_k=5, frequency_penalty=0.5, stop=[whole[30:32]]
    )
    tokens = [t for piece in pair.generate(PROMPT, params, gamma=gamma) for t in piece.tokens]
    assert tokens
    ids = [*PROMPT, *(token.id for token in tokens)]
    with Reference(tiny_target) as reference:
        expected = np.log(softmax(reference.evaluate(ids[:-1])))[len(PROMPT) - 1 :]
    for token, row in zip(tokens, expected, strict=True):
        assert token.logprob == pytest.approx(row[token.id], abs=1e-3)
        assert token.logprob < 0
        top = np.argsort(-row)[:3]
        assert [i for i, _ in token.top_logprobs] == top.tolist()
        assert [lp for _, lp in token.top_logprobs] == pytest.approx(row[top].tolist(), abs=1e-3)


def test_logprobs_do_not_change_the_text_and_are_absent_unless_asked_for(pair: Engine) -> None:
    plain = finish(pair.generate(PROMPT, SAMPLED))
    assert finish(pair.generate(PROMPT, with_params(SAMPLED, logprobs=0)))[:2] == plain[:2]
    token = next(pair.generate(PROMPT, SAMPLED)).tokens[0]
    assert (token.logprob, token.top_logprobs) == (None, ())


# ---- prompts and prefill ------------------------------------------------------------------------------


def passes(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> list[tuple[int, int]]:
    """Records position and width of every pass of the target."""
    seen: list[tuple[int, int]] = []
    original = Context._pass

    def record(self: Context, tokens: Sequence[int], n_logits: int) -> None:
        if self is engine._slots[0].context:
            seen.append((self.length, len(tokens)))
        original(self, tokens, n_logits)

    monkeypatch.setattr(Context, "_pass", record)
    return seen


def test_the_prompt_is_split_alike_with_and_without_a_draft(
    tiny_target: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [0, *(3 + i % 20 for i in range(28))]
    texts, splits = [], []
    for draft in (None, tiny_draft):
        with Engine(tiny_target, draft, gamma=4, n_ctx=128, n_batch=8, threads=1) as engine:
            seen = passes(monkeypatch, engine)
            texts.append(finish(engine.generate(prompt, GREEDY))[:2])
            splits.append([p for p in seen if p[0] + p[1] < len(prompt)])
    assert splits[0] == splits[1] == [(0, 8), (8, 8), (16, 8), (24, 4)]
    assert texts[0] == texts[1]


def test_prefill_is_reported_as_it_goes(tiny_target: Path) -> None:
    reports: list[tuple[int, int]] = []
    with Engine(tiny_target, n_ctx=64, n_batch=8, threads=1) as engine:
        finish(
            engine.generate(
                [0, *[3] * 20], GREEDY, on_prefill=lambda done, of: reports.append((done, of))
            )
        )
    assert reports == [(8, 20), (16, 20), (20, 20)]


def test_a_prompt_of_one_token_is_enough(pair: Engine) -> None:
    assert finish(pair.generate([0], GREEDY))[:2] == finish(pair.generate([0], GREEDY, gamma=0))[:2]


def test_text_prompts_begin_as_the_model_wants(pair: Engine) -> None:
    assert pair.target.tokenize("abc")[0] == byte_level().bos
    spelled = pair.target.tokenize("abc")
    assert finish(pair.generate("abc", GREEDY))[:2] == finish(pair.generate(spelled, GREEDY))[:2]


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], UsageError, "empty"),
        ([0] * 513, ContextOverflowError, "513 tokens and the context 512"),
        ([0, 24], UsageError, "token id 24"),
        ([0, -1], UsageError, "token id -1"),
    ],
)
def test_prompts_that_cannot_be_continued(
    pair: Engine, prompt: list[int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pair.generate(prompt)
    finish(pair.generate(PROMPT, GREEDY))


def test_a_prompt_that_fills_the_context_gets_one_token(pair: Engine) -> None:
    ids, _, statistics = finish(pair.generate([0] + [3] * 511, SAMPLED))
    assert len(ids) == 1
    assert statistics.finish_reason == "length"


@pytest.mark.parametrize("gamma", [-1, MAX_WIDTH])
def test_gamma_has_limits(pair: Engine, gamma: int) -> None:
    with pytest.raises(UsageError, match="gamma must be auto, or from 0 to 31"):
        pair.generate(PROMPT, gamma=gamma)


# ---- caches -------------------------------------------------------------------------------------------


def continuation_logits(context: Context, ids: list[int]) -> np.ndarray:
    """Logits after ids, of a context that holds a beginning of them."""
    context.evaluate(ids[context.length :], n_logits=1)
    return context.logits(-1).copy()


@pytest.mark.parametrize("gamma", [1, 4])
def test_after_rejections_both_caches_equal_a_fresh_evaluation(
    tiny_target: Path, tiny_draft: Path, gamma: int
) -> None:
    with Engine(tiny_target, tiny_draft, gamma=4, n_ctx=512, threads=1) as engine:
        pieces = engine.generate(PROMPT, SAMPLED, gamma=gamma)
        ids = list(PROMPT)
        for _ in range(15):
            ids += [token.id for token in next(pieces).tokens]
        pieces.close()
        contexts = engine._slots[0].context, engine._slots[0].drafters[0].context
        assert contexts[0].length == len(ids) - 1
        assert contexts[1].length <= len(ids) - 1
        for context in contexts:
            # In passes no wider than those whose logits do not depend on the width.
            fresh = Context(context.model, n_ctx=512, n_batch=16, threads=1)
            expected = continuation_logits(fresh, ids)
            found = continuation_logits(context, ids)
            fresh.close()
            np.testing.assert_array_equal(found, expected)


def test_an_abandoned_request_leaves_the_engine_usable(pair: Engine) -> None:
    whole = finish(pair.generate(PROMPT, SAMPLED))
    pieces = pair.generate(PROMPT, SAMPLED)
    next(pieces)
    pieces.close()
    assert finish(pair.generate(PROMPT, SAMPLED))[:2] == whole[:2]
    pair.generate(PROMPT, SAMPLED)  # never begun
    assert finish(pair.generate(PROMPT, SAMPLED))[:2] == whole[:2]


def test_a_new_request_ends_the_one_before(pair: Engine) -> None:
    whole = finish(pair.generate(PROMPT, SAMPLED))
    old = pair.generate(PROMPT, SAMPLED)
    next(old)
    new = pair.generate(PROMPT, SAMPLED)
    first = next(new)
    with pytest.raises(PyspecError, match="ended by another one"):
        next(old)
    ids = [token.id for piece in [first, *new] for token in piece.tokens]
    assert ids == whole[0], "the old one's end does not disturb the new one"


def test_an_interrupt_during_prefill_leaves_the_engine_usable(tiny_target: Path) -> None:
    def interrupt(_done: int, _of: int) -> None:
        raise KeyboardInterrupt

    with Engine(tiny_target, n_ctx=128, n_batch=8, threads=1) as engine:
        whole = finish(engine.generate([0, *[3] * 40], SAMPLED))
        with pytest.raises(KeyboardInterrupt):
            next(engine.generate([0, *[4] * 40], SAMPLED, on_prefill=interrupt))
        assert finish(engine.generate([0, *[3] * 40], SAMPLED))[:2] == whole[:2]


@pytest.mark.parametrize("fails_in", ["target", "draft"])
def test_an_interrupt_during_a_round_leaves_the_engine_usable(
    pair: Engine, monkeypatch: pytest.MonkeyPatch, fails_in: str
) -> None:
    whole = finish(pair.generate(PROMPT, SAMPLED))
    pieces = pair.generate(PROMPT, SAMPLED)
    next(pieces)
    context = pair._slots[0].context if fails_in == "target" else pair._slots[0].drafters[0].context
    original = Context._pass

    def interrupted(self: Context, tokens: Sequence[int], n_logits: int) -> None:
        original(self, tokens, n_logits)
        if self is context:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Context, "_pass", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(pieces)
    assert finish(pair.generate(PROMPT, SAMPLED))[:2] == whole[:2]


# ---- the draft ----------------------------------------------------------------------------------------


def test_a_draft_of_less_context_drafts_less_and_then_nothing(
    pair: Engine, tiny_target: Path, tiny_draft: Path
) -> None:
    plain = finish(pair.generate(PROMPT, GREEDY, gamma=0))
    with Engine(tiny_target, tiny_draft, gamma=4, n_ctx=512, draft_ctx=24, threads=1) as engine:
        ids, text, statistics = finish(engine.generate(PROMPT, GREEDY))
        assert (ids, text) == plain[:2]
        assert 0 < statistics.sources[tiny_draft.name].drafted < 24 * 5
        # For a prompt that does not fit in the draft's context at all it drafts nothing.
        _, _, statistics = finish(engine.generate([0] + [3] * 40, GREEDY))
        assert tiny_draft.name not in statistics.sources


def test_padded_vocabularies_fit_and_padding_is_never_proposed(
    tiny_target: Path, tiny_draft: Path, pair: Engine, tmp_path: Path
) -> None:
    plain = finish(pair.generate(PROMPT, GREEDY, gamma=0))
    padded = byte_level().padded(40)
    # Padding that the draft finds likely, so that it would be drawn if it could be.
    draft = write_llama(
        tmp_path / "d.gguf", padded, width=32, layers=1, biases=dict.fromkeys(range(24, 40), 8.0)
    )
    with Engine(tiny_target, draft, gamma=4, n_ctx=512, threads=1) as engine:
        assert finish(engine.generate(PROMPT, GREEDY))[:2] == plain[:2]
        ids, _, statistics = finish(engine.generate(PROMPT, SAMPLED, gamma=4))
        assert max(ids) < 24
        assert statistics.accepted > 0
    target, draft_name = write_llama(tmp_path / "t.gguf", padded), tiny_draft.name
    with Engine(target, tiny_draft, gamma=4, n_ctx=512, threads=1) as engine:
        both = [finish(engine.generate(PROMPT, GREEDY, gamma=gamma))[:2] for gamma in (0, 4)]
        assert both[0] == both[1]
        # An id that the draft does not have cannot be shown to it.
        _, _, statistics = finish(engine.generate([0, 3, 30], SAMPLED))
        assert draft_name not in statistics.sources


def other_vocabularies() -> dict[str, Vocabulary]:
    tiny = byte_level()
    return {
        "a token": tiny.spelled(9, "x"),
        "kind": sentence_piece(),
        "size": tiny.padded(300).of_type(TokenType.NORMAL, range(24, 300)),
        "BOS": replace(tiny, bos=2),
        "order": tiny.reordered([23, 9, 2, 1, 0, *range(3, 9), *range(10, 23)]),
    }


@pytest.mark.parametrize("case", other_vocabularies())
def test_a_draft_of_another_vocabulary_proposes_what_the_two_share(
    pair: Engine, tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    vocabulary = other_vocabularies()[case]
    plain = finish(pair.generate(PROMPT, GREEDY, gamma=0))
    rows = vocabulary.rows_like(byte_level())
    draft = write_llama(tmp_path / "d.gguf", vocabulary, width=32, layers=1, rows=rows)
    with (
        caplog.at_level("DEBUG", "pyspec.vocab"),
        Engine(pair.target, draft, gamma=4, n_ctx=512, threads=1, parallel=2) as engine,
    ):
        drafted = finish(engine.generate(PROMPT, GREEDY, gamma=4))
    assert drafted[:2] == plain[:2]
    assert drafted[2].accepted > 0
    assert re.search(r"d\.gguf drafts for target\.gguf through the \d+ tokens", caplog.text)


def test_a_draft_that_shares_next_to_nothing_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    vocabulary = byte_level()
    for token in range(3, 24):
        vocabulary = vocabulary.spelled(token, chr(ord("A") + token))
    draft = write_llama(tmp_path / "d.gguf", vocabulary, width=32, layers=1)
    message = r"d\.gguf cannot draft for target\.gguf: only 0 of its 21 tokens"
    with pytest.raises(VocabularyMismatchError, match=message):
        Engine(tiny_target, draft, n_ctx=64)


def test_a_draft_that_does_not_load_is_an_error(tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no-draft\.gguf"):
        Engine(tiny_target, tmp_path / "no-draft.gguf", n_ctx=64)


# ---- damaged models -----------------------------------------------------------------------------------


def test_nan_logits_are_an_error_that_names_the_position(
    tiny_target: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    damaged = write_llama(tmp_path / "nan.gguf", byte_level(), nan_token=7)
    with (
        Engine(damaged, tiny_draft, gamma=4, n_ctx=64, threads=1) as engine,
        pytest.raises(LogitsError, match="target's logits for position 5 are NaN"),
    ):
        finish(engine.generate(PROMPT, SAMPLED))
    draft = write_llama(tmp_path / "d.gguf", byte_level(), width=32, layers=1, nan_token=7)
    with (
        Engine(tiny_target, draft, gamma=4, n_ctx=64, threads=1) as engine,
        pytest.raises(LogitsError, match="draft's logits for position 5 are NaN"),
    ):
        finish(engine.generate(PROMPT, SAMPLED))


def test_banning_every_token_is_an_error(pair: Engine) -> None:
    params = with_params(SAMPLED, logit_bias=dict.fromkeys(range(24), -math.inf))
    with pytest.raises(LogitsError, match="all -inf"):
        finish(pair.generate(PROMPT, params))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": "a"}, "temperature must be a number"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"top_k": 2**31}, "below 2"),
        ({"max_tokens": 2.5}, "max_tokens must be a whole number"),
        ({"seed": "1"}, "seed must be a whole number"),
        ({"stop": "abc"}, "stop must be a list of texts"),
        ({"stop": None}, "stop must be a list of texts"),
        ({"stop": [1]}, "stop must be a list of texts"),
        ({"logit_bias": {1: 1e300}}, "a logit bias must be from"),
        ({"logit_bias": {"a": 1}}, "logit_bias must map token ids to numbers"),
        ({"repeat_penalty": 1e-300}, "repeat penalty must be over 0"),
        ({"frequency_penalty": -1e300}, "frequency penalty must be from"),
    ],
    ids=str,
)
def test_settings_of_the_wrong_kind_or_size_are_refused(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        with_params(SAMPLED, **change)


@pytest.mark.parametrize("token", [24, -1, 2**40])
def test_a_bias_on_a_token_that_is_not_there_is_refused(pair: Engine, token: int) -> None:
    with pytest.raises(UsageError, match="a logit bias has token id"):
        pair.generate(PROMPT, with_params(SAMPLED, logit_bias={token: 1.0}))


def test_a_rule_may_be_named_and_an_unknown_one_is_refused(pair: Engine) -> None:
    named = finish(pair.generate(PROMPT, SAMPLED, rule="coupled"))
    assert named[:2] == finish(pair.generate(PROMPT, SAMPLED, rule=Rule.COUPLED))[:2]
    with pytest.raises(UsageError, match="rule must be one of block, token, coupled"):
        pair.generate(PROMPT, SAMPLED, rule="nope")


# ---- the engine's life --------------------------------------------------------------------------------


def test_a_closed_engine_says_so(tiny_target: Path, tiny_draft: Path) -> None:
    engine = Engine(tiny_target, tiny_draft, gamma=4, n_ctx=64, threads=1)
    pieces = engine.generate(PROMPT, GREEDY)
    next(pieces)
    engine.close()
    engine.close()
    with pytest.raises(PyspecError):
        next(pieces)
    with pytest.raises(PyspecError, match="closed"):
        finish(engine.generate(PROMPT, GREEDY))
    with pytest.raises(PyspecError, match="closed"):
        engine.generate("abc", GREEDY)


def test_a_model_closed_under_an_engine_is_freed_after_it(tiny_target: Path) -> None:
    model = Model(tiny_target)
    with Engine(model, n_ctx=64, threads=1) as engine:
        pieces = engine.generate(PROMPT, GREEDY)
        next(pieces)
        model.close()
        with pytest.raises(ModelError, match="the model is closed"):
            list(pieces)
    with pytest.raises(ModelError, match="the model is closed"):
        model.tokenize("a")


def test_engines_that_only_the_collector_closes_do_not_stop_the_work(tiny_target: Path) -> None:
    class Chat:
        def __init__(self) -> None:
            self.engine = Engine(tiny_target, n_ctx=64, threads=1)
            self.say = self.answer  # a cycle, which reference counts alone never free

        def answer(self) -> str:
            params = with_params(SAMPLED, max_tokens=3)
            return "".join(piece.text for piece in self.engine.generate(PROMPT, params))

    texts = {Chat().say() for _ in range(60)}
    assert len(texts) == 1


def test_one_model_serves_engines_in_two_threads(chat_target: Path) -> None:
    model = Model(chat_target)
    params = with_params(SAMPLED, max_tokens=80)

    def write(_: int) -> tuple[list[int], str]:
        with Engine(model, n_ctx=256, threads=1) as engine:
            return finish(engine.generate(PROMPT, params))[:2]

    with ThreadPoolExecutor(2) as threads:
        written = list(threads.map(write, range(12)))
    model.close()
    assert all(one == written[0] for one in written)


HALF_USED = """
import sys
from pyspec import Engine
pieces = Engine(sys.argv[1], n_ctx=64).generate("abc")
next(pieces)
"""


def test_the_interpreter_may_end_with_a_half_used_engine(tiny_target: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", HALF_USED, tiny_target], capture_output=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, b"")


@pytest.mark.parametrize("text", ["\udcf7\udc88\udc93\udc82", "\ud800", "a\0b"])
def test_what_is_no_character_is_read_as_replacement_characters(
    chat_target: Path, text: str
) -> None:
    model = Model(chat_target)
    ids = model.tokenize(text, add_special=False)
    assert b"".join(map(model.piece, ids)).decode() == re.sub("[\ud800-\udfff]", "�", text)
    model.close()


def test_a_vocabulary_that_cannot_spell_every_text_is_refused(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", sentence_piece(byte_fallback=False))
    with pytest.raises(ModelError, match="no tokens for bytes"):
        Model(path)


def test_models_can_be_shared_and_outlive_an_engine(tiny_target: Path, tiny_draft: Path) -> None:
    target, draft = Model(tiny_target), Model(tiny_draft)
    texts = []
    for gamma in (0, 3):
        with Engine(target, draft, gamma=gamma, n_ctx=128, threads=1) as engine:
            texts.append(finish(engine.generate(PROMPT, GREEDY))[:2])
    assert texts[0] == texts[1]
    draft.close()
    target.close()


@pytest.mark.parametrize("argument", ["n_ctx", "n_batch", "threads", "draft_threads", "draft_ctx"])
def test_sizes_must_be_positive(tiny_target: Path, argument: str) -> None:
    with pytest.raises(UsageError, match=r"must be from 1 to \d+, not 0"):
        Engine(tiny_target, **{argument: 0})  # type: ignore[arg-type]


def test_a_model_larger_than_free_memory_stays_mapped(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=tiny_target.stat().st_size - 1)
    )
    with Engine(tiny_target, n_ctx=64, threads=1) as engine:
        assert "larger than free memory" in caplog.text
        assert finish(engine.generate(PROMPT, GREEDY))[2].bit_exact


def test_a_context_larger_than_memory_is_refused(tiny_target: Path) -> None:
    with pytest.raises(ModelError, match=r"needs .* GB of KV cache"):
        Engine(tiny_target, n_ctx=2**31 - 1)


# ---- models whose memory is no KV cache (docs/memory-kinds.md) ------------------------------------------


@pytest.mark.parametrize("write", [write_mamba, write_jamba])
def test_a_target_that_cannot_roll_back_is_refused_with_a_draft_and_decodes_without(
    write: Callable[..., Path], tiny_draft: Path, tmp_path: Path
) -> None:
    target = write(tmp_path / "t.gguf", byte_level())
    with pytest.raises(ModelError, match=r"t\.gguf: its recurrent memory .*--no-draft"):
        Engine(target, tiny_draft, n_ctx=128, threads=1)
    with Engine(target, n_ctx=128, threads=1) as engine:
        first = finish(engine.generate(PROMPT, GREEDY))
        stopped = finish(engine.generate(PROMPT, with_params(GREEDY, stop=[first[1][5:8]])))
        assert stopped[1] == first[1][: first[1].index(first[1][5:8])]
        assert finish(engine.generate(PROMPT, GREEDY))[:2] == first[:2]


@pytest.mark.parametrize("write", [write_lfm2, write_qwen35])
def test_a_hybrid_target_with_snapshots_rolls_back(
    write: Callable[..., Path], tiny_draft: Path, tmp_path: Path
) -> None:
    target = write(tmp_path / "t.gguf", byte_level())
    with Engine(target, tiny_draft, gamma=4, n_ctx=128, threads=1) as engine:
        plain = finish(engine.generate(PROMPT, GREEDY, gamma=0))
        for gamma in (1, 4, 20):
            drafted = finish(engine.generate(PROMPT, GREEDY, gamma=gamma))
            assert drafted[:2] == plain[:2]
            assert drafted[2].verified > drafted[2].accepted
            assert len(drafted[2].accepted_histogram) <= 9, "no more than the snapshots reach"


def test_a_recurrent_draft_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    draft = write_lfm2(tmp_path / "d.gguf", byte_level())
    with pytest.raises(ModelError, match=r"d\.gguf: its recurrent memory"):
        Engine(tiny_target, draft, n_ctx=128, threads=1)


def test_a_sliding_window_rolls_back_past_its_window(tiny_draft: Path, tmp_path: Path) -> None:
    target = write_gemma3(tmp_path / "t.gguf", byte_level(), window=16)
    with Engine(target, tiny_draft, gamma=4, n_ctx=256, threads=1) as engine:
        params = with_params(GREEDY, max_tokens=150)
        plain = finish(engine.generate(PROMPT, params, gamma=0))
        drafted = finish(engine.generate(PROMPT, params, gamma=6))
        assert drafted[:2] == plain[:2]
        assert drafted[2].verified > drafted[2].accepted
