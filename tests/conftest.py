"""Fixtures that several test files use."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import pytest

from tests.models import Vocabulary, byte_level, write_llama

LEVELS = {2: logging.WARNING, 3: logging.ERROR}


@pytest.fixture(scope="session", autouse=True)
def _llama_log() -> Iterator[None]:
    """Send llama.cpp's warnings to the log, which pytest shows when a test fails."""
    logger = logging.getLogger("llama.cpp")

    @llama_cpp.llama_log_callback
    def log(level: int, text: bytes, _data: ctypes.c_void_p) -> None:
        if level in LEVELS:
            logger.log(LEVELS[level], "%s", text.decode(errors="replace").rstrip())

    llama_cpp.llama_log_set(log, ctypes.c_void_p())
    yield
    # The callback is about to go: llama.cpp must not call it when the process ends.
    llama_cpp.llama_log_set(_silent, ctypes.c_void_p())


@llama_cpp.llama_log_callback
def _silent(_level: int, _text: bytes, _data: ctypes.c_void_p) -> None:
    pass


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for model files that last for the whole run."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """The 24 tokens of the tiny pair."""
    return byte_level()


@pytest.fixture(scope="session")
def tiny_target(models: Path, vocabulary: Vocabulary) -> Path:
    """A target of two layers."""
    return write_llama(models / "target.gguf", vocabulary)


@pytest.fixture(scope="session")
def tiny_draft(models: Path, vocabulary: Vocabulary) -> Path:
    """A draft for it: its leading part, of one layer and half the width."""
    return write_llama(models / "draft.gguf", vocabulary, width=32, layers=1)
