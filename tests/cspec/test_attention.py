"""Attention against softmax(Q K') V in double precision, and against itself bit by bit."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from pyspec._cspec import ffi, lib

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]

NAMES = {
    lib.CSPEC_KERNELS_C: "c",
    lib.CSPEC_KERNELS_AVX2: "avx2",
    lib.CSPEC_KERNELS_AVX512: "avx512",
}


def available() -> list[int]:
    """What this CPU can run, plain C first."""
    before = os.environ.pop("PYSPEC_KERNELS", None)
    best = lib.cspec_kernels()
    if before is not None:
        os.environ["PYSPEC_KERNELS"] = before
    return [kernels for kernels in NAMES if kernels <= max(best, lib.CSPEC_KERNELS_C)]


BEST = available()[-1]


@dataclass
class Attention:
    """One operation: shapes as llama.cpp passes them, except that all arrays are contiguous."""

    q: Floats  # [sequences, tokens, heads, k_size]
    k: Halves  # [sequences, cells, kv_heads, k_size]
    v: Halves  # [sequences, cells, kv_heads, v_size]
    mask: Halves | None = None  # [mask_sequences, mask_heads, tokens, cells]
    sinks: Floats | None = None  # [heads]
    max_bias: float = 0.0
    soft_cap: float = 0.0
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        self.scale = float(np.float32(self.q.shape[3] ** -0.5))

    def compute(self, kernels: int = BEST, threads: int = 1) -> Floats:
        """[sequences, tokens, heads, v_size], the threads one after the other."""
        sequences, tokens, heads, k_size = self.q.shape
        _, cells, kv_heads, v_size = self.v.shape
        out = np.full((sequences, tokens, heads, v_size), np.nan, np.float32)
        operation = ffi.new("cspec_attention *")
        kept = []  # the buffers, alive until the end

        def pointer(array: npt.NDArray[Any] | None, kind: str = "char[]") -> Any:
            if array is None:
                return ffi.NULL
            kept.append(ffi.from_buffer(kind, array))
            return kept[-1]

        def strides(array: npt.NDArray[Any] | None, *axes: int) -> list[int]:
            return [0, 0, 0] if array is None else [array.strides[axis] for axis in axes]

        operation.kernels = kernels
        operation.n_sequences, operation.n_tokens, operation.n_heads = sequences, tokens, heads
        operation.n_kv_heads, operation.n_cells = kv_heads, cells
        operation.k_size, operation.v_size = k_size, v_size
        operation.q, operation.k, operation.v = pointer(self.q), pointer(self.k), pointer(self.v)
        operation.mask, operation.out = pointer(self.mask), pointer(out)
        operation.sinks = pointer(self.sinks, "float[]")
        operation.mask_heads = operation.mask_sequences = 1
        if self.mask is not None:
            operation.mask_sequences, operation.mask_heads = self.mask.shape[:2]
        operation.q_stride = strides(self.q, 1, 2, 0)
        operation.k_stride, operation.v_stride = strides(self.k, 1, 2, 0), strides(self.v, 1, 2, 0)
        operation.mask_stride = strides(self.mask, 2, 1, 0)
        operation.out_stride = strides(out, 1, 2, 0)
        operation.scale, operation.max_bias, operation.soft_cap = (
            self.scale,
            self.max_bias,
            self.soft_cap,
        )
        assert lib.cspec_attention_covers(operation)
        # What lies in the memory is anything.
        size = lib.cspec_attention_work_size(operation, threads)
        work = np.full(size + 64, 0xFF, np.uint8)
        for step in (lib.cspec_attention_segments, lib.cspec_attention_combine):
            for thread in range(threads):
                step(operation, thread, threads, ffi.from_buffer(work))
        assert (work[size:] == 0xFF).all()
        return out

    def tokens(self, first: int, last: int) -> Attention:
        """The same operation on some of its tokens."""
        mask = None if self.mask is None else np.ascontiguousarray(self.mask[:, :, first:last])
        q = np.ascontiguousarray(self.q[:, first:last])
        return Attention(q, self.k, self.v, mask, self.sinks, self.max_bias, self.soft_cap)

    def cells(self, n: int) -> Attention:
        """The same operation on the first n cells."""
        mask = None if self.mask is None else np.ascontiguousarray(self.mask[..., :n])
        k, v = np.ascontiguousarray(self.k[:, :n]), np.ascontiguousarray(self.v[:, :n])
        return Attention(self.q, k, v, mask, self.sinks, self.max_bias, self.soft_cap)

    def expected(self) -> npt.NDArray[np.float64]:
        sequences, tokens, heads, _ = self.q.shape
        group = heads // self.k.shape[2]
        out = np.zeros((sequences, tokens, heads, self.v.shape[3]))
        slopes = alibi_slopes(heads, self.max_bias)
        for s, t, h in np.ndindex(sequences, tokens, heads):
            scores = self.k[s, :, h // group].astype(np.float64) @ self.q[s, t, h] * self.scale
            if self.soft_cap:
                scores = self.soft_cap * np.tanh(scores / self.soft_cap)
            seen = np.ones(len(scores), bool)
            if self.mask is not None:
                row = self.mask[s % self.mask.shape[0], h % self.mask.shape[1], t]
                seen = row != -np.inf
                scores[seen] += slopes[h] * row[seen].astype(np.float64)
            scores, values = scores[seen], self.v[s, seen, h // group].astype(np.float64)
            if self.sinks is not None:
                scores = np.append(scores, self.sinks[h])
                values = np.vstack([values, np.zeros(values.shape[1])])
            if len(scores):
                weights = np.exp(scores - scores.max())
                out[s, t, h] = weights @ values / weights.sum()
        return out


def alibi_slopes(heads: int, max_bias: float) -> list[float]:
    """Press et al., "Train Short, Test Long", and its authors' code for other than powers of two."""
    if max_bias == 0:
        return [1.0] * heads
    power = 2 ** int(np.log2(heads))
    slopes = [2 ** (-max_bias * (i + 1) / power) for i in range(power)]
    extra = [2 ** (-max_bias * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)]
    return slopes + extra[: heads - power]


