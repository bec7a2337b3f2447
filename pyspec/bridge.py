"""Attaches the bridge that makes logits independent of how many tokens are evaluated together.

llama.cpp's CPU backend sums in another order at another width. cspec's bridge (cspec/ggml_bridge.c) mends
that from outside; docs/exactness.md says how, and what withdraws the promise. Everything works without it,
except that a text with speculation may then differ from one without.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import llama_cpp
import numpy as np
import numpy.typing as npt

from pyspec import worker
from pyspec._cspec import ffi, lib

log = logging.getLogger("pyspec.bridge")

# The llama-cpp-python whose structures the bridge knows.
LLAMA_CPP_PYTHON = "0.3.36"

# Passes of at most this many tokens are exact by default, whatever they compute. In wider ones, of prompts
# or of many requests together, products that pyspec's kernels do not take run in llama.cpp's: in another
# order of summation, and three times as fast as one by one.
EXACT_WIDTH = 32


@dataclass(frozen=True)
class BridgeStatus:
    """Whether the bridge is attached to this process's llama.cpp, and why if not."""

    attached: bool
    reason: str = ""


@dataclass(frozen=True)
class BridgeCounts:
    """Operations that llama.cpp asked the bridge about, by what became of them."""

    attention: int  # made independent of the width
    products: int  # likewise
    wide: int  # left to llama.cpp: wider than the exact width
    foreign: int  # left to llama.cpp: weights that it has repacked
    unknown: int  # left to llama.cpp: of a kind that the bridge does not know
    shared: int  # of the products: with activations that another had quantised


@dataclass(frozen=True)
class KernelStatus:
    """The instruction set of the kernels for quantised products; empty if they are not used, and why."""

    instructions: str
    reason: str = ""


# Rows of a weight matrix that the kernels compute together.
PANEL_ROWS: int = lib.CSPEC_PANEL_ROWS

# Names of the instruction sets, as PYSPEC_KERNELS takes them, by cspec's number.
INSTRUCTIONS = ("off", "c", "avx2", "avxvnni", "avx512", "amx")

_lock = threading.Lock()
_status: BridgeStatus | None = None
_kernels: KernelStatus | None = None
_exact_width: int | None = EXACT_WIDTH


def attach() -> BridgeStatus:
    """Attach the bridge unless it is, or has been refused. Call before a model is loaded.

    PYSPEC_BRIDGE=off in the environment keeps it away.
    """
    global _status
    with _lock:
        if _status is None:
            # On the worker: no graph is computed meanwhile, and its OpenMP threads are the ones in use.
            reason = _refusal() or worker.run(_attach)
            _status = BridgeStatus(not reason, reason)
            log.debug("bridge %s", f"not attached: {reason}" if reason else "attached")
        return _status


def _refusal() -> str:
    if os.environ.get("PYSPEC_BRIDGE") == "off":
        return "PYSPEC_BRIDGE=off"
    if llama_cpp.__version__ != LLAMA_CPP_PYTHON:
        return f"llama-cpp-python is {llama_cpp.__version__}, not {LLAMA_CPP_PYTHON}"
    return ""


def _attach() -> str:
    reason = ffi.new("char[256]")
    lib.cspec_bridge_attach(_library(), 0, reason, len(reason))
    set_exact_width(EXACT_WIDTH)
    return str(ffi.string(reason).decode("utf-8", "replace"))


def _library() -> bytes:
    """The library as it was opened: an installation holds several copies of each."""
    return os.fsencode(llama_cpp.llama_cpp._lib._name)


def attach_kernels() -> KernelStatus:
    """Attach the bridge, and to it the kernels, unless they are or have been refused.

    PYSPEC_KERNELS in the environment limits them to an instruction set, or turns them off.
    """
    global _kernels
    attach()
    with _lock:
        if _kernels is None:
            wanted = os.environ.get("PYSPEC_KERNELS", INSTRUCTIONS[-1])
            if wanted in INSTRUCTIONS:
                _kernels = worker.run(lambda: _attach_kernels(INSTRUCTIONS.index(wanted)))
            else:
                _kernels = KernelStatus("", f"PYSPEC_KERNELS is none of {', '.join(INSTRUCTIONS)}")
            log.debug("kernels: %s", _kernels.instructions or f"not attached: {_kernels.reason}")
        return _kernels


