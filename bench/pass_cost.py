"""What a pass over several tokens costs, beside stock llama.cpp in the same run.

`python -m bench.pass_cost` prints, for each model and position, the median milliseconds of a pass over 1
to 16 tokens and its ratio to a pass over one, for pyspec and for stock llama.cpp (at each width the better of
its two settings of use_extra_bufts). Then for each model: the rate at which weights are read at width 1 and
that of multiply-adds at width 8, each beside what plain loops reach in the same run (bench/limits.py); the
rate of a prompt; and what loading takes in time and memory.

Every engine runs in a process of its own, and they take turns, a pass of each width at a time: what else
the machine does meanwhile meets all of them.

Without options it measures the whole of SUITE, which takes about a quarter of an hour. MODEL is a file or a
name of the catalogue; NAME:q4_0 is that model requantised, made when first needed and kept.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from bench.limits import MULTIPLIERS, Limits
from pyspec.catalogue import resolve
from pyspec.cli.progress import transfer_progress
from pyspec.gguf_file import inspect_gguf
from pyspec.quantise import quantisations, requantised

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
FEW_WIDTHS = (1, 4, 5, 8, 16)  # at all positions but the first
PROMPT = 512
PROMPT_TURNS = 3
LOADS = 3
PAUSE = 0.02  # seconds in which the threads of the engine before may still spin
BEST = "best"
STOCK = ("stock", "stock, repacked")


@dataclass(frozen=True)
class Case:
    """What is measured of a model."""

    model: str
    positions: tuple[int, ...] = (256,)
    kernels: tuple[str, ...] = (BEST,)


SUITE = (
    Case("qwen2.5-coder-1.5b", (256, 1500, 4000), (BEST, "avx2")),
    Case("qwen2.5-coder-0.5b", (256, 1500), (BEST, "avx2")),
    Case("smollm2-135m"),
    Case("qwen2.5-coder-0.5b:q8_0"),
    Case("qwen2.5-coder-0.5b:q4_0"),
    Case("qwen2.5-coder-0.5b:q6_k"),
)


def find(model: str) -> Path:
    """The file of a model, requantised if its name ends so."""
    name, _, quantisation = model.rpartition(":")
    with transfer_progress() as progress:
        if name and quantisation in quantisations():
            return requantised(resolve(name, progress=progress), quantisation, progress)
        return resolve(model, progress=progress)


def work_of_a_token(path: Path) -> tuple[int, int]:
    """Bytes of the matrices of a pass, and multiply-adds of a token with them.

    All but the embedding, of which a pass takes rows out; where there is no output matrix it is that too.
    """
    tensors = {t.name: t for t in GGUFReader(path).tensors}
    if "output.weight" in tensors:
        tensors.pop("token_embd.weight")
    matrices = [t for t in tensors.values() if len(t.shape) > 1]
    return sum(int(t.n_bytes) for t in matrices), sum(int(t.n_elements) for t in matrices)


# ---- an engine's process -----------------------------------------------------------------------------


def memory(field: str) -> float:
    """A field of this process's status, such as VmRSS, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1e3
    return 0.0


def serve(engine: str, path: Path, threads: int, positions: Sequence[int]) -> None:
    """Answer each line "POSITION WIDTH" on stdin with the milliseconds of such a pass."""
    from pyspec import bridge
    from pyspec.llama import Context, Model

    kernels = bridge.attach_kernels()
    before, loads = memory("VmRSS"), []
    for i in range(LOADS):
        start = time.perf_counter()
        model = Model(path, use_extra_bufts=engine == STOCK[1])
        loads.append(time.perf_counter() - start)
        if i == 0:
            resident, peak = memory("VmRSS") - before, memory("VmHWM") - before
        if i < LOADS - 1:
            model.close()
    report = {"load": min(loads), "resident": resident, "peak": peak}
    report["kernels"] = kernels.instructions or kernels.reason
    print(json.dumps(report), flush=True)

    most = max(positions) + max(PROMPT, *WIDTHS)
    context = Context(model, n_ctx=most, n_batch=PROMPT, n_logits=max(WIDTHS), threads=threads)
    tokens = model.tokenize(Path(__file__).read_text() * 10)[:most]
    for line in sys.stdin:
        position, width = map(int, line.split())
        if context.length < position:
            context.evaluate(tokens[context.length : position])
        context.truncate(position)
        # As while decoding, threads are awake, and each on a core of its own.
        context.evaluate(tokens[position : position + 1], n_logits=1)
        context.truncate(position)
        start = time.perf_counter()
        context.evaluate(tokens[position : position + width], n_logits=min(width, max(WIDTHS)))
        print(1e3 * (time.perf_counter() - start), flush=True)


# ---- the measurement ---------------------------------------------------------------------------------