def causal(tokens: int, cells: int, last: int, window: int = 0) -> Halves:
    """A mask whose last token sees the cells up to `last`."""
    position = last - tokens + 1 + np.arange(tokens)[:, None]
    cell = np.arange(cells)[None, :]
    seen = (cell <= position) & ((cell > position - window) | (window == 0))
    return np.where(seen, 0, -np.inf).astype(np.float16)[None, None]


def example(
    *,
    tokens: int = 8,
    heads: int = 6,
    kv_heads: int = 2,
    size: int = 64,
    v_size: int | None = None,
    cells: int = 288,
    sequences: int = 1,
    seed: int = 1,
    spread: float = 1.0,
) -> Attention:
    random = np.random.default_rng(seed)
    v_size = v_size or size
    return Attention(
        random.normal(0, spread, (sequences, tokens, heads, size)).astype(np.float32),
        random.normal(0, 1, (sequences, cells, kv_heads, size)).astype(np.float16),
        random.normal(0, 1, (sequences, cells, kv_heads, v_size)).astype(np.float16),
    )


def same_bits(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


# ---- right -------------------------------------------------------------------------------------------

# Each changes one thing of the example above.
SHAPES: dict[str, dict[str, int]] = {
    "head of 16": {"size": 16},
    "head of 80": {"size": 80},
    "head of 96": {"size": 96},
    "head of 112": {"size": 112},
    "head of 128": {"size": 128},
    "head of 256": {"size": 256},
    "K of 192, V of 128": {"size": 192, "v_size": 128},
    "K of 576, V of 512": {"size": 576, "v_size": 512, "kv_heads": 1},
    "a head of K for each": {"kv_heads": 6},
    "one head of K": {"kv_heads": 1},
    "groups of 7": {"heads": 14},
    "groups of 12": {"heads": 24},
    "a group of 71": {"heads": 71, "kv_heads": 1},
    "one cell": {"cells": 1},
    "cells past a block": {"cells": 33},
    "cells short of a vector": {"cells": 143},
    "three sequences": {"sequences": 3},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernels", available(), ids=NAMES.get)
def test_is_softmax_of_q_k_times_v(shape: str, kernels: int) -> None:
    a = example(**{"tokens": 3, **SHAPES[shape]})
    a.mask = causal(3, a.k.shape[1], a.k.shape[1] - 1)
    np.testing.assert_allclose(a.compute(kernels), a.expected(), rtol=0, atol=3e-6)


def variants() -> dict[str, Attention]:
    """One operation with each of the options."""
    made = {}
    for name in (
        "no mask",
        "causal",
        "window",
        "narrow window",
        "soft cap",
        "sinks",
        "ALiBi",
        "all",
    ):
        a = example(heads=6, tokens=9, cells=544)
        a.mask = causal(9, 544, 530)
        made[name] = a
    random = np.random.default_rng(2)
    made["no mask"].mask = None
    made["window"].mask = causal(9, 544, 530, window=300)
    made["narrow window"].mask = causal(9, 544, 530, window=3)
    made["soft cap"].soft_cap = 5.0
    made["sinks"].sinks = random.normal(0, 3, 6).astype(np.float32)
    distance = np.abs(np.arange(544)[None, :] - (522 + np.arange(9))[:, None])
    for name in ("ALiBi", "all"):
        mask = made[name].mask
        assert mask is not None
        made[name].mask = np.where(mask == 0, -distance, mask).astype(np.float16)
        made[name].max_bias = 8.0
    made["all"].soft_cap, made["all"].sinks = 2.0, made["sinks"].sinks
    # Another mask for each head, and scattered.
    a = example(heads=6, tokens=9, cells=544)
    a.mask = np.where(random.random((1, 6, 9, 544)) < 0.7, 0, -np.inf).astype(np.float16)
    made["scattered"] = a
    return made


@pytest.mark.parametrize("name", variants())
@pytest.mark.parametrize("kernels", available(), ids=NAMES.get)
def test_masks_caps_sinks_and_slopes(name: str, kernels: int) -> None:
    a = variants()[name]
    np.testing.assert_allclose(a.compute(kernels), a.expected(), rtol=0, atol=3e-6)


def test_masks_repeat_over_sequences() -> None:
    a = example(tokens=4, cells=160, sequences=4)
    a.mask = np.concatenate([causal(4, 160, 100), causal(4, 160, 150)])
    np.testing.assert_allclose(a.compute(), a.expected(), rtol=0, atol=3e-6)


def test_extreme_scores_do_not_overflow() -> None:
    a = example(spread=1e4)
    a.mask = causal(8, 288, 280)
    out = a.compute()
    assert np.isfinite(out).all()
    # The maximum takes nearly all; where two compete, scores of 1e5 are themselves only good to 1e-2.
    assert np.median(np.abs(out - a.expected())) < 1e-6


def test_a_row_that_sees_nothing_is_zero() -> None:
    a = example(tokens=3, cells=64)
    a.mask = causal(3, 64, 1)  # the first sees none
    out = a.compute()
    assert (out[0, 0] == 0).all()
    assert np.isfinite(out).all()
    a.sinks = np.ones(6, np.float32)
    assert (a.compute()[0, 0] == 0).all()


def test_a_number_that_is_none_shows_where_it_is_seen() -> None:
    a = example(tokens=3, cells=200)
    a.mask = causal(3, 200, 150)
    a.k[0, 149, 0, 5] = np.nan  # the second and third see cell 149
    out = a.compute()
    assert np.isfinite(out[0, 0]).all()
    assert np.isnan(out[0, 1:, :3]).all()
    assert np.isfinite(out[0, 1:, 3:]).all()


# ---- the same bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", variants())
def test_all_kernels_give_the_same_bits(name: str) -> None:
    a = variants()[name]
    first, *others = [a.compute(kernels) for kernels in available()]
    assert all(same_bits(first, other) for other in others)


@pytest.mark.parametrize("size", [16, 80, 128, 256])
def test_all_kernels_give_the_same_bits_at_any_head_size(size: int) -> None:
    a = example(size=size, tokens=3, cells=170)
    a.mask = causal(3, 170, 160)
    first, *others = [a.compute(kernels) for kernels in available()]
    assert all(same_bits(first, other) for other in others)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 13, 21, 33, 64])
