"""Sequences of tokens under evaluation, each with its KV cache."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import llama_cpp
import numpy as np
import numpy.typing as npt
import psutil

from pyspec import bridge, worker
from pyspec.errors import ModelError, PyspecError
from pyspec.llama.library import complaints, default_threads, why
from pyspec.llama.model import Model

Logits = npt.NDArray[np.float32]

# Tokens that a recurrent state can go back where llama.cpp keeps snapshots of it: a copy of the state each.
_SNAPSHOTS = 8
# The token that fills a pass up: any will do, for nothing of it is kept.
_FILLING = 0


class RollbackError(PyspecError):
    """A context could not drop the end of its sequence."""


class _Shared:
    """A llama_context, its batch, and how many of its sequences are open. Changed on the worker only.

    Args:
        model: What to evaluate with.
        n_sequences: Each has cells of its own, so that none changes another's logits.
        n_ctx: Positions of each.
        n_batch: Most tokens of one pass.
        n_logits: Most rows of logits of one sequence in a pass.
        threads: Threads of a pass.
    """

    def __init__(
        self,
        model: Model,
        n_sequences: int,
        *,
        n_ctx: int,
        n_batch: int,
        n_logits: int,
        threads: int | None,
    ) -> None:
        # llama.cpp rounds the size up; the size that was asked for is the one that counts.
        self.n_ctx = n_ctx
        self.n_batch = min(n_batch, n_ctx)
        self.n_logits = min(n_logits, self.n_batch)
        self.threads = threads or default_threads()
        self.n_open = n_sequences
        # Whether products of a wide pass were left to llama.cpp, whose results depend on the width.
        self.left_wide = False
        self.pointer: Any = None
        self.batch: Any = None
        _check_memory(model, n_ctx * n_sequences)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = n_ctx * n_sequences
        params.n_batch = params.n_ubatch = self.n_batch
        params.n_seq_max = n_sequences
        params.kv_unified = n_sequences == 1
        params.n_outputs_max = min(self.n_batch, self.n_logits * n_sequences)
        params.n_outputs_max_per_seq = self.n_logits
        params.n_threads = params.n_threads_batch = self.threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        # A sliding window of fewer cells reports removals that leave it wrong (docs/memory-kinds.md).
        params.swa_full = True
        # With less room than this beyond the snapshots llama.cpp ends the process.
        params.n_rs_seq = max(0, min(_SNAPSHOTS, self.n_batch - 2))
        params.offload_kqv = False
        params.op_offload = False
        params.abort_callback = ctypes.cast(worker.ABORT_CALLBACK, llama_cpp.ggml_abort_callback)
        params.abort_callback_data = worker.ABORT_FLAG
        complaints.clear()
        weights = self._weights = model.weights

        def create() -> None:
            self.pointer = llama_cpp.llama_init_from_model(weights.pointer, params)
            weights.n_contexts += bool(self.pointer)

        worker.run(create)
        if not self.pointer:
            raise ModelError(f"{model.path}: no context of {n_ctx} tokens: {why()}")
        self.batch = llama_cpp.llama_batch_init(self.n_batch, 0, 1)

    def release(self) -> None:
        """One open sequence fewer; with the last one go the cells and buffers."""
        self.n_open -= 1
        if self.n_open == 0:
            llama_cpp.llama_batch_free(self.batch)
            llama_cpp.llama_free(self.pointer)
            self._weights.n_contexts -= 1
            if self._weights.unwanted:
                self._weights.release()


def _check_memory(model: Model, n_cells: int) -> None:
    """Refuse a cache larger than free memory: Linux would grant it and kill the process later."""
    needed, free = model.kv_bytes(n_cells), psutil.virtual_memory().available
    if needed > free:
        raise ModelError(
            f"{model.path}: a context of {n_cells} tokens needs {needed / 1e9:.1f} GB of KV cache "
            f"and {free / 1e9:.1f} GB of memory is free: ask for a smaller context"
        )


class Context:
    """One sequence under evaluation: positions 0 to length - 1 are in its KV cache.

    Args:
        model: What to evaluate with.
        n_ctx: Positions that the cache has room for.
        n_batch: Most tokens of one pass; longer evaluations are split at multiples of it.
        n_logits: Most rows of logits asked of one evaluation.
        threads: Threads of a pass.
        place: Given by `several`: what the sequence shares with others, and its number there.

    Attributes:
        sequence: Its number among those of `several`, from 0.
        panels: Which logits `evaluate` computes, as for bridge.shortlist; None for all.

    Raises:
        ModelError: llama.cpp could not make the context, usually for want of memory.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_batch: int = 512,
        n_logits: int = 1,
        threads: int | None = None,
        place: tuple[_Shared, int] | None = None,
    ) -> None:
        self._shared: _Shared | None = None
        self.model = model
        if place is None:
            shared = _Shared(
                model, 1, n_ctx=n_ctx, n_batch=n_batch, n_logits=n_logits, threads=threads
            )
            place = shared, 0
        self._shared, self.sequence = place
        self.n_ctx, self.n_batch = self._shared.n_ctx, self._shared.n_batch
        self.n_logits, self.threads = self._shared.n_logits, self._shared.threads
        # Most tokens that can be rolled back after a pass; llama.cpp says how many snapshots it really keeps.
        self.max_rollback: int = (
            llama_cpp.llama_n_rs_seq(self.handle) if model.is_recurrent else n_ctx
        )
        self.panels: npt.NDArray[np.int32] | None = None
        self.length = 0
        self._first_row = 0
        self._n_rows = 0
        self._last_width = 0

    @classmethod
    def several(
        cls,
        n: int,
        model: Model,
        *,
        n_ctx: int,
        n_batch: int = 512,
        n_logits: int = 1,
        threads: int | None = None,
    ) -> list[Context]:
        """Make n contexts that can take part in the same passes (`evaluate_together`).

        Each has n_ctx positions of its own, and its logits are the same bits as if it were alone. An
        evaluation of any of them ends the validity of all their rows of logits.

        Args and errors are those of Context.
        """
        shared = _Shared(model, n, n_ctx=n_ctx, n_batch=n_batch, n_logits=n_logits, threads=threads)
        return [cls(model, n_ctx=n_ctx, place=(shared, sequence)) for sequence in range(n)]

    @property
    def handle(self) -> Any:
        """The llama_context pointer.

        Raises:
            ModelError: The context was closed.
        """
        return self._open.pointer

    @property
    def _open(self) -> _Shared:
        if self._shared is None:
            raise ModelError(f"{self.model.path}: the context is closed")
        return self._shared

    @property
    def _memory(self) -> Any:
        return llama_cpp.llama_get_memory(self.handle)

    def evaluate(self, tokens: Sequence[int], *, n_logits: int = 0) -> None:
        """Append tokens to the sequence, in passes of at most n_batch.

        Args:
            tokens: [n] ids; position length and following.
            n_logits: How many of the last tokens' logits to compute; all of these must be in one pass.

        Raises:
            ModelError: A pass failed. The sequence is as before, or forgotten whole where the model's memory
                cannot go back.
        """
        start = self.length
        self._check(tokens, n_logits)
        try:
            for offset in range(0, len(tokens), self.n_batch):
                chunk = tokens[offset : offset + self.n_batch]
                is_last = offset + len(chunk) == len(tokens)
                self._pass(chunk, n_logits if is_last else 0)
        except BaseException:
            self._remove_from(start)
            raise

    def _check(self, tokens: Sequence[int], n_logits: int) -> None:
        if self.length + len(tokens) > self.n_ctx:
            raise ModelError(
                f"{self.model.name}: {len(tokens)} tokens after {self.length} overflow a context of "
                f"{self.n_ctx}"
            )
        if n_logits > self.n_logits or n_logits > len(tokens):
            raise ValueError(f"{n_logits} rows of logits asked of {len(tokens)} tokens")

    def _pass(self, tokens: Sequence[int], n_logits: int) -> None:
        if n_logits > len(tokens):
            raise ValueError(f"the last {n_logits} tokens do not lie in one pass of {len(tokens)}")
        _decode([Part(self, tokens, n_logits)], panels=self.panels)

    def logits(self, row: int) -> Logits:
        """A view of llama.cpp's own row of logits, valid until the next evaluation.

        Args:
            row: Index among the rows asked for; negative ones count from the last.

        Returns:
            [n_vocab] float32, writeable.
        """
        if not -self._n_rows <= row < self._n_rows:
            raise ValueError(f"row {row} of {self._n_rows} rows of logits")
        pointer = llama_cpp.llama_get_logits_ith(self.handle, self._first_row + row % self._n_rows)
        return np.ctypeslib.as_array(pointer, shape=(self.model.n_vocab,))

    def bit_exact_reason(
        self, width: int, *, reused: bool = False, shared_wide: bool = False
    ) -> str | None:
        """Why logits may depend on how many tokens are evaluated together; None if they do not.

        Args:
            width: Tokens of the widest pass whose logits matter.
            reused: Whether cells of the prompt were evaluated for another text, in passes of other widths.
            shared_wide: Whether a pass shared with other sequences was one whose logits depend on its width.
        """
        return bridge.bit_exact_reason(
            width=width,
            extra_buffers=self.model.use_extra_bufts,
            reused=reused and self._open.left_wide,
            shared_wide=shared_wide,
        )

    def truncate(self, length: int) -> None:
        """Roll back: forget every position from `length` on, of which there may be none.

        Raises:
            RollbackError: The model's memory cannot drop its end. The sequence has been forgotten whole.
        """
        if not self._remove_from(length):
            raise RollbackError(
                f"{self.model.name}: its memory cannot roll back to position {length}: "
                "decode without a draft"
            )

    def _remove_from(self, length: int) -> bool:
        # llama.cpp agrees to take a recurrent state back over the whole last pass, and gets it wrong.
        possible = not self.model.is_recurrent or (
            self.length - self._last_width < length <= self.length
        )
        memory, sequence = self._memory, self.sequence
        if possible and worker.run(
            lambda: llama_cpp.llama_memory_seq_rm(memory, sequence, length, -1)
        ):
            self.length = min(self.length, length)
            return True
        self.clear()
        return False

    def clear(self) -> None:
        """Forget the sequence."""
        memory, sequence = self._memory, self.sequence
        worker.run(lambda: llama_cpp.llama_memory_seq_rm(memory, sequence, -1, -1))
        self.length = 0

    def copy_from(self, other: Context, length: int) -> None:
        """Take over the first `length` positions of another of `several`, in place of what this one holds."""
        memory, source, sequence = self._memory, other.sequence, self.sequence
        # Between caches of their own llama.cpp copies whole ones only.
        worker.run(lambda: llama_cpp.llama_memory_seq_cp(memory, source, sequence, -1, -1))
        self.length, self._last_width = other.length, other._last_width
        self.truncate(length)

    def close(self) -> None:
        """Free the cache and buffers."""
        shared, self._shared = self._shared, None
        if shared is not None:
            worker.run(shared.release)

    def __del__(self) -> None:
        if self._shared is not None:
            worker.free_later(self._shared.release)


