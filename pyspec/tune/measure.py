"""The measurements: costs of passes by threads, and texts written at several draft lengths."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np

from pyspec.drafters.model import ModelDrafter
from pyspec.engine import AUTO, DEFAULT_CONTEXT, Engine, Gamma
from pyspec.errors import UsageError
from pyspec.llama import Context, Model, default_threads
from pyspec.output import Source, Token
from pyspec.sampling import Rule, Sampler, SamplingParams, softmax_of
from pyspec.vocab import shared_tokens

# What is being measured, how many steps of it are done, and how many there are.
Progress = Callable[[str, int, int], None]

GAMMAS = (0, 1, 2, 3, 4, 6, 8, 12)
REPETITIONS = 5
# Where passes are timed: about where an answer to a short prompt is half written.
POSITION = 192

# One of each kind on which drafts do differently.
PROMPTS = (
    "Write a Python function that returns the longest run of equal elements in a list, with a docstring.",
    "Rename the variable `x` to `width` in this code and give back all of it.\n\n"
    "def frame(lines, x):\n    bar = '+' + '-' * x + '+'\n    yield bar\n    for line in lines:\n"
    "        yield '|' + line[:x].ljust(x) + '|'\n    yield bar\n",
    "A baker fills 18 trays of 24 rolls and sells 7 of every 8 rolls at 0.60. What does he take in? "
    "Show every step.",
    "What should one think of before getting a dog in a city flat?",
    "Summarise in two sentences: The swimming pool stays closed until the end of May. When it was drained in "
    "March, workmen found that tiles had come off at the deep end and that water had run behind the wall. A "
    "firm from the next town will mend it for 62,000. Season tickets are good for four weeks longer.",
    "Translate into French: The bakery opens at six. Whoever comes after nine finds only dark bread, but the "
    "baker's wife keeps a few rolls under the counter for people she knows.",
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What to measure and with which settings; fields not described here are the engine's.

    Attributes:
        prompts: [n] token ids of the prompts.
        params: Sampling settings of the texts.
        tokens: Length of a text.
        gammas: Draft lengths to try, 0 among them.
    """

    target: Model
    draft: Model
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    tokens: int = 64
    gammas: Sequence[int] = GAMMAS
    rule: Rule = Rule.BLOCK
    n_ctx: int | None = None
    threads: int | None = None
    draft_threads: int | None = None
    progress: Progress = field(default=lambda _what, _done, _total: None)


# ---- costs -------------------------------------------------------------------------------------------


def thread_counts(most: int | None = None) -> list[int]:
    """1, 2, 4, ... and as many as there are physical cores."""
    most = most or default_threads()
    doubled = itertools.takewhile(lambda n: n < most, (2**i for i in itertools.count()))
    return [*doubled, most]


def measure_costs(
    setup: Setup, widths: Iterable[int], *, threads: int, draft_threads: int
) -> dict[int, float]:
    """Median seconds of target passes over so many tokens, and under key 0 of a draft step.

    All take turns, so that what else the machine does meets them alike. The target's include
    the distributions of all tokens, the draft's that of one, the draw and the confidence in it.
    """
    widths = sorted(widths)
    sampler = Sampler(setup.params, setup.target.n_vocab)
    n_ctx = setup.n_ctx or min(DEFAULT_CONTEXT, setup.target.n_ctx_train)
    position = min(POSITION, n_ctx - widths[-1])
    if position < 1:
        raise UsageError(
            f"timing passes over {widths[-1]} tokens needs a larger context than {n_ctx}"
        )
    tokens = list(itertools.islice(itertools.cycle(itertools.chain(*setup.prompts)), n_ctx))
    with (
        closing(
            Context(setup.target, n_ctx=position + widths[-1], n_logits=widths[-1], threads=threads)
        ) as target,
        closing(Context(setup.draft, n_ctx=position + 1, threads=draft_threads)) as draft,
    ):
        # A draft of another vocabulary has other ids; which tokens it reads makes no difference to its time.
        drafts_tokens = [token % setup.draft.n_vocab for token in tokens]
        target.evaluate(tokens[:position])
        draft.evaluate(drafts_tokens[:position])
        if shared_tokens(setup.target, setup.draft) is None:
            # As where it drafts, logits that are not on its shortlist are not computed.
            ModelDrafter(draft, setup.target.n_vocab).shorten(tokens[:position])
        q = np.zeros(setup.target.n_vocab, np.float32)
        n_common = min(setup.target.n_vocab, setup.draft.n_vocab)

        def check(width: int) -> None:
            target.truncate(position)
            target.evaluate(tokens[position : position + width], n_logits=width)
            for row in range(width):
                logits = target.logits(row)
                sampler.distribution(logits, tokens[: position + row], logits, source="target")

        def step() -> None:
            draft.truncate(position)
            draft.evaluate(drafts_tokens[position : position + 1], n_logits=1)
            logits, out = draft.logits(-1)[:n_common], q[:n_common]
            sampler.distribution(logits, tokens[:position], out, source="draft")
            softmax_of(logits, sampler.draw_draft(q, round_=0, index=0, position=position))

        taken: dict[int, list[float]] = {key: [] for key in (0, *widths)}
        for _ in range(REPETITIONS + 1):
            for key, seconds in taken.items():
                start = time.perf_counter()
                check(key) if key else step()
                seconds.append(time.perf_counter() - start)
    # The first turn pages in and fills caches.
    return {key: statistics.median(seconds[1:]) for key, seconds in taken.items()}


