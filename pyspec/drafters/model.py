"""The draft model: a small model of the target's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from pyspec.costs import measured_costs
from pyspec.drafters import Drafter, GoOn, Proposal, always
from pyspec.drafters.ngram import NgramDrafter
from pyspec.drafters.shortlist import Shortlist
from pyspec.errors import NoTokenError
from pyspec.llama import Context, Logits
from pyspec.sampling import Sampler, softmax_of

# With half as many a step of the default draft is another 6 % shorter, and translations lose a fifth of its
# acceptance (bench/results/shortlist.md).
DEFAULT_SHORTLIST = 65536


class ModelDrafter(Drafter):
    """Draws each token from the draft's distribution, after the same transforms as the target's.

    Args:
        context: The draft's own; this drafter closes it.
        n_vocab: Size of the target's vocabulary. Ids that only one of the two models has get q = 0.
        shortlist: Draw only from ids below this, special ones, and those near ids of the text; None to draw
            from all. Other logits are not computed. It counts only where the kernels have the weights.

    Attributes:
        guide: Says what is likely to be drawn next, from the text's earlier parts. Guessed tokens are
            evaluated in the same pass as the one before them, and as many as are then drawn cost no pass of
            their own. What is drawn does not depend on them. There are fewer than the context has logits.
    """

    def __init__(
        self, context: Context, n_vocab: int, *, shortlist: int | None = DEFAULT_SHORTLIST
    ) -> None:
        self.name = context.model.name
        self.context = context
        self.guide: NgramDrafter | None = None
        self._n_vocab = n_vocab
        self._n_common = min(n_vocab, context.model.n_vocab)
        self._q: npt.NDArray[np.float32] = np.zeros((0, n_vocab), np.float32)
        self._guessed: list[int] = []  # what the cache holds beyond the text, in propose
        self._shortlist: Shortlist | None = None
        if shortlist is not None and shortlist < context.model.n_vocab:
            self._shortlist = Shortlist(context.model, shortlist)

    @property
    def guided(self) -> bool:
        """Whether it has a guide."""
        return self.guide is not None

    def measure(self) -> None:
        """Find out what the draft's passes cost."""
        self.shorten(())
        self.costs = measured_costs(self.context)

    def room(self, ids: Sequence[int]) -> int:
        """Most tokens that fit: the last one drawn needs no cell. None after an id it does not have."""
        unseen = ids[self.context.length :]
        if any(token >= self.context.model.n_vocab for token in unseen):
            return 0
        return max(0, self.context.n_ctx - len(ids) + 1)

    def backlog(self, ids: Sequence[int]) -> int:
        """Tokens of ids that the cache lacks."""
        return len(ids) - self.context.length

    def catch_up(self, ids: Sequence[int]) -> None:
        """Evaluate what the cache lacks of ids."""
        self.context.evaluate(ids[self.context.length :])

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

        The confidence is the probability at temperature 1, which says something of a greedy draft too.
        """
        self._reserve(gamma)
        tokens, confidence = list[int](), list[float]()
        self.shorten(ids)
        for index in range(gamma):
            text = [*ids, *tokens]
            logits, q = self._logits_after(text, gamma - index - 1), self._q[index]
            try:
                sampler.distribution(logits, text, q[: self._n_common], source="draft")
            except NoTokenError:
                break  # The request forbids all that is on the shortlist, but perhaps nothing else.
            token = sampler.draw_draft(q, round_=round_, index=index, position=len(text))
            tokens.append(token)
            confidence.append(softmax_of(logits, token))
            evaluated = self._guessed[:1] == [token]
            if index + 1 < gamma and not go_on(confidence[-1], evaluated=evaluated):
                break
        self._drop_guesses()
        return Proposal(tokens, list(self._q[: len(tokens)]), confidence)

    def _logits_after(self, text: Sequence[int], most: int) -> Logits:
        """Logits of what follows a text, which is the one before or has a token more.

        Args:
            text: What the cache may hold a beginning of, and guesses after that.
            most: Guesses that are of use.
        """
        context = self.context
        if self._guessed[:1] == [text[-1]] and context.length - len(self._guessed) == len(text) - 1:
            del self._guessed[0]
        else:
            self._drop_guesses()
            pending, guessed = text[context.length :], list[int]()
            most = min(most, context.n_logits - 1)
            if self.guide is not None and len(pending) + most <= context.n_batch:
                guessed = self._known(self.guide.guess(text, most))
            context.evaluate([*pending, *guessed], n_logits=1 + len(guessed))
            self._guessed = guessed
        return context.logits(-1 - len(self._guessed))[: self._n_common]

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """The tokens up to the first that the draft does not have."""
        n_vocab = self.context.model.n_vocab
        return list(takewhile(lambda token: token < n_vocab, tokens))

    def _drop_guesses(self) -> None:
        """Take the guesses that were not drawn out of the cache."""
        if self._guessed:
            self.context.truncate(self.context.length - len(self._guessed))
            self._guessed = []

    def shorten(self, ids: Sequence[int]) -> None:
        """Have the next passes compute the logits that are on the list after ids."""
        if self._shortlist is not None:
            self.context.panels = self._shortlist.panels(ids)

    def _reserve(self, gamma: int) -> None:
        if len(self._q) < gamma:
            self._q = np.zeros((gamma, self._n_vocab), np.float32)

    def roll_back(self, length: int) -> None:
        """Cut the cache back to at most `length` positions."""
        self.context.truncate(min(length, self.context.length))
        if self._shortlist is not None:
            self._shortlist.roll_back(length)

    def clear(self) -> None:
        """Empty the cache."""
        self.context.clear()
        self._guessed = []
        if self._shortlist is not None:
            self._shortlist.roll_back(0)

    def close(self) -> None:
        """Free the context; the model is its owner's."""
        self.context.close()
