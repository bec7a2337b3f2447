"""What an interrupt in the middle of a pass leaves in the caches."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from pyspec import Engine, Generation, SamplingParams, worker
from pyspec.errors import ModelError
from pyspec.llama import Context, Model

PROMPT = [0, *[3, 5, 7, 4] * 12]
SAMPLED = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, seed=11, max_tokens=40)
_ABORTED = 2  # by llama.h


@pytest.fixture
def pair(tiny_target: Path, tiny_draft: Path) -> Iterator[Engine]:
    with Engine(tiny_target, tiny_draft, gamma=4, n_ctx=256, n_batch=32, threads=1) as engine:
        yield engine


class Interrupt:
    """A llama_decode whose call number `at` is aborted after a while, and the caller interrupted."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, delay_s: float) -> None:
        self._decode, self._calls_left, self._delay_s = llama_cpp.llama_decode, at, delay_s
        self.status = 0
        patch.setattr(llama_cpp, "llama_decode", self)

    def __call__(self, *arguments: object) -> int:
        self._calls_left -= 1
        if self._calls_left != 0:
            return int(self._decode(*arguments))
        timer = threading.Timer(self._delay_s, self._abort)
        timer.start() if self._delay_s else self._abort()
        self.status = self._decode(*arguments)
        timer.cancel()
        raise KeyboardInterrupt

    def _abort(self) -> None:
        worker._abort[0] = 1


def carry_on(engine: Engine, generation: Generation) -> list[int]:
    """Step until it has finished, and return what was written."""
    n_prompt = len(generation.ids)
    while not generation.finished:
        engine.step([generation])
    return generation.ids[n_prompt:]


def text_and_cached(engine: Engine, ids: Sequence[int]) -> tuple[list[int], int]:
    """The text that follows, and how many of the ids were in the cache."""
    generation = engine.start(ids, SAMPLED)
    return carry_on(engine, generation), generation.statistics.cached_tokens


# A round of gamma 4 makes five calls, the last of them the target's.
@pytest.mark.parametrize(("at", "delay_s"), [(5, 0), (5, 3e-4), (5, 1), (2, 0), (10, 0)])
def test_what_was_committed_before_an_interrupted_round_is_kept(
    pair: Engine, monkeypatch: pytest.MonkeyPatch, at: int, delay_s: float
) -> None:
    generation = pair.start(PROMPT, SAMPLED)
    while generation.statistics.rounds < 3:
        pair.step([generation])
    with monkeypatch.context() as patch:
        interrupt = Interrupt(patch, at, delay_s)
        with pytest.raises(KeyboardInterrupt):
            carry_on(pair, generation)
    committed = list(generation.ids)
    if not delay_s:
        assert interrupt.status == _ABORTED
    context = pair._slots[0].context
    assert context.length == len(committed) - 1, "the last token was pending"
    follow_up = [*committed, 4, 9]
    kept, cached = text_and_cached(pair, follow_up)
    assert cached == len(committed) - 1
    pair._slots[0].forget()
    assert text_and_cached(pair, follow_up) == (kept, 0)


@pytest.mark.parametrize("delay_s", [0, 3e-4, 1])
def test_the_logits_after_an_interrupted_pass_are_the_bits_of_a_fresh_context(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, delay_s: float
) -> None:
    model = Model(tiny_target)
    fresh, context = (Context(model, n_ctx=128, n_logits=3, threads=1) for _ in range(2))
    for each in (fresh, context):
        each.evaluate(PROMPT)
    with monkeypatch.context() as patch:
        Interrupt(patch, 1, delay_s)
        with pytest.raises(KeyboardInterrupt):
            context.evaluate([8, 9, 8], n_logits=3)
    assert context.length == len(PROMPT)
    for each in (fresh, context):
        each.evaluate([7, 5, 6], n_logits=3)
    for row in range(3):
        np.testing.assert_array_equal(context.logits(row), fresh.logits(row))
    for each in (fresh, context, model):
        each.close()


def test_chunks_of_a_prompt_before_the_interrupted_one_are_kept(
    pair: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, cached = text_and_cached(pair, PROMPT)
    assert cached == 0
    pair._slots[0].forget()
    with monkeypatch.context() as patch:
        # The target's first chunk of 32 tokens, the draft's, and the target's second.
        Interrupt(patch, 3, 0)
        with pytest.raises(KeyboardInterrupt):
            next(pair.generate(PROMPT, SAMPLED))
    assert text_and_cached(pair, PROMPT) == (expected, 32)


def test_of_a_pass_that_failed_nothing_is_kept(
    pair: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = pair.generate(PROMPT, SAMPLED)
    next(pieces)
    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "llama_decode", lambda *_: -3)
        with pytest.raises(ModelError):
            next(pieces)
    assert pair._slots[0].context.length == 0
