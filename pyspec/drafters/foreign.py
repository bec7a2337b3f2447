"""A draft model of another vocabulary, which proposes through the tokens that the two share.

Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies", 2025: token-level intersection.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pyspec.costs import measured_costs
from pyspec.drafters import Drafter, GoOn, Proposal, always
from pyspec.drafters.model import ModelDrafter
from pyspec.errors import NoTokenError
from pyspec.llama import Context, Logits, Model
from pyspec.sampling import Sampler, softmax_of
from pyspec.vocab import SharedTokens

# Tokens before new text that may be spelled anew with it, if no word begins among them.
_SEAM = 8
# What stands in the text for a control token: any byte, since nobody reads it.
_MARK = b"\n"


class ForeignDrafter(Drafter):
    """Draws from the draft's distribution over the tokens that it shares with the target.

    The draft's logits are moved to the target's ids, -inf where there is no twin, and only then transformed
    as the request wants. So penalties and biases, which are about the target's ids, and the cuts mean what
    they mean for the target, and q is what a token is drawn from.

    Args:
        context: The draft's own; this drafter closes it.
        target: The model whose text is wanted.
        shared: The tokens that the draft shares with it.
    """

    def __init__(self, context: Context, target: Model, shared: SharedTokens) -> None:
        self.name = context.model.name
        self.context = context
        self.shared = shared
        self._text = Retelling(target, context.model, shared)
        self._cells = list[int]()  # the tokens that the cache holds
        self._logits: Logits = np.full(target.n_vocab, -np.inf, np.float32)
        self._q: npt.NDArray[np.float32] = np.zeros((0, target.n_vocab), np.float32)

    def measure(self) -> None:
        """Find out what the draft's passes cost."""
        self.costs = measured_costs(self.context)

    def room(self, ids: Sequence[int]) -> int:
        """Most tokens that fit. None before a text begins, or amid a character that cannot be spelled yet."""
        self._follow(ids)
        n = len(self._text.tokens)
        return max(0, self.context.n_ctx - n + 1) if n and self._text.is_whole else 0

    def backlog(self, ids: Sequence[int]) -> int:
        """Tokens of the text of ids that the cache lacks, and the last one."""
        self._follow(ids)
        return max(1, len(self._text.tokens) - len(self._cells))

    def catch_up(self, ids: Sequence[int]) -> None:
        """Evaluate what the cache lacks of the text of ids."""
        self._follow(ids)
        self._evaluate()

    def propose(
        self,
        ids: Sequence[int],
        gamma: int,
        sampler: Sampler,
        *,
        round_: int,
        go_on: GoOn = always,
    ) -> Proposal:
        """Draw tokens one after another, feeding each back.

        The confidence is the probability at temperature 1 among all the draft's tokens: what it would rather
        say in a way that the target lacks counts against the token.
        """
        self._follow(ids)
        self._reserve(gamma)
        # What follows a text is known from an evaluation of its last token.
        self._keep(len(self._text.tokens) - 1)
        tokens, confidence = list[int](), list[float]()
        for index in range(gamma):
            self._evaluate(n_logits=1)
            q, logits = self._q[index], self._in_targets_ids(self.context.logits(-1))
            try:
                sampler.distribution(logits, [*ids, *tokens], q, source="draft")
            except NoTokenError:
                break  # The request forbids every shared token, but perhaps not all of the target's.
            token = sampler.draw_draft(q, round_=round_, index=index, position=len(ids) + index)
            tokens.append(token)
            self._text.append(token)
            confidence.append(softmax_of(self.context.logits(-1), self._text.tokens[-1]))
            if index + 1 < gamma and not go_on(confidence[-1]):
                break
        return Proposal(tokens, list(self._q[: len(tokens)]), confidence)

    def _in_targets_ids(self, logits: Logits) -> Logits:
        """[n_vocab of the target] of the draft's row of logits; valid until the next."""
        self._logits[self.shared.target_ids] = logits[self.shared.draft_ids]
        return self._logits

    def _follow(self, ids: Sequence[int]) -> None:
        """Have the text be that of ids, and the cache a beginning of it."""
        self._text.follow(ids)
        self._keep(_n_common(self._cells, self._text.tokens))

    def _keep(self, n: int) -> None:
        """Keep at most n cells."""
        n = min(n, self.context.length)
        del self._cells[n:]
        self.context.truncate(n)

    def _evaluate(self, *, n_logits: int = 0) -> None:
        """Evaluate the tokens that the cache lacks."""
        pending = self._text.tokens[len(self._cells) :]
        self.context.evaluate(pending, n_logits=n_logits)
        self._cells += pending

    def _reserve(self, gamma: int) -> None:
        if len(self._q) < gamma:
            self._q = np.zeros((gamma, len(self._logits)), np.float32)

    def roll_back(self, length: int) -> None:
        """Forget the target's tokens from `length` on, and what tells of them."""
        self._text.roll_back(length)
        self._keep(_n_common(self._cells, self._text.tokens))

    def clear(self) -> None:
        """Empty the cache."""
        self._text.roll_back(0)
        self._cells.clear()
        self.context.clear()

    def close(self) -> None:
        """Free the context; the model is its owner's."""
        self.context.close()


