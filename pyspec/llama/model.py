"""A loaded GGUF file with its vocabulary."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import llama_cpp
import psutil

from pyspec import bridge, worker
from pyspec.errors import ModelError
from pyspec.gguf_file import check_gguf
from pyspec.llama.library import complaints, log, why


class Weights:
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
        self._weights: Weights | None = None
        self.path = Path(path)
        check_gguf(self.path)
        # llama.cpp copies the list that the bridge is entered in when the first model is loaded.
        bridge.attach_kernels()
        self.use_extra_bufts = use_extra_bufts
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        complaints.clear()
        params.progress_callback = ctypes.cast(
            worker.LOAD_CALLBACK, llama_cpp.llama_progress_callback
        )
        params.progress_callback_user_data = worker.ABORT_FLAG

        weights = self._weights = Weights()

        # The pointer is kept where it is made, so that an interrupt cannot lose it.
        def load() -> None:
            with self._weights_layout() as extra:
                params.use_extra_bufts = extra
                weights.pointer = llama_cpp.llama_model_load_from_file(
                    os.fsencode(self.path), params
                )

        worker.run(load)
        if not weights.pointer:
            raise ModelError(f"{self.path}: llama.cpp cannot load this model: {why()}")
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
            map(self.is_byte, range(self.n_vocab))
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
    def weights(self) -> Weights:
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

    @cached_property
    def pieces(self) -> Sequence[bytes]:
        """[n_vocab] the bytes that each token adds to a text, as piece says, read all at once."""
        vocab, size = self._vocab, 256
        buffer = ctypes.create_string_buffer(size)
        piece, text_of = llama_cpp.llama_token_to_piece, ctypes.string_at
        lengths = (piece(vocab, token, buffer, size, 0, False) for token in range(self.n_vocab))
        return [
            text_of(buffer, n) if n >= 0 else self.piece(token) for token, n in enumerate(lengths)
        ]

    @cached_property
    def adds_space(self) -> bool:
        """Whether the tokenizer puts a space before a text, as SentencePiece's do."""
        tokens = self.tokenize("a", add_special=False, parse_special=False)
        return b"".join(map(self.piece, tokens)) == b" a"

    @property
    def end_of_turn(self) -> int:
        """The token with which the model ends its turn of a chat; EOS if it has none."""
        token = int(llama_cpp.llama_vocab_eot(self._vocab))
        return token if token >= 0 else self.eos

    def token_text(self, token: int) -> bytes:
        """The token as the vocabulary spells it, before any decoding to bytes."""
        return llama_cpp.llama_vocab_get_text(self._vocab, token) or b""

    @cached_property
    def special_ids(self) -> Sequence[int]:
        """Ids that stand for something else than text, and those with a text of their own making."""
        vocab, get = self._vocab, llama_cpp.llama_vocab_get_attr
        special = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
        return [token for token in range(self.n_vocab) if get(vocab, token) & special]

    def is_unused(self, token: int) -> bool:
        """Whether the file marks this id as padding that stands for no text."""
        return self._has_attribute(token, llama_cpp.LLAMA_TOKEN_ATTR_UNUSED)

    def is_control(self, token: int) -> bool:
        """Whether the token is a mark such as BOS or the beginning of a turn, and no text."""
        return self._has_attribute(token, llama_cpp.LLAMA_TOKEN_ATTR_CONTROL)

    def is_byte(self, token: int) -> bool:
        """Whether it is SentencePiece's token of a byte, for characters that are no token."""
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
