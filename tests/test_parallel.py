"""Several requests at once, and what the next prompt finds in the caches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from pyspec import Engine, Generation, Model, Rule, SamplingParams, SlotsBusyError, bridge
from pyspec.costs import CostCurve
from pyspec.errors import LogitsError, ModelError, PyspecError
from pyspec.llama import Context, Part, evaluate_together
from pyspec.metrics import Statistics
from pyspec.sampling import Sampler
from tests.models import byte_level, write_mamba

PROMPTS = [[0, 3, 5, 7, 4], [0, 3, 5, 9], [0, 11, 6, *[3, 8, 4] * 9], [0, 3, 5, 7, 4, 12, 9, 9]]


def settings(seed: int, **changes: object) -> SamplingParams:
    """Settings of a text that does not end early."""
    values = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "seed": seed, "max_tokens": 30}
    bans = dict.fromkeys(byte_level().controls, -math.inf)
    return SamplingParams(**{**values, "logit_bias": bans, **changes})  # type: ignore[arg-type]


@pytest.fixture
def engine(tiny_target: Path, tiny_draft: Path) -> Iterator[Engine]:
    with Engine(
        tiny_target, tiny_draft, gamma=4, n_ctx=96, n_batch=16, threads=1, parallel=3
    ) as loaded:
        yield loaded


def alone(tiny_target: Path, tiny_draft: Path, *request: object, **options: object) -> list[int]:
    """The text of an engine that has seen nothing else."""
    with Engine(tiny_target, tiny_draft, gamma=4, n_ctx=96, n_batch=16, threads=1) as fresh:
        pieces = fresh.generate(*request, **options)  # type: ignore[arg-type]
        return [token.id for piece in pieces for token in piece.tokens]


def carry_on(engine: Engine, generations: Sequence[Generation]) -> list[list[int]]:
    """Step until all have finished; each one's tokens."""
    texts: dict[Generation, list[int]] = {generation: [] for generation in generations}
    while active := [generation for generation in generations if not generation.finished]:
        for generation, piece in zip(active, engine.step(active), strict=True):
            texts[generation] += [token.id for token in piece.tokens]
            assert (piece.statistics is not None) == generation.finished
    return list(texts.values())


@pytest.mark.parametrize("rule", list(Rule))
def test_texts_written_together_are_those_written_alone(
    engine: Engine, tiny_target: Path, tiny_draft: Path, rule: Rule
) -> None:
    gammas = (4, 0, 2)
    generations = [
        engine.start(prompt, settings(seed, max_tokens=20 + 7 * seed), gamma=gamma, rule=rule)
        for seed, (prompt, gamma) in enumerate(zip(PROMPTS, gammas, strict=False))
    ]
    texts = carry_on(engine, generations)
    for seed, (prompt, gamma) in enumerate(zip(PROMPTS, gammas, strict=False)):
        params = settings(seed, max_tokens=20 + 7 * seed)
        expected = alone(tiny_target, tiny_draft, prompt, params, gamma=gamma, rule=rule)
        assert texts[seed] == expected
        assert len(expected) == 20 + 7 * seed


def test_the_logits_of_a_shared_pass_are_the_bits_of_one_alone(tiny_target: Path) -> None:
    model = Model(tiny_target)
    together = Context.several(3, model, n_ctx=80, n_batch=32, n_logits=5, threads=2)
    single = Context(model, n_ctx=80, n_batch=32, n_logits=5, threads=2)
    for context, prompt in zip(together, PROMPTS, strict=False):
        context.evaluate(prompt)
    adds = [[3, 4, 5, 6, 7], [9], [8, 8, 3]]
    # The middle one takes no part: its neighbours still share the call.
    for members in ((0, 1, 2), (0, 2)):
        before = [context.length for context in together]
        evaluate_together([Part(together[i], adds[i], len(adds[i])) for i in members])
        found = {
            i: [together[i].logits(row).copy() for row in range(len(adds[i]))] for i in members
        }
        for i in members:
            assert together[i].length == before[i] + len(adds[i])
            single.clear()
            single.evaluate(PROMPTS[i])
            single.evaluate(adds[i], n_logits=len(adds[i]))
            for row, logits in enumerate(found[i]):
                np.testing.assert_array_equal(logits, single.logits(row))
            together[i].truncate(before[i])
    for context in (single, *together):
        context.close()
    model.close()


@pytest.mark.parametrize("gamma", [4, 15])
def test_wide_shared_passes_are_not_called_bit_exact(
    tiny_target: Path, tiny_draft: Path, gamma: int
) -> None:
    """No kernel takes F32: from 33 tokens on, which three requests of 16 exceed, llama.cpp does."""
    with Engine(tiny_target, tiny_draft, parallel=3, n_ctx=80) as engine:
        generations = [
            engine.start(prompt, settings(1, max_tokens=20), gamma=gamma) for prompt in PROMPTS[:3]
        ]
        statistics = []
        while len(statistics) < 3:
            statistics += [
                piece.statistics for piece in engine.step(generations) if piece.statistics
            ]
            generations = [each for each in generations if not each.finished]
    assert [each.bit_exact for each in statistics] == [gamma == 4] * 3
    if gamma == 15:
        assert "shared with other requests" in str(statistics[0].bit_exact_reason)


