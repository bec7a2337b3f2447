"""Checks that a target and its draft, on this machine, write what the target alone would write.

Three kinds, from the ground up: the logits of a position are the same bits whatever is evaluated with it;
greedy and coupled texts are the same with any draft; drawn tokens have the target's distribution. Each
result carries its figures. docs/verify.md says what a failure means.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pyspec import chat
from pyspec.drafters import Drafter, Proposal
from pyspec.engine import DEFAULT_CONTEXT, DEFAULT_GAMMA, MAX_WIDTH, Engine
from pyspec.errors import UsageError
from pyspec.llama import Context, Logits, Model
from pyspec.metrics import Statistics
from pyspec.sampling import Probabilities, Rule, Sampler, SamplingParams, Verdict

_SMALLEST_CONTEXT = 16

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
    gamma: int = DEFAULT_GAMMA
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
        prompts = [_prompt_ids(self.target, text) for text in self.prompts or self.effort.prompts]
        if not all(prompts):
            raise UsageError(f"prompt {prompts.index([]) + 1} has no tokens of {self.target.name}")
        return [ids[: max(1, n_ctx - n_free)] for ids in prompts]

    def counter(self, check: str, total: int) -> Callable[[], None]:
        """What to call after each of a check's steps."""
        self.progress(check, 0, total)
        done = itertools.count(1)
        return lambda: self.progress(check, next(done), total)


def _prompt_ids(model: Model, text: str) -> list[int]:
    if model.chat_template is None:
        return model.tokenize(text)
    return chat.prompt_ids(model, [{"role": "user", "content": text}])


def verify(setup: Setup) -> Iterator[Result]:
    """Run all checks, yielding each result as it comes.

    Without a draft only the target's bits are checked.

    Raises:
        UsageError: A setting is outside its range.
        VocabularyMismatchError: The draft's token ids do not mean what the target's do.
        ModelError: A model cannot do what a check needs.
        LogitsError: A model produced logits from which no distribution follows.
    """
    if setup.n_ctx is not None and setup.n_ctx < _SMALLEST_CONTEXT:
        raise UsageError(
            f"the checks need a context of {_SMALLEST_CONTEXT} or more, not {setup.n_ctx}"
        )
    # What the engine refuses is refused now, in its own words.
    setup.engine(setup.draft).close()
    yield from check_bits(setup, setup.target, "target")
    if setup.draft is None:
        for check in ("greedy", "coupled", "distribution"):
            yield Result(check, "draft", None, "there is no draft")
        return
    if setup.effort.bits_of_draft:
        yield from check_bits(setup, setup.draft, "draft")
    greedy = SamplingParams(temperature=0, max_tokens=setup.effort.max_tokens, seed=setup.seed)
    yield from check_texts(setup, "greedy", greedy, setup.rule)
    drawn = SamplingParams(max_tokens=setup.effort.max_tokens, seed=setup.seed)
    yield from check_texts(setup, "coupled", drawn, Rule.COUPLED)
    yield from check_distribution(setup)


# ---- bits --------------------------------------------------------------------------------------------


@dataclass
class _Comparison:
    """Rows of logits that should be equal."""

    rows: int = 0
    different: int = 0
    largest: float = 0.0
    position: int | None = None
    width: int | None = None

    def add(self, found: Logits, expected: Logits, position: int, width: int) -> None:
        """Compare the row of a position that was evaluated in a pass of some width."""
        self.rows += 1
        if np.array_equal(found.view(np.uint32), expected.view(np.uint32)):
            return
        self.different += 1
        difference = float(np.max(np.abs(found - expected)))
        if self.position is None or difference > self.largest:
            self.largest, self.position, self.width = difference, position, width

    def result(self, subject: str, reason: str | None) -> Result:
        """The result; reason says why the engine itself does not promise the same bits, if it does not."""
        detail = f"{self.rows} rows of logits have the same bits"
        if self.different:
            detail = (
                f"{self.different} of {self.rows} rows of logits differ, at most by {self.largest:.3g}: "
                f"position {self.position}, width {self.width}"
                + (f" (expected: {reason})" if reason else "")
            )
        figures = {
            "rows": self.rows,
            "rows_different": self.different,
            "largest_difference": self.largest if math.isfinite(self.largest) else None,
            "position": self.position,
            "width": self.width,
            "bit_exact_reason": reason,
        }
        return Result("bits", subject, self.different == 0, detail, figures)


