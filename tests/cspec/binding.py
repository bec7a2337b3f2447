"""The C functions on numpy arrays, with nothing added."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pyspec._cspec import ffi, lib

Row = npt.NDArray[np.float32]

OFF = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repeat_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}


def floats(row: Row) -> Any:
    assert row.dtype == np.float32
    return ffi.from_buffer("float[]", row)


def raw_probabilities(
    logits: Row,
    out: Row,
    seen: Mapping[int, int] | None = None,
    bias: Mapping[int, float] | None = None,
    allowed: Iterable[int] | None = None,
    **settings: float,
) -> int:
    """The status; the distribution is in out."""
    seen, bias = seen or {}, bias or {}
    words = ffi.NULL
    if allowed is not None:
        words = ffi.new("uint32_t[]", (len(logits) + 31) // 32)
        for id_ in allowed:
            words[id_ // 32] |= 1 << id_ % 32
    return lib.cspec_probabilities(
        floats(logits),
        floats(out),
        len(logits),
        ffi.new("cspec_sampling *", OFF | settings),
        ffi.new("int32_t[]", list(seen)),
        ffi.new("int32_t[]", list(seen.values())),
        len(seen),
        ffi.new("int32_t[]", list(bias)),
        ffi.new("float[]", list(bias.values())),
        len(bias),
        words,
    )


def probabilities(logits: npt.ArrayLike, **settings: Any) -> Row:
    row = np.array(logits, np.float32)
    out = np.full_like(row, np.nan)
    assert raw_probabilities(row, out, **settings) == lib.CSPEC_OK
    return out


def softmax_of(logits: Row, token: int) -> float:
    return lib.cspec_softmax_of(floats(logits), len(logits), token)


class Round:
    """The rows and drafted ids of one round, ready for the rules. A q row may be None."""

    def __init__(
        self,
        p: Sequence[npt.ArrayLike],
        q: Sequence[npt.ArrayLike | None],
        drafted: Sequence[int],
    ) -> None:
        self.gamma = len(drafted)
        self._p = [np.array(row, np.float32) for row in p]
        self._q = [None if row is None else np.array(row, np.float32) for row in q]
        self._arguments = (
            ffi.new("float *[]", [floats(row) for row in self._p]),
            ffi.new("float *[]", [ffi.NULL if r is None else floats(r) for r in self._q]),
            ffi.new("int32_t[]", list(drafted)),
            self.gamma,
            len(self._p[0]),
        )
        self._token = ffi.new("int32_t *")

    def token(self, u_accept: Sequence[float], u_draw: float) -> tuple[int, int]:
        t = lib.cspec_verify_token(*self._arguments, u_accept, u_draw, self._token)
        return t, self._token[0]

    def block(self, u_accept: Sequence[float], u_draw: float) -> tuple[int, int]:
        t = lib.cspec_verify_block(*self._arguments, u_accept, u_draw, self._token)
        return t, self._token[0]

    def block_thresholds(self) -> tuple[list[float], list[float]]:
        a, b = (ffi.new("double[]", self.gamma + 1) for _ in range(2))
        lib.cspec_block_thresholds(*self._arguments, a, b)
        return list(a), list(b)

    def coupled(self, seed: int, position: int) -> tuple[int, int]:
        p, _, drafted, gamma, n_vocab = self._arguments
        t = lib.cspec_verify_coupled(p, drafted, gamma, n_vocab, seed, position, self._token)
        return t, self._token[0]


def draw(p: npt.ArrayLike, u: float, q: npt.ArrayLike | None = None, scale: float = 1.0) -> int:
    row = np.array(p, np.float32)
    taken = ffi.NULL if q is None else floats(np.array(q, np.float32))
    return lib.cspec_draw(floats(row), taken, scale, len(row), u)


def coupled_choice(p: Row, seed: int, position: int) -> int:
    return lib.cspec_coupled_choice(floats(p), len(p), seed, position)
