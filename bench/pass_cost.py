"""What a pass over several tokens costs, beside stock llama.cpp in the same run.

`python -m bench.pass_cost [--models MODEL...]` prints, for each model and position, the median
milliseconds of a pass over 1 to 16 tokens and its ratio to a pass over one, for pyspec and for stock
llama.cpp (at each width the better of its two settings of use_extra_bufts); the rate at which the weights
are read at width 1, beside that of a plain loop over memory; the rate of a prompt; and what loading takes
in time and memory.

Every engine runs in a process of its own, and they take turns, a pass of each width at a time: what else the
machine does meanwhile meets all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pyspec._cspec import ffi, lib

from pyspec.catalogue import resolve

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
PROMPT = 512
LOADS = 3
MODELS = ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "smollm2-135m")
OURS = "pyspec"
STOCK = ("stock", "stock, repacked")
ENGINES = (OURS, *STOCK)


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
    report = {"load": min(loads), "resident": resident, "peak": peak, "size": model.size / 1e6}
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
        start = time.perf_counter()
        context.evaluate(tokens[position : position + width], n_logits=min(width, max(WIDTHS)))
        print(1e3 * (time.perf_counter() - start), flush=True)


# ---- the measurement ---------------------------------------------------------------------------------


class Engine:
    """A process that evaluates on demand."""

    def __init__(self, name: str, path: Path, threads: int, positions: Sequence[int]) -> None:
        self.name = name
        command = [
            sys.executable,
            "-m",
            "bench.pass_cost",
            "--serve",
            name,
            "--threads",
            str(threads),
        ]
        command += ["--positions", *map(str, positions), "--models", str(path)]
        environment = {**os.environ, "PYSPEC_BRIDGE": "off"} if name != OURS else None
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.report: dict[str, Any] = json.loads(self._answer())
        self.times: dict[tuple[int, int], list[float]] = {}

    def _answer(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline()

    def measure(self, position: int, width: int) -> None:
        """Have it evaluate a pass, and keep the time."""
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


class Reader:
    """A plain loop over memory, in as many threads as the engines have."""

    def __init__(self, threads: int) -> None:
        self._parts = [np.ones(1 << 25, np.uint64) for _ in range(threads)]
        self.rates: list[float] = []

    def measure(self) -> None:
        """Read it all once, and keep the rate."""

        def read(part: np.ndarray[Any, Any]) -> None:
            lib.cspec_read(ffi.from_buffer("uint64_t[]", part), len(part))

        threads = [threading.Thread(target=read, args=(part,)) for part in self._parts]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        size = sum(part.nbytes for part in self._parts)
        self.rates.append(size / (time.perf_counter() - start) / 1e9)


def best_stock(engines: Sequence[Engine], position: int, width: int) -> float:
    return min(e.median(position, width) for e in engines if e.name != OURS)


def report(path: Path, threads: int, positions: Sequence[int], turns: int) -> None:
    engines = [Engine(name, path, threads, positions) for name in ENGINES]
    ours, reader = engines[0], Reader(threads)
    widths = {
        position: [*WIDTHS, *([PROMPT] if i == 0 else [])] for i, position in enumerate(positions)
    }
    for position in positions:
        for turn in range(turns + 1):
            for width in widths[position]:
                for engine in engines:
                    if width < PROMPT or turn < 4:
                        engine.measure(position, width)
            reader.measure()
            if turn == 0:  # the first turn fills caches
                reader.rates.clear()
                for engine in engines:
                    engine.times = {key: t for key, t in engine.times.items() if key[0] != position}
    print(f"{path.name}, {threads} threads, kernels: {ours.report['kernels']}")
    for position in positions:
        print(f"  position {position}")
        print(f"    {'width':>16}" + "".join(f"{width:>8}" for width in WIDTHS))
        for name, cost in {
            "pyspec, ms": lambda w, p=position: ours.median(p, w),
            "ratio": lambda w, p=position: ours.median(p, w) / ours.median(p, 1),
            "stock, ms": lambda w, p=position: best_stock(engines, p, w),
            "ratio to stock": lambda w, p=position: ours.median(p, w) / best_stock(engines, p, w),
        }.items():
            digits = 1 if name.endswith("ms") else 2
            print(f"    {name:>16}" + "".join(f"{cost(width):8.{digits}f}" for width in WIDTHS))
    first = positions[0]
    rate = ours.report["size"] / ours.median(first, 1)
    prompt = [
        PROMPT / t * 1e3 for t in (ours.median(first, PROMPT), best_stock(engines, first, PROMPT))
    ]
    print(
        f"  weights read at width 1: {rate:.1f} GB/s, plain loop: {statistics.median(reader.rates):.1f} GB/s"
    )
    print(f"  prompt of {PROMPT}: {prompt[0]:.0f} tokens/s, stock {prompt[1]:.0f}")
    file_size = path.stat().st_size / 1e6
    for engine in engines:
        r = engine.report
        print(
            f"  {engine.name:16} loads in {r['load']:.2f} s, resident {r['resident'] / file_size:.2f}, "
            f"peak {r['peak'] / file_size:.2f} of the file"
        )
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", default=MODELS, help="files, or names of the catalogue"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--positions", nargs="+", type=int, default=[256])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, Path(options.models[0]), options.threads, options.positions)
        return
    for name in options.models:
        report(resolve(name), options.threads, options.positions, options.turns)


if __name__ == "__main__":
    main()