def check_bits(setup: Setup, model: Model, name: str) -> Iterator[Result]:
    """Compare the logits of wide passes, and of passes after a rollback, with those of one token a pass."""
    wide, rolled_back = _Comparison(), _Comparison()
    random = np.random.default_rng(setup.seed)
    with closing(setup.context(model)) as context:
        n_widest = min(context.n_logits, context.n_ctx - 1)
        widths = sorted({*setup.effort.widths, setup.gamma + 1} - {1})
        widths = [width for width in widths if width <= n_widest]
        positions = [n for n in setup.effort.positions if n + widths[-1] <= context.n_ctx]
        prompts = itertools.chain(*setup.prompt_ids(0, context.n_ctx))
        text = itertools.cycle([token for token in prompts if token < model.n_vocab])
        tokens = list(itertools.islice(text, positions[-1] + widths[-1]))
        advance = setup.counter(f"bits of the {name}", len(positions))
        for start in positions:
            end = start + widths[-1]
            _cover(context, tokens[:start])
            expected = {}
            for position in range(start, end):
                context.evaluate(tokens[position : position + 1], n_logits=1)
                expected[position] = context.logits(-1).copy()
            for width in widths:
                _cover(context, tokens[:start])
                context.evaluate(tokens[start : start + width], n_logits=width)
                for row in range(width):
                    wide.add(context.logits(row), expected[start + row], start + row, width)
                dropped = min(width // 2, context.max_rollback)
                if dropped == 0:
                    continue
                # A round: the first tokens stand, the others are wrong and rolled back.
                kept = start + width - dropped
                wrong = random.integers(0, model.n_vocab, dropped).tolist()
                _cover(context, tokens[:start])
                context.evaluate([*tokens[start:kept], *wrong], n_logits=width)
                context.truncate(kept)
                context.evaluate(tokens[kept : kept + 1], n_logits=1)
                rolled_back.add(context.logits(-1), expected[kept], kept, width)
            advance()
        reason = context.bit_exact_reason(widths[-1])
    yield wide.result(f"{name}, widths {widths[0]} to {widths[-1]}", reason)
    subject = f"{name}, after a rollback"
    if rolled_back.rows:
        yield rolled_back.result(subject, reason)
    else:
        yield Result("bits", subject, None, "its memory cannot roll back")


def _cover(context: Context, ids: Sequence[int]) -> None:
    """Have the cache hold exactly ids, of which it holds a beginning, or more than all.

    A recurrent memory goes back no further than one pass: there it starts again, always with the same passes.
    """
    if context.model.is_recurrent:
        context.clear()
    else:
        context.truncate(min(len(ids), context.length))
    context.evaluate(ids[context.length :])


# ---- texts -------------------------------------------------------------------------------------------


class RandomDrafter:
    """Proposes random tokens, so that nearly every round rolls back all of them.

    Args:
        n_vocab: Size of the target's vocabulary.
        seed: Chooses the tokens.
    """

    def __init__(self, n_vocab: int, seed: int = 0) -> None:
        self._n_vocab = n_vocab
        self._random = np.random.default_rng(seed)

    def room(self, ids: Sequence[int]) -> int:  # noqa: ARG002
        """As many as a pass takes."""
        return MAX_WIDTH

    def catch_up(self, ids: Sequence[int]) -> None:
        """It looks at no text."""

    def propose(self, ids: Sequence[int], gamma: int, sampler: Sampler, *, round_: int) -> Proposal:  # noqa: ARG002
        """Draw gamma tokens, each with a one-hot q: whichever came, it was certain to come."""
        tokens = self._random.integers(0, self._n_vocab, gamma)
        q: npt.NDArray[np.float32] = np.zeros((gamma, self._n_vocab), np.float32)
        q[np.arange(gamma), tokens] = 1
        return Proposal(tokens.tolist(), list(q))

    def roll_back(self, length: int) -> None:
        """It holds nothing."""

    def clear(self) -> None:
        """It holds nothing."""

    def close(self) -> None:
        """It holds nothing."""


class _Text(NamedTuple):
    ids: list[int]
    text: str
    finish_reason: str


def check_texts(setup: Setup, check: str, params: SamplingParams, rule: Rule) -> Iterator[Result]:
    """Compare the texts that the target writes with drafts and without, which should be one.

    Args:
        setup: Models and settings; it has a draft.
        check: The results' name.
        params: Settings with which a text does not depend on the draft: greedy, or any with the coupled rule.
        rule: How drafted tokens are verified.
    """
    drafts: list[tuple[str, Model | Drafter | None, Sequence[int]]] = [
        ("draft", setup.draft, sorted({*setup.effort.gammas, setup.gamma} - {0})),
        (
            "random tokens",
            RandomDrafter(setup.target.n_vocab, setup.seed),
            setup.effort.random_gammas,
        ),
    ]
    with setup.engine(None) as engine:
        prompts = setup.prompt_ids(setup.effort.max_tokens, engine.n_ctx)
        runs = 1 + sum(len(gammas) for _, _, gammas in drafts)
        advance = setup.counter(f"{check} texts", runs * len(prompts))
        expected = [_write(engine, ids, params, rule, 0, advance)[0] for ids in prompts]
    for name, draft, gammas in drafts:
        with setup.engine(draft) as engine:
            for gamma in gammas:
                written = [_write(engine, ids, params, rule, gamma, advance) for ids in prompts]
                subject = f"{name}, gamma {gamma}"
                yield _compare_texts(setup.target, check, subject, expected, written)


def _write(
    engine: Engine,
    ids: Sequence[int],
    params: SamplingParams,
    rule: Rule,
    gamma: int,
    advance: Callable[[], None],
) -> tuple[_Text, Statistics]:
    pieces = list(engine.generate(ids, params, gamma=gamma, rule=rule))
    statistics = pieces[-1].statistics
    assert statistics is not None
    text = _Text(
        [token.id for piece in pieces for token in piece.tokens],
        "".join(piece.text for piece in pieces),
        statistics.finish_reason,
    )
    advance()
    return text, statistics


def _compare_texts(
    target: Model,
    check: str,
    subject: str,
    expected: Sequence[_Text],
    written: Sequence[tuple[_Text, Statistics]],
) -> Result:
    verified = sum(statistics.verified for _, statistics in written)
    accepted = sum(statistics.accepted for _, statistics in written)
    figures: dict[str, Any] = {
        "texts": len(expected),
        "tokens": sum(len(text.ids) for text in expected),
        "acceptance_rate": accepted / verified if verified else None,
        "first_difference": None,
    }
    for index, ((text, _), wanted) in enumerate(zip(written, expected, strict=True)):
        if text != wanted:
            pairs = itertools.zip_longest(text.ids, wanted.ids)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(wanted.ids))
            found, right = (_token_text(target, ids[at : at + 1]) for ids in (text.ids, wanted.ids))
            figures["first_difference"] = {
                "prompt": index + 1,
                "token": at + 1,
                "found": found,
                "expected": right,
            }
            detail = f"prompt {index + 1} differs from token {at + 1} on: {found} for {right}"
            return Result(check, subject, False, detail, figures)
    rate = figures["acceptance_rate"]
    detail = f"{figures['texts']} texts, {figures['tokens']} tokens are the same; " + (
        "nothing was drafted" if rate is None else f"{100 * rate:.0f} % of verified tokens accepted"
    )
    return Result(check, subject, True, detail, figures)


