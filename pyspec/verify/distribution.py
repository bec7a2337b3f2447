"""Whether drawn tokens have the target's distribution, and whether broken rules would be caught."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyspec.drafters import Drafter
from pyspec.drafters.foreign import drafter_of
from pyspec.llama import Context, Logits
from pyspec.sampling import Probabilities, Rule, Sampler, SamplingParams, Verdict
from pyspec.verify.bits import cover
from pyspec.verify.setup import Result, Setup
from pyspec.vocab import shared_tokens

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
        q: Sequence[Probabilities | None],
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


class _Rows(ABC):
    """A model's distributions after a fixed text and some tokens, each evaluated once.

    Args:
        ids: The fixed text, of which the model's cache may hold a beginning.
        n_vocab: Size of the target's vocabulary.
    """

    def __init__(self, ids: Sequence[int], n_vocab: int) -> None:
        self.ids = ids
        self.sampler = Sampler(_PARAMS, n_vocab)
        self._rows: dict[tuple[int, ...], Probabilities] = {}

    def __call__(self, suffix: Sequence[int] = ()) -> Probabilities:
        """[n_vocab] of the target: the distribution of what follows the text and the suffix."""
        key = tuple(suffix)
        if key not in self._rows:
            self._rows[key] = self.evaluated(key)
        return self._rows[key]

    @abstractmethod
    def evaluated(self, suffix: Sequence[int]) -> Probabilities:
        """The same, not remembered."""


class _TargetRows(_Rows):
    """What the target says."""

    def __init__(self, context: Context, ids: Sequence[int]) -> None:
        super().__init__(ids, context.model.n_vocab)
        self._context = context

    def evaluated(self, suffix: Sequence[int]) -> Probabilities:
        cover(self._context, self.ids[:-1])
        self._context.evaluate([self.ids[-1], *suffix], n_logits=1)
        return _distribution(self.sampler, self._context.logits(-1), [*self.ids, *suffix])


class _DraftRows(_Rows):
    """What a draft draws from."""

    def __init__(self, drafter: Drafter, ids: Sequence[int], n_vocab: int) -> None:
        super().__init__(ids, n_vocab)
        self._drafter = drafter

    def knows(self, suffix: Sequence[int]) -> bool:
        """Whether it can draw after the text and the suffix."""
        self._drafter.roll_back(len(self.ids) - 1)
        return self._drafter.room([*self.ids, *suffix]) > 0

    def evaluated(self, suffix: Sequence[int]) -> Probabilities:
        self._drafter.roll_back(len(self.ids) - 1)
        (q,) = self._drafter.propose([*self.ids, *suffix], 1, self.sampler, round_=0).q
        assert q is not None, "a model says what it drew from"
        return q.copy()


def _distribution(sampler: Sampler, logits: Logits, history: Sequence[int]) -> Probabilities:
    """[n_vocab] the target's probabilities of what follows."""
    p = np.empty_like(logits)
    sampler.distribution(logits, history, p, source="target")
    return p


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
    shared = shared_tokens(setup.target, setup.draft)
    with (
        closing(setup.context(setup.target)) as target,
        closing(drafter_of(setup.context(setup.draft), setup.target, shared)) as drafter,
    ):
        prompts = setup.prompt_ids(effort.rounds_gamma + 1, target.n_ctx)[: effort.contexts]
        advance = setup.counter("distributions", len(prompts) * len(samplers))
        for index, prompt in enumerate(prompts):
            drafter.clear()
            known = [token for token in prompt if drafter.room([prompt[0], token]) > 0]
            ids, distance = _hardest_beginning(target, drafter, known)
            disagreement = max(disagreement, distance)
            p, q = _TargetRows(target, ids), _DraftRows(drafter, ids, n_vocab)
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
    target: Context, drafter: Drafter, prompt: Sequence[int]
) -> tuple[list[int], float]:
    """Where about half of what is drafted is rejected and the target is uncertain: faults show most there.

    Returns:
        The beginning of the prompt, and the total variation between p and q after it.
    """
    n_rows = min(len(prompt), target.n_logits)
    start = len(prompt) - n_rows
    sampler = Sampler(_PARAMS, target.model.n_vocab)
    target.clear()
    target.evaluate(prompt[:start])
    target.evaluate(prompt[start:], n_logits=n_rows)
    drafter.clear()
    best, hardest, distance = -1.0, start, 0.0
    for row in range(n_rows):
        history = prompt[: start + row + 1]
        q = _DraftRows(drafter, history, target.model.n_vocab)
        if not q.knows(()):
            continue
        p = _distribution(sampler, target.logits(row), history)
        apart = float(np.abs(p - q()).sum()) / 2
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


def _two_tokens(
    sampler: Sampler, p: _Rows, q: _DraftRows, gamma: int, position: int
) -> tuple[int, int]:
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
