"""Speculative decoding of GGUF models on the CPU.

A small draft model proposes tokens, the target model checks several in one pass, and the text is
distributed as the target alone would write it::

    from pyspec import Engine, SamplingParams

    with Engine("target.gguf", "draft.gguf") as engine:
        for piece in engine.generate("Once upon a time", SamplingParams(max_tokens=100)):
            print(piece.text, end="", flush=True)
    print(piece.statistics)
"""

from pyspec.engine import Engine
from pyspec.errors import (
    ContextOverflowError,
    DownloadError,
    LogitsError,
    ModelError,
    PyspecError,
    UsageError,
    VocabularyMismatchError,
)
from pyspec.llama import Model
from pyspec.metrics import Statistics
from pyspec.output import Piece, Source, Token
from pyspec.sampling import Rule, SamplingParams

__all__ = [
    "ContextOverflowError",
    "DownloadError",
    "Engine",
    "LogitsError",
    "Model",
    "ModelError",
    "Piece",
    "PyspecError",
    "Rule",
    "SamplingParams",
    "Source",
    "Statistics",
    "Token",
    "UsageError",
    "VocabularyMismatchError",
]
