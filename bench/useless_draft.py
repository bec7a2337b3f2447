"""A draft that is of no use: random weights behind another model's vocabulary.

It is cheap and never right, so all that it can do is cost time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGUFReader, TokenType

from tests.models import Vocabulary, write_llama


def write(path: Path, target: Path) -> Path:
    """Write a tiny model with the vocabulary of a target of byte-level tokens."""
    fields = GGUFReader(target).fields

    def read(name: str) -> Any:
        return fields[f"tokenizer.ggml.{name}"].contents()

    vocabulary = Vocabulary(
        texts=tuple(read("tokens")),
        types=tuple(map(TokenType, read("token_type"))),
        bos=int(read("bos_token_id")),
        eos=int(read("eos_token_id")),
        add_bos=bool(read("add_bos_token")),
    )
    return write_llama(path, vocabulary, width=32, layers=1)
