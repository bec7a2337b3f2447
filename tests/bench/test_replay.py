"""Rounds that are replayed are those of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.replay import Costs, Trace, curve, fixed, record, replay, speedup
from pyspec.costs import CostCurve
from pyspec.drafters.model import ModelDrafter
from pyspec.engine import Engine
from pyspec.llama import Context, Model
from pyspec.planner import FixedGamma, Planner
from pyspec.sampling import SamplingParams

PROMPT = [0, 3, 5, 7, 4, 3, 5, 7]
TOKENS = 60
COSTS = Costs(CostCurve((1, 2, 32), (1.0, 1.05, 2.5)), CostCurve((1, 2, 32), (0.2, 0.21, 0.5)))


@pytest.fixture(scope="module")
def trace(tiny_target: Path, tiny_draft: Path) -> Iterator[Trace]:
    target, small = Model(tiny_target), Model(tiny_draft)
    draft = ModelDrafter(Context(small, n_ctx=128, threads=1), target.n_vocab)
    yield record("kind", PROMPT, Context(target, n_ctx=128, threads=1), draft, TOKENS)
    draft.close()


@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_a_fixed_gamma_replayed_is_the_engines_own(
    trace: Trace, tiny_target: Path, tiny_draft: Path, gamma: int
) -> None:
    with Engine(tiny_target, tiny_draft, gamma=gamma, n_ctx=128, threads=1) as engine:
        pieces = list(engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=TOKENS)))
    statistics = pieces[-1].statistics
    assert statistics is not None
    replayed = replay(trace, COSTS, FixedGamma(gamma), copies=False)
    assert [token.id for piece in pieces for token in piece.tokens] == trace.text
    assert (replayed.rounds, replayed.drafted, replayed.accepted) == (
        statistics.rounds,
        statistics.drafted,
        statistics.accepted,
    )


def test_a_texts_time_is_that_of_its_passes(trace: Trace) -> None:
    plain = replay(trace, COSTS, FixedGamma(0), copies=False)
    assert plain.seconds == pytest.approx(len(trace.text) * COSTS.target(1))
    assert speedup([trace], COSTS, fixed(0), copies=False) == pytest.approx(1)


def test_guesses_save_time_and_change_no_round(trace: Trace) -> None:
    """The same tokens are drafted by a planner that takes copies' help to cost nothing either way."""
    alone = replay(trace, COSTS, FixedGamma(4), copies=False)
    guided = replay(trace, COSTS, FixedGamma(4))
    assert (guided.rounds, guided.drafted) == (alone.rounds, alone.drafted)
    assert guided.seconds != alone.seconds


def test_a_planner_of_copies_alone_needs_no_model(trace: Trace) -> None:
    planner = Planner(COSTS.target, [None])
    assert replay(trace, COSTS, planner, model=False).seconds > 0


def test_a_curve_is_read_in_milliseconds() -> None:
    assert curve("1:20,4:35.5")(4) == pytest.approx(0.0355)