class Engine:
    """A process that evaluates on demand.

    Args:
        name: One of STOCK, or else pyspec with the kernels of that name.
        path: The model.
        threads: Threads of a pass.
        positions: Where passes will begin.
    """

    def __init__(self, name: str, path: Path, threads: int, positions: Sequence[int]) -> None:
        self.name = name
        self.is_stock = name in STOCK
        command = [sys.executable, "-m", "bench.pass_cost", "--serve", name]
        command += ["--threads", str(threads), "--models", str(path)]
        command += ["--positions", *map(str, positions)]
        setting = {} if name == BEST else {"PYSPEC_KERNELS": name}
        environment = {"PYSPEC_BRIDGE": "off"} if self.is_stock else setting
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.report: dict[str, Any] = json.loads(self._answer())
        self.times: dict[tuple[int, int], list[float]] = {}

    @property
    def title(self) -> str:
        """What it is called in the report."""
        return self.name if self.is_stock else f"pyspec {self.report['kernels']}"

    def _answer(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline()

    def measure(self, position: int, width: int) -> None:
        """Have it evaluate a pass, and keep the time."""
        time.sleep(PAUSE)
        assert self._process.stdin
        self._process.stdin.write(f"{position} {width}\n")
        self._process.stdin.flush()
        self.times.setdefault((position, width), []).append(float(self._answer()))

    def median(self, position: int, width: int) -> float:
        """Milliseconds of such a pass."""
        return statistics.median(self.times[position, width])

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@dataclass
class Measurement:
    """One model's engines, with their times, and the rates of the limits measured between them."""

    path: Path
    positions: Sequence[int]
    ours: list[Engine]
    stock: list[Engine]
    read_rates: list[float]
    multiply_rates: dict[str, list[float]]

    def widths(self, position: int) -> Sequence[int]:
        """The widths measured at a position."""
        return WIDTHS if position == self.positions[0] else FEW_WIDTHS

    def best_stock(self, position: int, width: int) -> float:
        """Milliseconds of the better of stock's settings."""
        return min(engine.median(position, width) for engine in self.stock)


def measure(
    path: Path, threads: int, positions: Sequence[int], kernels: Sequence[str], turns: int
) -> Measurement:
    limits = Limits(threads)
    engines = [Engine(name, path, threads, positions) for name in (*kernels, *STOCK)]
    ours = [engine for engine in engines if not engine.is_stock]
    sets = {e.report["kernels"] for e in ours if e.report["kernels"] in MULTIPLIERS}
    result = Measurement(
        path,
        positions,
        ours,
        [engine for engine in engines if engine.is_stock],
        [],
        {name: [] for name in sets},
    )
    for position in positions:
        is_first = position == positions[0]
        for engine in engines:
            engine.measure(position, 1)  # evaluates what is before
            del engine.times[position, 1]
        for turn in range(turns):
            for width in result.widths(position):
                for engine in engines:
                    engine.measure(position, width)
            if is_first and turn < PROMPT_TURNS:
                for engine in engines:
                    engine.measure(position, PROMPT)
            time.sleep(PAUSE)
            result.read_rates.append(limits.read())
            for name, rates in result.multiply_rates.items():
                rates.append(limits.multiply(name))
    for engine in engines:
        engine.close()
    return result


# ---- the report --------------------------------------------------------------------------------------


def print_row(name: str, values: Sequence[float], digits: int) -> None:
    print(f"    {name:>18}" + "".join(f"{value:8.{digits}f}" for value in values))


def print_position(m: Measurement, position: int) -> None:
    widths = m.widths(position)
    stock = [m.best_stock(position, width) for width in widths]
    print(f"  position {position}")
    print_row("width", widths, 0)
    print_row("stock, ms", stock, 1)
    print_row("ratio to width 1", [t / stock[0] for t in stock], 2)
    for engine in m.ours:
        times = [engine.median(position, width) for width in widths]
        print_row(f"{engine.title}, ms", times, 1)
        print_row("ratio to width 1", [t / times[0] for t in times], 2)
        print_row("ratio to stock", [t / s for t, s in zip(times, stock, strict=True)], 2)


def print_rates(m: Measurement, engine: Engine) -> None:
    n_bytes, n_products = work_of_a_token(m.path)
    first = m.positions[0]
    read = n_bytes / engine.median(first, 1) / 1e6
    line = f"  {engine.title}: reads {read:.1f} GB/s at width 1"
    line += f", {100e9 * read / statistics.median(m.read_rates):.0f} % of the limit"
    multiplied = 8 * n_products / engine.median(first, 8) / 1e6
    line += f"; {multiplied:.0f} G multiply-adds/s at width 8"
    if rates := m.multiply_rates.get(engine.report["kernels"]):
        line += f", {100e9 * multiplied / statistics.median(rates):.0f} % of the limit"
    print(line)
    prompt, stock = engine.median(first, PROMPT), m.best_stock(first, PROMPT)
    print(
        f"  {engine.title}: prompt of {PROMPT} at {1e3 * PROMPT / prompt:.0f} tokens/s, "
        f"stock {1e3 * PROMPT / stock:.0f}, {stock / prompt:.2f} times"
    )


def print_report(m: Measurement, threads: int) -> None:
    types = ", ".join(f"{n} {name}" for name, n in inspect_gguf(m.path).tensor_types.items())
    print(f"{m.path.name} ({types}), {threads} threads")
    for position in m.positions:
        print_position(m, position)
    for engine in m.ours:
        print_rates(m, engine)
    line = f"  limits in the same run: plain loop reads {statistics.median(m.read_rates) / 1e9:.1f} GB/s"
    for name, rates in m.multiply_rates.items():
        line += f", {MULTIPLIERS[name][1]} {statistics.median(rates) / 1e9:.0f} G multiply-adds/s"
    print(line)
    file_size = m.path.stat().st_size / 1e6
    for engine in (*m.ours, *m.stock):
        r = engine.report
        print(
            f"  {engine.title:16} loads in {r['load']:.2f} s, resident {r['resident'] / file_size:.2f}, "
            f"peak {r['peak'] / file_size:.2f} of the file"
        )
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", metavar="MODEL")
    parser.add_argument("--positions", nargs="+", type=int, metavar="N", help="default: SUITE's")
    parser.add_argument(
        "--kernels", nargs="+", metavar="NAME", help="avx512, avx2, c or best; default: SUITE's"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, Path(options.models[0]), options.threads, options.positions)
        return
    known = {case.model: case for case in SUITE}
    for model in options.models or known:
        case = known.get(model, Case(model))
        positions = options.positions or case.positions
        kernels = options.kernels or case.kernels
        m = measure(find(model), options.threads, positions, kernels, options.turns)
        print_report(m, options.threads)


if __name__ == "__main__":
    main()
