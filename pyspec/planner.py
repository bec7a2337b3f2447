"""How far to draft, and with what: decided from measured costs and measured acceptance.

Let v(n) be the seconds of a target pass over n tokens, d those of a draft step, and lambda the tokens a
second that the request has been getting. With i tokens drafted, drafting k more is worth its time where

    sum over j <= k of P(the j-th of them is reached and accepted) > lambda (k d + v(i + 1 + k) - v(i + 1)).

k = 1 would do on a convex cost curve; real ones have steps, past which it may pay to go. The probabilities
come from what is known before a token is drawn: how sure the drafter was of those drawn so far, and what
became of tokens it was as sure of earlier in the request. The decision never looks at a token that is then
dropped, so it does not bias the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from pyspec.costs import CostCurve

# Where the drafter's confidence in a token falls into classes, each with an acceptance rate of its own.
_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97, 0.995)
_CENTRES = [(a + b) / 2 for a, b in pairwise((0.0, *_EDGES, 1.0))]
# Before anything is observed: the part of its confidence that a drawn token is believed, since confidence and
# acceptance are nearly the same in texts of the default pair; and the acceptance of one not yet drawn.
_BELIEVED = 0.97
_PRIOR = 0.7
# A round begins with a hope of the acceptance that is this many standard errors over what is expected: what a
# drafter is worth is learnt only while it drafts.
_HOPE = 1.0
# How many observations the prior counts as, and how fast old ones fade.
_PRIOR_WEIGHT = 4.0
_FADING = 0.99
# Of the past of the rate about twenty rounds count, over a prior of some rounds of plain decoding: after a
# few lucky tokens it would be overrated, and drafting given up as too dear.
_RATE_FADING = 0.95
_RATE_PRIOR = 5.0
# A drafter that did not pay is tried again after 2, 4, 8, ... rounds, at most this many.
_LONGEST_REST = 64
_FIRST_REST = 2
# The part of a request's time that may go into trying drafters that did not pay.
_TRIES = 0.02
# P(a token is reached) below which it is not worth a thought.
_NEGLIGIBLE = 0.02
# Contexts grow, and passes with them: only costs that are over the passes' own times are wrong.
_TOO_HIGH = 0.75
# Of passes this short, which only toys of models have, the times say little.
_SHORTEST_S = 2e-3
# How many tokens ahead a step in the costs is looked past.
_HORIZON = 8
# A drafter that has caught up is expected to be of use for this many rounds.
_ROUNDS_OF_A_CATCH_UP = 16


@dataclass
class _Rate:
    """An acceptance rate: observations that fade, over a prior that may yet change."""

    accepted: float = 0.0
    total: float = 0.0

    def mean(self, prior: float) -> float:
        """What is expected, where `prior` would be with nothing observed."""
        return (self.accepted + _PRIOR_WEIGHT * prior) / (self.total + _PRIOR_WEIGHT)

    def hoped(self, prior: float) -> float:
        """The mean, and what it may well be too low by."""
        mean = self.mean(prior)
        return mean + _HOPE * math.sqrt(mean * (1 - mean) / (self.total + _PRIOR_WEIGHT + 1))

    def add(self, accepted: bool) -> None:
        self.accepted = _FADING * self.accepted + accepted
        self.total = _FADING * self.total + 1


def _class_of(confidence: float) -> int:
    return sum(confidence >= edge for edge in _EDGES)


class Acceptance:
    """What is known of a drafter's acceptance in one request.

    Two kinds of rate: of a token that has been drawn, by the drafter's confidence in it; and of the token
    after it, which has not, by the confidence in the one before (in the first of a round: whether all of the
    last proposal was accepted).
    """

    def __init__(self) -> None:
        self._drawn = [_Rate() for _ in _CENTRES]
        self._next = [_Rate() for _ in _CENTRES]
        self._first = {True: _Rate(), False: _Rate()}
        self._all_accepted = True
        self._overall = _Rate()

    def drawn(self, confidence: float) -> float:
        """P(a drawn token is accepted | those before it are)."""
        index = _class_of(confidence)
        return self._drawn[index].mean(_BELIEVED * _CENTRES[index])

    def following(self, confidence: float | None) -> float:
        """P(the token after one of this confidence is accepted | those before it are); None: the first."""
        if confidence is None:
            return self._first[self._all_accepted].hoped(self.overall)
        return self._next[_class_of(confidence)].mean(self.overall)

    @property
    def overall(self) -> float:
        """P(a token is accepted | those before it are)."""
        return self._overall.mean(_PRIOR)

    def record(self, confidence: Sequence[float], accepted: int) -> None:
        """Take in what became of a proposal of which `accepted` tokens stood."""
        before: float | None = None
        for index in range(min(len(confidence), accepted + 1)):
            stood = index < accepted
            self._drawn[_class_of(confidence[index])].add(stood)
            if before is None:
                self._first[self._all_accepted].add(stood)
            else:
                self._next[_class_of(before)].add(stood)
            self._overall.add(stood)
            before = confidence[index]
        if confidence:
            self._all_accepted = accepted == len(confidence)


@dataclass(frozen=True)
class Candidate:
    """What a drafter could do in the next round.

    Attributes:
        room: Most tokens that it can draft.
        backlog: Tokens that it has to evaluate before its first draft.
        confidence: In the tokens that it would propose, where it knows them without drawing.
        guided: Whether it draws along what another would copy. While it pays, copies alone are not proposed:
            it tells the right ones from the wrong ones in about a step, and goes on past their end.
    """

    room: int
    backlog: int = 1
    confidence: Sequence[float] | None = None
    guided: bool = False


class Plan(Protocol):
    """A round's plan."""

    @property
    def source(self) -> int | None:
        """Index of the drafter; None to draft nothing."""

    @property
    def most(self) -> int:
        """Most tokens to draft."""

    def go_on(self, confidence: float, *, evaluated: bool = False) -> bool:
        """Whether to draw another token, as drafters.GoOn."""