def drafter_of(
    context: Context, target: Model, shared: SharedTokens | None
) -> ModelDrafter | ForeignDrafter:
    """The drafter that a draft model is to a target.

    Args:
        context: The draft's own; the drafter closes it.
        target: The model whose text is wanted.
        shared: What their vocabularies share, if it is not all (`vocab.shared_tokens`).
    """
    if shared is None:
        return ModelDrafter(context, target.n_vocab)
    return ForeignDrafter(context, target, shared)


def _n_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])


class Retelling:
    """The text of a target's tokens in a draft's tokens, kept in step with it as it grows and is rolled back.

    Tokens are those of the draft's own tokenizer for the whole text, or nearly: how a word is split may
    change with the letters that follow, so from the beginning of the last word on the text is spelled anew
    whenever it grows. A control token of the target is the draft's twin of it, or else its name as text.

    Args:
        target: The model whose tokens are retold.
        draft: The model in whose tokens.
        shared: The tokens that the two share.

    Attributes:
        tokens: The draft's ids, with BOS where the draft wants it.
    """

    def __init__(self, target: Model, draft: Model, shared: SharedTokens) -> None:
        self._target, self._shared = target, shared
        self._ids = list[int]()  # of the target
        self._id_ends = list[int]()  # where in the text each of them ends
        self._text = bytearray()
        # Where in the text a control token stands, and the draft's id.
        self._marks = list[tuple[int, int]]()
        beginning = [draft.bos] if draft.adds_bos and draft.bos >= 0 else []
        self._n_beginning = len(beginning)
        self.tokens = beginning
        self._ends = [0] * len(beginning)  # where in the text each token ends
        self._n_spelled = len(beginning)  # tokens before any that the draft drew

    @property
    def is_whole(self) -> bool:
        """Whether the tokens tell the text to its end."""
        return self._end(len(self.tokens)) == len(self._text)

    def follow(self, ids: Sequence[int]) -> None:
        """Have the tokens tell the text of ids."""
        self.roll_back(_n_common(self._ids, list(ids)))
        new = ids[len(self._ids) :]
        for token in new:
            self._add(token)
        if new or not self.is_whole:
            self._spell_from(self._seam())

    def append(self, token: int) -> None:
        """Add a token of the target that has a twin, and tell it as that."""
        self._add(token)
        self.tokens.append(int(self._shared.to_draft[token]))
        self._ends.append(len(self._text))

    def roll_back(self, length: int) -> None:
        """Forget the target's tokens from `length` on, and every token that tells of them."""
        if length >= len(self._ids):
            return
        end = self._id_ends[length - 1] if length else 0
        del self._ids[length:], self._id_ends[length:], self._text[end:]
        while self._marks and self._marks[-1][0] >= end:
            self._marks.pop()
        n = bisect_right(self._ends, end)
        del self.tokens[n:], self._ends[n:]
        self._n_spelled = min(self._n_spelled, n)

    def _add(self, token: int) -> None:
        """Add the text of a token of the target."""
        target, begins = self._target, not self._ids
        text = target.pieces[token]
        if begins and target.adds_bos and token == target.bos:
            pass  # The draft has a beginning of its own.
        elif not text and target.is_control(token):
            twin = int(self._shared.to_draft[token])
            if twin >= 0:
                self._marks.append((len(self._text), twin))
            text = _MARK if twin >= 0 else target.piece(token, special=True)
        elif target.adds_space and (begins or target.is_control(self._ids[-1])):
            text = text.removeprefix(b" ")
        self._ids.append(token)
        self._text += text
        self._id_ends.append(len(self._text))

    def _end(self, n: int) -> int:
        """Where in the text the first n tokens end."""
        return self._ends[n - 1] if n else 0

    def _is_marked(self, place: int) -> bool:
        """Whether a control token stands there."""
        index = bisect_left(self._marks, (place, 0))
        return index < len(self._marks) and self._marks[index][0] == place

    def _begins(self, place: int) -> bool:
        """Whether text after this place begins anew, as after a control token."""
        return place == 0 or self._is_marked(place - 1)

    def _seam(self) -> int:
        """How many tokens cannot change with what follows them: up to where the last word begins."""
        for n in range(self._n_spelled, self._n_beginning, -1):
            place = self._end(n)
            if place == self._end(n - 1):
                continue  # The token is the space that a tokenizer puts before a text.
            before, after = self._text[place - 1 : place], self._text[place : place + 1]
            if self._begins(place) or (after == b" " and not before.isspace()):
                return n
            # Text without spaces. A character's later bytes are 0x80 to 0xBF.
            if n <= self._n_spelled - _SEAM and not b"\x80" <= after <= b"\xbf":
                return n
        return self._n_beginning

    def _spell_from(self, n: int) -> None:
        """Spell the text after the first n tokens."""
        del self.tokens[n:], self._ends[n:]
        start = self._end(n)
        for place, mark in [*self._marks, (len(self._text), None)]:
            if place < start:
                continue
            part = bytes(self._text[start:place])
            tokens, ends = self._shared.speller.spell(part, begins=self._begins(start))
            self.tokens += tokens
            self._ends += [start + end for end in ends]
            if mark is not None:
                self.tokens.append(mark)
                self._ends.append(place + 1)
            start = place + 1
        self._n_spelled = len(self.tokens)