def attention_of(work: Callable[[], object]) -> int:
    """How many attention operations the work takes: a pass has one for each layer."""
    before = bridge.counts().attention
    work()
    return bridge.counts().attention - before


# With free tokens all that lies between is carried along; with free passes nothing is.
@pytest.mark.parametrize(("last_cost", "n_passes"), [(1.01, 1), (32.0, 2)])
def test_slots_that_are_not_neighbours_share_a_pass_where_that_is_cheaper(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, last_cost: float, n_passes: int
) -> None:
    costs = CostCurve([1, 32], [1.0, last_cost])
    monkeypatch.setattr("pyspec.engine.measured_costs", lambda _: costs)
    with Engine(tiny_target, n_ctx=96, n_batch=32, threads=1, parallel=4) as engine:
        generations = [engine.start(prompt, settings(i)) for i, prompt in enumerate(PROMPTS)]
        for _ in range(2):
            engine.step(generations)
        one = attention_of(lambda: engine.step(generations[:1]))
        assert one > 0
        assert attention_of(lambda: engine.step(generations)) == one
        # Whatever order they come in.
        assert attention_of(lambda: engine.step(generations[::-1])) == one
        generations[1].close()
        held = engine._slots[1].held
        rest = [generations[i] for i in (3, 0, 2)]
        assert attention_of(lambda: engine.step(rest)) == n_passes * one
        assert engine._slots[1].held == held, "what fills a pass up is not kept"
        carry_on(engine, rest)
        for i, generation in ((3, rest[0]), (0, rest[1]), (2, rest[2])):
            with Engine(tiny_target, n_ctx=96, n_batch=32, threads=1) as fresh:
                fresh_one = fresh.start(PROMPTS[i], settings(i))
                carry_on(fresh, [fresh_one])
            assert generation.ids == fresh_one.ids
        # The slot between still holds what it did, to the bit.
        again = engine.start([*held, 5], settings(9, max_tokens=20))
        assert cached(again) == len(held)
        carry_on(engine, [again])
        with Engine(tiny_target, n_ctx=96, n_batch=32, threads=1) as fresh:
            fresh_one = fresh.start([*held, 5], settings(9, max_tokens=20))
            carry_on(fresh, [fresh_one])
        assert again.ids == fresh_one.ids


