"""What to check, how thoroughly, and what a check reports."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspec import chat
from pyspec.drafters import Drafter
from pyspec.engine import AUTO, DEFAULT_CONTEXT, MAX_WIDTH, Engine, Gamma
from pyspec.errors import UsageError
from pyspec.llama import Context, Model
from pyspec.sampling import Rule

# What is being checked, how many steps of it are done, and how many there are.
Progress = Callable[[str, int, int], None]

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number without recursion, with a docstring "
    "and two tests.",
    "My neighbour's cat keeps sleeping in my flower pots. What can I do that is kind to the cat?",
    "Continue this story: The lighthouse keeper had not spoken to anybody since the first snow, and on the "
    "day the radio finally crackled he",
)
# Its continuation passes position 512, from where llama.cpp's attention takes another path.
LONG_PROMPT = "Continue this log of a harbour.\n" + "".join(
    f"Day {day}: {7 * day % 11} ships came in, {5 * day % 7} left, the wind was {3 * day % 9}.\n"
    for day in range(1, 23)
)


@dataclass(frozen=True)
class Result:
    """The outcome of one check.

    Attributes:
        check: Its kind: "bits", "greedy", "coupled", "distribution" or "broken rule".
        subject: What was checked.
        passed: None if it was skipped.
        detail: One line for a person.
        figures: What was measured, for JSON.
    """

    check: str
    subject: str
    passed: bool | None
    detail: str
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much to check.

    Attributes:
        positions: Lengths of the cache before the passes that are compared.
        widths: Tokens of those passes.
        bits_of_draft: Whether the draft's logits are compared too.
        gammas: Tokens that the draft draws a round, besides the gamma asked for.
        random_gammas: Tokens that the random drafter draws a round.
        prompts: The built-in prompts.
        max_tokens: Of a greedy or coupled text.
        contexts: Prompts in which distributions are compared, at one position each.
        rounds_gamma: Tokens drafted in the first round of a sample.
        samples: Samples of each rule at each context.
    """

    positions: Sequence[int]
    widths: Sequence[int]
    bits_of_draft: bool
    gammas: Sequence[int]
    random_gammas: Sequence[int]
    prompts: Sequence[str]
    max_tokens: int
    contexts: int
    rounds_gamma: int
    samples: int


QUICK = Effort(
    positions=(1, 200, 511, 512, 600),
    widths=(2, 5, 8),
    bits_of_draft=False,
    gammas=(1,),
    random_gammas=(2,),
    prompts=PROMPTS,
    max_tokens=24,
    contexts=2,
    rounds_gamma=2,
    samples=1500,
)
THOROUGH = Effort(
    positions=(1, 31, 200, 511, 512, 600, 1020, 1500, 3000),
    widths=tuple(range(2, 17)),
    bits_of_draft=True,
    gammas=(1, 2, 4, 8),
    random_gammas=(1, 4, 7),
    prompts=(*PROMPTS, LONG_PROMPT),
    max_tokens=96,
    contexts=3,
    rounds_gamma=3,
    samples=20_000,
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What to check and with which settings; the fields not described here are the engine's.

    Attributes:
        prompts: Texts to continue, each a user's message if the target has a chat template. By default the
            effort's.
        rule: Used for greedy texts; the other checks try every rule.
        seed: What all random numbers are made from.
    """

    target: Model
    draft: Model | None = None
    effort: Effort = QUICK
    prompts: Sequence[str] = ()
    gamma: Gamma = AUTO
    rule: Rule = Rule.BLOCK
    n_ctx: int | None = None
    threads: int | None = None
    draft_threads: int | None = None
    seed: int = 0
    progress: Progress = field(default=lambda _check, _done, _total: None)

    def context(self, model: Model) -> Context:
        """A context of the same settings as the engine's, with room for logits of the widest pass."""
        n_ctx = self.n_ctx or min(DEFAULT_CONTEXT, self.target.n_ctx_train)
        threads = self.draft_threads if model is self.draft else None
        return Context(model, n_ctx=n_ctx, n_logits=MAX_WIDTH, threads=threads or self.threads)

    def engine(self, draft: Model | Drafter | None) -> Engine:
        """An engine of the target and a draft."""
        return Engine(
            self.target,
            draft,
            gamma=self.gamma,
            n_ctx=self.n_ctx,
            threads=self.threads,
            draft_threads=self.draft_threads,
        )

    def prompt_ids(self, n_free: int, n_ctx: int) -> list[list[int]]:
        """The prompts' tokens, cut so that n_free more fit in a context of n_ctx.

        Raises:
            UsageError: A prompt has no tokens.
        """
        prompts = [
            chat.message_ids(self.target, text) for text in self.prompts or self.effort.prompts
        ]
        if not all(prompts):
            raise UsageError(f"prompt {prompts.index([]) + 1} has no tokens of {self.target.name}")
        return [ids[: max(1, n_ctx - n_free)] for ids in prompts]

    def counter(self, check: str, total: int) -> Callable[[], None]:
        """What to call after each of a check's steps."""
        self.progress(check, 0, total)
        done = itertools.count(1)
        return lambda: self.progress(check, next(done), total)
