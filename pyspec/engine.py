"""The round: the draft proposes, the target checks all proposals in one pass, a rule decides.

Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023.

Between rounds the target's cache covers every committed token but the last, which is pending: the next
pass evaluates it together with the drafted ones. Plain decoding is the same round with nothing drafted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType

from pyspec.drafters import Drafter, Proposal
from pyspec.drafters.model import ModelDrafter
from pyspec.errors import ContextOverflowError, ModelError, PyspecError, UsageError
from pyspec.llama import Context, Model, RollbackError
from pyspec.metrics import Statistics
from pyspec.output import Output, Piece, Source, Token, with_logprobs
from pyspec.sampling import Rule, Sampler, SamplingParams
from pyspec.vocab import check_same_vocabulary

DEFAULT_GAMMA = 4
DEFAULT_CONTEXT = 4096
# Tokens of the widest target pass after the prefill; gamma is less than this.
MAX_WIDTH = 32
# llama.cpp's own limits: of its thread pools, and of a position.
_MAX_THREADS = 512
_MAX_CONTEXT = 2**31 - 1


class Engine:
    """A target, perhaps a draft, and their caches. One request at a time.

    Args:
        target: The model whose text is wanted: a loaded Model or a file.
        draft: A small model of the same vocabulary, or a ready drafter, which stays its owner's to close;
            None for plain decoding.
        gamma: Tokens drafted a round.
        n_ctx: Positions of context: prompt and output together. By default 4096, or as many as the target
            was trained for if that is less.
        n_batch: Most tokens of one pass of the prefill.
        threads: Threads of the target; by default one a physical core.
        draft_threads: Threads of the draft; by default as many as the target's.
        draft_ctx: Positions of the draft's context; beyond it nothing is drafted.

    Raises:
        ModelError: A model cannot be loaded.
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
    ) -> None:
        for name, value, most in (
            ("the context", n_ctx, _MAX_CONTEXT),
            ("the batch", n_batch, _MAX_CONTEXT),
            ("threads", threads, _MAX_THREADS),
            ("the draft's threads", draft_threads, _MAX_THREADS),
            ("the draft's context", draft_ctx, _MAX_CONTEXT),
        ):
            if value is not None and not 1 <= value <= most:
                raise UsageError(f"{name} must be from 1 to {most}, not {value}")
        self.gamma = _checked_gamma(gamma)
        self._owned: list[Model | Context | Drafter] = []
        self._request = 0
        try:
            self.target = self._load(target)
            self.draft: Model | None = None
            self._drafter: Drafter | None = None
            if isinstance(draft, (Model, str, Path)):
                self.draft = self._load(draft)
                check_same_vocabulary(self.target, self.draft)
            else:
                self._drafter = draft
            n_ctx = n_ctx or min(DEFAULT_CONTEXT, self.target.n_ctx_train)
            self._context = Context(
                self.target, n_ctx=n_ctx, n_batch=n_batch, n_logits=MAX_WIDTH, threads=threads
            )
            self._owned.append(self._context)
            if draft is not None:
                self._check_rollback()
            if self.draft is not None:
                draft_context = Context(
                    self.draft,
                    n_ctx=draft_ctx or n_ctx,
                    n_batch=n_batch,
                    threads=draft_threads or threads,
                )
                self._drafter = ModelDrafter(draft_context, self.target.n_vocab)
                self._owned.append(self._drafter)
        except BaseException:
            self.close()
            raise

    def _check_rollback(self) -> None:
        """Refuse models of which no drafted token could be taken back."""
        if self._context.max_rollback == 0:
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
    def n_ctx(self) -> int:
        """Positions of context: prompt and output together."""
        return self._context.n_ctx

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

        The iterator may be abandoned at any point. The next request ends it.

        Args:
            prompt: Text, tokenized with the model's own beginning (such as BOS), or token ids as they are.
            params: Sampling settings; llama.cpp's defaults if None.
            gamma: Tokens drafted a round, instead of the engine's; 0 decodes plainly.
            rule: How drafted tokens are verified.
            on_prefill: Called with how many of the prompt's tokens are evaluated, and how many there are.

        Yields:
            A piece a round; the last has the statistics.

        Raises:
            UsageError: The prompt is empty, or an argument is outside its range.
            ContextOverflowError: The prompt does not fit in the context.
            LogitsError: A model produced logits from which no distribution follows.
        """
        params = params or SamplingParams()
        gamma = self.gamma if gamma is None else _checked_gamma(gamma)
        for token in params.logit_bias:
            self._check_token(token, "a logit bias")
        ids = self.target.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        self._check_prompt(ids)
        self._request += 1
        return self._run(
            ids,
            params,
            Sampler(params, self.target.n_vocab, _checked_rule(rule)),
            gamma,
            on_prefill,
            self._request,
        )

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

    def _run(
        self,
        ids: list[int],
        params: SamplingParams,
        sampler: Sampler,
        gamma: int,
        on_prefill: Callable[[int, int], None] | None,
        request: int,
    ) -> Iterator[Piece]:
        """The rounds of a request. ids holds the committed tokens, prompt and output."""
        start = time.perf_counter()
        n_prompt = len(ids)
        statistics = Statistics(prompt_tokens=n_prompt, seed=sampler.seed)
        # The last token of a full context is written and never evaluated.
        n_end = self.n_ctx + 1
        if params.max_tokens is not None:
            n_end = min(n_end, n_prompt + params.max_tokens)
        output = Output(self.target, params.stop)
        with statistics.timed("prefill_s"):
            self._prefill(ids, self._clamp(gamma, ids, n_end) > 0, on_prefill)
        while not output.finish_reason:
            if request != self._request:
                raise PyspecError("this request was ended by another one, or by closing the engine")
            with statistics.timed("decode_s"):
                emitted = self._round(ids, self._clamp(gamma, ids, n_end), sampler, statistics)
                shown = output.push(emitted)
                ids += [token.id for token in emitted]
                del ids[n_prompt + output.n_tokens :]
                if output.finish_reason or len(ids) >= n_end:
                    shown += output.finish("length")
                with statistics.timed("sample_s"):
                    self._roll_back(len(ids) - 1, is_last=bool(output.finish_reason))
            statistics.completion_tokens = output.n_tokens
            if statistics.ttft_s is None and any(token.text for token in shown):
                statistics.ttft_s = time.perf_counter() - start
            if output.finish_reason:
                statistics.finish_reason = output.finish_reason
                widest = len(statistics.accepted_histogram)
                statistics.bit_exact_reason = self._context.bit_exact_reason(widest)
            yield Piece(tuple(shown), statistics if output.finish_reason else None)

    def _clamp(self, gamma: int, ids: Sequence[int], n_end: int) -> int:
        """Tokens to draft: no more than are wanted, than fit in one pass, or than the drafter can."""
        if self._drafter is None:
            return 0
        wanted = n_end - len(ids) - 1
        context = self._context
        limits = wanted, context.n_logits - 1, context.max_rollback, self._drafter.room(ids)
        return max(0, min(gamma, *limits))

    def _prefill(
        self, ids: Sequence[int], drafting: bool, on_prefill: Callable[[int, int], None] | None
    ) -> None:
        """Evaluate all of the prompt but its last token, split alike with and without a draft."""
        self._context.clear()
        if self._drafter is not None:
            self._drafter.clear()
        n_batch, covered = self._context.n_batch, len(ids) - 1
        for start in range(0, covered, n_batch):
            self._context.evaluate(ids[start : min(start + n_batch, covered)])
            if on_prefill is not None:
                on_prefill(self._context.length, covered)
        if self._drafter is not None and drafting:
            self._drafter.catch_up(ids[:covered])

    def _round(
        self, ids: list[int], gamma: int, sampler: Sampler, statistics: Statistics
    ) -> list[Token]:
        """Draft gamma tokens, check them, and return the accepted ones and the one that follows."""
        round_ = statistics.rounds
        proposal = Proposal()
        if gamma > 0 and self._drafter is not None:
            with statistics.timed("draft_s"):
                proposal = self._drafter.propose(ids, gamma, sampler, round_=round_)
        drafted = list(proposal.tokens)
        with statistics.timed("verify_s"):
            self._context.evaluate([ids[-1], *drafted], n_logits=len(drafted) + 1)
        with statistics.timed("sample_s"):
            p = [self._context.logits(row) for row in range(len(drafted) + 1)]
            # Probabilities take the place of the logits; a copy is kept if those are to be reported.
            n_top = sampler.params.logprobs
            raw = [] if n_top is None else [logits.copy() for logits in p]
            for row, logits in enumerate(p):
                sampler.distribution(logits, [*ids, *drafted[:row]], logits, source="target")
            verdict = sampler.verify(p, proposal.q, drafted, round_=round_, position=len(ids))
            statistics.count_round(len(drafted), verdict.accepted)
            emitted = [Token(token, "", Source.DRAFT) for token in drafted[: verdict.accepted]]
            emitted.append(Token(verdict.token, "", Source.TARGET))
            if n_top is not None:
                emitted = [with_logprobs(*pair, n_top) for pair in zip(emitted, raw, strict=False)]
        return emitted

    def _roll_back(self, length: int, *, is_last: bool) -> None:
        """Cut both caches back to what is committed; after the last round they may as well be empty."""
        with suppress(RollbackError) if is_last else nullcontext():
            self._context.truncate(length)
            if self._drafter is not None:
                self._drafter.roll_back(length)

    def close(self) -> None:
        """Free the contexts, and the models that this engine loaded."""
        self._request += 1
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


def _checked_rule(rule: Rule | str) -> Rule:
    try:
        return Rule(rule)
    except ValueError:
        raise UsageError(f"rule must be one of {', '.join(Rule)}, not {rule}") from None


def _checked_gamma(gamma: int) -> int:
    if not 0 <= gamma < MAX_WIDTH:
        raise UsageError(f"gamma must be from 0 to {MAX_WIDTH - 1}, not {gamma}")
    return gamma
