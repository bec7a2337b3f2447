"""What can go wrong, as one family of exceptions.

Each message is one line that says what is wrong and what to do; the CLI prints it as it is.
"""

from __future__ import annotations


class PyspecError(Exception):
    """Base of every error that pyspec raises on purpose. The CLI exits with status 1."""


class UsageError(PyspecError, ValueError):
    """A setting or an argument is outside what is allowed. The CLI exits with status 2."""


class ModelError(PyspecError):
    """A model file is missing, damaged, of an unusable kind, or does not fit in memory."""


class VocabularyMismatchError(PyspecError):
    """The draft's vocabulary is not the target's, or shares next to nothing with it where that would do."""


class ContextOverflowError(PyspecError):
    """The prompt does not fit in the context."""


class SlotsBusyError(PyspecError):
    """As many requests are under way as an engine has slots for."""


class LogitsError(PyspecError):
    """A model produced logits from which no distribution follows (NaN, +inf, all -inf)."""


class NoTokenError(LogitsError):
    """The logits of all tokens are -inf: the model's own, or because the request forbids every token."""


class DownloadError(PyspecError):
    """A model could not be fetched, verified or stored."""