def _token_text(target: Model, ids: Sequence[int]) -> str:
    return ascii(target.piece(ids[0]).decode("utf-8", "replace")) if ids else "the end"


# ---- distributions -----------------------------------------------------------------------------------

# A right sampler fails one comparison in a million; a broken one must do worse than that.
SIGNIFICANCE = 1e-6
# Few outcomes, so that each is counted often; supports that differ, so that residuals matter.
_PARAMS = SamplingParams(temperature=1.0, top_k=6, top_p=1.0, min_p=0.0)
# Total variation of p and q below which hardly anything is rejected, and little can be broken.
_DISAGREEMENT = 0.2
_SMALLEST_CELL = 5.0


class _ResidualFromTarget(Sampler):
    """Broken: the token after a rejection is drawn from p."""

    def verify(
        self,
        p: Sequence[Probabilities],
        q: Sequence[Probabilities],
        drafted: Sequence[int],
        *,
        round_: int,
        position: int,
    ) -> Verdict:
        verdict = super().verify(p, q, drafted, round_=round_, position=position)
        row, index = p[verdict.accepted], len(drafted)
        token = super().draw_draft(row, round_=round_, index=index, position=position)
        return Verdict(verdict.accepted, token)


class _GreedyDraft(Sampler):
    """Broken: the draft's likeliest token is proposed as if it had been drawn from q."""

    def draw_draft(self, q: Probabilities, *, round_: int, index: int, position: int) -> int:  # noqa: ARG002
        return int(np.argmax(q))


