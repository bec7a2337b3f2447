"""What the C sampler costs, beside numpy doing the same in the same run.

`python -m bench.sampler` prints milliseconds a row for distributions and milliseconds a round for the
verification rules: medians, one thread, a vocabulary of 151 936 (Qwen2.5's), gamma 4, temperature 1 and no
truncation for the rules. Making the distributions is not part of a round's cost.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pyspec._cspec import ffi, lib

N_VOCAB = 151936
GAMMA = 4
REPEATS = 31
ROUNDS = 60

Row = npt.NDArray[np.float32]

# temperature, top-k, top-p, min-p
SETTINGS: dict[str, tuple[float, int, float, float]] = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature 1": (1.0, 0, 1.0, 0.0),
    "temperature, top-p, min-p": (0.8, 0, 0.95, 0.05),
    "top-p 0.95": (1.0, 0, 0.95, 0.0),
    "min-p 0.05": (1.0, 0, 1.0, 0.05),
    "top-k 40": (1.0, 40, 1.0, 0.0),
    "top-k, top-p, min-p": (0.8, 40, 0.95, 0.05),
}


def logits_of_a_kind() -> dict[str, Row]:
    """Rows from easy to hard: a model's, whose mass is in few tokens; normal; and one value throughout."""
    rng = np.random.default_rng(0)
    rank = 1 + rng.permutation(N_VOCAB)
    return {
        "Zipf": (18 - 1.6 * np.log(rank) + rng.normal(0, 0.5, N_VOCAB)).astype(np.float32),
        "normal": rng.normal(0, 2.5, N_VOCAB).astype(np.float32),
        "constant": np.ones(N_VOCAB, np.float32),
    }


