"""Whole output distributions on tiny vocabularies, exactly.

A model gives each prefix its rows as fractions over a power of two, so the floats that C sees are the
fractions themselves. A decision procedure maps drafted tokens to the probabilities of (t, y): t tokens
accepted, then y. Putting drafts, decisions and the target's continuation together gives the distribution
of the output, to be compared with the target's own.

Three sources of decisions: the rules in rational arithmetic; the C functions, measured from outside as
functions of their random numbers; and deliberately wrong ones.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from tests.cspec.binding import Round

Tokens = tuple[int, ...]
FractionRow = list[Fraction]
Outcomes = dict[tuple[int, int], float | Fraction]
Verify = Callable[[Sequence[float], float], tuple[int, int]]

DENOMINATOR = 64
LAST = 1 - 2**-53  # the greatest u that exists
RESOLUTION = 2**-40


# ---- models -------------------------------------------------------------------------------------


@dataclass
class Model:
    """Target and draft of one vocabulary; rows depend on the whole prefix."""

    n_vocab: int
    p: dict[Tokens, FractionRow] = field(default_factory=dict)
    q: dict[Tokens, FractionRow] = field(default_factory=dict)
    without_q: set[Tokens] = field(default_factory=set)  # C is given a null row there

    def p_rows(self, drafted: Tokens) -> list[FractionRow]:
        return [self.p[drafted[:i]] for i in range(len(drafted) + 1)]

    def q_rows(self, drafted: Tokens) -> list[FractionRow]:
        return [self.q[drafted[:i]] for i in range(len(drafted))]

    def round(self, drafted: Tokens) -> Round:
        q = [
            None if drafted[:i] in self.without_q else row
            for i, row in enumerate(self.q_rows(drafted))
        ]
        return Round(self.p_rows(drafted), q, drafted)

    def drafts(self, gamma: int) -> Iterator[tuple[Tokens, Fraction]]:
        for drafted in itertools.product(range(self.n_vocab), repeat=gamma):
            probability = Fraction(1)
            for row, x in zip(self.q_rows(drafted), drafted, strict=True):
                probability *= row[x]
            if probability:
                yield drafted, probability


def one_hot(n_vocab: int, x: int) -> FractionRow:
    return [Fraction(int(i == x)) for i in range(n_vocab)]


def random_row(rng: random.Random, n_vocab: int, support: Sequence[int]) -> FractionRow:
    row = [Fraction(0)] * n_vocab
    # A token more often drawn makes the row uneven.
    favourites = rng.choices(support, k=3)
    for _ in range(DENOMINATOR):
        row[rng.choice(rng.choice([support, favourites]))] += Fraction(1, DENOMINATOR)
    return row


KINDS = ("any", "any", "zeros", "equal", "disjoint", "certain", "no q", "opposed")


def random_model(seed: int, n_vocab: int, gamma: int, kinds: Sequence[str] = KINDS) -> Model:
    """Rows of every kind that has been trouble: equal, disjoint, one-hot, with zeros, opposed."""
    rng = random.Random(f"{seed} {n_vocab} {gamma}")
    model = Model(n_vocab)
    ids = range(n_vocab)
    for length in range(gamma + 1):
        for prefix in itertools.product(ids, repeat=length):
            kind = rng.choice(kinds)
            p = random_row(rng, n_vocab, ids)
            q = random_row(rng, n_vocab, ids)
            if kind == "zeros":
                p = random_row(rng, n_vocab, rng.sample(ids, rng.randint(1, n_vocab)))
                q = random_row(rng, n_vocab, rng.sample(ids, rng.randint(1, n_vocab)))
            elif kind == "equal":
                q = p
            elif kind == "disjoint" and n_vocab > 1:
                cut = rng.randint(1, n_vocab - 1)
                p = random_row(rng, n_vocab, ids[:cut])
                q = random_row(rng, n_vocab, ids[cut:])
            elif kind == "certain":
                p = one_hot(n_vocab, rng.choice(ids))
            elif kind == "no q":
                q = one_hot(n_vocab, rng.choice(ids))
                model.without_q.add(prefix)
            elif kind == "opposed":
                q = p[::-1]
            model.p[prefix] = p
            model.q[prefix] = q
    return model


# ---- outputs ------------------------------------------------------------------------------------


def target_outputs(model: Model, length: int) -> dict[Tokens, Fraction]:
    outputs = {(): Fraction(1)}
    for _ in range(length):
        outputs = {
            (*prefix, x): probability * model.p[prefix][x]
            for prefix, probability in outputs.items()
            for x in range(model.n_vocab)
        }
    return outputs


def speculative_outputs(
    model: Model, gamma: int, decide: Callable[[Tokens], Outcomes]
) -> dict[Tokens, float | Fraction]:
    """What one round and then the target alone write, gamma + 1 tokens in all."""
    outputs: dict[Tokens, float | Fraction] = defaultdict(Fraction)
    for drafted, probability in model.drafts(gamma):
        for (t, y), share in decide(drafted).items():
            outputs[(*drafted[:t], y)] += probability * share
    for length in range(1, gamma + 1):
        for prefix in [prefix for prefix in outputs if len(prefix) == length]:
            share = outputs.pop(prefix)
            for x in range(model.n_vocab):
                outputs[(*prefix, x)] += share * model.p[prefix][x]
    return outputs


def departure(model: Model, gamma: int, decide: Callable[[Tokens], Outcomes]) -> float | Fraction:
    """The largest error of an output's probability: zero for a lossless procedure."""
    target = target_outputs(model, gamma + 1)
    ours = speculative_outputs(model, gamma, decide)
    return max(abs(ours.get(output, 0) - target.get(output, 0)) for output in {*target, *ours})