# ---- texts -------------------------------------------------------------------------------------------


@dataclass
class Acceptance:
    """How often drafted tokens were accepted, by their position in a round.

    Attributes:
        examined: [n] rounds in which the token at that position was decided on: all before it were accepted.
        accepted: [n] in how many of them it was accepted.
    """

    examined: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def count(self, drafted: int, accepted: int) -> None:
        """Add a round."""
        longer = drafted - len(self.examined)
        self.examined += [0] * longer
        self.accepted += [0] * longer
        for position in range(min(accepted + 1, drafted)):
            self.examined[position] += 1
            self.accepted[position] += position < accepted

    def add(self, other: Acceptance) -> None:
        """Add the rounds of another count."""
        for mine, theirs in (
            (self.examined, other.examined),
            (self.accepted, other.accepted),
        ):
            mine += [0] * (len(theirs) - len(mine))
            for position, count in enumerate(theirs):
                mine[position] += count

    @property
    def rate(self) -> float:
        """Accepted of all decided on: the likeliest value if it is the same at every position."""
        return sum(self.accepted) / max(1, sum(self.examined))

    @property
    def by_position(self) -> list[float]:
        """The rate at each position; that of all where none was decided on."""
        return [
            accepted / examined if examined else self.rate
            for accepted, examined in zip(self.accepted, self.examined, strict=True)
        ]


@dataclass
class Run:
    """The texts written with one draft length.

    Attributes:
        gamma: Tokens drafted a round with the draft model; or "auto", the default, where the engine chooses
            and may also copy from the text.
        tokens: Written after the first round of each text.
        seconds: That they took.
        rounds: In which they were written.
        acceptance: Of drafted tokens; not counted with "auto".
    """

    gamma: Gamma
    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)

    @property
    def tokens_per_second(self) -> float:
        """Speed of decoding, prompts excluded."""
        return self.tokens / self.seconds

    def write(self, engine: Engine, setup: Setup, prompt: Sequence[int]) -> None:
        """Add a text.

        Its first round, which evaluates the prompt, is left out, and so is one that the end of the text cut
        short.
        """
        params = replace(setup.params, max_tokens=None)
        pieces = engine.generate(prompt, params, gamma=self.gamma, rule=setup.rule)
        start = last = 0.0
        tokens: list[Token] = []
        for piece in pieces:
            if piece.statistics is not None:
                break
            last = time.perf_counter()
            start = start or last
            tokens += piece.tokens
            if len(tokens) >= setup.tokens:
                break
        self.seconds += last - start
        for round_ in itertools.islice(_rounds(tokens), 1, None):
            self.tokens += len(round_)
            self.rounds += 1
            if self.gamma != AUTO:
                self.acceptance.count(self.gamma, len(round_) - 1)


def _rounds(tokens: Iterable[Token]) -> Iterator[list[Token]]:
    """Split a text into its rounds, each ending with the target's own token; what is not whole is left out.

    Pieces are not rounds: the beginning of a character waits for its end, which another round may bring.
    """
    round_: list[Token] = []
    for token in tokens:
        round_.append(token)
        if token.source is Source.TARGET:
            yield round_
            round_ = []


def measure_runs(setup: Setup) -> list[Run]:
    """Write every prompt's text with each draft length and with "auto", all taking turns."""
    runs = [*(Run(gamma) for gamma in setup.gammas), Run(AUTO)]
    with Engine(
        setup.target,
        setup.draft,
        n_ctx=setup.n_ctx,
        threads=setup.threads,
        draft_threads=setup.draft_threads,
    ) as engine:
        Run(max(setup.gammas)).write(engine, setup, setup.prompts[0])  # pages in and fills caches
        total = len(setup.prompts) * len(runs)
        for turn, (prompt, run) in enumerate(itertools.product(setup.prompts, runs)):
            setup.progress("texts", turn, total)
            run.write(engine, setup, prompt)
        setup.progress("texts", total, total)
    if not all(run.tokens for run in runs):
        raise UsageError("the texts end at once: give prompts with longer answers")
    return runs