class Part(NamedTuple):
    """What one sequence adds to a shared pass.

    Attributes:
        context: One of `several`.
        tokens: [n] ids; position length and following. None at all only fill the pass up.
        n_logits: How many of the last tokens' logits to compute.
    """

    context: Context
    tokens: Sequence[int]
    n_logits: int


def evaluate_together(parts: Sequence[Part]) -> bool:
    """Append tokens to several sequences in one pass.

    llama.cpp takes sequences into one pass when their numbers follow one another and they add equally many
    tokens; it makes several passes of others. So the shorter parts are filled up, and the filling is rolled
    back; a part without tokens joins the sequences on both of its sides.

    Args:
        parts: Of different contexts of one `several`, each with room for as many tokens as the longest has,
            all together at most n_batch.

    Returns:
        Whether logits may depend on which sequences took part: llama.cpp took products of a wide pass.

    Raises:
        ModelError: The pass failed. The sequences are as before.
    """
    if len(parts) == 1:
        context, tokens, n_logits = parts[0]
        context.evaluate(tokens, n_logits=n_logits)
        return False
    parts = sorted(parts, key=lambda part: part.context.sequence)
    width = max(len(part.tokens) for part in parts)
    for context, tokens, n_logits in parts:
        context._check([_FILLING] * width, 0)
        context._check(tokens, n_logits)
    starts = [part.context.length for part in parts]
    try:
        left_wide = _decode(parts, width)
        for start, part in zip(starts, parts, strict=True):
            part.context.truncate(start + len(part.tokens))
        return left_wide
    except BaseException:
        for start, part in zip(starts, parts, strict=True):
            part.context._remove_from(start)
        raise


