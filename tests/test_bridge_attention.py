"""FLASH_ATTN_EXT as llama.cpp runs it, with every type of cache, comes out of our kernels."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from typing import Any

import gguf
import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type
from pyspec._cspec import lib

from pyspec import bridge

pytestmark = pytest.mark.skipif(
    sys.platform != "linux"
    or platform.machine() not in {"x86_64", "aarch64"}
    or os.environ.get("PYSPEC_BRIDGE") == "off"
    or lib.cspec_kernels() == lib.CSPEC_KERNELS_OFF,
    reason="the bridge or its kernels are not meant to work here",
)

ggml: Any = llama_cpp.llama_cpp._lib
pointer = ctypes.c_void_p
HEADS, KV_HEADS, SIZE, CELLS, SEEN = 6, 2, 64, 320, 290


class InitParams(ctypes.Structure):
    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


@pytest.fixture(autouse=True)
def attached() -> None:
    for name, result, *arguments in (
        ("ggml_init", pointer, InitParams),
        ("ggml_get_data", pointer, pointer),
        ("ggml_new_tensor_4d", pointer, pointer, ctypes.c_int, *[ctypes.c_int64] * 4),
        ("ggml_permute", pointer, pointer, pointer, *[ctypes.c_int] * 4),
        ("ggml_flash_attn_ext", pointer, *[pointer] * 5, *[ctypes.c_float] * 3),
        ("ggml_flash_attn_ext_add_sinks", None, pointer, pointer),
        ("ggml_new_graph", pointer, pointer),
        ("ggml_build_forward_expand", None, pointer, pointer),
        ("ggml_graph_compute_with_ctx", ctypes.c_int, pointer, pointer, ctypes.c_int),
        ("ggml_free", None, pointer),
    ):
        getattr(ggml, name).restype = result
        getattr(ggml, name).argtypes = arguments
    assert bridge.attach().attached


def attend(
    q: npt.NDArray[np.float32],  # [tokens][HEADS][SIZE]
    k: npt.NDArray[Any],  # [CELLS][KV_HEADS][row], of types
    v: npt.NDArray[Any],
    types: tuple[Type, Type],
    sinks: npt.NDArray[np.float32],
    threads: int = 2,
) -> npt.NDArray[np.float32]:
    """The result, [tokens][HEADS][SIZE]. The last token sees the first SEEN cells."""
    context = ggml.ggml_init(InitParams(64 << 20, None, False))

    def tensor(kind: int, values: npt.NDArray[Any], *sizes: int) -> int:
        made: int = ggml.ggml_new_tensor_4d(context, kind, *sizes, *[1] * (4 - len(sizes)))
        ctypes.memmove(ggml.ggml_get_data(made), values.tobytes(), values.nbytes)
        return made

    n = len(q)
    seen = np.arange(CELLS)[None, :] < SEEN - n + 1 + np.arange(n)[:, None]
    mask = np.where(seen, 0, -np.inf).astype(np.float16)
    inputs = (
        tensor(Type.F32, q, SIZE, HEADS, n),
        tensor(types[0], k, SIZE, KV_HEADS, CELLS),
        tensor(types[1], v, SIZE, KV_HEADS, CELLS),
    )
    heads_outside = [ggml.ggml_permute(context, t, 0, 2, 1, 3) for t in inputs]
    result = ggml.ggml_flash_attn_ext(
        context, *heads_outside, tensor(Type.F16, mask, CELLS, n), SIZE**-0.5, 0.0, 0.0
    )
    ggml.ggml_flash_attn_ext_add_sinks(result, tensor(Type.F32, sinks, HEADS))
    graph = ggml.ggml_new_graph(context)
    ggml.ggml_build_forward_expand(graph, result)
    assert ggml.ggml_graph_compute_with_ctx(context, graph, threads) == 0
    floats = (ctypes.c_float * (n * HEADS * SIZE)).from_address(ggml.ggml_get_data(result))
    out = np.array(floats, np.float32).reshape(n, HEADS, SIZE)
    ggml.ggml_free(context)
    return out


def expected(
    q: npt.NDArray[np.float32],
    k: npt.NDArray[np.float32],
    v: npt.NDArray[np.float32],
    sinks: npt.NDArray[np.float32],
) -> npt.NDArray[np.float64]:
    out = np.empty(q.shape, np.float64)
    for t, h in np.ndindex(len(q), HEADS):
        seen = SEEN - len(q) + 1 + t
        group = h // (HEADS // KV_HEADS)
        scores = k[:seen, group].astype(np.float64) @ q[t, h] * SIZE**-0.5
        weights = np.exp(scores)
        out[t, h] = weights @ v[:seen, group] / (weights.sum() + np.exp(float(sinks[h])))
    return out


@pytest.mark.parametrize(
    "types",
    [
        (Type.F16, Type.F16),
        (Type.F32, Type.F32),
        (Type.BF16, Type.BF16),
        (Type.Q8_0, Type.Q8_0),
        (Type.Q4_0, Type.Q4_0),
        (Type.Q8_0, Type.F16),
        (Type.F16, Type.Q5_1),
    ],
    ids=lambda types: f"{types[0].name}-{types[1].name}",
)
def test_every_type_of_cache(types: tuple[Type, Type]) -> None:
    random = np.random.default_rng(1)
    q = random.normal(0, 1, (9, HEADS, SIZE)).astype(np.float32)
    sinks = random.normal(0, 1, HEADS).astype(np.float32)
    cache = [random.normal(0, 1, (CELLS, KV_HEADS, SIZE)).astype(np.float32) for _ in types]
    stored = [gguf.quants.quantize(each, kind) for each, kind in zip(cache, types, strict=True)]
    k, v = (gguf.quants.dequantize(each, kind) for each, kind in zip(stored, types, strict=True))

    before = bridge.counts()
    out = attend(q, *stored, types, sinks)
    assert bridge.counts().attention == before.attention + 1
    # ggml itself rounds Q to the type of K: within 1e-5 it can only be our kernels.
    np.testing.assert_allclose(out, expected(q, k, v, sinks), rtol=0, atol=1e-5)
    for threads in (1, 2):
        last = attend(q[-1:], *stored, types, sinks, threads)
        assert last.tobytes() == out[-1:].tobytes()


def test_without_kernels_ggml_takes_one_row_at_a_time() -> None:
    random = np.random.default_rng(1)
    q = random.normal(0, 1, (9, HEADS, SIZE)).astype(np.float32)
    sinks = random.normal(0, 1, HEADS).astype(np.float32)
    k, v = random.normal(0, 1, (2, CELLS, KV_HEADS, SIZE)).astype(np.float16)
    types = (Type.F16, Type.F16)
    ours = attend(q, k, v, types, sinks)
    lib.cspec_bridge_kernels(lib.CSPEC_KERNELS_OFF)
    try:
        whole = attend(q, k, v, types, sinks)
        assert whole.tobytes() != ours.tobytes()
        np.testing.assert_allclose(whole, ours, rtol=0, atol=1e-2)
        assert attend(q[-1:], k, v, types, sinks, 1).tobytes() == whole[-1:].tobytes()
    finally:
        lib.cspec_bridge_kernels(lib.cspec_kernels())