def median_ms(function: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def floats(row: Row) -> Any:
    return ffi.from_buffer("float[]", row)


# ---- distributions --------------------------------------------------------------------------------


def c_distribution(
    logits: Row, settings: tuple[float, int, float, float], out: Row
) -> Callable[[], object]:
    sampling = ffi.new("cspec_sampling *", [*settings, 1.0, 0.0, 0.0])
    none = ffi.NULL
    row = floats(logits), floats(out), len(logits)
    arguments = (*row, sampling, none, none, 0, none, none, 0, none)
    return lambda: lib.cspec_probabilities(*arguments)


def numpy_distribution(logits: Row, settings: tuple[float, int, float, float]) -> Row:
    temperature, top_k, top_p, min_p = settings
    out = np.zeros_like(logits)
    if temperature == 0:
        out[logits.argmax()] = 1
        return out
    kept = np.arange(len(logits))
    if top_k > 0:
        kept = np.argpartition(-logits, top_k)[:top_k]
    if top_p < 1:
        kept = kept[np.argsort(-logits[kept])]
        weights = np.exp(logits[kept] - logits[kept[0]])
        cumulative = np.cumsum(weights, dtype=float)
        kept = kept[: np.searchsorted(cumulative, top_p * cumulative[-1]) + 1]
    if min_p > 0:
        kept = kept[logits[kept] >= logits[kept].max() + np.log(min_p)]
    weights = np.exp((logits[kept] - logits[kept].max()) / temperature)
    out[kept] = weights / weights.sum(dtype=float)
    return out


# ---- rules ----------------------------------------------------------------------------------------


class Rounds:
    """Rounds on the same rows: a target, and a draft that mostly agrees with it."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        logits = rng.normal(0, 2.5, (GAMMA + 1, N_VOCAB))
        off = rng.normal(0, 0.7, (GAMMA, N_VOCAB))
        self.p = [numpy_distribution(row.astype(np.float32), (1, 0, 1, 0)) for row in logits]
        self.q = [
            numpy_distribution(row.astype(np.float32), (1, 0, 1, 0)) for row in logits[:GAMMA] + off
        ]
        self.p_rows = ffi.new("float *[]", [floats(row) for row in self.p])
        self.q_rows = ffi.new("float *[]", [floats(row) for row in self.q])
        self.token = ffi.new("int32_t *")

    def each(self) -> Iterator[tuple[int, list[int], list[float], float]]:
        """A number, drafted ids, and the random numbers of each round."""
        for i in range(ROUNDS):
            u = [[lib.cspec_uniform(1, stream, i, j) for j in range(GAMMA)] for stream in range(3)]
            drafted = [
                lib.cspec_draw(floats(row), ffi.NULL, 1.0, N_VOCAB, u[0][j])
                for j, row in enumerate(self.q)
            ]
            yield i, drafted, u[1], u[2][0]


def invert(weights: npt.NDArray[np.float64], u: float) -> int:
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))


def numpy_residual(p: Row, q: Row, scale: float) -> npt.NDArray[np.float64]:
    return np.maximum(np.multiply(p, scale, dtype=np.float64) - q, 0)


def numpy_token(rows: Rounds, drafted: list[int], u_accept: list[float], u: float) -> int:
    for p, q, x, u_i in zip(rows.p, rows.q, drafted, u_accept, strict=False):
        if u_i * q[x] >= p[x]:
            return invert(numpy_residual(p, q, 1.0), u)
    return invert(rows.p[GAMMA].astype(np.float64), u)


def numpy_block(rows: Rounds, drafted: list[int], u_accept: list[float], u: float) -> int:
    a, accepted, scale = 1.0, 0, 1.0
    for i, x in enumerate(drafted, 1):
        a = min(1.0, a * float(rows.p[i - 1][x]) / float(rows.q[i - 1][x]))
        b = a
        if i < GAMMA and 0 < a < 1:
            mass = numpy_residual(rows.p[i], rows.q[i], a).sum()
            b = mass / (mass + 1 - a)
        if u_accept[i - 1] < b:
            accepted, scale = i, a
    if accepted == GAMMA:
        return invert(rows.p[GAMMA].astype(np.float64), u)
    return invert(numpy_residual(rows.p[accepted], rows.q[accepted], scale), u)


def numpy_coupled(rows: Rounds, drafted: list[int], position: int) -> int:
    choice = -1
    for i, p in enumerate(rows.p):
        noise = np.random.Generator(np.random.Philox(key=position + i)).standard_exponential(
            N_VOCAB
        )
        with np.errstate(divide="ignore"):
            choice = int((noise / p).argmin())
        if i == GAMMA or choice != drafted[i]:
            break
    return choice


def rule_times(rows: Rounds) -> dict[str, tuple[float, float]]:
    """Median milliseconds a round of each rule, in C and in numpy."""
    times: dict[str, tuple[list[float], list[float]]] = {
        rule: ([], []) for rule in ("token", "block", "coupled")
    }

    def clock(rule: str, c: Callable[[], object], peer: Callable[[], object]) -> None:
        for record, function in zip(times[rule], (c, peer), strict=True):
            start = time.perf_counter()
            function()
            record.append(1e3 * (time.perf_counter() - start))

    for i, drafted, u_accept, u in rows.each():
        arguments = (rows.p_rows, rows.q_rows, drafted, GAMMA, N_VOCAB, u_accept, u, rows.token)
        numpy_arguments = (rows, drafted, u_accept, u)
        clock(
            "token",
            lambda a=arguments: lib.cspec_verify_token(*a),  # type: ignore[misc]
            lambda a=numpy_arguments: numpy_token(*a),  # type: ignore[misc]
        )
        clock(
            "block",
            lambda a=arguments: lib.cspec_verify_block(*a),  # type: ignore[misc]
            lambda a=numpy_arguments: numpy_block(*a),  # type: ignore[misc]
        )
        # The dearest round of the coupled rule: the target's own choices, all of them accepted.
        position = i * (GAMMA + 1)
        own = [
            lib.cspec_coupled_choice(floats(p), N_VOCAB, 1, position + j)
            for j, p in enumerate(rows.p[:GAMMA])
        ]
        accepted = (rows.p_rows, own, GAMMA, N_VOCAB, 1, position, rows.token)
        numpy_own = [numpy_coupled(rows, [-1] * GAMMA, position + j) for j in range(GAMMA)]
        clock(
            "coupled",
            lambda a=accepted: lib.cspec_verify_coupled(*a),  # type: ignore[misc]
            lambda a=(rows, numpy_own, position): numpy_coupled(*a),  # type: ignore[misc]
        )
    return {
        rule: (statistics.median(c), statistics.median(peer)) for rule, (c, peer) in times.items()
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(": ", 1)[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    print(f"{processor()}, Python {platform.python_version()}, numpy {np.__version__}")
    print(f"{'':36}{'C, ms':>8}{'numpy, ms':>11}{'ratio':>8}")
    out = np.empty(N_VOCAB, np.float32)
    for kind, logits in logits_of_a_kind().items():
        print(f"a row of {kind} logits")
        for name, settings in SETTINGS.items():
            ours = median_ms(c_distribution(logits, settings, out))
            peer = median_ms(lambda a=(logits, settings): numpy_distribution(*a))  # type: ignore[misc]
            print(f"  {name:34}{ours:8.3f}{peer:11.3f}{peer / ours:8.1f}")
    print(f"a round of {GAMMA} drafted tokens")
    for rule, (ours, peer) in rule_times(Rounds()).items():
        print(f"  {rule:34}{ours:8.3f}{peer:11.3f}{peer / ours:8.1f}")


if __name__ == "__main__":
    main()
