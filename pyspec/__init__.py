"""Speculative decoding of GGUF models on the CPU.

A small draft model proposes tokens, the target model checks several in one pass, and the text is
distributed as the target alone would write it::

    from pyspec import Engine, SamplingParams

    with Engine("target.gguf", "draft.gguf") as engine:
        for piece in engine.generate("Once upon a time", SamplingParams(max_tokens=100)):
            print(piece.text, end="", flush=True)
    print(piece.statistics)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyspec.openmp import wait_briefly

if TYPE_CHECKING:
    from pyspec.engine import Engine
    from pyspec.errors import (
        ContextOverflowError,
        DownloadError,
        LogitsError,
        ModelError,
        PyspecError,
        SlotsBusyError,
        UsageError,
        VocabularyMismatchError,
    )
    from pyspec.generation import Generation
    from pyspec.grammar import Grammar
    from pyspec.llama import Model
    from pyspec.metrics import Statistics
    from pyspec.output import Piece, Source, Token
    from pyspec.sampling import Rule, SamplingParams

wait_briefly()

__all__ = [
    "ContextOverflowError",
    "DownloadError",
    "Engine",
    "Generation",
    "Grammar",
    "LogitsError",
    "Model",
    "ModelError",
    "Piece",
    "PyspecError",
    "Rule",
    "SamplingParams",
    "SlotsBusyError",
    "Source",
    "Statistics",
    "Token",
    "UsageError",
    "VocabularyMismatchError",
]

_MODULES = ("engine", "errors", "generation", "grammar", "llama", "metrics", "output", "sampling")


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: a command line starts without llama.cpp."""
    if name in __all__:
        for module in _MODULES:
            found = vars(import_module(f"pyspec.{module}")).get(name)
            if found is not None:
                return found
    raise AttributeError(f"module 'pyspec' has no attribute {name!r}")
