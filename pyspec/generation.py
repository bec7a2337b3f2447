"""A request under way, and the slot that it occupies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from pyspec.drafters import Drafter, Proposal
from pyspec.errors import PyspecError
from pyspec.llama import Context, RollbackError
from pyspec.metrics import Statistics
from pyspec.output import Output, Piece, Source, Token, with_logprobs
from pyspec.sampling import Sampler


@dataclass
class Slot:
    """Where one request at a time is evaluated. Its caches outlive the request, for the next one's prompt.

    Attributes:
        context: A sequence of the target.
        drafter: What drafts for it.
        ids: Tokens of which the target's cache holds the first context.length and the drafter's a beginning.
        generation: The request, while there is one.
    """

    context: Context
    drafter: Drafter | None = None
    ids: list[int] = field(default_factory=list)
    generation: Generation | None = None

    @property
    def held(self) -> list[int]:
        """The tokens that the target's cache covers."""
        return self.ids[: self.context.length]

    def keep(self, length: int) -> int:
        """Roll both caches back to at most `length` positions; returns how many the target's has left."""
        with suppress(RollbackError):
            self.context.truncate(min(length, self.context.length))
        if self.drafter is not None:
            try:
                self.drafter.roll_back(min(length, self.context.length))
            except RollbackError:
                self.drafter.clear()
        return self.context.length

    def forget(self) -> None:
        """Empty both caches."""
        self.context.clear()
        if self.drafter is not None:
            self.drafter.clear()
        self.ids = []

    def take_over(self, other: Slot, length: int) -> None:
        """Copy the first `length` positions of another slot's target cache."""
        self.context.copy_from(other.context, length)
        if self.drafter is not None:
            self.drafter.clear()


