"""What a text should be distributed as, worked out apart from the package: llama.cpp's logits and numpy.

The transforms follow llama.cpp's documented sampler chain (logit bias, penalties, top-k, top-p, min-p,
temperature) in double precision, with sorting where the C library selects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pyspec.sampling import SamplingParams
from tests.models import Reference, softmax

Row = npt.NDArray[np.float64]


def distribution(
    logits: npt.NDArray[np.float32],
    params: SamplingParams,
    history: Sequence[int],
    allowed: Iterable[int] | None = None,
) -> Row:
    """The probabilities of the token after history, of which logits is the model's row.

    The request's grammar is not looked at: allowed are the ids that it leaves.
    """
    row = logits.astype(np.float64)
    if allowed is not None:
        row[np.setdiff1d(np.arange(len(row)), list(allowed))] = -np.inf
    for token, bias in params.logit_bias.items():
        row[token] += bias
    last_n = params.repeat_last_n
    window = list(history) if last_n < 0 else list(history)[max(0, len(history) - last_n) :]
    for token in set(window):
        row[token] *= params.repeat_penalty if row[token] <= 0 else 1 / params.repeat_penalty
        row[token] -= params.frequency_penalty * window.count(token) + params.presence_penalty
    order = np.argsort(-row, kind="stable")
    if params.top_k > 0:
        order = order[: params.top_k]
    # The shortest prefix that reaches top_p has one token more than those that fall short of it.
    kept = softmax(row[order])
    order = order[: 1 + int(np.sum(np.cumsum(kept) < params.top_p))]
    kept = softmax(row[order])
    order = order[kept >= params.min_p * kept[0]]
    probabilities = np.zeros_like(row)
    probabilities[order] = softmax(row[order] / params.temperature)
    return probabilities


def along(
    model: Reference, ids: Sequence[int], n_prompt: int, params: SamplingParams
) -> Iterator[Row]:
    """The distribution that each token of ids after the prompt was to be drawn from."""
    logits = model.evaluate(ids[:-1])
    for place in range(n_prompt, len(ids)):
        yield distribution(logits[place - 1], params, ids[:place])


class Enumeration:
    """The probabilities of every output of a few tokens.

    Args:
        model: The target.
        prompt: What the outputs follow.
        ends: Ids after which there is nothing; an output does not contain them.
        allowed: The ids that may follow an output; None: all.
    """

    def __init__(
        self,
        model: Reference,
        prompt: Sequence[int],
        ends: Sequence[int],
        allowed: Callable[[tuple[int, ...]], Iterable[int]] | None = None,
    ) -> None:
        self._allowed = allowed
        self._model = model
        self._prompt = tuple(prompt)
        self._ends = ends
        self._logits: dict[tuple[int, ...], npt.NDArray[np.float32]] = {}

    def of_length(
        self, length: int, params: SamplingParams, given: tuple[int, ...] = ()
    ) -> dict[tuple[int, ...], float]:
        """Outputs of `length` tokens, or fewer where the text ends, that begin with `given`."""
        if len(given) == length:
            return {given: 1.0}
        history = self._prompt + given
        if history not in self._logits:
            self._logits[history] = self._model.evaluate(history)[-1].copy()
        allowed = self._allowed and self._allowed(given)
        p = distribution(self._logits[history], params, history, allowed)
        found: dict[tuple[int, ...], float] = {}
        for token in map(int, np.flatnonzero(p)):
            if token in self._ends:
                found[given] = found.get(given, 0.0) + p[token]
                continue
            for output, share in self.of_length(length, params, (*given, token)).items():
                found[output] = found.get(output, 0.0) + p[token] * share
        return found
