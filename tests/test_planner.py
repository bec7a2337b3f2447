"""The planner on synthetic costs and acceptance processes, whose optimum is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from pyspec.costs import CostCurve
from pyspec.planner import Acceptance, Candidate, FixedGamma, Planner

MOST = 31
N_ROUNDS = 500


def line(first: float, slope: float) -> CostCurve:
    """v(n) = first + slope (n - 1)."""
    widths = (1, 2, 32)
    return CostCurve(widths, [first + slope * (n - 1) for n in widths])


def steps(first: float, height: float, every: int) -> CostCurve:
    """A pass costs the same until a step: v(n) = first + height floor((n - 1) / every)."""
    widths = range(1, 33)
    return CostCurve(widths, [first + height * ((n - 1) // every) for n in widths])


@dataclass
class Process:
    """Drafted tokens that are accepted with a probability each, of which the drafter knows something.

    Attributes:
        costs: v(n).
        draft: d; None if the tokens are known without drawing.
        acceptance: The probability in round r.
        informed: The drafter's confidence is the token's own probability, spread around `acceptance`.
    """

    costs: CostCurve
    draft: CostCurve | None
    acceptance: Callable[[int], float]
    informed: bool = False

    def token(self, round_: int, random: np.random.Generator) -> tuple[float, bool]:
        """The confidence in a token, and whether it would be accepted if it were reached."""
        a = self.acceptance(round_)
        if not self.informed:
            return a, bool(random.random() < a)
        probability = 0.98 if random.random() < a else 0.15
        return probability, bool(random.random() < probability)

    def rate(self, planner: Planner | FixedGamma, *, seed: int = 0, n: int = N_ROUNDS) -> float:
        """Tokens a second of n rounds, by the true costs."""
        random = np.random.default_rng(seed)
        tokens = seconds = 0.0
        for round_ in range(n):
            ahead = [self.token(round_, random) for _ in range(MOST)]
            known = [confidence for confidence, _ in ahead] if self.draft is None else None
            plan = planner.plan([Candidate(MOST, confidence=known)])
            n_drawn = 0
            if plan.source is not None:
                n_drawn = plan.most if known is not None else 1
                while n_drawn < plan.most and known is None and plan.go_on(ahead[n_drawn - 1][0]):
                    n_drawn += 1
            drawn = ahead[:n_drawn]
            accepted = next((i for i, (_, stands) in enumerate(drawn) if not stands), n_drawn)
            verify_s = self.costs(n_drawn + 1)
            draft_s = self.draft(1) * n_drawn if self.draft is not None else 0.0
            planner.record(
                plan, [c for c, _ in drawn], accepted, draft_s=draft_s, verify_s=verify_s
            )
            tokens += accepted + 1
            seconds += verify_s + draft_s
        return tokens / seconds

    def planned(self, **options: int) -> float:
        """The rate with a planner of its own."""
        return self.rate(Planner(self.costs, [self.draft]), **options)

    def best_fixed(self) -> float:
        """The rate of the best fixed gamma."""
        return max(self.rate(FixedGamma(gamma)) for gamma in (0, 1, 2, 3, 4, 5, 6, 8, 12, 20, MOST))

    def best_steady(self, a: float) -> float:
        """The rate of the fixed gamma that is best at a steady acceptance: (1 - a^(g+1)) / (1 - a) tokens."""
        d = self.draft(1) if self.draft is not None else 0.0

        def expected(gamma: int) -> float:
            return (1 - a ** (gamma + 1)) / (gamma * d + self.costs(gamma + 1))

        return self.rate(FixedGamma(max(range(MOST + 1), key=expected)))

    def plain(self) -> float:
        """The rate of plain decoding."""
        return 1 / self.costs(1)


CURVES = {
    "flat": line(0.036, 0.001),
    "ours": CostCurve((1, 2, 4, 8, 16, 32), (0.036, 0.038, 0.040, 0.050, 0.09, 0.17)),
    "steep": line(0.036, 0.020),
    "steps of 4": steps(0.036, 0.020, 4),
    "steps of 8": steps(0.036, 0.036, 8),
}
DRAFTS = {"model": line(0.014, 0.001), "copied": None}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("a", [0.2, 0.5, 0.7, 0.9, 0.97])
def test_a_steady_acceptance_is_drafted_for_as_by_the_best_fixed_gamma(
    curve: str, draft: str, a: float
) -> None:
    process = Process(CURVES[curve], DRAFTS[draft], lambda _: a)
    planned, best = process.planned(), process.best_steady(a)
    assert planned > 0.95 * best, f"{planned:.1f} tokens/s, of {best:.1f}"


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_useless_draft_costs_next_to_nothing(curve: str, draft: str) -> None:
    process = Process(CURVES[curve], DRAFTS[draft], lambda _: 0.0)
    assert process.planned() > 0.97 * process.plain()


@pytest.mark.parametrize(("early", "late"), [(0.95, 0.1), (0.1, 0.95)])
def test_an_acceptance_that_changes_midway_is_followed(early: float, late: float) -> None:
    """Better than any fixed gamma, which must be wrong in one of the halves."""
    half = N_ROUNDS // 2
    process = Process(CURVES["ours"], DRAFTS["model"], lambda i: early if i < half else late)
    assert process.planned() > process.best_fixed()


def test_a_drafter_that_knows_when_it_is_sure_is_stopped_in_time() -> None:
    process = Process(CURVES["ours"], DRAFTS["model"], lambda _: 0.75, informed=True)
    assert process.planned() > 1.02 * process.best_fixed()


def test_a_drafter_that_has_become_good_is_found_again() -> None:
    process = Process(CURVES["ours"], DRAFTS["model"], lambda i: 0.0 if i < 250 else 0.95)
    assert process.planned(n=1000) > 1.5 * process.plain()


def test_a_lucky_round_does_not_make_drafting_seem_too_dear() -> None:
    """Costs of the default pair where memory is fast: drafting pays from an acceptance of 0.55."""
    costs = CostCurve((1, 2, 3, 4, 5, 6), (0.021, 0.0237, 0.026, 0.0289, 0.0324, 0.0375))
    planner = Planner(costs, [line(0.009, 0.001)])
    for confidence, accepted in (([0.47], 0), ([1.0, 1.0, 0.81, 0.95], 4)):
        plan = planner.plan([Candidate(MOST)])
        n = len(confidence)
        planner.record(plan, confidence, accepted, draft_s=0.009 * n, verify_s=costs(n + 1))
        assert plan.source == 0
    assert planner.plan([Candidate(MOST, backlog=2)]).source == 0


def run(
    planner: Planner, costs: CostCurve, sources: list[tuple[float, float]], n: int
) -> list[int]:
    """Rounds of each source, of (acceptance, seconds a step) each."""
    random = np.random.default_rng(1)
    chosen = [0] * len(sources)
    for _ in range(n):
        plan = planner.plan([Candidate(MOST) for _ in sources])
        confidence, accepted, open_ = list[float](), 0, True
        if plan.source is not None:
            chosen[plan.source] += 1
            a, step = sources[plan.source]
            while len(confidence) < plan.most and (not confidence or plan.go_on(confidence[-1])):
                confidence.append(0.6)
                open_ = open_ and bool(random.random() < a)
                accepted += open_
        step = sources[plan.source][1] if plan.source is not None else 0.0
        planner.record(
            plan,
            confidence,
            accepted,
            draft_s=step * len(confidence),
            verify_s=costs(len(confidence) + 1),
        )
    return chosen


def test_the_draft_that_earns_most_a_second_is_used() -> None:
    costs = CURVES["ours"]
    for good in (0, 1):
        sources = [(0.3, 0.014), (0.3, 0.004)]
        sources[good] = (0.9, sources[good][1])
        drafts = [line(step, 0.001) for _, step in sources]
        chosen = run(Planner(costs, drafts), costs, sources, 300)
        assert chosen[good] > 0.85 * 300


def test_a_long_backlog_is_worth_catching_up_with_only_for_a_drafter_that_pays() -> None:
    planner = Planner(CURVES["ours"], [line(0.014, 0.001)])
    assert planner.plan([Candidate(MOST, backlog=1)]).source == 0
    assert planner.plan([Candidate(MOST, backlog=100_000)]).most <= 1


def test_without_timing_a_plan_depends_on_the_tokens_alone() -> None:
    plans = []
    for slowdown in (1.0, 7.0):
        planner = Planner(CURVES["ours"], [DRAFTS["model"]], observe_time=False)
        made = []
        for round_ in range(60):
            plan = planner.plan([Candidate(MOST)])
            n = 0
            while n < plan.most and (n == 0 or plan.go_on(0.8)):
                n += 1
            made.append(n)
            planner.record(
                plan,
                [0.8] * n,
                min(n, round_ % 4),
                draft_s=0.01 * slowdown * n,
                verify_s=0.04 * slowdown * (1 + (n == 3)),
            )
        plans.append(made)
    assert plans[0] == plans[1]
    assert len(set(plans[0])) > 1


def test_shared_passes_are_dearer_and_draft_less() -> None:
    def drafted(share: int) -> int:
        plan = Planner(CURVES["ours"], [None]).plan(
            [Candidate(MOST, confidence=[0.9] * MOST)], share
        )
        return plan.most

    assert drafted(1) > drafted(4) >= 0


@pytest.mark.parametrize("observe_time", [False, True])
@pytest.mark.parametrize(("slowdown", "fits"), [(0.5, False), (1.0, True), (3.0, True)])
def test_costs_that_were_measured_on_a_busy_machine_are_noticed(
    observe_time: bool, slowdown: float, fits: bool
) -> None:
    costs = CURVES["ours"]
    planner = Planner(costs, [None], observe_time=observe_time)
    for _ in range(30):
        plan = planner.plan([Candidate(0)])
        planner.record(plan, [], 0, draft_s=0.0, verify_s=slowdown * costs(1))
    assert planner.costs_fit is fits


# ---- the parts ---------------------------------------------------------------------------------------


def test_costs_lie_on_lines_between_the_measured_widths_and_beyond() -> None:
    curve = CostCurve((1, 3, 5), (10.0, 14.0, 24.0))
    assert [curve(n) for n in (0, 1, 2, 3, 4, 5, 7)] == [0, 10, 12, 14, 19, 24, 34]
    assert CostCurve((1,), (2.0,))(3) == 6.0


def test_observed_costs_are_followed_most_near_what_was_observed() -> None:
    curve = line(1.0, 1.0)
    for _ in range(200):
        curve.observe(4, 8.0)
    assert curve(4) == pytest.approx(8.0)
    assert 1.0 < curve(1) < 1.3
    assert 5.0 < curve(5) < 10.0
    assert curve(40) / 40 == pytest.approx(curve(32) / 32)
    assert curve.copy()(4) == 4.0


def test_no_single_pass_moves_costs_far() -> None:
    curve = line(1.0, 1.0)
    curve.observe(1, 1e9)
    assert 1.0 < curve(1) < 1.3


def test_costs_that_change_their_shape_are_followed() -> None:
    """A machine whose memory has become faster: narrow passes take less and wide ones more."""
    curve = CostCurve((1, 2, 4, 6, 8), (0.0297, 0.0301, 0.0309, 0.0340, 0.0412))
    real = CostCurve((1, 2, 4, 6, 8), (0.0210, 0.0237, 0.0289, 0.0375, 0.0485))
    random = np.random.default_rng(0)
    for n in random.integers(1, 9, 100):
        curve.observe(n, real(n) * float(random.normal(1, 0.03)))
    assert [curve(n) for n in range(1, 9)] == pytest.approx(
        [real(n) for n in range(1, 9)], rel=0.06
    )


def test_rates_start_from_a_prior_and_end_at_what_is_observed() -> None:
    acceptance = Acceptance()
    assert acceptance.drawn(0.05) < acceptance.drawn(0.5) < acceptance.drawn(0.99)
    for _ in range(300):
        acceptance.record([0.55, 0.99], 1)
    assert acceptance.drawn(0.55) > 0.9
    assert acceptance.drawn(0.99) < 0.1
    assert acceptance.overall == pytest.approx(0.5, abs=0.05)
    assert math.isclose(acceptance.following(0.55), acceptance.drawn(0.99), abs_tol=0.05)


def test_a_draft_that_draws_along_the_copies_is_preferred_to_them_while_it_pays() -> None:
    copies = Candidate(MOST, confidence=[0.99] * MOST)
    costs, draft = CURVES["ours"], DRAFTS["model"]
    planner = Planner(costs, [draft, None])
    assert planner.plan([Candidate(MOST), copies]).source == 1
    assert planner.plan([Candidate(MOST, guided=True), copies]).source == 0
    assert planner.plan([Candidate(0, guided=True), copies]).source == 1
    dear = Planner(costs, [line(0.1, 0.001), None])
    assert dear.plan([Candidate(MOST, guided=True), copies]).source == 1


def test_a_token_that_takes_no_step_is_drawn_at_less_confidence() -> None:
    # At d = v(1) / 2 and a flat curve a step is worth half a token: 0.4 is less, but more than nothing.
    planner = Planner(line(0.036, 0.0001), [line(0.018, 0.0001)])
    for evaluated in (False, True):
        plan = planner.plan([Candidate(2)])
        assert plan.source == 0
        assert plan.go_on(0.4, evaluated=evaluated) == evaluated


def test_a_fixed_gamma_takes_the_first_drafter_that_has_something() -> None:
    known = Candidate(9, confidence=[0.5])
    assert FixedGamma(4).plan([Candidate(0), known, Candidate(9)]).source == 1
    plan = FixedGamma(4).plan([Candidate(9)])
    assert (plan.source, plan.most, plan.go_on(0.0)) == (0, 4, True)
    assert FixedGamma(4).plan([Candidate(0), Candidate(3, confidence=[])]).source is None