class _SharedNumbers(Sampler):
    """Broken: the number that drew a token also decides whether it is accepted."""

    def _uniform(self, stream: int, round_: int, index: int) -> float:  # noqa: ARG002
        return super()._uniform(0, round_, index)


_BROKEN: Sequence[tuple[str, type[Sampler]]] = (
    ("residual drawn from p", _ResidualFromTarget),
    ("greedy draft scored with q", _GreedyDraft),
    ("shared random numbers", _SharedNumbers),
)


class _Rows:
    """A model's distributions after a fixed text and some tokens, each evaluated once.

    Args:
        context: Whose cache may hold a beginning of the text.
        ids: The text.
        n_vocab: Size of the target's vocabulary.
        source: Whose logits these are, for messages.
    """

    def __init__(self, context: Context, ids: Sequence[int], n_vocab: int, source: str) -> None:
        self._context, self._ids, self._source = context, ids, source
        self._sampler = Sampler(_PARAMS, n_vocab)
        self._rows: dict[tuple[int, ...], Probabilities] = {}

    def knows(self, tokens: Sequence[int]) -> bool:
        """Whether the model has all these ids."""
        return all(token < self._context.model.n_vocab for token in tokens)

    def __call__(self, suffix: Sequence[int] = ()) -> Probabilities:
        """The distribution of what follows the text and the suffix."""
        key = tuple(suffix)
        if key not in self._rows:
            _cover(self._context, self._ids[:-1])
            self._context.evaluate([self._ids[-1], *key], n_logits=1)
            history = [*self._ids, *key]
            self._rows[key] = _distribution(self._sampler, self._context, -1, history, self._source)
        return self._rows[key]


def _distribution(
    sampler: Sampler, context: Context, row: int, history: Sequence[int], source: str
) -> Probabilities:
    """[n_vocab] of the target; ids that the model lacks have probability 0."""
    logits = context.logits(row)[: sampler.n_vocab]
    probabilities: Probabilities = np.zeros(sampler.n_vocab, np.float32)
    sampler.distribution(logits, history, probabilities[: len(logits)], source=source)
    return probabilities