@dataclass(frozen=True)
class Settled:
    """A plan that is settled before anything is drawn."""

    source: int | None = None
    most: int = 0

    def go_on(self, confidence: float, *, evaluated: bool = False) -> bool:
        """Up to `most`."""
        del confidence, evaluated
        return True


class FixedGamma:
    """Drafts gamma tokens a round with the first drafter that has any."""

    predicted_rate = None
    costs_fit = True

    @property
    def drafts(self) -> bool:
        """Whether it drafts at all."""
        return self.gamma > 0

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma

    def plan(self, candidates: Sequence[Candidate], share: int = 1) -> Plan:  # noqa: ARG002
        """Choose the drafter."""
        for source, candidate in enumerate(candidates):
            most = min(self.gamma, candidate.room)
            if candidate.confidence is not None:
                most = min(most, len(candidate.confidence))
            if most > 0:
                return Settled(source, most)
        return Settled()

    def record(
        self,
        plan: Plan,
        confidence: Sequence[float],
        accepted: int,
        *,
        draft_s: float,
        verify_s: float,
    ) -> None:
        """Nothing is learnt."""


class Planner:
    """Plans the rounds of one request, of which it learns as it goes, from nothing.

    Args:
        costs: Of the target's passes.
        draft_costs: Of each drafter's, None for one that reads no model.
        observe_time: Follow the passes' measured times. Where a text depends on how far it was drafted
            (sampling with any rule but coupled) it must not, or a seed would not write the same text again.
    """

    def __init__(
        self,
        costs: CostCurve,
        draft_costs: Sequence[CostCurve | None],
        *,
        observe_time: bool = True,
    ) -> None:
        self.drafts = True
        self._remembered = costs
        self._observed = costs.copy()
        self._costs = self._observed if observe_time else costs
        self._sources = [_Source(curve and curve.copy()) for curve in draft_costs]
        self._observe_time = observe_time
        self._tokens = self._seconds = 0.0
        self._spent_s = self._tried_s = 0.0
        self._share = 1
        self._expected_tokens = self._expected_s = 0.0

    @property
    def rate(self) -> float:
        """lambda: tokens a second of late, and no less than plain decoding is known to give."""
        one = self._pass(1)
        return max(1 / one, (self._tokens + _RATE_PRIOR) / (self._seconds + _RATE_PRIOR * one))

    @property
    def predicted_rate(self) -> float | None:
        """Tokens a second that were expected of the rounds so far, each before it was verified."""
        return self._expected_tokens / self._expected_s if self._expected_s else None

    @property
    def costs_fit(self) -> bool:
        """Whether the remembered costs are not far too high, as if measured while the machine was busy."""
        remembered = self._remembered(1)
        return remembered < _SHORTEST_S or self._observed(1) > _TOO_HIGH * remembered

    def _pass(self, n: int) -> float:
        """Seconds of a pass over n tokens; this request's part of one that several share."""
        return self._costs(self._share * n) / self._share

    def plan(self, candidates: Sequence[Candidate], share: int = 1) -> Plan:
        """Choose a drafter for the next round, or none.

        Args:
            candidates: One for each drafter.
            share: Requests that share the target's passes.
        """
        self._share = share if self._observe_time else 1
        best: Plan = Settled()
        best_gain, guided = 0.0, False
        for index, candidate in enumerate(candidates):
            if candidate.room > 0 and candidate.confidence is None:
                gain, plan = self._drawing(index, candidate)
                guided |= candidate.guided and gain > 0
                if gain > best_gain:
                    best, best_gain = plan, gain
        for index, candidate in enumerate(candidates):
            if candidate.room > 0 and candidate.confidence is not None and not guided:
                gain, most = self._gain_of_known(self._sources[index], candidate)
                if gain > best_gain:
                    best, best_gain = Settled(index, most), gain
        return best

    def _drawing(self, index: int, candidate: Candidate) -> tuple[float, Plan]:
        """What drawing from a model is worth, and the plan of it; infinitely much if it is time for a try."""
        source, gain = self._sources[index], self._gain_of_first(index, candidate)
        if gain > 0:
            source.rest, source.next_rest = 0, _FIRST_REST
        elif source.wants_another_try() and self._can_try(source, candidate):
            return math.inf, Settled(index, 1)
        return gain, _Drawing(self, index, candidate.room)

    def _can_try(self, source: _Source, candidate: Candidate) -> bool:
        """Whether the time of another try, catching up included, is a small part of the request's so far."""
        seconds = source.step(candidate.backlog) + self._pass(2) - self._pass(1)
        if self._tried_s + seconds > _TRIES * self._spent_s:
            return False
        self._tried_s += seconds
        return True

    def _gain_of_known(self, source: _Source, candidate: Candidate) -> tuple[float, int]:
        """What a proposal is worth that costs nothing to make, at its best length, and that length."""
        best, most, tokens, reached = 0.0, 0, 0.0, 1.0
        rate, narrowest = self.rate, self._pass(1)
        for n, confidence in enumerate((candidate.confidence or ())[: candidate.room], 1):
            reached *= source.acceptance.drawn(confidence)
            tokens += reached
            gain = tokens - rate * (self._pass(n + 1) - narrowest)
            if gain > best:
                best, most = gain, n
            if reached < _NEGLIGIBLE:
                break
        return best, most

    def _gain_of_first(self, index: int, candidate: Candidate) -> float:
        source = self._sources[index]
        # What catching up takes is spent once, for the rounds to come.
        catching_up = source.step(candidate.backlog) - source.step(1)
        return self.gain_of_drawing(
            index=index,
            drawn=0,
            left=candidate.room,
            probability=source.acceptance.following(None),
            once=catching_up / _ROUNDS_OF_A_CATCH_UP,
        )

    def gain_of_drawing(
        self,
        *,
        index: int,
        drawn: int,
        left: int,
        probability: float,
        once: float = 0.0,
        evaluated: bool = False,
    ) -> float:
        """The most that drawing on is worth: tokens beyond what the time would give anyway.

        Args:
            index: The drafter.
            drawn: Tokens drawn so far in the round.
            left: Most that may yet be drawn.
            probability: P(the next one is reached and accepted).
            once: Seconds that the first takes beyond a step.
            evaluated: Whether the first takes no step.
        """
        source, rate, checked = self._sources[index], self.rate, self._pass(drawn + 1)
        best, tokens, seconds = -math.inf, 0.0, once
        for k in range(1, min(left, _HORIZON) + 1):
            tokens += probability
            probability *= source.acceptance.overall
            seconds += 0.0 if evaluated and k == 1 else source.step(1)
            extra = seconds + self._pass(drawn + 1 + k) - checked
            best = max(best, tokens - rate * extra)
        return best

    def acceptance(self, index: int) -> Acceptance:
        """What is known of a drafter's acceptance."""
        return self._sources[index].acceptance

    def record(
        self,
        plan: Plan,
        confidence: Sequence[float],
        accepted: int,
        *,
        draft_s: float,
        verify_s: float,
    ) -> None:
        """Take in a round.

        Args:
            plan: The round's.
            confidence: In each drafted token.
            accepted: How many of them were.
            draft_s: Seconds that drafting took.
            verify_s: Seconds of the target's pass.
        """
        n = len(confidence)
        expected_s, expected_tokens, reached = self._pass(n + 1), 1.0, 1.0
        if plan.source is not None:
            source = self._sources[plan.source]
            expected_s += n * source.step(1)
            for value in confidence:
                reached *= source.acceptance.drawn(value)
                expected_tokens += reached
            source.acceptance.record(confidence, accepted)
        self._expected_s += expected_s
        self._expected_tokens += expected_tokens
        self._observed.observe(self._share * (n + 1), verify_s)
        if self._observe_time:
            if plan.source is not None:
                self._sources[plan.source].observe(n, draft_s)
            spent = draft_s + verify_s / self._share
        else:
            spent = expected_s
        self._spent_s += spent
        self._tokens = _RATE_FADING * self._tokens + accepted + 1
        self._seconds = _RATE_FADING * self._seconds + spent


