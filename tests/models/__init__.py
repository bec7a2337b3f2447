"""Tiny random model files that llama.cpp loads, written in milliseconds."""

from .damage import empty, foreign, misshapen, truncated
from .file import write_file
from .llama import write_llama
from .memory import write_gemma3, write_jamba, write_lfm2, write_mamba, write_qwen35
from .reference import Reference, softmax
from .vocabulary import CHATML, Vocabulary, all_bytes, byte_level, sentence_piece, spell

__all__ = [
    "CHATML",
    "Reference",
    "Vocabulary",
    "all_bytes",
    "byte_level",
    "empty",
    "foreign",
    "misshapen",
    "sentence_piece",
    "softmax",
    "spell",
    "truncated",
    "write_file",
    "write_gemma3",
    "write_jamba",
    "write_lfm2",
    "write_llama",
    "write_mamba",
    "write_qwen35",
]
