"""What costs and acceptance say about speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pyspec.costs import CostCurve


@dataclass(frozen=True)
class Costs:
    """Seconds that the parts of a round take.

    Attributes:
        target: A pass, with the distributions that follow from it.
        draft: Drawing one drafted token.
    """

    target: CostCurve
    draft: float

    @property
    def c(self) -> float:
        """A draft step as a share of a target pass over one token."""
        return self.draft / self.target(1)

    def round(self, gamma: int) -> float:
        """Drawing gamma tokens and checking them."""
        return gamma * self.draft + self.target(gamma + 1)

    def added(self, gamma: int) -> float:
        """What the gamma-th drafted token adds to a round, as a share of a target pass over one token."""
        return (self.round(gamma) - self.round(gamma - 1)) / self.target(1)


def paper_speedup(a: float, gamma: int, c: float) -> float:
    """Theorem 3.8 of Leviathan et al., with checking that costs as much as a pass over one token.

    S = (1 - a^(gamma + 1)) / ((1 - a) (1 + gamma c))

    Args:
        a: Probability that a drafted token is accepted, alike and independent at all positions.
        gamma: Tokens drafted a round.
        c: Costs.c.
    """
    tokens = gamma + 1 if a == 1 else (1 - math.pow(a, gamma + 1)) / (1 - a)
    return tokens / (1 + gamma * c)


def tokens_per_round(by_position: Sequence[float], gamma: int) -> float:
    """Expected tokens of a round.

    Args:
        by_position: [gamma or more] probability that a drafted token is accepted if those before it are.
        gamma: Tokens drafted.
    """
    return 1 + sum(math.prod(by_position[:n]) for n in range(1, gamma + 1))


def speedup(by_position: Sequence[float], gamma: int, costs: Costs) -> float:
    """How many times as fast as plain decoding, from the full cost curve. Arguments as above."""
    return tokens_per_round(by_position, gamma) * costs.target(1) / costs.round(gamma)
