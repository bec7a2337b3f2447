"""Tiny random model files that llama.cpp loads, written in milliseconds."""

from .file import write_file
from .llama import write_llama
from .reference import Reference, softmax
from .vocabulary import CHATML, Vocabulary, all_bytes, byte_level, sentence_piece, spell

__all__ = [
    "CHATML",
    "Reference",
    "Vocabulary",
    "all_bytes",
    "byte_level",
    "sentence_piece",
    "softmax",
    "spell",
    "write_file",
    "write_llama",
]
