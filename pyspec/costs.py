"""What passes cost on this machine: measured once a model, then remembered in the user's cache."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import math
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate
from pathlib import Path

import numpy as np

from pyspec import _cspec, bridge
from pyspec.catalogue import cache_folder
from pyspec.llama import Context, Model, system_info, version

log = logging.getLogger("pyspec.costs")

# Between them a curve is straight enough; the last is the widest pass of a round.
_WIDTHS = (1, 2, 4, 6, 8, 12, 16, 32)
_TURNS = 2
# Remembered costs over this many times those of a few passes now are not believed: they were measured while
# the machine did something else. A draft that seems too dear is never tried: nothing would correct them.
_TOO_DEAR = 1.6
# How much of the difference to what was expected is believed of passes over as many tokens, and of those over
# twice as many, half as many, or fewer or more than that.
_FOLLOWING = 0.3
_FOLLOWING_FAR = 0.05


class CostCurve:
    """Seconds of a pass over n tokens, between and beyond the widths at which it was measured.

    Args:
        widths: [k] rising numbers of tokens, from 1.
        seconds: [k] of a pass over as many.
    """

    def __init__(self, widths: Sequence[int], seconds: Sequence[float]) -> None:
        self.widths = tuple(widths)
        self.seconds = tuple(seconds)
        xs, ys = np.array(self.widths, float), np.array(self.seconds, float)
        slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]) if len(xs) > 1 else ys[0]
        self._slope = max(0.0, float(slope))
        n = np.arange(self.widths[-1] + 1)
        self._table: list[float] = np.interp(n, xs, ys).tolist()

    def __call__(self, n: int) -> float:
        """Seconds of a pass over n tokens; 0 for none."""
        if n <= 0:
            return 0.0
        last = len(self._table) - 1
        if n <= last:
            return self._table[n]
        # The slope as measured, at the scale that observations have given the widest.
        return self._table[last] * (1 + self._slope * (n - last) / self.seconds[-1])

    def observe(self, n: int, seconds: float) -> None:
        """Take a pass into account: costs change with the context's length and with what else runs.

        Memory and arithmetic do not slow down alike, so passes over about as many tokens follow it most.
        """
        if n > 0:
            # One pass that was held up says little.
            ratio = min(2.0, max(0.5, seconds / self(n)))
            for m in range(1, len(self._table)):
                near = max(0.0, 1 - abs(math.log2(n / m)))
                self._table[m] *= ratio ** (_FOLLOWING_FAR + (_FOLLOWING - _FOLLOWING_FAR) * near)

    def copy(self) -> CostCurve:
        """The curve as it was measured."""
        return CostCurve(self.widths, self.seconds)


def measured_costs(context: Context) -> CostCurve:
    """The cost curve of a context's model, with its threads: remembered, or else measured in about a second.

    Args:
        context: Empty, and empty afterwards.
    """
    path = _file(context)
    try:
        stored = json.loads(path.read_text())
        remembered = CostCurve(stored["widths"], stored["seconds"])
        if remembered(1) <= _TOO_DEAR * _fastest(context, [1])[1]:
            return remembered
        log.debug("%s: costs were remembered of a busier machine", context.model.name)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        pass
    curve = _measure(context)
    log.debug(
        "%s: passes over %s tokens take %s s", context.model.name, curve.widths, curve.seconds
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"widths": curve.widths, "seconds": curve.seconds}))
        partial.replace(path)
    except OSError as error:
        log.debug("costs are not remembered: %s", error)
    return curve


def forget_costs(context: Context) -> None:
    """Have the costs of a context's model measured anew when next they are asked for.

    Where the cache cannot be changed they stay.
    """
    with suppress(OSError):
        _file(context).unlink(missing_ok=True)


def _file(context: Context) -> Path:
    return cache_folder() / "costs" / f"{_key(context)}.json"


def _measure(context: Context) -> CostCurve:
    fastest = _fastest(context, [n for n in _WIDTHS if n <= min(context.n_batch, context.n_ctx)])
    # What was held up would make a wider pass look cheaper than a narrower one.
    seconds = list(accumulate(reversed(fastest.values()), min))
    return CostCurve(list(fastest), seconds[::-1])


def _fastest(context: Context, widths: list[int]) -> dict[int, float]:
    """Seconds of the fastest of a few passes over each number of tokens."""
    fastest = dict.fromkeys(widths, float("inf"))
    # The first pass of a context finds none of its memory in place.
    for n in (widths[-1], *widths * _TURNS):
        start = time.perf_counter()
        context.evaluate([0] * n, n_logits=min(n, context.n_logits))
        fastest[n] = min(fastest[n], time.perf_counter() - start)
        context.clear()
    return fastest


def _key(context: Context) -> str:
    """Names the model's content, the machine, and all else that a pass's time depends on."""
    circumstances = (
        _fingerprint(context.model),
        context.threads,
        context.n_logits > 1,
        None if context.panels is None else len(context.panels),
        bridge.attach_kernels().instructions,
        _library_hash(),
        version(),
        system_info(),
        _cpu(),
    )
    return hashlib.sha256(repr(circumstances).encode()).hexdigest()[:32]


@cache
def _library_hash() -> str:
    return hashlib.sha256(Path(inspect.getfile(_cspec)).read_bytes()).hexdigest()


def _fingerprint(model: Model) -> str:
    """A hash of the file's size and its beginning, which has every tensor's name, shape and type."""
    with model.path.open("rb") as file:
        beginning = file.read(1 << 16)
    return hashlib.sha256(beginning + str(model.path.stat().st_size).encode()).hexdigest()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line for line in lines if line.startswith("model name")]
    return f"{platform.machine()} {platform.processor()} {names[:1]} {len(names) or os.cpu_count()}"
