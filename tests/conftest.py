"""Fixtures that several test files use."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import llama_cpp
import pytest

from tests.models import Vocabulary, all_bytes, byte_level, write_llama

ERROR = 4  # of ggml_log_level


@llama_cpp.llama_log_callback
def _log(level: int, text: bytes, _data: ctypes.c_void_p) -> None:
    """Send llama.cpp's errors to the log, which pytest shows when a test fails."""
    if level == ERROR:
        logging.getLogger("llama.cpp").error("%s", text.decode(errors="replace").rstrip())


# Here and not in a fixture, so that a callback that the package sets later stays in force.
llama_cpp.llama_log_set(_log, ctypes.c_void_p())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the longer proofs out unless -m asks for them."""
    if "thorough" in config.option.markexpr:
        return
    longer = [item for item in items if item.get_closest_marker("thorough")]
    config.hook.pytest_deselected(items=longer)
    items[:] = [item for item in items if item not in longer]


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


@pytest.fixture(scope="session")
def chat_target(models: Path) -> Path:
    """A target with a chat template, which tokenises any text."""
    return write_llama(models / "chat-target.gguf", all_bytes())


@pytest.fixture(scope="session")
def chat_draft(models: Path) -> Path:
    """A draft for it."""
    return write_llama(models / "chat-draft.gguf", all_bytes(), width=32, layers=1)