@pytest.mark.parametrize("kernels", available(), ids=NAMES.get)
def test_a_row_is_the_same_at_any_width(width: int, kernels: int) -> None:
    tokens = 64 if kernels != lib.CSPEC_KERNELS_C else min(width + 1, 16)
    a = example(tokens=tokens, size=32, heads=14, cells=512)
    a.mask = causal(tokens, 512, 450, window=310)
    whole = a.compute(kernels, threads=2)
    for first in range(0, tokens, width):
        last = min(first + width, tokens)
        assert same_bits(a.tokens(first, last).compute(kernels), whole[:, first:last])


@pytest.mark.parametrize("name", variants())
def test_a_row_is_the_same_alone_with_every_option(name: str) -> None:
    a = variants()[name]
    whole = a.compute()
    for t in range(whole.shape[1]):
        assert same_bits(a.tokens(t, t + 1).compute(), whole[:, t : t + 1])


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_any_number_of_threads(tokens: int) -> None:
    a = example(tokens=tokens, cells=700, size=32)
    a.mask = causal(tokens, 700, 650)
    one = a.compute()
    for threads in (2, 3, 4, 5, 64):
        assert same_bits(a.compute(threads=threads), one)


def test_more_masked_cells_change_nothing() -> None:
    a = example(tokens=5, cells=1024)
    a.mask = causal(5, 1024, 200)
    whole = a.compute(threads=3)
    for n in (201, 208, 224, 256, 512):
        assert same_bits(a.cells(n).compute(threads=3), whole)