@dataclass
class _Fit:
    """Pearson's chi-square of counts against probabilities, added up over contexts."""

    chi_square: float = 0.0
    degrees_of_freedom: int = 0
    impossible: int = 0

    def add(self, counts: Mapping[Any, int], probabilities: Mapping[Any, float]) -> None:
        """Add a context's. Outcomes are pooled, the rarest first, until each cell expects enough."""
        n = sum(counts.values())
        self.impossible += sum(counts[outcome] for outcome in counts.keys() - probabilities.keys())
        cells, observed, expected = list[tuple[float, float]](), 0.0, 0.0
        for outcome, probability in sorted(probabilities.items(), key=lambda item: item[1]):
            observed += counts.get(outcome, 0)
            expected += n * probability
            if expected >= _SMALLEST_CELL:
                cells.append((observed, expected))
                observed = expected = 0.0
        self.chi_square += sum((o - e) ** 2 / e for o, e in cells)
        self.degrees_of_freedom += max(0, len(cells) - 1)

    @property
    def p_value(self) -> float:
        """How often counts drawn from the probabilities fit as badly."""
        if self.impossible:
            return 0.0
        return chi_square_tail(self.chi_square, self.degrees_of_freedom)

    def figures(self) -> dict[str, Any]:
        return {**vars(self), "p_value": self.p_value}

    def __str__(self) -> str:
        text = (
            f"p {self.p_value:.2g} (chi-square {self.chi_square:.1f} of {self.degrees_of_freedom}"
        )
        return text + (f", {self.impossible} impossible)" if self.impossible else ")")


