"""Products of quantised weights: right, and the same bits however they are computed."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
from cffi import FFI
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize
from pyspec._cspec import ffi, lib

from pyspec import _cspec

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Where the F16 scales of a block lie.
SCALES: dict[Type, list[int]] = {
    Type.Q4_0: [0],
    Type.Q4_1: [0, 2],
    Type.Q5_0: [0],
    Type.Q5_1: [0, 2],
    Type.Q8_0: [0],
    Type.Q2_K: [80, 82],
    Type.Q3_K: [108],
    Type.Q4_K: [0, 2],
    Type.Q5_K: [0, 2],
    Type.Q6_K: [208],
    Type.IQ4_NL: [0],
    Type.IQ4_XS: [0],
    Type.F16: [],
    Type.BF16: [],
}
FLOATS = {Type.F16, Type.BF16}
TYPES = pytest.mark.parametrize("kind", list(SCALES), ids=lambda kind: kind.name)

WIDTHS = [1, 2, 3, 4, 5, 7, 8, 9, 16, 33, 64]
PLAIN = lib.CSPEC_MATMUL_C
INSTRUCTIONS = [
    level
    for level in (
        PLAIN,
        lib.CSPEC_MATMUL_AVX2,
        lib.CSPEC_MATMUL_AVXVNNI,
        lib.CSPEC_MATMUL_AVX512,
        lib.CSPEC_MATMUL_AMX,
    )
    if lib.cspec_matmul_has(level)
]
BEST = INSTRUCTIONS[-1]


def aligned(size: int) -> Bytes:
    """Zeros at the beginning of a cache line."""
    room = np.zeros(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size]


def block_size(kind: Type) -> int:
    return 32 if kind in FLOATS else GGML_QUANT_SIZES[kind][0]


def random_weights(
    kind: Type, n_rows: int, n_k: int, scale: Callable[[tuple[int, int]], Any] | None = None
) -> Bytes:
    """Rows of random bytes, valid in every type but for the F16 scales, which are chosen."""
    rng = np.random.default_rng([kind, n_rows, n_k])
    if kind in FLOATS:
        values = rng.standard_normal((n_rows, n_k))
        if kind == Type.F16:
            return values.astype(np.float16).view(np.uint8)
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    block, size = GGML_QUANT_SIZES[kind]
    shape = (n_rows, n_k // block)
    rows = rng.integers(0, 256, (*shape, size), dtype=np.uint8)
    for offset in SCALES[kind]:
        values = scale(shape) if scale else 0.01 * rng.standard_normal(shape)
        rows[:, :, offset : offset + 2] = (
            np.asarray(values, np.float16).view(np.uint8).reshape(*shape, 2)
        )
    return rows.reshape(n_rows, -1)


def random_tokens(n_tokens: int, n_k: int) -> Floats:
    """Activations with a few large ones, as models have."""
    rng = np.random.default_rng([n_tokens, n_k])
    return rng.standard_t(4, (n_tokens, n_k)).astype(np.float32)


class Product:
    """Packed weights."""

    def __init__(self, kind: Type, n_rows: int, n_k: int, rows: Bytes) -> None:
        self.shape = (kind, n_rows, n_k)
        size = lib.cspec_matmul_packed_size(*self.shape)
        assert size > 0
        self.packed = aligned(size)
        lib.cspec_matmul_pack(*self.shape, ffi.from_buffer(rows), ffi.from_buffer(self.packed))

    def __call__(
        self, x: Floats, instructions: int = BEST, parts: int = 1, panels: Sequence[int] = ()
    ) -> Floats:
        kind, n_rows, n_k = self.shape
        out = np.full((len(x), n_rows), np.nan, np.float32)
        scratch = aligned(lib.cspec_matmul_activations_size(kind, n_k, len(x)))
        lib.cspec_matmul(
            instructions,
            *self.shape,
            len(x),
            ffi.from_buffer(self.packed),
            ffi.from_buffer("float[]", np.ascontiguousarray(x)),
            ffi.from_buffer(scratch),
            ffi.from_buffer("float[]", out),
            ffi.new("int32_t[]", panels) if panels else ffi.NULL,
            len(panels),
            parts,
        )
        return out


def bits(values: Floats) -> bytes:
    return np.ascontiguousarray(values).tobytes()


# ---- right -------------------------------------------------------------------------------------------


class _Traits(ctypes.Structure):
    """ggml's functions for a type: a row of floats to it, and a dot product with another type."""

    _fields_ = [
        ("from_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
        (
            "vec_dot",
            ctypes.CFUNCTYPE(
                None,
                ctypes.c_int,
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.c_int,
            ),
        ),
        ("vec_dot_type", ctypes.c_int),
    ]


def stock_product(kind: Type, rows: Bytes, x: Floats) -> Floats:
    """The product as llama.cpp computes it."""
    folder = Path(llama_cpp.llama_cpp._lib._name).parent
    library = ctypes.CDLL(str(next(folder.glob("libggml-cpu.*"))))
    library.ggml_cpu_init()
    library.ggml_get_type_traits_cpu.restype = ctypes.POINTER(_Traits)
    traits = library.ggml_get_type_traits_cpu(int(kind)).contents
    convert = library.ggml_get_type_traits_cpu(traits.vec_dot_type).contents.from_float
    out = np.zeros((len(x), len(rows)), np.float32)
    for token in range(len(x)):
        column = aligned(x.shape[1] * 4 + 1024)
        convert(x[token].ctypes.data, column.ctypes.data, x.shape[1])
        for row in range(len(rows)):
            to = out[token, row:].ctypes.data
            traits.vec_dot(x.shape[1], to, 0, rows[row].ctypes.data, 0, column.ctypes.data, 0, 1)
    return out


@TYPES
def test_error_is_that_of_rounding_the_activations(kind: Type) -> None:
    n_rows, n_k = 40, 1024
    rows, x = random_weights(kind, n_rows, n_k), random_tokens(max(WIDTHS), n_k)
    weights = dequantize(rows, kind).astype(np.float64)
    product = Product(kind, n_rows, n_k, rows)
    # An activation is off by at most half a step, of which 127 make the block's largest magnitude.
    block = block_size(kind)
    steps = np.abs(x).reshape(len(x), -1, block).max(axis=2).repeat(block, axis=1) / 127
    rounding = 0 if kind in FLOATS else (steps / 2) @ np.abs(weights).T
    bound = rounding + 1e-5 * np.abs(x) @ np.abs(weights).T
    for width in WIDTHS:
        error = np.abs(product(x[:width]) - x[:width].astype(np.float64) @ weights.T)
        assert (error <= bound[:width]).all()


@TYPES
def test_error_is_no_larger_than_llama_cpps(kind: Type) -> None:
    n_rows, n_k, n_tokens = 48, 1024, 16
    rows, x = random_weights(kind, n_rows, n_k), random_tokens(n_tokens, n_k)
    exact = x.astype(np.float64) @ dequantize(rows, kind).astype(np.float64).T
    ours = np.sqrt(np.mean((Product(kind, n_rows, n_k, rows)(x) - exact) ** 2))
    stock = np.sqrt(np.mean((stock_product(kind, rows, x) - exact) ** 2))
    assert stock < 0.05 * np.sqrt(np.mean(exact**2))
    assert ours <= 1.02 * stock  # the two round the same activations independently


# ---- the same bits -----------------------------------------------------------------------------------


@TYPES
def test_bits_do_not_depend_on_the_way(kind: Type) -> None:
    n_rows, n_k = 37, 512
    product = Product(kind, n_rows, n_k, random_weights(kind, n_rows, n_k))
    x = random_tokens(max(WIDTHS), n_k)
    one_by_one = np.concatenate([product(x[t : t + 1], PLAIN) for t in range(len(x))])
    for width in WIDTHS:
        for instructions in INSTRUCTIONS:
            for parts in range(1, 6) if width in (1, 5, 9) else (1,):
                assert bits(product(x[:width], instructions, parts)) == bits(one_by_one[:width])


@TYPES
def test_nor_at_any_width_to_64_and_any_number_of_threads_to_64(kind: Type) -> None:
    n_rows, n_k = 37, 256  # three panels: most threads have none
    product = Product(kind, n_rows, n_k, random_weights(kind, n_rows, n_k))
    x = random_tokens(64, n_k)
    one_by_one = np.concatenate([product(x[t : t + 1], PLAIN) for t in range(len(x))])
    for n in range(1, 65):
        assert bits(product(x[:n])) == bits(one_by_one[:n])
        assert bits(product(x[:5], parts=n)) == bits(one_by_one[:5])
        assert bits(product(x[:20], parts=n)) == bits(one_by_one[:20])


@TYPES
def test_bits_do_not_depend_on_a_tokens_place(kind: Type) -> None:
    product = Product(kind, 16, 256, random_weights(kind, 16, 256))
    x = random_tokens(11, 256)
    assert bits(product(x)[::-1]) == bits(product(x[::-1]))


@TYPES
@pytest.mark.parametrize("panels", [[0], [2], [0, 1], [1, 3], [0, 1, 2, 3]], ids=str)
def test_rows_that_are_not_wanted_are_left_out_and_the_others_the_same_bits(
    kind: Type, panels: list[int]
) -> None:
    n_rows, n_k = 55, 256
    product = Product(kind, n_rows, n_k, random_weights(kind, n_rows, n_k))
    x = random_tokens(9, n_k)
    wanted = np.isin(np.arange(n_rows) // 16, panels)
    expected = np.where(wanted, product(x), np.float32(-np.inf))
    for width in (1, 9):
        for parts in (1, 3):
            out = product(x[:width], parts=parts, panels=panels)
            assert bits(out) == bits(expected[:width])


# ---- shapes ------------------------------------------------------------------------------------------


@TYPES
@pytest.mark.parametrize("n_rows", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("n_blocks", [1, 3])
def test_odd_shapes(kind: Type, n_rows: int, n_blocks: int) -> None:
    n_k = n_blocks * block_size(kind)
    rows, x = random_weights(kind, n_rows, n_k), random_tokens(9, n_k)
    product = Product(kind, n_rows, n_k, rows)
    exact = x.astype(np.float64) @ dequantize(rows, kind).astype(np.float64).T
    for instructions in INSTRUCTIONS:
        out = product(x, instructions)
        assert np.abs(out - exact).max() < 0.05 * np.abs(exact).max()
        assert bits(out) == bits(product(x, PLAIN))


@TYPES
def test_packed_weights_are_hardly_larger(kind: Type) -> None:
    n_rows, n_k = 1 << 20, 1 << 16  # far more than 2 GiB
    block, size = GGML_QUANT_SIZES[kind]
    packed = lib.cspec_matmul_packed_size(kind, n_rows, n_k)
    assert 1 <= packed / (n_rows * n_k // block * size) < 1.001


def test_what_is_not_covered() -> None:
    assert lib.cspec_matmul_packed_size(Type.IQ2_XXS, 16, 256) == 0
    assert lib.cspec_matmul_packed_size(Type.F32, 16, 256) == 0
    assert lib.cspec_matmul_packed_size(Type.Q4_K, 16, 128) == 0
    assert lib.cspec_matmul_packed_size(Type.Q4_K, 0, 256) == 0


# ---- what only ggml passes ---------------------------------------------------------------------------

# The functions beneath those for Python, which take some of the panels, and tokens with strides.
HEADER = Path(__file__).resolve().parents[2] / "cspec/matmul/matmul.h"
inner_ffi = FFI()
inner_ffi.cdef(
    "\n".join(line for line in HEADER.read_text().splitlines() if not line.startswith("#"))
)
inner: Any = inner_ffi.dlopen(_cspec.__file__)


def address(array: npt.NDArray[Any]) -> Any:
    return inner_ffi.cast("char *", array.ctypes.data)


def quantised_activations(kind: Type, x: Floats) -> Bytes:
    """Of tokens [a, b, c, n_k] with any strides but the last."""
    n_k, n_tokens = x.shape[-1], math.prod(x.shape[:-1])
    tokens = inner_ffi.new(
        "struct matmul_tokens *", [address(x), list(x.shape[2::-1]), list(x.strides[2::-1])]
    )
    out = aligned(lib.cspec_matmul_activations_size(kind, n_k, n_tokens))
    n_blocks = n_k // block_size(kind)
    inner.matmul_quantise(
        inner.matmul_find_type(kind), BEST, n_blocks, tokens, n_tokens, address(out), 0, n_blocks
    )
    return out


@TYPES
def test_views_and_strides(kind: Type) -> None:
    whole = random_tokens(2 * 3 * 5, 2 * 512).reshape(2, 5, 3, 2 * 512)
    views = {
        "part of each row": whole[..., 256:768],
        "every other token": whole[:, ::2, :, :512],
        "permuted": whole.transpose(0, 2, 1, 3)[..., :512],
        "repeated": np.broadcast_to(whole[:1, :, :, :512], (2, 5, 3, 512)),
    }
    for name, view in views.items():
        expected = quantised_activations(kind, np.ascontiguousarray(view))
        assert bits(quantised_activations(kind, view)) == bits(expected), name
    different = quantised_activations(kind, np.ascontiguousarray(views["part of each row"]))
    assert bits(different) != bits(quantised_activations(kind, whole[..., :512]))


@pytest.mark.skipif(sys.maxsize < 1 << 32, reason="no address space for it")
@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_K, Type.F16], ids=lambda kind: kind.name)
def test_offsets_past_4_gib(kind: Type) -> None:
    # Both tensors are address space without memory but for the last panel, of which a few rows exist.
    n_k, last_rows = 1 << 15, 5
    block, size = (32, 64) if kind in FLOATS else GGML_QUANT_SIZES[kind]
    row_size = n_k // block * size
    n_panels = (9 << 29) // (16 * row_size)
    n_rows = 16 * n_panels + last_rows
    found = inner.matmul_find_type(kind)
    panel_size = inner.matmul_panel_size(found, n_k // block_size(kind))
    few = random_weights(kind, last_rows, n_k)
    with mmap.mmap(-1, n_rows * row_size) as rows, mmap.mmap(-1, (n_panels + 1) * panel_size) as to:
        rows[-few.nbytes :] = few.tobytes()
        whole, panels = np.frombuffer(rows, np.uint8), np.frombuffer(to, np.uint8)
        inner.matmul_pack(
            found, n_rows, n_k, address(whole), address(panels), n_panels, n_panels + 1
        )
        x = random_tokens(9, n_k)
        activations = quantised_activations(kind, x[None, None])
        out = np.zeros((len(x), n_rows), np.float32)
        product = {
            "type": found,
            "level": BEST,
            "n_rows": n_rows,
            "n_k": n_k,
            "n_tokens": len(x),
            "panels": address(panels),
            "activations": address(activations),
            "out": inner_ffi.cast("float *", out.ctypes.data),
            "stride": n_rows,
        }
        inner.matmul_multiply(
            inner_ffi.new("struct matmul_product *", product), n_panels, n_panels + 1
        )
        del whole, panels  # the mappings cannot be closed while they are in use
        expected = Product(kind, last_rows, n_k, few)(x)
        assert bits(out[:, -last_rows:]) == bits(expected)
        assert not out[:, :-last_rows].any()


# A configuration of a thread's tile registers as another library may have left it: two of its own shape.
TILES = bytes([1, *[0] * 15, 32, 0, 16, 0, *[0] * 28, 5, 3, *[0] * 14])


@pytest.mark.skipif(not lib.cspec_matmul_has(lib.CSPEC_MATMUL_AMX), reason="no AMX")
@pytest.mark.parametrize("before", [TILES, bytes(64)], ids=["in use", "not in use"])
def test_a_threads_tiles_are_what_they_were(before: bytes) -> None:
    config = inner_ffi.new("struct matmul_tile_config *")
    inner_ffi.buffer(config)[:] = before
    inner.matmul_amx_load(config)
    try:
        product = Product(Type.Q4_K, 16, 256, random_weights(Type.Q4_K, 16, 256))
        for width in (1, 9, 64):
            product(random_tokens(width, 256), lib.CSPEC_MATMUL_AMX)
            inner.matmul_amx_save(config)
            assert bytes(inner_ffi.buffer(config)) == before
    finally:
        inner_ffi.buffer(config)[:] = bytes(64)
        inner.matmul_amx_load(config)


@pytest.mark.skipif(not lib.cspec_matmul_has(lib.CSPEC_MATMUL_AMX), reason="no AMX")
@pytest.mark.parametrize("kind", [k for k in SCALES if block_size(k) == 256], ids=lambda k: k.name)
def test_amx_takes_every_sum_to_its_end(kind: Type) -> None:
    """The largest quants and scales with equal activations: sums that are as large as they get."""
    for byte in (0x00, 0x3F, 0x7F, 0x80, 0xFF):
        rows = random_weights(kind, 16, 512, lambda shape: np.full(shape, 1.0))
        scales = rows.reshape(16, 2, -1)
        kept = {i + j for i in SCALES[kind] for j in (0, 1)}
        scales[:, :, [i for i in range(scales.shape[2]) if i not in kept]] = byte
        product = Product(kind, 16, 512, rows)
        for x in (np.ones((9, 512), np.float32), -np.ones((9, 512), np.float32)):
            assert bits(product(x, lib.CSPEC_MATMUL_AMX)) == bits(product(x, PLAIN))


# ---- extremes ----------------------------------------------------------------------------------------

SIXTEEN_BITS = {"zero": 0.0, "smallest": 6e-8, "subnormal": 3e-5, "largest": 65504.0}


@TYPES
@pytest.mark.parametrize("scale", SIXTEEN_BITS.values(), ids=SIXTEEN_BITS)
def test_extreme_scales(kind: Type, scale: float) -> None:
    rows = random_weights(kind, 17, 256, lambda shape: np.full(shape, scale))
    x = random_tokens(9, 256)
    exact = x.astype(np.float64) @ dequantize(rows, kind).astype(np.float64).T
    product = Product(kind, 17, 256, rows)
    for width in (5, 9):
        for instructions in INSTRUCTIONS:
            out = product(x[:width], instructions)
            assert np.isfinite(out).all()
            assert np.abs(out - exact[:width]).max() <= 0.05 * np.abs(exact).max()
            assert bits(out) == bits(product(x[:width], PLAIN))


@TYPES
@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-37, 1e-20, 1e20])
def test_extreme_activations(kind: Type, magnitude: float) -> None:
    rows = random_weights(kind, 16, 256)
    x = np.tile(np.sign(random_tokens(3, 256)) * np.float32(magnitude), (3, 1))
    exact = x.astype(np.float64) @ dequantize(rows, kind).astype(np.float64).T
    out = Product(kind, 16, 256, rows)(x)
    assert np.abs(out - exact).max() <= 0.05 * np.abs(exact).max() + 1e-34


@TYPES
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_token_and_is_not_hidden(kind: Type, value: float) -> None:
    product = Product(kind, 16, 512, random_weights(kind, 16, 512))
    x = random_tokens(9, 512)
    expected = product(x)
    x[1, 100] = value
    for width in (3, 9):
        for instructions in INSTRUCTIONS:
            out = product(x[:width], instructions)
            assert not np.isfinite(out[1]).any()
            assert bits(np.delete(out, 1, 0)) == bits(np.delete(expected[:width], 1, 0))
