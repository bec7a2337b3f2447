"""What proposes tokens. A drafter knows nothing of the engine or the target's cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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


class Drafter(Protocol):
    """Proposes continuations of a text that it is shown."""

    def room(self, ids: Sequence[int]) -> int:
        """Most tokens it can propose after ids."""

    def catch_up(self, ids: Sequence[int]) -> None:
        """Take in ids, of which it may already hold a beginning."""

    def propose(self, ids: Sequence[int], gamma: int, sampler: Sampler, *, round_: int) -> Proposal:
        """Draw at most gamma tokens that may follow ids."""

    def roll_back(self, length: int) -> None:
        """Forget every position from `length` on."""

    def clear(self) -> None:
        """Forget everything: another text follows."""

    def close(self) -> None:
        """Free what it holds."""
