"""Models and contexts of llama.cpp. The only module that imports llama_cpp.

A Model is a loaded GGUF file with its vocabulary; a Context evaluates tokens of one sequence with it and
holds the sequence's KV cache. llama.cpp's own log lines go to the logger "pyspec.llama".
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

# Should llama.cpp end the process, the debugger's report that it would start belongs on no one's output.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

import llama_cpp
import numpy as np
import numpy.typing as npt
import psutil

from pyspec import bridge, worker
from pyspec.errors import ModelError, PyspecError
from pyspec.gguf_file import check_gguf

Logits = npt.NDArray[np.float32]

# Tokens that a recurrent state can go back where llama.cpp keeps snapshots of it: a copy of the state each.
_SNAPSHOTS = 8

log = logging.getLogger("pyspec.llama")


class RollbackError(PyspecError):
    """A context could not drop the end of its sequence."""


# ---- llama.cpp's log ---------------------------------------------------------------------------------

_LOG_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.WARNING}
_CONTINUED = 5
# llama.cpp says why a call failed only in its log, so its last complaints are kept for the message.
_complaints: deque[str] = deque(maxlen=8)
_last_level = logging.DEBUG


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _to_logging(level: int, text: bytes, _: object) -> None:
    global _last_level
    if level != _CONTINUED:
        _last_level = _LOG_LEVELS.get(level, logging.DEBUG)
    line = text.decode("utf-8", "replace").strip(" \n.")
    if line:
        log.log(_last_level, "%s", line)
        if _last_level == logging.WARNING:
            _complaints.append(line)


llama_cpp.llama_log_set(_to_logging, None)
llama_cpp.llama_backend_init()


def _why() -> str:
    """The first of llama.cpp's last complaints, the one nearest to the cause."""
    return _complaints[0] if _complaints else "llama.cpp gave no reason"


# ---- the machine ------------------------------------------------------------------------------------


def default_threads() -> int:
    """Physical cores that this process may run on: more threads than that fight for the same units."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(psutil.cpu_count(logical=False) or 1, allowed or 1))


def version() -> str:
    """llama-cpp-python's version."""
    return str(llama_cpp.__version__)


def llama_cpp_version() -> str:
    """The version of the llama.cpp inside it."""
    return str(llama_cpp.llama_version().decode())


def system_info() -> str:
    """The CPU features that llama.cpp was built with, as it prints them."""
    return str(llama_cpp.llama_print_system_info().decode().strip(" |\n"))


# ---- models ------------------------------------------------------------------------------------------


class _Weights:
    """A llama_model and how many contexts use it. Changed on the worker only."""

    def __init__(self) -> None:
        self.pointer: Any = None
        self.n_contexts = 0
        self.unwanted = False

    def release(self) -> None:
        """Free the model as soon as no context uses it."""
        self.unwanted = True
        if self.pointer and self.n_contexts == 0:
            llama_cpp.llama_model_free(self.pointer)
            self.pointer = None


