"""The tables of bench.decode."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bench.run import conditions

if TYPE_CHECKING:
    from bench.decode import Row

RESAMPLES = 10_000

Sample = npt.NDArray[np.float64]


class Rates:
    """Tokens a second by engine at one temperature for one kind of prompt, or for all.

    Args:
        rows: What was measured there.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rates: dict[str, dict[tuple[str, str], float]] = {}
        for row in rows:
            # An answer that came at once has no rate.
            if row.rate:
                self._rates.setdefault(row.engine, {})[row.kind, row.prompt] = row.rate

    def of(self, engine: str) -> Sample:
        """One value a prompt."""
        return np.array(list(self._rates.get(engine, {}).values()))

    def ratios(self, engine: str, other: str) -> Sample:
        """One value for each prompt that both answered."""
        mine, theirs = self._rates.get(engine, {}), self._rates.get(other, {})
        return np.array([rate / theirs[key] for key, rate in mine.items() if key in theirs])

    def best(self, stem: str) -> str | None:
        """Of the engines named STEM-NUMBER the fastest."""
        numbered = [name for name in self._rates if name.removeprefix(stem + "-").isdecimal()]
        return max(numbered, key=lambda name: geometric_mean(self.of(name)), default=None)


def geometric_mean(sample: Sample) -> float:
    return float(np.exp(np.log(sample).mean()))


def interval(sample: Sample, statistic: str) -> tuple[float, float, float]:
    """A statistic, "median" or "mean" (the geometric one), and its 95 % bootstrap interval."""
    random = np.random.default_rng(0)
    drawn = np.log(sample)[random.integers(0, len(sample), (RESAMPLES, len(sample)))]
    reduce = {"median": np.median, "mean": np.mean}[statistic]
    low, high = np.quantile(reduce(drawn, axis=1), [0.025, 0.975])
    return tuple(float(np.exp(x)) for x in (reduce(np.log(sample)), low, high))  # type: ignore[return-value]


# ---- the page ----------------------------------------------------------------------------------------


def markdown(rows: Sequence[Row], command: str, options: argparse.Namespace) -> str:
    """What was measured, where and how, as a page of bench/results."""
    kinds = list(dict.fromkeys(row.kind for row in rows))
    prompts = len({(row.kind, row.prompt) for row in rows})
    lines = [
        "# How fast texts are written",
        "",
        f"    {command}",
        "",
        conditions(options),
        f"{prompts} prompts, answers of up to {options.tokens} tokens; nothing is cut off the distributions.",
    ]
    for temperature in dict.fromkeys(row.temperature for row in rows):
        at = [row for row in rows if row.temperature == temperature]
        columns = [Rates(row for row in at if row.kind == kind) for kind in kinds]
        columns.append(Rates(at))
        header = ["", *kinds, "all"]
        lines += [
            "",
            f"## Temperature {temperature:g}",
            "",
            "Tokens a second, median over prompts:",
            "",
        ]
        lines += table(header, speeds(at, columns))
        lines += ["", "Ratios, geometric mean over prompts:", "", *table(header, ratios(columns))]
        accepted = list(acceptance(at, kinds))
        if accepted:
            lines += ["", "Accepted of the drafted tokens, percent:", "", *table(header, accepted)]
        achieved = list(achievement(at, kinds))
        if achieved:
            lines += [
                "",
                "Achieved, as a multiple of what the planner expected, median over prompts:",
                "",
            ]
            lines += table(header, achieved)
    lines += [
        "",
        f"In brackets: 95 % intervals, {RESAMPLES} bootstrap samples over prompts. The best fixed gamma and "
        "the best n of llama-server, given in square brackets, are chosen for each column after the fact.",
        "Tokens a second by the engines' own account, as a multiple of those above: "
        + ", ".join(f"{engine} {factor:.3f}" for engine, factor in own_account(rows))
        + ".",
    ]
    return "\n".join(lines)


def table(header: Sequence[str], body: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for row in body:
        yield "| " + " | ".join(row) + " |"


def speeds(rows: Sequence[Row], columns: Sequence[Rates]) -> Iterator[list[str]]:
    for engine in dict.fromkeys(sorted(row.engine for row in rows)):
        samples = [column.of(engine) for column in columns]
        yield [engine, *(_cell(sample, "median", digits=1) for sample in samples)]


def ratios(columns: Sequence[Rates]) -> Iterator[list[str]]:
    """A row for each comparison that was measured."""
    for label, engine, other in (
        ("pyspec / llama-server", "pyspec", "llama-server"),
        ("pyspec / llama-server with draft, best n", "pyspec", "llama-server-*"),
        ("pyspec / plain", "pyspec", "pyspec-plain"),
        ("pyspec / best fixed gamma", "pyspec", "pyspec-gamma-*"),
        ("without a draft model / plain", "pyspec-no-draft", "pyspec-plain"),
        ("with the squeezed draft / pyspec", "pyspec-squeezed", "pyspec"),
        ("with a useless draft model / plain", "pyspec-useless", "pyspec-plain"),
        ("plain / llama-server", "pyspec-plain", "llama-server"),
        ("llama-server with draft, best n / without", "llama-server-*", "llama-server"),
    ):
        cells = [_comparison(column, engine, other) for column in columns]
        if any(cells):
            yield [label, *cells]


def _comparison(rates: Rates, engine: str, other: str) -> str:
    chosen = ""
    names = [engine, other]
    for i, name in enumerate(names):
        if name.endswith("-*"):
            names[i] = rates.best(name.removesuffix("-*")) or ""
            chosen = f" [{names[i].rpartition('-')[2]}]"
    cell = _cell(rates.ratios(*names), "mean", digits=2)
    return cell and cell + chosen


def achievement(rows: Sequence[Row], kinds: Sequence[str]) -> Iterator[list[str]]:
    """By the engines' own account of their speed: what is expected is expected of the rounds alone."""
    for engine in dict.fromkeys(sorted(row.engine for row in rows if row.predicted)):
        mine = [row for row in rows if row.engine == engine and row.predicted]
        columns = [*([row for row in mine if row.kind == kind] for kind in kinds), mine]
        samples = [np.array([row.own_rate / row.predicted for row in of]) for of in columns]
        yield [engine, *(_cell(sample, "median", digits=2) for sample in samples)]


def acceptance(rows: Sequence[Row], kinds: Sequence[str]) -> Iterator[list[str]]:
    for engine in dict.fromkeys(sorted(row.engine for row in rows if row.drafted)):
        mine = [row for row in rows if row.engine == engine]
        cells = []
        for of_kind in [*([row for row in mine if row.kind == kind] for kind in kinds), mine]:
            drafted = sum(row.drafted for row in of_kind)
            accepted = sum(row.accepted for row in of_kind)
            cells.append(f"{100 * accepted / drafted:.0f} of {drafted}" if drafted else "")
        yield [engine, *cells]


def own_account(rows: Sequence[Row]) -> Iterator[tuple[str, float]]:
    for engine in dict.fromkeys(sorted(row.engine for row in rows)):
        mine = [row.own_rate / row.rate for row in rows if row.engine == engine and row.rate]
        yield engine, float(np.median(mine))


def _cell(sample: Sample, statistic: str, *, digits: int) -> str:
    if not len(sample):
        return ""
    value, low, high = interval(sample, statistic)
    if len(sample) == 1:
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