class Generation:
    """A request that an engine has accepted; `Engine.step` carries it on.

    Attributes:
        ids: Committed tokens, prompt and output.
        error: What ended it early, if anything did.
    """

    def __init__(
        self,
        slot: Slot,
        ids: list[int],
        sampler: Sampler,
        *,
        gamma: int,
        on_prefill: Callable[[int, int], None] | None,
    ) -> None:
        self.ids = ids
        self.error: BaseException | None = None
        self.gamma = gamma
        self.sampler = sampler
        self.statistics = Statistics(prompt_tokens=len(ids), seed=sampler.seed)
        self.started = time.perf_counter()
        self._on_prefill = on_prefill
        self._n_prompt = len(ids)
        # The last token of a full context is written and never evaluated.
        self._n_end = slot.context.n_ctx + 1
        max_tokens = sampler.params.max_tokens
        if max_tokens is not None:
            self._n_end = min(self._n_end, len(ids) + max_tokens)
        self._output = Output(slot.context.model, sampler.params.stop)
        self._proposal = Proposal()
        self._slot: Slot | None = slot
        slot.ids, slot.generation = ids, self

    # ---- life --------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether nothing more will come of it."""
        return self._slot is None

    @property
    def slot(self) -> Slot:
        """Where it is evaluated.

        Raises:
            PyspecError: It has ended.
        """
        if self._slot is None:
            raise self.error or PyspecError("this request has ended")
        return self._slot

    def close(self, error: BaseException | None = None) -> None:
        """End it, at any time between steps, and free its slot for another request.

        Args:
            error: What a later use of this generation raises.
        """
        # The collector may come by here on any thread: nothing is asked of llama.cpp.
        slot, self._slot = self._slot, None
        if slot is not None:
            self.error = error
            slot.generation = None

    def fail(self, error: BaseException) -> None:
        """End it in the middle of a step, where the caches may hold what was never committed."""
        slot = self.slot
        self.close(error)
        slot.forget()

    # ---- the prompt --------------------------------------------------------------------------------------

    @property
    def prefilled(self) -> bool:
        """Whether all of the prompt but its last token is evaluated."""
        return self.slot.context.length >= self._n_prompt - 1

    def prefill(self) -> None:
        """Evaluate the next chunk of the prompt, split alike with and without a draft."""
        context, covered = self.slot.context, self._n_prompt - 1
        with self.statistics.timed("prefill_s"):
            end = min(context.length + context.n_batch, covered)
            context.evaluate(self.ids[context.length : end])
            if self.slot.drafter is not None and self.clamped_gamma() > 0:
                self.slot.drafter.catch_up(self.ids[: context.length])
        if self._on_prefill is not None:
            self._on_prefill(context.length, covered)

    # ---- a round -----------------------------------------------------------------------------------------

    def clamped_gamma(self) -> int:
        """Tokens to draft: no more than are wanted, than fit in one pass, or than the drafter can."""
        slot = self.slot
        if slot.drafter is None:
            return 0
        wanted = self._n_end - len(self.ids) - 1
        limits = wanted, slot.context.n_logits - 1, slot.context.max_rollback
        return max(0, min(self.gamma, *limits, slot.drafter.room(self.ids)))

    def propose(self, most: int) -> Sequence[int]:
        """Draft at most `most` tokens; the target is to evaluate what is returned."""
        drafter, gamma = self.slot.drafter, min(most, self.clamped_gamma())
        self._proposal = Proposal()
        if drafter is not None and gamma > 0:
            with self.statistics.timed("draft_s"):
                self._proposal = drafter.propose(
                    self.ids, gamma, self.sampler, round_=self.statistics.rounds
                )
        return [self.ids[-1], *self._proposal.tokens]

    def conclude(self) -> Piece:
        """Verify the proposal with the logits of the pass, commit what stands, and roll back the rest."""
        with self.statistics.timed("sample_s"):
            shown = self._output.push(emitted := self._verify())
            self.ids += [token.id for token in emitted]
            del self.ids[self._n_prompt + self._output.n_tokens :]
            if len(self.ids) >= self._n_end:
                shown += self._output.finish("length")
            self._roll_back(len(self.ids) - 1)
        statistics, reason = self.statistics, self._output.finish_reason
        statistics.completion_tokens = self._output.n_tokens
        if statistics.ttft_s is None and any(token.text for token in shown):
            statistics.ttft_s = time.perf_counter() - self.started
        if reason:
            statistics.finish_reason = reason
            statistics.bit_exact_reason = self.slot.context.bit_exact_reason(
                len(statistics.accepted_histogram), reused=statistics.cached_tokens > 0
            )
            self.close()
        return Piece(tuple(shown), statistics if reason else None)

    def _verify(self) -> list[Token]:
        """Decide on the drafted tokens, and return the accepted ones and the one that follows."""
        context, sampler, q = self.slot.context, self.sampler, self._proposal.q
        drafted = list(self._proposal.tokens)
        p = [context.logits(row) for row in range(len(drafted) + 1)]
        # Probabilities take the place of the logits; a copy is kept if those are to be reported.
        n_top = sampler.params.logprobs
        raw = [] if n_top is None else [logits.copy() for logits in p]
        for row, logits in enumerate(p):
            sampler.distribution(logits, [*self.ids, *drafted[:row]], logits, source="target")
        verdict = sampler.verify(
            p, q, drafted, round_=self.statistics.rounds, position=len(self.ids)
        )
        self.statistics.count_round(len(drafted), verdict.accepted)
        emitted = [Token(token, "", Source.DRAFT) for token in drafted[: verdict.accepted]]
        emitted.append(Token(verdict.token, "", Source.TARGET))
        if n_top is not None:
            emitted = [with_logprobs(*pair, n_top) for pair in zip(emitted, raw, strict=False)]
        return emitted

    def _roll_back(self, length: int) -> None:
        """Cut both caches back to what is committed; after the last round they may as well be empty."""
        slot = self.slot
        if self._output.finish_reason:
            slot.keep(length)
            return
        slot.context.truncate(length)
        if slot.drafter is not None:
            slot.drafter.roll_back(length)
