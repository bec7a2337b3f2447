"""Tests of whether draws follow a distribution. Each gives a p-value: 0 where a draw was impossible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from scipy import stats

Outcome = TypeVar("Outcome", bound=Hashable)
Uniforms = npt.NDArray[np.float64]

# Below this expected count the chi-square approximation is not trusted (Cochran's rule).
LEAST_EXPECTED = 5.0
# Squares on a side of the serial test's grid.
GRID = 5


def chi_square(draws: Iterable[Outcome], probabilities: Mapping[Outcome, float]) -> float:
    """Pearson's test; outcomes of small expectation share a cell."""
    counts = Counter(draws)
    if any(outcome not in probabilities for outcome in counts):
        return 0.0
    observed, expected = [0.0], [0.0]
    for outcome in sorted(probabilities, key=probabilities.__getitem__):
        if expected[-1] >= LEAST_EXPECTED:
            observed.append(0.0)
            expected.append(0.0)
        observed[-1] += counts[outcome]
        expected[-1] += probabilities[outcome] * counts.total()
    if expected[-1] < LEAST_EXPECTED and len(expected) > 1:
        observed[-2] += observed.pop()
        expected[-2] += expected.pop()
    return float(stats.chisquare(observed, expected).pvalue)


def integral_transform(
    p: npt.NDArray[np.float64], order: npt.NDArray[np.float64], token: int, v: float
) -> float:
    """The randomised probability integral transform: uniform in [0, 1) if token was drawn from p.

    Args:
        p: [n_vocab] what token should have been drawn from.
        order: [n_vocab] what ids are ranked by. A fault that prefers high ranks shows as high values.
        token: The draw.
        v: A uniform number, to spread the token's probability evenly.

    Returns:
        NaN where p of the token is zero.
    """
    if p[token] == 0:
        return float("nan")
    rank = np.lexsort((np.arange(len(p)), order))
    before = rank[: int(np.flatnonzero(rank == token)[0])]
    return float(p[before].sum() + v * p[token])


def uniformity(u: Uniforms) -> float:
    """The Kolmogorov-Smirnov test against the uniform distribution."""
    return 0.0 if np.isnan(u).any() else float(stats.kstest(u, "uniform").pvalue)


def independence(u: Uniforms) -> float:
    """The serial test: of pairs of neighbours, equally many fall in each square of a grid."""
    if np.isnan(u).any():
        return 0.0
    pairs = (u[: len(u) // 2 * 2].reshape(-1, 2) * GRID).astype(int)
    counts = np.bincount(pairs @ [GRID, 1], minlength=GRID**2)
    return float(stats.chisquare(counts).pvalue)