@pytest.mark.parametrize("kernels", available(), ids=NAMES.get)
def test_what_masked_cells_hold_never_matters(kernels: int) -> None:
    a = example(tokens=5, cells=600)
    a.mask = causal(5, 600, 500, window=200)
    whole = a.compute(kernels)
    for value in (np.nan, np.inf, -np.inf, 65504, -0.0):
        for t in range(5):
            one = a.tokens(t, t + 1)
            one.k, one.v = one.k.copy(), one.v.copy()
            assert one.mask is not None
            unseen = one.mask[0, 0, 0] == -np.inf
            one.k[:, unseen], one.v[:, unseen] = value, value
            assert same_bits(one.compute(kernels), whole[:, t : t + 1])


@pytest.mark.parametrize("kernels", available(), ids=NAMES.get)
def test_what_other_rows_see_never_matters(kernels: int) -> None:
    a = example(tokens=5, cells=160)
    a.mask = causal(5, 160, 150)
    whole = a.compute(kernels)
    a.k[0, 147:], a.v[0, 147:] = np.nan, np.inf  # the first sees up to cell 146
    assert same_bits(a.compute(kernels)[:, 0], whole[:, 0])


def test_sequences_do_not_meet() -> None:
    a = example(tokens=4, cells=200, sequences=3)
    a.mask = causal(4, 200, 190)
    whole = a.compute(threads=2)
    for s in range(3):
        one = Attention(a.q[s : s + 1], a.k[s : s + 1], a.v[s : s + 1], a.mask)
        assert same_bits(one.compute(), whole[s : s + 1])


def test_subnormal_halves_are_converted_alike() -> None:
    a = example(tokens=1, cells=96)
    a.v = np.arange(-48 * 128, 48 * 128).reshape(a.v.shape).astype(np.int16).view(np.float16)
    a.v[~np.isfinite(a.v)] = 0
    a.v[np.abs(a.v) > 1] = 2.0**-24
    first, *others = [a.compute(kernels) for kernels in available()]
    assert all(same_bits(first, other) for other in others)


# ---- what is not covered -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"k_size": 40},
        {"v_size": 72},
        {"k_size": 592},
        {"n_heads": 5},
        {"kernels": 0},
        {"n_cells": 0},
    ],
)
def test_other_shapes_are_refused(change: dict[str, int]) -> None:
    fields = {
        "kernels": BEST, "k_size": 64, "v_size": 64, "n_heads": 4, "n_kv_heads": 2, "n_cells": 32,
        "n_tokens": 1, "n_sequences": 1,
    }  # fmt: skip
    assert lib.cspec_attention_covers(ffi.new("cspec_attention *", fields))
    assert not lib.cspec_attention_covers(ffi.new("cspec_attention *", fields | change))


@pytest.mark.parametrize(("value", "kernels"), [("off", "OFF"), ("c", "C")])
def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch, value: str, kernels: str) -> None:
    monkeypatch.setenv("PYSPEC_KERNELS", value)
    assert lib.cspec_kernels() == getattr(lib, f"CSPEC_KERNELS_{kernels}")