def _decode(
    parts: Sequence[Part], width: int = 0, panels: npt.NDArray[np.int32] | None = None
) -> bool:
    """One call of llama_decode; parts of fewer than `width` tokens are filled up to it.

    Returns:
        Whether products were left to llama.cpp for the pass's width.
    """
    shared = parts[0].context._open
    batch, n = shared.batch, 0
    for context, tokens, n_logits in parts:
        first = n
        filled = [*tokens, *[_FILLING] * (width - len(tokens))]
        for i, token in enumerate(filled):
            batch.token[n] = token
            batch.pos[n] = context.length + i
            batch.n_seq_id[n] = 1
            batch.seq_id[n][0] = context.sequence
            batch.logits[n] = len(tokens) - n_logits <= i < len(tokens)
            n += 1
        context._first_row = first + len(tokens) - n_logits
    batch.n_tokens = n
    complaints.clear()
    n_vocab = parts[0].context.model.n_vocab

    def decode() -> tuple[int, bool]:
        # On the worker no other pass counts meanwhile.
        before = bridge.counts().wide
        with bridge.shortlist(panels, n_vocab):
            status = int(llama_cpp.llama_decode(shared.pointer, batch))
        left_wide = bridge.counts().wide > before
        shared.left_wide |= left_wide
        return status, left_wide

    status, left_wide = worker.run(decode)
    if status != 0:
        context = parts[0].context
        raise ModelError(
            f"{context.model.name}: evaluating {n} tokens at position {context.length} failed "
            f"with status {status}: {why()}"
        )
    for context, tokens, n_logits in parts:
        context._n_rows = n_logits
        context._last_width = max(width, len(tokens))
        context.length += context._last_width
    return left_wide
