from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pyspec.costs import CostCurve
from pyspec.engine import AUTO
from pyspec.errors import UsageError
from pyspec.llama import Model
from pyspec.sampling import SamplingParams
from pyspec.tune import (
    Acceptance,
    Costs,
    Report,
    Run,
    Setup,
    measure_costs,
    measure_runs,
    paper_speedup,
    speedup,
    thread_counts,
    tokens_per_round,
    tune,
)


def curve(*seconds: float) -> CostCurve:
    """Of passes over 1, 2, ... tokens."""
    return CostCurve(range(1, len(seconds) + 1), seconds)


# ---- predictions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "gamma", "expected"),
    # Leviathan et al., table 1, where c is 0.
    [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 5, 3.69), (0.9, 2, 2.71), (0.9, 10, 6.86)],
)
def test_the_paper_s_own_figures(a: float, gamma: int, expected: float) -> None:
    assert paper_speedup(a, gamma, 0.0) == pytest.approx(expected, abs=0.005)


def test_the_paper_s_formula_with_a_draft_that_costs() -> None:
    # (1 - 0.5^3) / (0.5 (1 + 2 0.25)) = 0.875 / 0.75
    assert paper_speedup(0.5, 2, 0.25) == pytest.approx(7 / 6)
    assert paper_speedup(0.0, 4, 0.25) == pytest.approx(1 / 2)
    assert paper_speedup(1.0, 4, 0.25) == pytest.approx(5 / 2), "the limit"
    assert paper_speedup(0.7, 0, 0.25) == pytest.approx(1)


def test_the_speed_up_from_a_cost_curve() -> None:
    costs = Costs(curve(10.0, 12.0, 15.0), 4.0)
    assert tokens_per_round((0.5, 0.4), 2) == pytest.approx(1 + 0.5 + 0.5 * 0.4)
    # A round draws two tokens and checks three: 2 4 + 15 = 23, for 1.7 tokens; plain ones take 10 each.
    assert speedup((0.5, 0.4), 2, costs) == pytest.approx(1.7 * 10 / 23)
    assert speedup((0.5, 0.4), 0, costs) == 1
    assert costs.c == pytest.approx(0.4)
    assert costs.added(2) == pytest.approx(0.7), "another draft step, and 3 more to check"


def test_both_predictions_agree_where_their_assumptions_do() -> None:
    flat = Costs(curve(*[10.0] * 9), 1.0)
    for gamma in (1, 4, 8):
        assert speedup([0.7] * 8, gamma, flat) == pytest.approx(paper_speedup(0.7, gamma, 0.1))


# ---- acceptance --------------------------------------------------------------------------------------


def test_acceptance_by_position() -> None:
    counted = Acceptance()
    for drafted, accepted in ((3, 3), (3, 1), (3, 0), (1, 1)):
        counted.count(drafted, accepted)
    # The first is decided on in every round, the second where the first was accepted and another drafted.
    assert counted.examined == [4, 2, 1]
    assert counted.accepted == [3, 1, 1]
    assert counted.by_position == [3 / 4, 1 / 2, 1.0]
    assert counted.rate == 5 / 7


def test_counts_add_up() -> None:
    total = Acceptance()
    total.count(1, 1)
    other = Acceptance()
    other.count(2, 1)
    total.add(other)
    assert (total.examined, total.accepted) == ([2, 1], [2, 0])


# ---- conclusions -------------------------------------------------------------------------------------


def report(
    costs: Costs, accepted: Sequence[int], speedups: Sequence[float], lack: str | None = None
) -> Report:
    """Gammas 0, 1, ... at so many times 20 tokens/s; of 100 first tokens and so on so many accepted."""
    acceptance = Acceptance([100, *accepted[:-1]], list(accepted))
    runs = [
        Run(gamma, tokens=200, seconds=10 / times, rounds=100)
        for gamma, times in enumerate((1.0, *speedups))
    ]
    runs[-1].acceptance = acceptance
    runs.append(Run(AUTO, tokens=200, seconds=8, rounds=100))
    return Report(costs, (), tuple(runs), lack)


CHEAP = Costs(curve(30.0, 31.0, 32.0), 3.0)


def test_when_it_pays() -> None:
    found = report(CHEAP, (80, 64), (1.61, 2.02))
    assert found.pays
    assert found.best.gamma == 2
    # 1 + 0.8 + 0.8 0.8 tokens in 2 3 + 32
    assert found.best.predicted == pytest.approx(2.44 * 30 / 38)
    assert found.conclusion == (
        "Drafting pays: 2.02 times as fast, 40.4 tokens/s with gamma 2, 20.0 without a draft. "
        "With gamma auto, the default, it is 1.25 times as fast, 25.0 tokens/s."
    )