def test_a_full_slot_between_others_is_left_out(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = CostCurve([1, 32], [1.0, 1.01])
    monkeypatch.setattr("pyspec.engine.measured_costs", lambda _: costs)
    with Engine(tiny_target, n_ctx=96, n_batch=32, threads=1, parallel=3) as engine:
        generations = [engine.start(prompt, settings(1)) for prompt in PROMPTS[:3]]
        engine.step(generations)
        one = attention_of(lambda: engine.step(generations[:1]))
        generations[1].close()
        context = engine._slots[1].context
        context.evaluate([3] * (96 - context.length))
        rest = [generations[0], generations[2]]
        assert attention_of(lambda: engine.step(rest)) == 2 * one
        carry_on(engine, rest)
        assert [generation.statistics.completion_tokens for generation in rest] == [30, 30]


def test_a_request_gets_a_slot_beside_those_under_way(tiny_target: Path) -> None:
    with Engine(tiny_target, n_ctx=96, n_batch=16, threads=1, parallel=5) as engine:
        generations = [engine.start(prompt, settings(1)) for prompt in (*PROMPTS, PROMPTS[0])]
        places = [generation.slot.context.sequence for generation in generations]
        assert places == [0, 1, 2, 3, 4]
        for i in (0, 1, 3):
            generations[i].close()
        carry_on(engine, [generations[2]])
        # Of the first four, which hold as much of it, the last is beside the one that is under way.
        assert engine.start([15, 15], settings(1)).slot.context.sequence == 3


def test_a_prompt_is_read_only_where_it_differs_from_what_a_cache_holds(engine: Engine) -> None:
    system = [0, *[5, 6, 7] * 10]
    first = engine.start([*system, 3], settings(1))
    text = carry_on(engine, [first])[0]
    assert cached(first) == 0
    again = engine.start([*system, 3, *text, 9], settings(2))
    carry_on(engine, [again])
    # The last token written was never evaluated.
    assert cached(again) == len(system) + len(text)
    other = engine.start([*system, 4, 4], settings(3))
    carry_on(engine, [other])
    assert cached(other) == len(system)


def test_a_beginning_that_a_busy_slot_holds_is_copied(
    engine: Engine, tiny_target: Path, tiny_draft: Path
) -> None:
    system = [0, *[5, 6, 7] * 10]
    busy = engine.start([*system, 3], settings(1))
    while not busy.prefilled:
        engine.step([busy])
    engine.step([busy])
    copied = engine.start([*system, 4, 9], settings(2))
    assert copied.statistics.cached_tokens == len(system)
    texts = carry_on(engine, [busy, copied])
    expected = alone(tiny_target, tiny_draft, [*system, 4, 9], settings(2))
    assert texts[1] == expected
    assert busy.statistics.completion_tokens == 30


def test_the_answer_to_a_kept_conversation_is_that_of_a_fresh_engine(
    engine: Engine, tiny_target: Path, tiny_draft: Path
) -> None:
    ids = [0, 3, 5, 7, 4]
    for turn in range(3):
        params = settings(turn, max_tokens=12, stop=["e"] if turn == 1 else ())
        text = [t.id for piece in engine.generate(ids, params) for t in piece.tokens]
        assert text == alone(tiny_target, tiny_draft, ids, params)
        ids = [*ids, *text, 6, 9]


def test_as_many_requests_as_there_are_slots(engine: Engine) -> None:
    generations = [engine.start(prompt, settings(1)) for prompt in PROMPTS[:3]]
    with pytest.raises(SlotsBusyError, match="3 requests are under way"):
        engine.start(PROMPTS[3], settings(1))
    generations[1].close()
    replacement = engine.start(PROMPTS[3], settings(1))
    with pytest.raises(PyspecError, match="this request has ended"):
        engine.step([generations[1]])
    carry_on(engine, [generations[0], generations[2], replacement])


def test_iterators_share_the_slots_and_the_oldest_gives_way(engine: Engine) -> None:
    iterators = [engine.generate(prompt, settings(1)) for prompt in PROMPTS]
    with pytest.raises(PyspecError, match="ended by another one"):
        next(iterators[0])
    for pieces in iterators[1:]:
        assert sum(len(piece.tokens) for piece in pieces) == 30


def test_damaged_logits_end_one_request_alone(
    engine: Engine, tiny_target: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generations = [engine.start(prompt, settings(1)) for prompt in PROMPTS[:3]]
    original = Sampler.distribution

    def damaged(self: Sampler, logits: object, history: Sequence[int], *rest: object, **of: object):
        if history[: len(PROMPTS[1])] == PROMPTS[1] and len(history) > 12:
            raise LogitsError("the target's logits are NaN")
        original(self, logits, history, *rest, **of)  # type: ignore[arg-type]

    monkeypatch.setattr(Sampler, "distribution", damaged)
    texts = []
    while active := [generation for generation in generations if not generation.finished]:
        texts.append(engine.step(active))
    monkeypatch.undo()
    assert isinstance(generations[1].error, LogitsError)
    assert generations[0].error is generations[2].error is None
    assert generations[2].ids[len(PROMPTS[2]) :] == alone(
        tiny_target, tiny_draft, PROMPTS[2], settings(1)
    )
    assert cached(engine.start(PROMPTS[1], settings(1))) <= len(PROMPTS[1]) - 1


def test_a_failing_pass_ends_all_and_leaves_the_engine_usable(
    engine: Engine, tiny_target: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generations = [engine.start(prompt, settings(1)) for prompt in PROMPTS[:2]]
    engine.step(generations)

    def fails(_parts: object) -> None:
        raise ModelError("the pass failed")

    monkeypatch.setattr("pyspec.engine.evaluate_together", fails)
    with pytest.raises(ModelError, match="the pass failed"):
        engine.step(generations)
    monkeypatch.undo()
    assert all(generation.finished for generation in generations)
    pieces = engine.generate(PROMPTS[0], settings(1))
    ids = [token.id for piece in pieces for token in piece.tokens]
    assert ids == alone(tiny_target, tiny_draft, PROMPTS[0], settings(1))


def test_slots_fill_their_contexts_to_the_last_token(engine: Engine) -> None:
    generations = [
        engine.start(prompt, settings(1, max_tokens=None), gamma=gamma)
        for prompt, gamma in zip(PROMPTS, (7, 1, 3), strict=False)
    ]
    carry_on(engine, generations)
    assert [len(generation.ids) for generation in generations] == [97, 97, 97]


def test_recurrent_models_take_one_request_at_a_time(models: Path) -> None:
    with pytest.raises(ModelError, match="one request at a time"):
        Engine(write_mamba(models / "parallel-mamba.gguf", byte_level()), n_ctx=64, parallel=2)


def cached(generation: Generation) -> int:
    """How many tokens of its prompt were in a cache."""
    statistics: Statistics = generation.statistics
    return statistics.cached_tokens
