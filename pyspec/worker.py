"""The one thread on which llama.cpp works.

Everything that loads a model or touches a context runs there, one call after the other; a round is one call.
A signal then reaches the main thread at once, though a pass takes seconds; nothing is freed or cut under a
running pass, wherever the interrupt struck; and OpenMP, which keeps a pool of threads for each caller, has
one to keep.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from pyspec._cspec import ffi, lib

_Result = TypeVar("_Result")

_executor: ThreadPoolExecutor | None = None
_thread: int | None = None
_to_free: deque[Callable[[], object]] = deque()
_abort = np.zeros(1, dtype=np.int32)

# For llama.cpp: what it calls, and with what, to learn whether a pass is to end or a load to go on.
ABORT_CALLBACK = int(ffi.cast("uintptr_t", ffi.addressof(lib, "cspec_abort_requested")))
LOAD_CALLBACK = int(ffi.cast("uintptr_t", ffi.addressof(lib, "cspec_load_wanted")))
ABORT_FLAG: int = _abort.ctypes.data


def run(call: Callable[[], _Result]) -> _Result:
    """Run a call on the worker after those before it, and return its result; on the worker itself, at once.

    An exception in the waiting thread, such as a KeyboardInterrupt, ends a running pass early and is
    raised when the worker has nothing left to do.
    """
    global _executor
    if threading.get_ident() == _thread:
        return call()
    if _executor is None:
        _executor = ThreadPoolExecutor(
            1, thread_name_prefix="pyspec-llama", initializer=_remember_thread
        )

    def unaborted() -> _Result:
        while _to_free:
            _to_free.popleft()()
        _abort[0] = 0
        return call()

    try:
        return _executor.submit(unaborted).result()
    except BaseException:
        # The interrupt may have struck before the future was at hand, so it is the queue that is waited for.
        _abort[0] = 1
        _executor.submit(int).result()
        raise


def _remember_thread() -> None:
    global _thread
    _thread = threading.get_ident()


def free_later(call: Callable[[], object]) -> None:
    """Have something freed before the next call runs; nothing waits for it.

    For finalisers: they run wherever the collector strikes, also inside of `run` and on the worker itself.
    """
    _to_free.append(call)


def _forget() -> None:
    """In a forked child the thread does not exist."""
    global _executor, _thread
    _executor = _thread = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
