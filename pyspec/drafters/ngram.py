"""Tokens copied from where the text's end occurred before: in the prompt, the output or a corpus."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul

from pyspec._cspec import ffi, lib
from pyspec.drafters import Drafter, GoOn, Proposal, always
from pyspec.errors import PyspecError, UsageError
from pyspec.sampling import Sampler

# A token that followed its context c of n times, where m tokens match, is given c / (n + DOUBT / m). Of the
# forms tried, this one predicted best which copied tokens were right, in 53 texts of the default target.
_DOUBT = 2.5
# Tokens that are evaluated in the hope that a draft will draw them: each costs its pass about a tenth more,
# and saves another pass if it is drawn. So many at most, and while all are right at least so often.
MOST_GUESSED = 8
_WORTH_A_GUESS = 0.2
_SEPARATOR = -1
_MOST = 2**31 - 1


class NgramDrafter(Drafter):
    """Proposes what followed the most recent occurrence of the longest match of the text's end.

    It reads no model, so a proposal costs next to nothing, and where nothing matches there is none.

    Args:
        corpus: Texts as token ids, to copy from besides the request's own.
        min_match: Tokens that must match. A single one says next to nothing.
        max_match: Longer matches count as this long.
        reach: Most tokens proposed, as a multiple of the match's length: a short match is soon left. At twice
            the length, in texts of the default target, a token is still reached and right one time in
            eight, which is about what checking it costs.

    Raises:
        UsageError: An argument is outside its range.
    """

    def __init__(
        self,
        corpus: Iterable[Sequence[int]] = (),
        *,
        min_match: int = 2,
        max_match: int = 32,
        reach: float = 2.0,
    ) -> None:
        if not 1 <= min_match <= max_match <= 2**20:
            raise UsageError(
                f"matches must be from 1 to {2**20} tokens, not from {min_match} to {max_match}"
            )
        if not reach > 0:
            raise UsageError(f"reach must be over 0, not {reach}")
        self.name = "ngram"
        self._min_match = min_match
        self._max_match = max_match
        self._reach = reach
        self._text = _Index(max_match)
        self._corpus = _Index(max_match)
        for text in corpus:
            self._corpus.push([*text, _SEPARATOR])

    def room(self, ids: Sequence[int]) -> int:  # noqa: ARG002
        """As many as are wanted."""
        return _MOST

    def catch_up(self, ids: Sequence[int]) -> None:
        """Index what is new of ids."""
        self._text.push(ids[len(self._text) :])

    def peek(self, ids: Sequence[int], gamma: int) -> Proposal:
        """What it would propose. Nothing is drawn, so that q is one-hot at each token."""
        self.catch_up(ids)
        tokens, confidence, matches = self._continuation(ids, gamma)
        if not tokens:
            return Proposal()
        n = max(1, int(self._reach * matches[0]))
        return Proposal(tokens[:n], [None] * len(tokens[:n]), confidence[:n], matches[0])

    def guess(self, ids: Sequence[int], most: int) -> list[int]:
        """What a draft may well draw after ids, if they were to be the text.

        Args:
            ids: The text as it was last caught up with, and what is drafted so far.
            most: Tokens wanted; there are never more than MOST_GUESSED.
        """
        most = min(most, MOST_GUESSED)
        if most <= 0:
            return []
        tokens, confidence, _ = self._continuation(ids, most)
        reached = accumulate(confidence, mul)
        return [token for token, p in zip(tokens, reached, strict=True) if p >= _WORTH_A_GUESS]

    def _continuation(self, ids: Sequence[int], n: int) -> tuple[list[int], list[float], list[int]]:
        """Tokens, confidences and match lengths, at most n of each, from where the longest match is."""
        tail = ids[-self._max_match :]
        return max(
            (index.continuation(tail, n, self._min_match) for index in (self._text, self._corpus)),
            key=lambda found: found[2][:1],
        )

    def propose(
        self,
        ids: Sequence[int],
        gamma: int,
        sampler: Sampler,  # noqa: ARG002
        *,
        round_: int,  # noqa: ARG002
        go_on: GoOn = always,  # noqa: ARG002
    ) -> Proposal:
        """Copy at most gamma tokens."""
        return self.peek(ids, gamma)

    def roll_back(self, length: int) -> None:
        """Forget the tokens from `length` on; it costs as much as indexing those before them."""
        self._text.truncate(length)

    def clear(self) -> None:
        """Forget the text; the corpus stays."""
        self._text.truncate(0)

    def close(self) -> None:
        """Nothing to do: the memory is freed with the drafter."""


class _Index:
    """A suffix index in C."""

    def __init__(self, max_match: int) -> None:
        self._index = ffi.gc(_allocated(lib.cspec_ngram_new(max_match)), lib.cspec_ngram_free)

    def __len__(self) -> int:
        return int(lib.cspec_ngram_length(self._index))

    def push(self, tokens: Sequence[int]) -> None:
        if lib.cspec_ngram_push(self._index, tokens, len(tokens)) != lib.CSPEC_OK:
            _allocated(ffi.NULL)

    def truncate(self, length: int) -> None:
        lib.cspec_ngram_truncate(self._index, length)

    def continuation(
        self, tail: Sequence[int], n: int, min_match: int
    ) -> tuple[list[int], list[float], list[int]]:
        """Tokens, confidences and match lengths, n of each or fewer."""
        tokens, matches, followed, totals = (ffi.new("int32_t[]", n) for _ in range(4))
        n = lib.cspec_ngram_continue(
            self._index, tail, len(tail), n, min_match, tokens, matches, followed, totals
        )
        confidence = [followed[i] / (totals[i] + _DOUBT / matches[i]) for i in range(n)]
        return list(tokens[0:n]), confidence, list(matches[0:n])


def _allocated(index: object) -> object:
    if index == ffi.NULL:
        raise PyspecError("there is not enough memory for the n-gram index: run without it")
    return index
