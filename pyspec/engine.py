"""The round: the draft proposes, the target checks all proposals in one pass, a rule decides.

Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023.

Between rounds the target's cache covers every committed token but the last, which is pending: the next
pass evaluates it together with the drafted ones. Plain decoding is the same round with nothing drafted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Literal

from pyspec import worker
from pyspec.costs import CostCurve, forget_costs, measured_costs
from pyspec.drafters import Drafter
from pyspec.drafters.foreign import drafter_of
from pyspec.drafters.model import ModelDrafter
from pyspec.drafters.ngram import MOST_GUESSED, NgramDrafter
from pyspec.errors import (
    ContextOverflowError,
    LogitsError,
    ModelError,
    PyspecError,
    SlotsBusyError,
    UsageError,
)
from pyspec.generation import Generation, Slot
from pyspec.grammar import Constraint
from pyspec.llama import Context, Model, Part, evaluate_together
from pyspec.output import Piece
from pyspec.planner import FixedGamma, Planner
from pyspec.sampling import Rule, Sampler, SamplingParams
from pyspec.vocab import shared_tokens

Gamma = int | Literal["auto"]
AUTO: Literal["auto"] = "auto"
NGRAM = "ngram"
Draft = Model | str | Path | Drafter
DEFAULT_CONTEXT = 4096
# Tokens of the widest target pass after the prefill; gamma is less than this.
MAX_WIDTH = 32
# llama.cpp's own limits: of its thread pools, of a position ...
_MAX_THREADS = 512
_MAX_CONTEXT = 2**31 - 1
# Of the sequences of a context.
_MAX_PARALLEL = 64

_ENDED = "this request was ended by another one, or by closing the engine"


class Engine:
    """A target, perhaps a draft, and their caches.

    Several requests can be under way at once, each in a slot of its own; a step of them shares one pass of
    the target. A slot's caches outlive its request: of the next prompt only what differs is evaluated.

    Args:
        target: The model whose text is wanted: a loaded Model or a file.
        draft: What to draft with, or several: small models of any vocabulary, each a loaded Model or a
            file; "ngram", which copies from where the text's end occurred before; ready drafters, which
            stay their owner's to close and serve the first slot only. None for plain decoding.
        gamma: Tokens drafted a round, with the first drafter that has any; or "auto", to choose the drafter
            and how far it drafts anew in each round, by what passes cost here and what was accepted of late.
        ngram: With "auto", draft from the text itself too, besides the models.
        n_ctx: Positions of context: prompt and output together. By default 4096, or as many as the target
            was trained for if that is less.
        n_batch: Most tokens of one pass of the prefill.
        threads: Threads of the target; by default one a physical core.
        draft_threads: Threads of the draft; by default as many as the target's.
        draft_ctx: Positions of the draft's context; beyond it nothing is drafted.
        parallel: Slots, each with n_ctx positions of its own.

    Raises:
        ModelError: A model cannot be loaded, or not as asked for.
        VocabularyMismatchError: A draft shares next to no tokens with the target.
        UsageError: An argument is outside its range.
    """

    def __init__(
        self,
        target: Model | str | Path,
        draft: Draft | Sequence[Draft] | None = None,
        *,
        gamma: Gamma = AUTO,
        ngram: bool = True,
        n_ctx: int | None = None,
        n_batch: int = 512,
        threads: int | None = None,
        draft_threads: int | None = None,
        draft_ctx: int | None = None,
        parallel: int = 1,
    ) -> None:
        for name, value, most in (
            ("the context", n_ctx, _MAX_CONTEXT),
            ("the batch", n_batch, _MAX_CONTEXT),
            ("threads", threads, _MAX_THREADS),
            ("the draft's threads", draft_threads, _MAX_THREADS),
            ("the draft's context", draft_ctx, _MAX_CONTEXT),
            ("parallel requests", parallel, _MAX_PARALLEL),
        ):
            if value is not None and not 1 <= value <= most:
                raise UsageError(f"{name} must be from 1 to {most}, not {value}")
        self.gamma = checked_gamma(gamma)
        self._owned: list[Model | Context | Drafter] = []
        self._slots: list[Slot] = []
        self._costs: CostCurve | None = None
        self.drafts: list[Model] = []
        try:
            self.target = self._load(target)
            self.n_ctx = n_ctx or min(DEFAULT_CONTEXT, self.target.n_ctx_train)
            contexts = Context.several(
                parallel,
                self.target,
                n_ctx=self.n_ctx,
                n_batch=n_batch,
                n_logits=MAX_WIDTH,
                threads=threads,
            )
            self._owned += contexts
            self._slots = [Slot(context) for context in contexts]
            drafts = _listed(draft)
            self._check_memory_kind(drafting=bool(drafts))
            has_models = any(isinstance(draft, (Model, Path, str)) for draft in drafts)
            if ngram and has_models and self.gamma == AUTO and NGRAM not in drafts:
                drafts.append(NGRAM)
            draft_settings = {
                "n_ctx": draft_ctx or self.n_ctx,
                "n_batch": n_batch,
                "threads": draft_threads or threads,
                "n_logits": 1 + MOST_GUESSED if NGRAM in drafts else 1,
            }
            for each in drafts:
                self._add_drafter(each, draft_settings)
            for slot in self._slots:
                _guide(slot.drafters)
            if self.gamma == AUTO and drafts:
                for slot in self._slots:
                    self._measure(slot)
            elif parallel > 1:
                self._costs = measured_costs(contexts[0])
        except BaseException:
            self.close()
            raise

    def _check_memory_kind(self, *, drafting: bool) -> None:
        """Refuse a target of which no drafted token could be taken back."""
        if self.target.is_recurrent and self.parallel > 1:
            raise ModelError(
                f"{self.target.name}: its recurrent memory cannot take part in shared passes: "
                "serve one request at a time (--parallel 1)"
            )
        if drafting and self._slots[0].context.max_rollback == 0:
            raise ModelError(
                f"{self.target.name}: its recurrent memory cannot roll back rejected tokens: "
                "run it without a draft (--no-draft)"
            )

    def _add_drafter(self, draft: Draft, settings: Mapping[str, int | None]) -> None:
        """Give each slot a drafter of its own, or the first slot a ready one."""
        if draft == NGRAM:
            for slot in self._slots:
                slot.drafters.append(NgramDrafter())
            return
        if not isinstance(draft, (Model, str, Path)):
            slot = self._slots[0]
            slot.drafters.append(draft)
            slot.reader = slot.reader or draft
            return
        model = self._load(draft)
        self.drafts.append(model)
        shared = shared_tokens(self.target, model)
        # A draft evaluates one token at a time, and llama.cpp's snapshots do not reach past a pass.
        if model.is_recurrent:
            raise ModelError(
                f"{model.name}: its recurrent memory cannot roll back rejected tokens: "
                "use another draft, or none (--no-draft)"
            )
        contexts = Context.several(self.parallel, model, **settings)  # type: ignore[arg-type]
        for slot, context in zip(self._slots, contexts, strict=True):
            drafter = drafter_of(context, self.target, shared)
            self._owned.append(drafter)
            slot.drafters.append(drafter)
            slot.reader = slot.reader or drafter

    def _measure(self, slot: Slot) -> CostCurve:
        """What the target's passes cost, and each drafter's; a slot's caches may be emptied for it."""
        if self._costs is None or not slot.measured:
            slot.forget()
            self._costs = self._costs or measured_costs(slot.context)
            for drafter in slot.drafters:
                drafter.measure()
            slot.measured = True
        return self._costs

    def _load(self, model: Model | str | Path) -> Model:
        if isinstance(model, Model):
            return model
        loaded = Model(model)
        self._owned.append(loaded)
        return loaded

    @property
    def draft(self) -> Model | None:
        """The first of the draft models."""
        return self.drafts[0] if self.drafts else None

    @property
    def parallel(self) -> int:
        """Requests that can be under way at once."""
        return len(self._slots)

    def start(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        gamma: Gamma | None = None,
        rule: Rule | str = Rule.BLOCK,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Generation:
        """Accept a request, for `step` to carry on.

        It gets the free slot whose cache holds most of its prompt's beginning, of several the one nearest to
        others under way. What another slot holds of it is copied where that is more.

        Args:
            prompt: Text, tokenized with the model's own beginning (such as BOS), or token ids as they are.
            params: Sampling settings; llama.cpp's defaults if None.
            gamma: Tokens drafted a round or "auto", instead of the engine's; 0 decodes plainly.
            rule: How drafted tokens are verified.
            on_prefill: Called with how many of the prompt's tokens are evaluated, and how many there are.

        Raises:
            UsageError: The prompt is empty, an argument is outside its range, or nothing that the grammar
                allows can be written with the target's tokens.
            ContextOverflowError: The prompt does not fit in the context.
            SlotsBusyError: As many requests as there are slots are under way.
        """
        params = params or SamplingParams()
        gamma = self.gamma if gamma is None else checked_gamma(gamma)
        rule = _checked_rule(rule)
        for token in params.logit_bias:
            self._check_token(token, "a logit bias")
        ids = self.target.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        self._check_prompt(ids)
        free = [slot for slot in self._slots if slot.generation is None]
        if not free:
            raise SlotsBusyError(f"{self.parallel} requests are under way, which is all that fit")
        grammar = params.grammar
        constraint = None if grammar is None else Constraint(grammar, self.target, len(ids))
        slot = max(free, key=lambda slot: (_common(slot.held, ids), -self._distance(slot)))
        sampler = Sampler(params, self.target.n_vocab, rule, constraint)
        planner = self._planner(slot, gamma, sampler)
        cached = self._reuse(slot, ids)
        generation = Generation(slot, ids, sampler, planner, on_prefill=on_prefill)
        generation.statistics.cached_tokens = cached
        return generation

    def _planner(self, slot: Slot, gamma: Gamma, sampler: Sampler) -> Planner | FixedGamma:
        if gamma != AUTO:
            return FixedGamma(gamma)
        if not slot.drafters:
            return FixedGamma(0)
        costs = self._measure(slot)
        # What a random number decides depends on what is drafted when: a seed is to write its text again.
        timeless = sampler.params.temperature > 0 and sampler.rule is not Rule.COUPLED
        drafts = [drafter.costs for drafter in slot.drafters]
        return Planner(costs, drafts, observe_time=not timeless)

    def _distance(self, slot: Slot) -> int:
        """From a slot to the nearest one with a request: neighbours share passes."""
        place = slot.context.sequence
        return min(
            (abs(place - other.slot.context.sequence) for other in self._generations), default=0
        )

    def _reuse(self, slot: Slot, ids: list[int]) -> int:
        """Have a slot hold as much of the prompt as any does, and nothing else; returns how much that is."""
        # The last token is evaluated in any case: the first round needs its logits.
        prompt = ids[:-1]
        fullest = max(self._slots, key=lambda other: _common(other.held, prompt))
        common = _common(fullest.held, prompt)
        if common > _common(slot.held, prompt):
            slot.take_over(fullest, common)
        return slot.keep(common)

    def step(self, generations: Sequence[Generation]) -> list[Piece]:
        """Carry each of some requests on: by one chunk of its prompt, or by one round.

        All rounds share a pass of the target. What goes wrong with one request ends it alone, with `error`
        set and an empty piece; what goes wrong with the pass is raised and ends all.

        Args:
            generations: Different ones, none finished.

        Returns:
            A piece each, empty while the prompt is read; a request's last has the statistics.

        Raises:
            PyspecError: The pass failed, or a generation had ended.
        """
        ready = [generation for generation in generations if generation.prefilled]
        lengths = [generation.slot.context.length for generation in generations]
        try:
            for generation in generations:
                if not generation.prefilled:
                    generation.prefill(len(generations))
            # As one call: to hand each pass over to the worker and back takes as long as to choose a token.
            pieces = worker.run(lambda: self._round(ready)) if ready else {}
        except BaseException as error:
            for generation, length in zip(generations, lengths, strict=True):
                if not generation.finished:
                    # What an interrupt left is as it was before it; of what went wrong nothing is trusted.
                    generation.fail(error, keep=0 if isinstance(error, Exception) else length)
            raise
        return [pieces.get(generation, Piece(())) for generation in generations]

    def _round(self, generations: Sequence[Generation]) -> dict[Generation, Piece]:
        """A round of each, sharing a pass of the target."""
        with ExitStack() as timers:
            for generation in generations:
                timers.enter_context(generation.statistics.timed("decode_s"))
            contexts = [generation.slot.context for generation in generations]
            # For a moment each sequence needs room for as many tokens as the widest evaluates.
            width = min(context.n_ctx - context.length for context in contexts)
            width = min(width, contexts[0].n_batch // len(contexts))
            parts: dict[Generation, Part] = {}
            for generation in generations:
                with _ending_alone(generation):
                    tokens = generation.propose(width - 1, len(generations))
                    parts[generation] = Part(generation.slot.context, tokens, len(tokens))
            start = time.perf_counter()
            shared_wide = bool(parts) and evaluate_together(
                [*parts.values(), *self._between(list(parts.values()))]
            )
            verify_s = time.perf_counter() - start
            pieces: dict[Generation, Piece] = {}
            for generation in parts:
                with _ending_alone(generation):
                    pieces[generation] = generation.conclude(verify_s, shared_wide)
                    if generation.finished and not generation.costs_fit:
                        forget_costs(parts[generation].context)
        return pieces

    def _between(self, parts: Sequence[Part]) -> list[Part]:
        """Parts without tokens of slots that lie between others', where they cost less than a pass more."""
        if self._costs is None:
            return []
        width = max(len(part.tokens) for part in parts)
        fillers: list[Part] = []
        joined, *others = _runs(part.context.sequence for part in parts)
        for run in others:
            gap = [slot.context for slot in self._slots[joined.stop : run.start]]
            whole = range(joined.start, run.stop)
            n_tokens = width * (len(parts) + len(fillers) + len(gap))
            fits = n_tokens <= parts[0].context.n_batch and all(
                context.length + width <= context.n_ctx for context in gap
            )
            together, *apart = (self._costs(width * len(each)) for each in (whole, joined, run))
            if fits and together < sum(apart):
                fillers += [Part(context, (), 0) for context in gap]
                joined = whole
            else:
                joined = run
        return fillers

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        gamma: Gamma | None = None,
        rule: Rule | str = Rule.BLOCK,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Iterator[Piece]:
        """Write a continuation of the prompt.

        The iterator may be abandoned at any point. Where no slot is free the oldest request is ended.

        Args are those of `start`, and so are the errors raised at once.

        Yields:
            A piece a round; the last has the statistics.

        Raises:
            LogitsError: A model produced logits from which no distribution follows.
            UsageError: The grammar is too complex to go on.
        """
        if all(slot.generation for slot in self._slots):
            oldest = min(self._generations, key=lambda generation: generation.started)
            oldest.close(PyspecError(_ENDED))
        generation = self.start(prompt, params, gamma=gamma, rule=rule, on_prefill=on_prefill)
        return self._pieces(generation)

    def _pieces(self, generation: Generation) -> Iterator[Piece]:
        try:
            while not generation.prefilled:
                self.step([generation])
            finished = False
            while not finished:
                (piece,) = self.step([generation])
                if generation.error is not None:
                    raise generation.error
                finished = generation.finished
                yield piece
        finally:
            generation.close()

    @property
    def _generations(self) -> list[Generation]:
        return [slot.generation for slot in self._slots if slot.generation is not None]

    def _check_prompt(self, ids: Sequence[int]) -> None:
        if not ids:
            raise UsageError("the prompt is empty: there is nothing to continue")
        if len(ids) > self.n_ctx:
            raise ContextOverflowError(
                f"the prompt has {len(ids)} tokens and the context {self.n_ctx}: "
                "shorten the prompt or ask for a larger context"
            )
        for token in ids:
            self._check_token(token, "the prompt")

    def _check_token(self, token: int, whose: str) -> None:
        if not 0 <= token < self.target.n_vocab:
            raise UsageError(
                f"{whose} has token id {token}, outside 0 to {self.target.n_vocab - 1}"
            )

    def close(self) -> None:
        """End all requests, and free the contexts and the models that this engine loaded."""
        for generation in self._generations:
            generation.close(PyspecError(_ENDED))
        while self._owned:
            self._owned.pop().close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@contextmanager
def _ending_alone(generation: Generation) -> Iterator[None]:
    """What is wrong with one request's logits, or with its grammar, ends that one."""
    try:
        yield
    except (LogitsError, UsageError) as error:
        generation.fail(error)


def _runs(numbers: Iterable[int]) -> list[range]:
    """The ranges that different numbers make up."""
    runs: list[range] = []
    for number in sorted(numbers):
        if runs and number == runs[-1].stop:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


def _guide(drafters: Sequence[Drafter]) -> None:
    """Have the draft models look at what the n-gram drafter would copy."""
    guide = next((drafter for drafter in drafters if isinstance(drafter, NgramDrafter)), None)
    for drafter in drafters:
        if isinstance(drafter, ModelDrafter):
            drafter.guide = guide


def _common(held: Sequence[int], ids: Sequence[int]) -> int:
    """Length of the beginning that two texts share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(held, ids, strict=False)))


def _checked_rule(rule: Rule | str) -> Rule:
    try:
        return Rule(rule)
    except ValueError:
        raise UsageError(f"rule must be one of {', '.join(Rule)}, not {rule}") from None


def checked_gamma(gamma: Gamma) -> Gamma:
    """Return gamma if it is one; raises UsageError otherwise."""
    if gamma != AUTO and not (isinstance(gamma, int) and 0 <= gamma < MAX_WIDTH):
        raise UsageError(f"gamma must be auto, or from 0 to {MAX_WIDTH - 1}, not {gamma}")
    return gamma


def _listed(draft: Draft | Sequence[Draft] | None) -> list[Draft]:
    if draft is None:
        return []
    if isinstance(draft, Sequence) and not isinstance(draft, str):
        return list(draft)
    return [draft]