class Model:
    """A GGUF file, loaded for the CPU, and its vocabulary.

    Args:
        path: The file.
        use_extra_bufts: Let llama.cpp repack the weights for its own kernels. Their results depend on how
            many tokens are evaluated together, so it is off: see docs/exactness.md.

    Raises:
        ModelError: The file is missing, not a GGUF, truncated, of an unknown kind or too large.
    """

    def __init__(self, path: str | Path, *, use_extra_bufts: bool = False) -> None:
        self._weights: _Weights | None = None
        self.path = Path(path)
        check_gguf(self.path)
        # llama.cpp copies the list that the bridge is entered in when the first model is loaded.
        bridge.attach_kernels()
        self.use_extra_bufts = use_extra_bufts
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        _complaints.clear()
        params.progress_callback = ctypes.cast(
            worker.LOAD_CALLBACK, llama_cpp.llama_progress_callback
        )
        params.progress_callback_user_data = worker.ABORT_FLAG

        weights = self._weights = _Weights()

        # The pointer is kept where it is made, so that an interrupt cannot lose it.
        def load() -> None:
            with self._weights_layout() as extra:
                params.use_extra_bufts = extra
                weights.pointer = llama_cpp.llama_model_load_from_file(
                    os.fsencode(self.path), params
                )

        worker.run(load)
        if not weights.pointer:
            raise ModelError(f"{self.path}: llama.cpp cannot load this model: {_why()}")
        if not llama_cpp.llama_model_has_decoder(self.handle) or llama_cpp.llama_model_has_encoder(
            self.handle
        ):
            self.close()
            raise ModelError(f"{self.path}: not a decoder-only language model")
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self.n_ctx_train: int = llama_cpp.llama_model_n_ctx_train(self.handle)
        self.bos: int = llama_cpp.llama_vocab_bos(self._vocab)
        self.eos: int = llama_cpp.llama_vocab_eos(self._vocab)
        self.adds_bos = bool(llama_cpp.llama_vocab_get_add_bos(self._vocab))
        self.adds_eos = bool(llama_cpp.llama_vocab_get_add_eos(self._vocab))
        self.vocab_type: int = llama_cpp.llama_vocab_type(self._vocab)
        if self.vocab_type == llama_cpp.LLAMA_VOCAB_TYPE_SPM and not any(
            map(self._is_byte, range(self.n_vocab))
        ):
            self.close()
            raise ModelError(
                f"{self.path}: its SentencePiece vocabulary has no tokens for bytes, without which "
                "llama.cpp cannot read every text"
            )

    def _weights_layout(self) -> AbstractContextManager[bool]:
        """Within it a load packs weights for the kernels; yields whether extra buffer types are needed.

        Packed weights are memory of this process. A file larger than what is free stays mapped instead.
        """
        size, free = self.path.stat().st_size, psutil.virtual_memory().available
        if self.use_extra_bufts:
            return nullcontext(True)
        if size > free:
            log.warning("%s is larger than free memory: read from disk, without kernels", self.name)
            return nullcontext(False)
        return bridge.packed_weights()

    @property
    def handle(self) -> Any:
        """The llama_model pointer.

        Raises:
            ModelError: The model was closed.
        """
        return self.weights.pointer

    @property
    def weights(self) -> _Weights:
        """The pointer with its count of contexts. Raises as handle does."""
        if self._weights is None:
            raise ModelError(f"{self.path}: the model is closed")
        return self._weights

    @property
    def _vocab(self) -> Any:
        return llama_cpp.llama_model_get_vocab(self.handle)

    @property
    def name(self) -> str:
        """The file's name, for messages."""
        return self.path.name

    @property
    def is_recurrent(self) -> bool:
        """Whether some of its memory is a recurrent state, which has no cells to remove."""
        return bool(
            llama_cpp.llama_model_is_recurrent(self.handle)
            or llama_cpp.llama_model_is_hybrid(self.handle)
        )

    @property
    def size(self) -> int:
        """Bytes of all weights."""
        return int(llama_cpp.llama_model_size(self.handle))

    def kv_bytes(self, n_ctx: int) -> int:
        """Bytes of an F16 KV cache of n_ctx positions, as far as the header tells."""
        heads_kv = int(llama_cpp.llama_model_n_head_kv(self.handle))
        heads = max(1, int(llama_cpp.llama_model_n_head(self.handle)))
        head_size = int(llama_cpp.llama_model_n_embd(self.handle)) // heads
        return (
            2 * 2 * n_ctx * int(llama_cpp.llama_model_n_layer(self.handle)) * heads_kv * head_size
        )

    @cached_property
    def chat_template(self) -> str | None:
        """The Jinja source of the model's chat template."""
        template = llama_cpp.llama_model_chat_template(self.handle, None)
        return template.decode("utf-8", "replace") if template else None

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of a text. What is no character, such as bytes that are not UTF-8, becomes U+FFFD.

        Args:
            text: What to tokenize.
            add_special: Add the tokens with which the model wants a text to begin and end, such as BOS.
            parse_special: Read texts such as <|im_end|> as the special tokens that they name.
        """
        # llama.cpp ends the process on some invalid texts.
        data = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()
        size = len(data) + 8
        while True:
            buffer = (llama_cpp.llama_token * size)()
            n = llama_cpp.llama_tokenize(
                self._vocab, data, len(data), buffer, size, add_special, parse_special
            )
            if n >= 0:
                return list(buffer[:n])
            size = -n

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes that a token adds to a text; control tokens add none unless `special`."""
        vocab, size = self._vocab, 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = llama_cpp.llama_token_to_piece(vocab, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def token_text(self, token: int) -> bytes:
        """The token as the vocabulary spells it, before any decoding to bytes."""
        return llama_cpp.llama_vocab_get_text(self._vocab, token) or b""

    def is_unused(self, token: int) -> bool:
        """Whether the file marks this id as padding that stands for no text."""
        return self._has_attribute(token, llama_cpp.LLAMA_TOKEN_ATTR_UNUSED)

    def _is_byte(self, token: int) -> bool:
        return self._has_attribute(token, llama_cpp.LLAMA_TOKEN_ATTR_BYTE)

    def _has_attribute(self, token: int, attribute: int) -> bool:
        return bool(llama_cpp.llama_vocab_get_attr(self._vocab, token) & attribute)

    def is_end(self, token: int) -> bool:
        """Whether the token ends a generation (EOS, end of turn, and their like)."""
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))

    def close(self) -> None:
        """Free the weights, or have the last context of this model free them when it is closed."""
        weights, self._weights = self._weights, None
        if weights is not None:
            worker.run(weights.release)

    def __del__(self) -> None:
        if self._weights is not None:
            worker.free_later(self._weights.release)


# ---- contexts ----------------------------------------------------------------------------------------


