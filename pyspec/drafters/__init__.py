"""What proposes tokens. A drafter knows nothing of the engine or the target's cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pyspec.costs import CostCurve
from pyspec.sampling import Probabilities, Sampler


@dataclass(frozen=True)
class Proposal:
    """Tokens to be verified and what they were drawn from.

    Attributes:
        tokens: [gamma] ids, every one that was drawn.
        q: [gamma] rows [n_vocab], the very distribution each token was drawn from; None where it could be no
            other (one-hot). Valid until the next proposal.
        confidence: [gamma] in 0 to 1, how likely the drafter thinks each token, given those before it. It
            grows with the probability of acceptance and need not equal it.
        match_length: Length of the earlier occurrence that the tokens are copied from; 0 if they are not.
    """

    tokens: Sequence[int] = ()
    q: Sequence[Probabilities | None] = ()
    confidence: Sequence[float] = ()
    match_length: int = 0


class GoOn(Protocol):
    """Whether to draw another token, asked after each that was drawn."""

    def __call__(self, confidence: float, *, evaluated: bool = False) -> bool:
        """Decide.

        Args:
            confidence: In the token drawn last.
            evaluated: Whether what follows it is already computed, so that another takes no time.
        """


def always(confidence: float, *, evaluated: bool = False) -> bool:
    """Go on drawing: for a fixed gamma."""
    del confidence, evaluated
    return True


class Drafter(Protocol):
    """Proposes continuations of a text that it is shown.

    Attributes:
        name: What statistics call it.
        costs: Of its own passes, by the tokens evaluated; None if it reads no model, or this is not known.
    """

    name: str
    costs: CostCurve | None = None

    @property
    def guided(self) -> bool:
        """Whether it draws what the n-gram drafter would copy, where it agrees, at next to no cost."""
        return False

    def measure(self) -> None:
        """Find out its costs; its cache is empty, before and after."""
        self.costs = None

    def room(self, ids: Sequence[int]) -> int:
        """Most tokens it can propose after ids."""

    def backlog(self, ids: Sequence[int]) -> int:
        """Tokens that it has to evaluate before it can propose the first after ids."""
        del ids
        return 1

    def catch_up(self, ids: Sequence[int]) -> None:
        """Take in ids, of which it may already hold a beginning."""

    def peek(self, ids: Sequence[int], gamma: int) -> Proposal | None:
        """What `propose` would propose, if that can be told without drawing; None if not."""
        del ids, gamma
        return None

    def propose(
        self,
        ids: Sequence[int],
        gamma: int,
        sampler: Sampler,
        *,
        round_: int,
        go_on: GoOn = always,
    ) -> Proposal:
        """Draw at most gamma tokens that may follow ids.

        Args:
            ids: Prompt and output so far.
            gamma: 1 or more.
            sampler: The request's.
            round_: Number of the round in the request.
            go_on: Asked after each drawn token but the last.
        """

    def roll_back(self, length: int) -> None:
        """Forget every position from `length` on."""

    def clear(self) -> None:
        """Forget everything: another text follows."""

    def close(self) -> None:
        """Free what it holds."""