def test_a_draft_that_is_too_slow() -> None:
    found = report(Costs(curve(30.0, 33.0, 36.0), 15.0), (40, 16), (0.8, 0.7))
    assert not found.pays
    assert found.conclusion.startswith(
        "Drafting does not pay: 0.80 times as fast, 16.0 tokens/s with gamma 1, 20.0 without a draft. "
        "A drafted token adds 0.60 of a plain pass to a round, 0.50 to draw it and 0.10 to check it, and is "
        "accepted 0.40 of the time: the draft is too slow for how often it is right. Try a smaller one, or "
        "one closer to the target. With gamma auto"
    )


def test_checking_that_is_too_dear() -> None:
    dear = Costs(curve(30.0, 54.0, 78.0), 3.0)
    found = report(dear, (70, 49), (0.95, 0.9), "switched off")
    assert not found.pays
    assert (
        "0.90 of a plain pass to a round, 0.10 to draw it and 0.80 to check it" in found.conclusion
    )
    assert (
        "accepted 0.70 of the time: checking costs too much. The kernels that make it cheap are not in use: "
        "switched off. With"
    ) in found.conclusion
    assert "kernels" not in replace(found, kernels_lack=None).conclusion


def test_gains_within_noise_are_none() -> None:
    assert not report(CHEAP, (80, 64), (1.01, 1.0)).pays


@pytest.mark.parametrize("speedups", [(0.9, 0.9), (1.6, 3.5)])
def test_a_measurement_that_the_costs_contradict_is_doubted(speedups: Sequence[float]) -> None:
    found = report(CHEAP, (80, 64), speedups)
    assert "times would follow: was the machine busy?" in found.conclusion


# ---- measurements ------------------------------------------------------------------------------------


@pytest.fixture
def setup(tiny_target: Path, tiny_draft: Path) -> Setup:
    target = Model(tiny_target)
    return Setup(
        target=target,
        draft=Model(tiny_draft),
        prompts=[target.tokenize("ab cd"), target.tokenize("bad cab")],
        params=SamplingParams(temperature=0.0),
        tokens=24,
        gammas=(0, 1, 4),
        n_ctx=256,
        threads=1,
    )


def test_every_cost_is_measured(setup: Setup) -> None:
    costs = measure_costs(setup, (1, 3), threads=1, draft_threads=1)
    assert sorted(costs) == [0, 1, 3]
    assert min(costs.values()) > 0


def test_a_context_too_small_for_the_passes_is_refused(setup: Setup) -> None:
    with pytest.raises(UsageError, match=r"passes over 9 tokens needs a larger context than 9"):
        measure_costs(replace(setup, n_ctx=9), (1, 9), threads=1, draft_threads=1)


def test_runs_count_whole_rounds_only(setup: Setup) -> None:
    plain, one, four, auto = measure_runs(setup)
    assert (plain.gamma, one.gamma, four.gamma, auto.gamma) == (0, 1, 4, "auto")
    # The first round of either text is not counted; a text may end with two that complete a character.
    assert 2 * (setup.tokens - 1) <= plain.tokens == plain.rounds <= 2 * setup.tokens
    assert plain.acceptance.examined == []
    for run in (one, four):
        assert run.acceptance.examined[0] == run.rounds, "every round drafted"
        assert len(run.acceptance.examined) == run.gamma
        assert run.tokens == run.rounds + sum(run.acceptance.accepted)
    assert four.rounds < one.rounds < plain.rounds
    assert auto.tokens >= auto.rounds > 0
    assert auto.acceptance.examined == [], "of whatever it drafted"


def test_the_target_as_its_own_draft_is_always_accepted(setup: Setup) -> None:
    report = tune(replace(setup, draft=setup.target))
    assert report.acceptance.rate == 1
    assert [speed.tokens_per_round for speed in report.speeds] == [1, 2, 5]
    assert report.costs.target.widths == (1, 2, 3, 4, 5)
    assert report.auto.speedup > 0


def test_texts_that_end_at_once_are_refused(setup: Setup) -> None:
    params = SamplingParams(logit_bias={setup.target.eos: 100.0})
    with pytest.raises(UsageError, match="end at once"):
        measure_runs(replace(setup, params=params))


def test_thread_counts() -> None:
    assert [thread_counts(most) for most in (1, 2, 6, 8)] == [
        [1],
        [1, 2],
        [1, 2, 4, 6],
        [1, 2, 4, 8],
    ]
