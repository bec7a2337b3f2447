"""The one thread on which llama.cpp works.

Everything that loads a model or touches a context runs there, one call after the other. A signal then
reaches the main thread at once, though a pass takes seconds; nothing is freed or cut under a running pass,
wherever the interrupt struck; and OpenMP, which keeps a pool of threads for each caller, has one to keep.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from pyspec._cspec import ffi, lib

_Result = TypeVar("_Result")

_executor: ThreadPoolExecutor | None = None
_abort = np.zeros(1, dtype=np.int32)

# For llama.cpp: what it calls, and with what, to learn whether a pass is to end or a load to go on.
ABORT_CALLBACK = int(ffi.cast("uintptr_t", ffi.addressof(lib, "cspec_abort_requested")))
LOAD_CALLBACK = int(ffi.cast("uintptr_t", ffi.addressof(lib, "cspec_load_wanted")))
ABORT_FLAG: int = _abort.ctypes.data


def run(call: Callable[[], _Result]) -> _Result:
    """Run a call on the worker after those before it, and return its result.

    An exception in the waiting thread, such as a KeyboardInterrupt, ends a running pass early and is
    raised when the worker has nothing left to do.
    """
    global _executor
    if _executor is None:
        _executor = ThreadPoolExecutor(1, thread_name_prefix="pyspec-llama")

    def unaborted() -> _Result:
        _abort[0] = 0
        return call()

    try:
        return _executor.submit(unaborted).result()
    except BaseException:
        # The interrupt may have struck before the future was at hand, so it is the queue that is waited for.
        _abort[0] = 1
        run_last(int)
        raise


def run_last(call: Callable[[], _Result]) -> _Result:
    """Run a call that frees something: on the worker, or here once the interpreter has ended the worker."""
    if _executor is None:
        return call()
    try:
        future = _executor.submit(call)
    except RuntimeError:
        return call()
    return future.result()


def _forget() -> None:
    """In a forked child the thread does not exist."""
    global _executor
    _executor = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