class _Drawing:
    """A plan that looks at each drawn token before the next."""

    def __init__(self, planner: Planner, source: int, most: int) -> None:
        self.source: int | None = source
        self.most = most
        self._planner = planner
        self._index = source
        self._drawn = 0
        self._reached = 1.0

    def go_on(self, confidence: float, *, evaluated: bool = False) -> bool:
        acceptance = self._planner.acceptance(self._index)
        self._drawn += 1
        self._reached *= acceptance.drawn(confidence)
        gain = self._planner.gain_of_drawing(
            index=self._index,
            drawn=self._drawn,
            left=self.most - self._drawn,
            probability=self._reached * acceptance.following(confidence),
            evaluated=evaluated,
        )
        return gain > 0


class _Source:
    """What the planner has learnt of a drafter."""

    def __init__(self, costs: CostCurve | None) -> None:
        self._costs = costs
        self.acceptance = Acceptance()
        self.rest = 0
        self.next_rest = _FIRST_REST

    def step(self, n: int) -> float:
        """Seconds that evaluating n tokens takes it."""
        return self._costs(n) if self._costs is not None else 0.0

    def observe(self, n: int, seconds: float) -> None:
        """Take into account how long drawing n tokens took."""
        if self._costs is not None and n > 0:
            # Drawing takes n steps, the distributions and the choices among them.
            self._costs.observe(1, seconds / n)

    def wants_another_try(self) -> bool:
        """Whether it is time again though it does not seem to pay: nobody would learn that it does."""
        if self.rest > 0:
            self.rest -= 1
            return False
        self.rest, self.next_rest = self.next_rest, min(2 * self.next_rest, _LONGEST_REST)
        return True