def chi_square_tail(statistic: float, degrees_of_freedom: int) -> float:
    """P(X >= statistic) of a chi-square variable: Q(k/2, x/2) as the finite sum it is for whole k.

    Abramowitz and Stegun, 26.4.4 and 26.4.5.
    """
    if statistic <= 0 or degrees_of_freedom == 0:
        return 1.0
    x, odd = statistic / 2, degrees_of_freedom % 2
    tail = math.erfc(math.sqrt(x)) if odd else 0.0
    for i in range(degrees_of_freedom // 2):
        power = i + odd / 2
        tail += math.exp(power * math.log(x) - x - math.lgamma(power + 1))
    return min(1.0, tail)


def check_distribution(setup: Setup) -> Iterator[Result]:
    """Compare tokens that rounds write with the target's probabilities, for each rule.

    The rounds are real in all but the models' passes: at a few fixed contexts every row that a round may
    need is evaluated once. The same comparison must catch samplers that are known to be broken.
    """
    assert setup.draft is not None
    n_vocab, effort = setup.target.n_vocab, setup.effort
    samplers = {
        ("distribution", f"{rule.value} rule"): Sampler(_PARAMS, n_vocab, rule) for rule in Rule
    } | {("broken rule", name): broken(_PARAMS, n_vocab) for name, broken in _BROKEN}
    fits = {key: (_Fit(), _Fit()) for key in samplers}
    disagreement = 0.0
    with (
        closing(setup.context(setup.target)) as target,
        closing(setup.context(setup.draft)) as draft,
    ):
        prompts = setup.prompt_ids(effort.rounds_gamma + 1, target.n_ctx)[: effort.contexts]
        advance = setup.counter("distributions", len(prompts) * len(samplers))
        for index, prompt in enumerate(prompts):
            known = [token for token in prompt if token < draft.model.n_vocab]
            ids, distance = _hardest_beginning(target, draft, known)
            disagreement = max(disagreement, distance)
            p = _Rows(target, ids, n_vocab, "target")
            q = _Rows(draft, ids, n_vocab, "draft")
            first, pairs = _exact(p)
            for key, sampler in samplers.items():
                counts = Counter[tuple[int, int]]()
                for sample in range(index * effort.samples, (index + 1) * effort.samples):
                    sampler.seed = (setup.seed + sample) % 2**64
                    counts[_two_tokens(sampler, p, q, effort.rounds_gamma, len(ids))] += 1
                one, two = fits[key]
                two.add(counts, pairs)
                one.add(_first_of(counts), first)
                advance()
    n_samples = len(prompts) * effort.samples
    for (check, subject), (one, two) in fits.items():
        yield _judge(check, subject, one, two, n_samples, disagreement)


def _hardest_beginning(
    target: Context, draft: Context, prompt: Sequence[int]
) -> tuple[list[int], float]:
    """Where about half of what is drafted is rejected and the target is uncertain: faults show most there.

    Returns:
        The beginning of the prompt, and the total variation between p and q after it.
    """
    n_rows = min(len(prompt), target.n_logits)
    start = len(prompt) - n_rows
    sampler = Sampler(_PARAMS, target.model.n_vocab)
    for context in (target, draft):
        context.clear()
        context.evaluate(prompt[:start])
        context.evaluate(prompt[start:], n_logits=n_rows)
    best, hardest, distance = -1.0, start, 0.0
    for row in range(n_rows):
        history = prompt[: start + row + 1]
        p, q = (
            _distribution(sampler, context, row, history, source)
            for context, source in ((target, "target"), (draft, "draft"))
        )
        apart = float(np.abs(p - q).sum()) / 2
        score = 4 * apart * (1 - apart) + 1 - float(p.max())
        if score > best:
            best, hardest, distance = score, start + row, apart
    return list(prompt[: hardest + 1]), distance


def _exact(p: _Rows) -> tuple[dict[int, float], dict[tuple[int, int], float]]:
    """The target's probabilities of the next token, and of the next two."""
    first = {int(token): float(p()[token]) for token in np.flatnonzero(p())}
    pairs = {
        (token, int(second)): probability * float(p((token,))[second])
        for token, probability in first.items()
        for second in np.flatnonzero(p((token,)))
    }
    return first, pairs


def _two_tokens(sampler: Sampler, p: _Rows, q: _Rows, gamma: int, position: int) -> tuple[int, int]:
    """The first two tokens that rounds write after a text of `position` tokens."""
    written: list[int] = []
    for round_ in range(2):
        if len(written) >= 2:
            break
        rows, drafted = list[Probabilities](), list[int]()
        here = position + len(written)
        for index in range(gamma - len(written) if q.knows(written) else 0):
            rows.append(q([*written, *drafted]))
            token = sampler.draw_draft(rows[-1], round_=round_, index=index, position=here + index)
            drafted.append(token)
        verdict = sampler.verify(
            [p([*written, *drafted[:n]]) for n in range(len(drafted) + 1)],
            rows,
            drafted,
            round_=round_,
            position=here,
        )
        written += [*drafted[: verdict.accepted], verdict.token]
    return written[0], written[1]


def _first_of(counts: Mapping[tuple[int, int], int]) -> Counter[int]:
    first = Counter[int]()
    for (token, _), count in counts.items():
        first[token] += count
    return first


def _judge(
    check: str, subject: str, one: _Fit, two: _Fit, n_samples: int, disagreement: float
) -> Result:
    figures = {
        "samples": n_samples,
        "next_token": one.figures(),
        "two_tokens": two.figures(),
        "threshold": SIGNIFICANCE,
        "disagreement": disagreement,
    }
    fits = min(one.p_value, two.p_value) >= SIGNIFICANCE
    detail = f"next token: {one}, two tokens: {two}; threshold p {SIGNIFICANCE:g}"
    if check == "distribution":
        return Result(check, subject, fits, detail, figures)
    if not fits:
        return Result(check, subject, True, f"caught: {detail}", figures)
    if disagreement < _DISAGREEMENT:
        detail = f"target and draft agree to {disagreement:.2g}, hardly anything is rejected"
        return Result(check, subject, None, detail, figures)
    return Result(
        check, subject, False, f"not caught, so this test proves nothing: {detail}", figures
    )
