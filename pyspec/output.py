"""The output of a request: emitted tokens in, tokens to show out, cut where the text ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from pyspec.llama import Logits, Model
from pyspec.metrics import Statistics
from pyspec.vocab import TokenDecoder


class Source(str, Enum):
    """Where a token came from."""

    DRAFT = "draft"
    TARGET = "target"


@dataclass(frozen=True)
class Token:
    """An output token.

    Attributes:
        id: Its id.
        text: The text that it completed.
        source: DRAFT if it was proposed by a drafter and accepted.
        logprob: Its log probability, where asked for.
        top_logprobs: The likeliest ids at its place and their log probabilities, likeliest first.
    """

    id: int
    text: str
    source: Source
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


def with_logprobs(token: Token, logits: Logits, n_top: int) -> Token:
    """Fill in a token's log probabilities.

    They are the model's own, before temperature and every other transform, as OpenAI's API and
    llama.cpp's server report them.

    Args:
        token: The token that was emitted.
        logits: [n_vocab] the target's logits at its place.
        n_top: How many of the likeliest ids to report.
    """
    logprobs = logits.astype(np.float64)
    logprobs -= logprobs.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    n_top = min(n_top, len(logprobs))
    likeliest = np.argpartition(-logprobs, n_top - 1)[:n_top] if n_top else np.empty(0, np.int64)
    # Ties in order of their ids, as the sampler breaks them.
    ranked = sorted((-logprobs[i], int(i)) for i in likeliest)
    return replace(
        token,
        logprob=float(logprobs[token.id]),
        top_logprobs=tuple((i, float(-negated)) for negated, i in ranked),
    )


@dataclass(frozen=True)
class Piece:
    """What a round added to the output.

    Attributes:
        tokens: The tokens that are free to be shown. Text that may yet turn out to begin a stop string is
            held back with its tokens; a character spread over tokens comes with the last of them.
        statistics: Of the whole request, on its last piece only.
    """

    tokens: tuple[Token, ...]
    statistics: Statistics | None = None

    @property
    def text(self) -> str:
        """The tokens' text."""
        return "".join(token.text for token in self.tokens)


class Output:
    """Turns emitted tokens into tokens to show, until one ends the text.

    An end-of-generation token is no part of the output. A stop string is not either, nor are the tokens
    that begin in or after it; the token in whose middle it begins has its text cut.

    Attributes:
        n_tokens: Tokens of the output so far, shown or held back.
        finish_reason: Why the output has ended; empty while it has not.
    """

    def __init__(self, target: Model, stop: Sequence[str]) -> None:
        self._target = target
        self._decoder = TokenDecoder(target)
        self._stop_strings = StopStrings(stop)
        self._incomplete: list[Token] = []
        self._n_shown = 0
        self.n_tokens = 0
        self.finish_reason = ""

    def push(self, emitted: Sequence[Token]) -> list[Token]:
        """Add a round's tokens, whose text is yet to be found, and return those that may be shown."""
        shown: list[Token] = []
        for token in emitted:
            if self._target.is_end(token.id):
                return shown + self.finish("stop")
            self.n_tokens += 1
            self._incomplete.append(replace(token, text=self._decoder.text(token.id)))
            if self._decoder.incomplete:
                continue
            shown += self._release()
            if self.finish_reason:
                break
        return shown

    def finish(self, reason: str) -> list[Token]:
        """End the output, unless it has ended, and return what was held back."""
        if self.finish_reason:
            return []
        if self._incomplete:
            last = self._incomplete[-1]
            self._incomplete[-1] = replace(last, text=last.text + self._decoder.flush())
        shown = self._release()
        if not self.finish_reason:
            self.finish_reason = reason
            shown += self._stop_strings.flush()
        return shown

    def _release(self) -> list[Token]:
        """Pass on the tokens whose characters are complete, up to a stop string."""
        shown: list[Token] = []
        for token in self._incomplete:
            released, stopped = self._stop_strings.push(token)
            shown += released
            if stopped:
                self.finish_reason = "stop"
                self.n_tokens = self._n_shown + len(shown)
                break
        self._n_shown += len(shown)
        self._incomplete.clear()
        return shown


class StopStrings:
    """Cuts a stream of tokens before the first stop string, also where one spans several tokens.

    Tokens are held back as long as their text might be the beginning of a stop string, so that nothing
    of one is ever shown.

    Args:
        stop: Non-empty texts.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held: deque[Token] = deque()

    def push(self, token: Token) -> tuple[list[Token], bool]:
        """Add a token.

        Returns:
            The tokens that are now free to be shown, and whether a stop string was completed. If it was,
            the last of them may have had its text cut, and the rest is gone.
        """
        self._held.append(token)
        text = "".join(held.text for held in self._held)
        found = min((at for at in map(text.find, self._stop) if at >= 0), default=None)
        if found is None:
            return self._release(len(text) - self._undecided(text)), False
        released = self._release(found)
        shown = sum(len(token.text) for token in released)
        if shown < found:
            released.append(replace(self._held[0], text=self._held[0].text[: found - shown]))
        self._held.clear()
        return released, True

    def flush(self) -> list[Token]:
        """The tokens still held back, when no more will come."""
        held = list(self._held)
        self._held.clear()
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of text that begins a stop string."""
        longest = max(map(len, self._stop), default=0) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0

    def _release(self, end: int) -> list[Token]:
        """Take out the tokens whose text ends at or before `end`."""
        released: list[Token] = []
        while self._held and len(self._held[0].text) <= end:
            end -= len(self._held[0].text)
            released.append(self._held.popleft())
        return released
