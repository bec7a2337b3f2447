"""Plain use of llama.cpp's C API: what the package's own results are compared with."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import llama_cpp
import numpy as np

from .weights import Array


class Reference:
    """A model and one context, used as a context manager."""

    def __init__(self, path: Path, *, n_ctx: int = 256, threads: int = 1, **settings: int) -> None:
        """Load ``path``; further settings are fields of llama_context_params."""
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise ValueError(f"llama.cpp does not load {path}")
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = n_ctx
        parameters.n_threads = parameters.n_threads_batch = threads
        for name, value in settings.items():
            setattr(parameters, name, value)
        self.context = llama_cpp.llama_init_from_model(self.model, parameters)
        if not self.context:
            llama_cpp.llama_model_free(self.model)
            raise ValueError(f"llama.cpp makes no context for {path}")
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.size: int = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.memory = llama_cpp.llama_get_memory(self.context)

    def __enter__(self) -> Reference:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def decode(self, tokens: Sequence[int], start: int = 0) -> Array:
        """Evaluate tokens in one batch from position ``start``; logits, (tokens, vocabulary)."""
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = start + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = 1
        status = llama_cpp.llama_decode(self.context, batch)
        llama_cpp.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        rows = [llama_cpp.llama_get_logits_ith(self.context, i) for i in range(len(tokens))]
        return np.stack([np.ctypeslib.as_array(row, (self.size,)) for row in rows])

    def evaluate(self, tokens: Sequence[int]) -> Array:
        """The logits after each of the tokens, evaluated one by one in an empty context."""
        llama_cpp.llama_memory_clear(self.memory, True)
        return np.concatenate([self.decode([token], i) for i, token in enumerate(tokens)])

    def remove(self, start: int) -> bool:
        """Ask to forget everything from position ``start`` on; whether llama.cpp says it did."""
        return bool(llama_cpp.llama_memory_seq_rm(self.memory, 0, start, -1))

    def tokenize(self, text: str | bytes, *, special: bool = False, bos: bool = False) -> list[int]:
        """The tokens of a text; with ``special``, texts of control tokens in it become them."""
        raw = text.encode() if isinstance(text, str) else text
        room = len(raw) + 2
        tokens = (llama_cpp.llama_token * room)()
        count = llama_cpp.llama_tokenize(self.vocab, raw, len(raw), tokens, room, bos, special)
        return list(tokens[:count])

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes that a token writes."""
        buffer = ctypes.create_string_buffer(64)
        count = llama_cpp.llama_token_to_piece(self.vocab, token, buffer, 64, 0, special)
        return buffer.raw[:count]


def softmax(logits: Array) -> Array:
    """Probabilities along the last axis, in double precision."""
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    probabilities: Array = weights / weights.sum(axis=-1, keepdims=True)
    return probabilities