# ---- the rules in rational arithmetic -----------------------------------------------------------


def normalised(weights: FractionRow) -> FractionRow:
    return [weight / sum(weights) for weight in weights]


def residual(p: FractionRow, q: FractionRow, scale: Fraction) -> FractionRow:
    return [max(scale * p_x - q_x, Fraction(0)) for p_x, q_x in zip(p, q, strict=True)]


def token_outcomes(model: Model, drafted: Tokens) -> Outcomes:
    outcomes: Outcomes = defaultdict(Fraction)
    p, q = model.p_rows(drafted), model.q_rows(drafted)
    reached = Fraction(1)
    for t, x in enumerate(drafted):
        accept = min(Fraction(1), p[t][x] / q[t][x])
        if accept < 1:
            for y, share in enumerate(normalised(residual(p[t], q[t], Fraction(1)))):
                outcomes[t, y] += reached * (1 - accept) * share
        reached *= accept
    for y, share in enumerate(p[-1]):
        outcomes[len(drafted), y] += reached * share
    return outcomes


def block_thresholds(model: Model, drafted: Tokens) -> tuple[FractionRow, FractionRow]:
    p, q = model.p_rows(drafted), model.q_rows(drafted)
    a, b = [Fraction(1)], [Fraction(1)]
    for i, x in enumerate(drafted, 1):
        a.append(min(Fraction(1), a[-1] * p[i - 1][x] / q[i - 1][x]))
        if i == len(drafted):
            b.append(a[i])
        else:
            mass = sum(residual(p[i], q[i], a[i]))
            whole = mass + 1 - a[i]
            b.append(mass / whole if whole else Fraction(1))
    return a, b


def block_outcomes(model: Model, drafted: Tokens) -> Outcomes:
    outcomes: Outcomes = defaultdict(Fraction)
    p, q = model.p_rows(drafted), model.q_rows(drafted)
    a, b = block_thresholds(model, drafted)
    undecided = Fraction(1)
    for t in range(len(drafted), -1, -1):
        chosen = undecided * b[t]
        undecided -= chosen
        if chosen:
            weights = p[t] if t == len(drafted) else residual(p[t], q[t], a[t])
            for y, share in enumerate(normalised(weights)):
                outcomes[t, y] += chosen * share
    return outcomes


# ---- decisions measured from outside ------------------------------------------------------------


def first_change(function: Callable[[float], object], low: float, high: float) -> float:
    """Where a step function that differs at its ends leaves its first value."""
    at_low = function(low)
    while high - low > RESOLUTION:
        middle = (low + high) / 2
        if function(middle) == at_low:
            low = middle
        else:
            high = middle
    return high


def accept_threshold(verify: Verify, gamma: int, i: int) -> float | None:
    """The u_accept[i] at which the decision changes; None if it never does."""
    for others in itertools.product((0.0, LAST), repeat=gamma - 1):

        def accepted(u: float, others: Tokens = others) -> int:
            return verify([*others[:i], u, *others[i:]], 0.5)[0]

        if accepted(0.0) != accepted(LAST):
            return first_change(accepted, 0.0, LAST)
    return None


def draw_shares(draw: Callable[[float], int]) -> dict[int, float]:
    """How much of [0, 1) leads to each id."""
    shares: dict[int, float] = defaultdict(float)

    def split(low: float, high: float, at_low: int, at_high: int) -> None:
        if at_low == at_high:
            shares[at_low] += high - low
            return
        change = first_change(draw, low, high)
        shares[at_low] += change - low
        split(change, high, draw(change), at_high)

    # A grid, lest a procedure that leaves an id and comes back look constant.
    grid = [j / 4 for j in range(4)] + [LAST]
    for low, high in itertools.pairwise(grid):
        split(low, high, draw(low), draw(high))
    return shares


def measured_outcomes(verify: Verify, gamma: int) -> Outcomes:
    """The probabilities of a verification's outcomes, from how they depend on its random numbers."""
    thresholds = [accept_threshold(verify, gamma, i) for i in range(gamma)]
    probabilities: dict[int, float] = defaultdict(float)
    example: dict[int, list[float]] = {}
    sides = [[True] if c is None else [True, False] for c in thresholds]
    for passes in itertools.product(*sides):
        probability = 1.0
        u_accept = []
        for c, passed in zip(thresholds, passes, strict=True):
            edge = 1.0 if c is None else c
            probability *= edge if passed else 1 - edge
            u_accept.append(edge / 2 if passed else (1 + edge) / 2)
        t = verify(u_accept, 0.5)[0]
        probabilities[t] += probability
        example[t] = u_accept
    outcomes: Outcomes = {}
    for t, probability in probabilities.items():

        def token(u: float, t: int = t) -> int:
            return verify(example[t], u)[1]

        for y, share in draw_shares(token).items():
            outcomes[t, y] = probability * share
    return outcomes
