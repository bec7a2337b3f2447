"""The round: the draft proposes, the target checks all proposals in one pass, a rule decides.

Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023.

Between rounds the target's cache covers every committed token but the last, which is pending: the next
pass evaluates it together with the drafted ones. Plain decoding is the same round with nothing drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path
from types import TracebackType

from pyspec.drafters import Drafter
from pyspec.drafters.model import ModelDrafter
from pyspec.errors import (
    ContextOverflowError,
    LogitsError,
    ModelError,
    PyspecError,
    SlotsBusyError,
    UsageError,
)
from pyspec.generation import Generation, Slot
from pyspec.llama import Context, Model, Part, evaluate_together
from pyspec.output import Piece
from pyspec.sampling import Rule, Sampler, SamplingParams
from pyspec.vocab import check_same_vocabulary

DEFAULT_GAMMA = 4
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
        draft: A small model of the same vocabulary, or a ready drafter, which stays its owner's to close;
            None for plain decoding. A ready drafter serves one slot only.
        gamma: Tokens drafted a round.
        n_ctx: Positions of context: prompt and output together. By default 4096, or as many as the target
            was trained for if that is less.
        n_batch: Most tokens of one pass of the prefill.
        threads: Threads of the target; by default one a physical core.
        draft_threads: Threads of the draft; by default as many as the target's.
        draft_ctx: Positions of the draft's context; beyond it nothing is drafted.
        parallel: Slots, each with n_ctx positions of its own.

    Raises:
        ModelError: A model cannot be loaded, or not as asked for.
        VocabularyMismatchError: The draft's token ids do not mean what the target's do.
        UsageError: An argument is outside its range.
    """

    def __init__(
        self,
        target: Model | str | Path,
        draft: Model | str | Path | Drafter | None = None,
        *,
        gamma: int = DEFAULT_GAMMA,
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
        self.gamma = _checked_gamma(gamma)
        self._owned: list[Model | Context | Drafter] = []
        self._slots: list[Slot] = []
        try:
            self.target = self._load(target)
            self.draft: Model | None = None
            if isinstance(draft, (Model, str, Path)):
                self.draft = self._load(draft)
                check_same_vocabulary(self.target, self.draft)
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
            self._check_memory_kinds(draft)
            if self.draft is not None:
                draft_contexts = Context.several(
                    parallel,
                    self.draft,
                    n_ctx=draft_ctx or self.n_ctx,
                    n_batch=n_batch,
                    threads=draft_threads or threads,
                )
                for slot, context in zip(self._slots, draft_contexts, strict=True):
                    slot.drafter = ModelDrafter(context, self.target.n_vocab)
                    self._owned.append(slot.drafter)
            elif draft is not None and not isinstance(draft, (Model, str, Path)):
                self._slots[0].drafter = draft
        except BaseException:
            self.close()
            raise

    def _check_memory_kinds(self, draft: object | None) -> None:
        """Refuse models of which no drafted token could be taken back."""
        if self.target.is_recurrent and len(self._slots) > 1:
            raise ModelError(
                f"{self.target.name}: its recurrent memory cannot take part in shared passes: "
                "serve one request at a time"
            )
        if draft is not None and self._slots[0].context.max_rollback == 0:
            raise ModelError(
                f"{self.target.name}: its recurrent memory cannot roll back rejected tokens: "
                "run it without a draft (--no-draft)"
            )
        # A draft evaluates one token at a time, and llama.cpp's snapshots do not reach past a pass.
        if self.draft is not None and self.draft.is_recurrent:
            raise ModelError(
                f"{self.draft.name}: its recurrent memory cannot roll back rejected tokens: "
                "use another draft, or none (--no-draft)"
            )

    def _load(self, model: Model | str | Path) -> Model:
        if isinstance(model, Model):
            return model
        loaded = Model(model)
        self._owned.append(loaded)
        return loaded

    @property
    def parallel(self) -> int:
        """Requests that can be under way at once."""
        return len(self._slots)

    def start(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        gamma: int | None = None,
        rule: Rule | str = Rule.BLOCK,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Generation:
        """Accept a request, for `step` to carry on.

        It gets the free slot whose cache holds most of its prompt's beginning. What another slot holds of it
        is copied where that is more.

        Args:
            prompt: Text, tokenized with the model's own beginning (such as BOS), or token ids as they are.
            params: Sampling settings; llama.cpp's defaults if None.
            gamma: Tokens drafted a round, instead of the engine's; 0 decodes plainly.
            rule: How drafted tokens are verified.
            on_prefill: Called with how many of the prompt's tokens are evaluated, and how many there are.

        Raises:
            UsageError: The prompt is empty, or an argument is outside its range.
            ContextOverflowError: The prompt does not fit in the context.
            SlotsBusyError: As many requests as there are slots are under way.
        """
        params = params or SamplingParams()
        gamma = self.gamma if gamma is None else _checked_gamma(gamma)
        rule = _checked_rule(rule)
        for token in params.logit_bias:
            self._check_token(token, "a logit bias")
        ids = self.target.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        self._check_prompt(ids)
        free = [slot for slot in self._slots if slot.generation is None]
        if not free:
            raise SlotsBusyError(f"{self.parallel} requests are under way, which is all that fit")
        slot = max(free, key=lambda slot: _common(slot.held, ids))
        cached = self._reuse(slot, ids)
        sampler = Sampler(params, self.target.n_vocab, rule)
        generation = Generation(slot, ids, sampler, gamma=gamma, on_prefill=on_prefill)
        generation.statistics.cached_tokens = cached
        return generation

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
        try:
            for generation in generations:
                if not generation.prefilled:
                    generation.prefill()
            pieces = self._round(ready) if ready else {}
        except BaseException as error:
            for generation in generations:
                if not generation.finished:
                    generation.fail(error)
            raise
        return [pieces.get(generation, Piece(())) for generation in generations]

    def _round(self, generations: Sequence[Generation]) -> dict[Generation, Piece]:
        """A round of each, sharing a pass of the target."""
        with _timed(generations, "decode_s"):
            contexts = [generation.slot.context for generation in generations]
            # For a moment each sequence needs room for as many tokens as the widest evaluates.
            width = min(context.n_ctx - context.length for context in contexts)
            width = min(width, contexts[0].n_batch // len(contexts))
            parts: dict[Generation, Part] = {}
            for generation in generations:
                with _ending_alone(generation):
                    tokens = generation.propose(width - 1)
                    parts[generation] = Part(generation.slot.context, tokens, len(tokens))
            if parts:
                with _timed(parts, "verify_s"):
                    evaluate_together(list(parts.values()))
            pieces: dict[Generation, Piece] = {}
            for generation in parts:
                with _ending_alone(generation):
                    pieces[generation] = generation.conclude()
        return pieces

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        gamma: int | None = None,
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
def _timed(generations: Iterable[Generation], name: str) -> Iterator[None]:
    """Add the time spent inside to the named statistic of each."""
    with ExitStack() as timers:
        for generation in generations:
            timers.enter_context(generation.statistics.timed(name))
        yield


@contextmanager
def _ending_alone(generation: Generation) -> Iterator[None]:
    """What is wrong with one request's logits ends that one."""
    try:
        yield
    except LogitsError as error:
        generation.fail(error)


def _common(held: Sequence[int], ids: Sequence[int]) -> int:
    """Length of the beginning that two texts share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(held, ids, strict=False)))


def _checked_rule(rule: Rule | str) -> Rule:
    try:
        return Rule(rule)
    except ValueError:
        raise UsageError(f"rule must be one of {', '.join(Rule)}, not {rule}") from None


def _checked_gamma(gamma: int) -> int:
    if not 0 <= gamma < MAX_WIDTH:
        raise UsageError(f"gamma must be from 0 to {MAX_WIDTH - 1}, not {gamma}")
    return gamma