def _attach_kernels(wanted: int) -> KernelStatus:
    reason = ffi.new("char[256]")
    found = lib.cspec_kernels_attach(_library(), wanted, 0, reason, len(reason))
    why = str(ffi.string(reason).decode("utf-8", "replace"))
    return KernelStatus(INSTRUCTIONS[found] if found else "", why)


def notice() -> str | None:
    """What a user should know who did not ask for it, in one line: what is not attached, and what follows.

    None when everything is, or when PYSPEC_KERNELS=off was the user's wish.
    """
    status, kernels = attach(), attach_kernels()
    if not status.attached:
        return (
            f"llama.cpp runs without pyspec's bridge ({status.reason}): checking several tokens "
            "costs more, and a draft may change greedy text"
        )
    if not kernels.instructions and os.environ.get("PYSPEC_KERNELS") != "off":
        return f"no kernels ({kernels.reason}): checking several tokens costs more"
    return None


@contextmanager
def packed_weights() -> Iterator[bool]:
    """While it lasts, models load their weights in the kernels' layout, if the kernels are attached.

    Yields whether they are: use_extra_bufts must be the same. Models are loaded one at a time, on the worker.
    """
    packed = _kernels is not None and bool(_kernels.instructions)
    lib.cspec_kernels_offer(packed)
    try:
        yield packed
    finally:
        lib.cspec_kernels_offer(0)


@contextmanager
def shortlist(panels: npt.NDArray[np.int32] | None, n_rows: int) -> Iterator[None]:
    """While it lasts, passes compute only some rows of an output matrix; the other logits are -inf.

    Nothing changes where the matrix is not in the kernels' layout. For use on the worker, around one pass.

    Args:
        panels: Ascending numbers of groups of PANEL_ROWS rows; None for all rows.
        n_rows: Rows of the matrix.
    """
    if panels is None:
        yield
        return
    lib.cspec_kernels_shortlist(ffi.from_buffer("int32_t[]", panels), len(panels), n_rows)
    try:
        yield
    finally:
        lib.cspec_kernels_shortlist(ffi.NULL, 0, 0)


def set_exact_width(n_tokens: int | None) -> None:
    """Choose the widest pass, in tokens, that is exact; None for any width, which makes prompts slow."""
    global _exact_width
    _exact_width = n_tokens
    lib.cspec_bridge_exact_width(2**62 if n_tokens is None else n_tokens)


def counts() -> BridgeCounts:
    """The operations of all contexts of this process since the bridge was attached."""
    values = ffi.new("uint64_t[]", lib.CSPEC_BRIDGE_COUNTS)
    lib.cspec_bridge_read_counts(values)
    return BridgeCounts(*values)


def bit_exact_reason(
    *,
    width: int,
    flash_attention: bool = True,
    extra_buffers: bool = False,
    gpu_layers: int = 0,
    swa_full: bool = True,
    reused: bool = False,
    shared_wide: bool = False,
) -> str | None:
    """Why logits may depend on how many tokens are evaluated together; None when they do not.

    Args:
        width: Tokens of the widest pass whose logits matter: a round's drafted tokens and one.
        flash_attention: Whether the context was made with flash attention.
        extra_buffers: Whether the model was loaded with use_extra_bufts.
        gpu_layers: Layers on another device.
        swa_full: Whether layers with a sliding window have cells for the whole context.
        reused: Whether cells of the prompt were evaluated for another text, in passes of other widths, and
            some of the model's products are left to llama.cpp in wide ones.
        shared_wide: Whether such products were in a pass shared with other requests.
    """
    status = attach()
    if not status.attached:
        return f"the bridge is not attached: {status.reason}"
    if not flash_attention:
        return "flash attention is off"
    if extra_buffers:
        return "llama.cpp has repacked the weights (use_extra_bufts)"
    if gpu_layers or lib.cspec_bridge_devices() > 1:
        return "another device than the CPU takes part"
    if not swa_full:
        return "cells of the sliding window are reused (swa_full is off)"
    if _exact_width is not None and width > _exact_width:
        return f"passes of {width} tokens are wider than {_exact_width}"
    if counts().unknown:
        return "llama.cpp computes a matrix product of a kind that the bridge does not know"
    if shared_wide:
        return (
            "a pass was shared with other requests, and llama.cpp's products in passes wider than "
            f"{_exact_width} tokens depend on the width"
        )
    if reused:
        return (
            "a part of the prompt was kept from an earlier request, and llama.cpp's products in passes "
            f"wider than {_exact_width} tokens depend on the width"
        )
    return None
