"""Models and contexts of llama.cpp: no other package imports llama_cpp, but for pyspec.bridge.

A Model is a loaded GGUF file with its vocabulary; a Context evaluates tokens of one sequence with it and
holds the sequence's KV cache.
"""

from pyspec.llama.context import Context, Logits, Part, RollbackError, evaluate_together
from pyspec.llama.library import (
    default_threads,
    llama_cpp_version,
    log,
    system_info,
    version,
)
from pyspec.llama.model import Model

__all__ = [
    "Context",
    "Logits",
    "Model",
    "Part",
    "RollbackError",
    "default_threads",
    "evaluate_together",
    "llama_cpp_version",
    "log",
    "system_info",
    "version",
]
