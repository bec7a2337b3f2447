"""Attention's share of a pass, computed three ways: stock llama.cpp's, its reference path, and ours.

Run as: python -m bench.attention [--model NAME] [--positions 512 2048 8192] [--widths 1 5 8]

Every layer's FLASH_ATTN_EXT of the model, on a cache of its shape, in one graph of nothing else. The
reference path is the other way to make attention independent of the width.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import gguf
import llama_cpp
from pyspec._cspec import lib

from pyspec import bridge
from pyspec.catalogue import resolve

F32, F16 = 0, 1

ggml: Any = llama_cpp.llama_cpp._lib
pointer, size_t = ctypes.c_void_p, ctypes.c_size_t
for name, result, *arguments in (
    ("ggml_get_data", pointer, pointer),
    ("ggml_new_tensor_4d", pointer, pointer, ctypes.c_int, *[ctypes.c_int64] * 4),
    ("ggml_permute", pointer, pointer, pointer, *[ctypes.c_int] * 4),
    ("ggml_flash_attn_ext", pointer, *[pointer] * 5, *[ctypes.c_float] * 3),
    ("ggml_new_graph", pointer, pointer),
    ("ggml_build_forward_expand", None, pointer, pointer),
    ("ggml_graph_compute_with_ctx", ctypes.c_int, pointer, pointer, ctypes.c_int),
    ("ggml_free", None, pointer),
):
    getattr(ggml, name).restype = result
    getattr(ggml, name).argtypes = arguments


class InitParams(ctypes.Structure):
    """What ggml_init takes."""

    _fields_ = [("mem_size", size_t), ("mem_buffer", pointer), ("no_alloc", ctypes.c_bool)]


ggml.ggml_init.restype = pointer
ggml.ggml_init.argtypes = [InitParams]


def shape(path: str) -> tuple[int, int, int, int]:
    """Layers, heads, heads of K and V, and head size of a model."""
    fields = gguf.GGUFReader(path).fields
    family = bytes(fields["general.architecture"].parts[-1]).decode()

    def number(key: str) -> int | None:
        field = fields.get(f"{family}.{key}")
        return None if field is None else int(field.parts[-1][0])

    heads = number("attention.head_count") or 1
    size = number("attention.key_length") or (number("embedding_length") or 0) // heads
    return number("block_count") or 1, heads, number("attention.head_count_kv") or heads, size


def build(
    layers: int, heads: int, kv_heads: int, size: int, cells: int, width: int
) -> tuple[int, int]:
    """A ggml context, and a graph of as many attentions with a causal mask."""
    bytes_needed = layers * (2 * cells * kv_heads * size * 2 + 2 * width * heads * size * 4 + 8192)
    context = ggml.ggml_init(InitParams((64 << 20) + bytes_needed + width * cells * 2, None, False))

    def tensor(kind: int, *sizes: int) -> int:
        made: int = ggml.ggml_new_tensor_4d(context, kind, *sizes, *[1] * (4 - len(sizes)))
        ctypes.memset(ggml.ggml_get_data(made), 0x2A, _bytes(kind, sizes))
        return made

    mask = tensor(F16, cells, width)
    values = (ctypes.c_uint16 * (cells * width)).from_address(ggml.ggml_get_data(mask))
    for row in range(width):
        seen = cells - width + row + 1
        values[row * cells : (row + 1) * cells] = [0] * seen + [0xFC00] * (cells - seen)
    graph = ggml.ggml_new_graph(context)
    for _ in range(layers):
        # The cache is [cells][heads][size], Q [tokens][heads][size]; the operation wants heads outside.
        q, k, v = (
            ggml.ggml_permute(context, t, 0, 2, 1, 3)
            for t in (
                tensor(F32, size, heads, width),
                tensor(F16, size, kv_heads, cells),
                tensor(F16, size, kv_heads, cells),
            )
        )
        out = ggml.ggml_flash_attn_ext(context, q, k, v, mask, size**-0.5, 0.0, 0.0)
        ggml.ggml_build_forward_expand(graph, out)
    return context, graph


def _bytes(kind: int, sizes: tuple[int, ...]) -> int:
    n = 4 if kind == F32 else 2
    for each in sizes:
        n *= each
    return n


def stock() -> None:
    lib.cspec_bridge_enable(False)


def reference() -> None:
    lib.cspec_bridge_enable(True)
    lib.cspec_bridge_kernels(lib.CSPEC_KERNELS_OFF)


def ours() -> None:
    lib.cspec_bridge_enable(True)
    lib.cspec_bridge_kernels(lib.cspec_kernels())


WAYS: list[Callable[[], None]] = [stock, reference, ours]


def compare(context: int, graph: int, threads: int, repetitions: int) -> list[float]:
    """Median seconds of the graph in each way, taken in turns."""
    seconds: list[list[float]] = [[] for _ in WAYS]
    for repetition in range(repetitions + 1):
        for way, taken in zip(WAYS, seconds, strict=True):
            way()
            start = time.perf_counter()
            ggml.ggml_graph_compute_with_ctx(context, graph, threads)
            if repetition > 0:
                taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--positions", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 5, 8])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()

    status = bridge.attach()
    if not status.attached:
        parser.exit(1, f"the bridge is not attached: {status.reason}\n")
    bridge.set_exact_width(None)
    layers, heads, kv_heads, size = shape(str(resolve(arguments.model)))
    print(
        f"{arguments.model}: {layers} layers, {heads} heads of {size} on {kv_heads},"
        f" {arguments.threads} threads, median of {arguments.repetitions}"
    )
    print("position  width  stock ms  reference ms  ours ms   GB/s")
    for position in arguments.positions:
        cache = layers * 2 * position * kv_heads * size * 2
        for width in arguments.widths:
            context, graph = build(layers, heads, kv_heads, size, position, width)
            ms = [
                1e3 * each
                for each in compare(context, graph, arguments.threads, arguments.repetitions)
            ]
            print(
                f"{position:8}  {width:5}  {ms[0]:8.2f}  {ms[1]:12.2f}  {ms[2]:7.2f}  "
                f"{cache / ms[2] / 1e6:5.1f}",
                flush=True,
            )
            ggml.ggml_free(context)


if __name__ == "__main__":
    main()