class Context:
    """One sequence under evaluation: positions 0 to length - 1 are in its KV cache.

    Args:
        model: What to evaluate with.
        n_ctx: Positions that the cache has room for.
        n_batch: Most tokens of one pass; longer evaluations are split at multiples of it.
        n_logits: Most rows of logits asked of one evaluation.
        threads: Threads of a pass.

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
    ) -> None:
        self._handle = None
        self._batch: Any = None
        self.model = model
        self.n_batch = min(n_batch, n_ctx)
        self.n_logits = min(n_logits, self.n_batch)
        self.threads = threads or default_threads()
        self.length = 0
        self._n_rows = 0
        self._last_width = 0
        self._check_memory(n_ctx)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = self.n_batch
        params.n_seq_max = 1
        params.n_outputs_max = params.n_outputs_max_per_seq = self.n_logits
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
        _complaints.clear()

        weights = self._weights = model.weights

        def create() -> None:
            self._handle = llama_cpp.llama_init_from_model(weights.pointer, params)
            weights.n_contexts += bool(self._handle)

        worker.run(create)
        if not self._handle:
            raise ModelError(f"{model.path}: no context of {n_ctx} tokens: {_why()}")
        # llama.cpp rounds the size up; the size that was asked for is the one that counts.
        self.n_ctx = n_ctx
        # Most tokens that can be rolled back after a pass; llama.cpp says how many snapshots it really keeps.
        self.max_rollback: int = (
            llama_cpp.llama_n_rs_seq(self._handle) if model.is_recurrent else n_ctx
        )
        self._batch = llama_cpp.llama_batch_init(self.n_batch, 0, 1)

    def _check_memory(self, n_ctx: int) -> None:
        """Refuse a cache larger than free memory: Linux would grant it and kill the process later."""
        needed, free = self.model.kv_bytes(n_ctx), psutil.virtual_memory().available
        if needed > free:
            raise ModelError(
                f"{self.model.path}: a context of {n_ctx} tokens needs {needed / 1e9:.1f} GB of KV cache "
                f"and {free / 1e9:.1f} GB of memory is free: ask for a smaller context"
            )

    @property
    def handle(self) -> Any:
        """The llama_context pointer.

        Raises:
            ModelError: The context was closed.
        """
        if not self._handle:
            raise ModelError(f"{self.model.path}: the context is closed")
        return self._handle

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
        if start + len(tokens) > self.n_ctx:
            raise ModelError(
                f"{self.model.name}: {len(tokens)} tokens after {start} overflow a context of {self.n_ctx}"
            )
        if n_logits > self.n_logits or n_logits > len(tokens):
            raise ValueError(f"{n_logits} rows of logits asked of {len(tokens)} tokens")
        try:
            for offset in range(0, len(tokens), self.n_batch):
                chunk = tokens[offset : offset + self.n_batch]
                is_last = offset + len(chunk) == len(tokens)
                self._pass(chunk, n_logits if is_last else 0)
        except BaseException:
            self._remove_from(start)
            raise

    def _pass(self, tokens: Sequence[int], n_logits: int) -> None:
        batch, n = self._batch, len(tokens)
        if n_logits > n:
            raise ValueError(f"the last {n_logits} tokens do not lie in one pass of {n}")
        batch.n_tokens = n
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = self.length + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = i >= n - n_logits
        _complaints.clear()
        handle = self.handle
        status = worker.run(lambda: llama_cpp.llama_decode(handle, batch))
        if status != 0:
            raise ModelError(
                f"{self.model.name}: evaluating {n} tokens at position {self.length} failed "
                f"with status {status}: {_why()}"
            )
        self.length += n
        self._n_rows = n_logits
        self._last_width = n

    def logits(self, row: int) -> Logits:
        """A view of llama.cpp's own row of logits, valid until the next evaluation.

        Args:
            row: Index among the rows asked for; negative ones count from the last.

        Returns:
            [n_vocab] float32, writeable.
        """
        if not -self._n_rows <= row < self._n_rows:
            raise ValueError(f"row {row} of {self._n_rows} rows of logits")
        pointer = llama_cpp.llama_get_logits_ith(
            self.handle, row - self._n_rows if row >= 0 else row
        )
        return np.ctypeslib.as_array(pointer, shape=(self.model.n_vocab,))

    def bit_exact_reason(self, width: int) -> str | None:
        """Why logits may depend on how many tokens, up to `width`, are evaluated together; None if not."""
        return bridge.bit_exact_reason(width=width, extra_buffers=self.model.use_extra_bufts)

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
        memory = self._memory
        if possible and worker.run(lambda: llama_cpp.llama_memory_seq_rm(memory, 0, length, -1)):
            self.length = min(self.length, length)
            return True
        self.clear()
        return False

    def clear(self) -> None:
        """Forget the sequence."""
        memory = self._memory
        worker.run(lambda: llama_cpp.llama_memory_clear(memory, False))
        self.length = 0

    def close(self) -> None:
        """Free the cache and buffers."""
        free = self._take_free()
        if free is not None:
            worker.run(free)

    def _take_free(self) -> Callable[[], None] | None:
        """What frees the context, once; nothing is left to free afterwards."""
        handle, self._handle = self._handle, None
        batch, self._batch = self._batch, None
        if not handle:
            return None
        weights = self._weights

        def free() -> None:
            if batch is not None:
                llama_cpp.llama_batch_free(batch)
            llama_cpp.llama_free(handle)
            weights.n_contexts -= 1
            if weights.unwanted:
                weights.release()

        return free

    def __del__(self) -> None:
        free = self._take_free()
        if free is not None:
            worker.free_later(free)
