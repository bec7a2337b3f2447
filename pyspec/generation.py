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
from pyspec.planner import Candidate, FixedGamma, Plan, Planner, Settled
from pyspec.sampling import Sampler

# The confidence in the tokens of a drafter that does not state it.
_UNKNOWN = 0.5


@dataclass
class Slot:
    """Where one request at a time is evaluated. Its caches outlive the request, for the next one's prompt.

    Attributes:
        context: A sequence of the target.
        drafters: What drafts for it.
        reader: The one of them that reads a prompt along with the target where no other request is under way;
            otherwise, and all the others, they catch up when they are tried.
        ids: Tokens of which the target's cache holds the first context.length and each drafter's a beginning.
        generation: The request, while there is one.
        measured: Whether its drafters know their costs.
    """

    context: Context
    drafters: list[Drafter] = field(default_factory=list)
    reader: Drafter | None = None
    ids: list[int] = field(default_factory=list)
    generation: Generation | None = None
    measured: bool = False

    @property
    def held(self) -> list[int]:
        """The tokens that the target's cache covers."""
        return self.ids[: self.context.length]

    def keep(self, length: int) -> int:
        """Roll all caches back to at most `length` positions; returns how many the target's has left."""
        with suppress(RollbackError):
            self.context.truncate(min(length, self.context.length))
        for drafter in self.drafters:
            try:
                drafter.roll_back(min(length, self.context.length))
            except RollbackError:
                drafter.clear()
        return self.context.length

    def forget(self) -> None:
        """Empty all caches."""
        self.restore(0)

    def restore(self, length: int) -> None:
        """Cut the target's cache back to at most `length` positions, and trust no drafter's."""
        with suppress(RollbackError):
            self.context.truncate(length)
        for drafter in self.drafters:
            drafter.clear()
        self.ids = self.ids[:length]

    def take_over(self, other: Slot, length: int) -> None:
        """Copy the first `length` positions of another slot's target cache."""
        self.context.copy_from(other.context, length)
        for drafter in self.drafters:
            drafter.clear()


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
        planner: Planner | FixedGamma,
        *,
        on_prefill: Callable[[int, int], None] | None,
    ) -> None:
        self.ids = ids
        self.error: BaseException | None = None
        self._planner = planner
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
        self._plan: Plan = Settled()
        self._proposal = Proposal()
        self._shared_wide = False
        self._draft_s = 0.0
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

    @property
    def costs_fit(self) -> bool:
        """Whether the costs that it was planned with are not far over what passes took."""
        return self._planner.costs_fit

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

    def fail(self, error: BaseException, *, keep: int = 0) -> None:
        """End it in the middle of a step, where the caches may hold what was never committed.

        Args:
            error: What a later use of this generation raises.
            keep: Positions of the target's cache that are right all the same.
        """
        slot = self.slot
        self.close(error)
        slot.restore(keep)

    # ---- the prompt --------------------------------------------------------------------------------------

    @property
    def prefilled(self) -> bool:
        """Whether all of the prompt but its last token is evaluated."""
        return self.slot.context.length >= self._n_prompt - 1

    def prefill(self, share: int) -> None:
        """Evaluate the next chunk of the prompt, split alike with and without a draft.

        Args:
            share: Requests under way.
        """
        context, covered = self.slot.context, self._n_prompt - 1
        with self.statistics.timed("prefill_s"):
            end = min(context.length + context.n_batch, covered)
            context.evaluate(self.ids[context.length : end])
            self._read_along(share)
        if self._on_prefill is not None:
            self._on_prefill(context.length, covered)

    def _read_along(self, share: int) -> None:
        """Have the reader take in what of the prompt the target has, if it is to draft.

        Passes that several share are cheap for each, and a draft may never be worth its reading: that is for
        the plan to say.
        """
        reader = self.slot.reader
        wanted = share == 1 and self._planner.drafts and self._room() > 0
        if reader is not None and wanted and reader.room(self.ids) > 0:
            reader.catch_up(self.ids[: self.slot.context.length])

    # ---- a round -----------------------------------------------------------------------------------------

    def _room(self) -> int:
        """Tokens that may be drafted: no more than are wanted, or than fit in one pass."""
        context, wanted = self.slot.context, self._n_end - len(self.ids) - 1
        return max(0, min(wanted, context.n_logits - 1, context.max_rollback))

    def propose(self, most: int, share: int) -> Sequence[int]:
        """Draft, and return what the target is to evaluate: the pending token and the drafted ones.

        Args:
            most: Most tokens to draft.
            share: Requests that share the pass.
        """
        slot, start = self.slot, time.perf_counter()
        room = min(most, self._room())
        if not self.statistics.rounds:
            self._read_along(share)
        candidates = [self._candidate(drafter, room) for drafter in slot.drafters]
        self._plan = self._planner.plan(candidates, share)
        self._proposal = Proposal()
        if self._plan.source is not None:
            self._proposal = slot.drafters[self._plan.source].propose(
                self.ids,
                self._plan.most,
                self.sampler,
                round_=self.statistics.rounds,
                go_on=self._plan.go_on,
            )
        self._draft_s = time.perf_counter() - start
        self.statistics.draft_s += self._draft_s
        return [self.ids[-1], *self._proposal.tokens]

    def _candidate(self, drafter: Drafter, room: int) -> Candidate:
        room = min(room, drafter.room(self.ids)) if room > 0 else 0
        known = drafter.peek(self.ids, room) if room > 0 else None
        return Candidate(
            room,
            drafter.backlog(self.ids),
            confidence=None if known is None else known.confidence,
            guided=drafter.guided,
        )

    def conclude(self, verify_s: float, shared_wide: bool) -> Piece:
        """Verify the proposal with the logits of the pass, commit what stands, and roll back the rest.

        Args:
            verify_s: Seconds that the pass took.
            shared_wide: Whether its logits do: it was wide, and not all products are the kernels'.
        """
        self.statistics.verify_s += verify_s
        self._shared_wide |= shared_wide
        with self.statistics.timed("sample_s"):
            shown = self._output.push(emitted := self._verify(verify_s))
            self.ids += [token.id for token in emitted]
            del self.ids[self._n_prompt + self._output.n_tokens :]
            if len(self.ids) >= self._n_end:
                shown += self._output.finish("length")
            self._roll_back(len(self.ids) - 1)
        statistics, reason = self.statistics, self._output.finish_reason
        statistics.completion_tokens = self._output.n_tokens
        if statistics.ttft_s is None and any(token.text for token in shown):
            statistics.ttft_s = time.perf_counter() - self.started
        statistics.predicted_tokens_per_second = self._planner.predicted_rate
        if reason:
            statistics.finish_reason = reason
            statistics.bit_exact_reason = self.slot.context.bit_exact_reason(
                len(statistics.accepted_histogram),
                reused=statistics.cached_tokens > 0,
                shared_wide=self._shared_wide,
            )
            self.close()
        return Piece(tuple(shown), statistics if reason else None)

    def _verify(self, verify_s: float) -> list[Token]:
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
        self._count(len(drafted), verdict.accepted, verify_s)
        emitted = [Token(token, "", Source.DRAFT) for token in drafted[: verdict.accepted]]
        emitted.append(Token(verdict.token, "", Source.TARGET))
        if n_top is not None:
            emitted = [with_logprobs(*pair, n_top) for pair in zip(emitted, raw, strict=False)]
        return emitted

    def _count(self, drafted: int, accepted: int, verify_s: float) -> None:
        source = None
        if self._plan.source is not None:
            source = self.slot.drafters[self._plan.source].name
        self.statistics.count_round(drafted, accepted, source)
        confidence = self._proposal.confidence or [_UNKNOWN] * drafted
        self._planner.record(
            self._plan, confidence, accepted, draft_s=self._draft_s, verify_s=verify_s
        )

    def _roll_back(self, length: int) -> None:
        """Cut both caches back to what is committed; after the last round they may as well be empty."""
        slot = self.slot
        if self._output.finish_reason:
            slot.keep(length)
            return
        slot.context.truncate(length)
        for drafter in slot.drafters:
            drafter.roll_back(length)
