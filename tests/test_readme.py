"""Every command of the README, run as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub import Server, offer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
# CI runs these two; a pip install is what tests/test_packaging.py does.
ELSEWHERE = ("make demo", "make test", "pip install .")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    lines = [
        line.partition("  #")[0].strip() for text in blocks("sh") for line in text.splitlines()
    ]
    completion = re.findall(r"`(eval .*?)`", README)
    return [line for line in [*lines, *completion] if line and line not in ELSEWHERE]


def test_the_first_two_commands_are_those_of_the_makefile() -> None:
    assert [line.split("  ")[0] for line in blocks("sh")[0].splitlines()] == list(ELSEWHERE[:2])
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "make demo" in (ROOT / ".ci" / "run").read_text()


@pytest.fixture
def folder(chat_target: Path, chat_draft: Path, tmp_path: Path) -> Path:
    """Where the README's reader might be: with models under the names it uses, and a change to show."""
    for name in ("big", "target", "model"):
        (tmp_path / f"{name}.gguf").symlink_to(chat_target)
    for name in ("small", "smaller", "draft"):
        (tmp_path / f"{name}.gguf").symlink_to(chat_draft)
    (tmp_path / "person.json").write_text(
        '{"type": "object", "properties": {"name": {"enum": ["Ada"]}}}'
    )
    (tmp_path / "list.gbnf").write_text('root ::= ("- " [a-z]{1,9} "\\n"){3}\n')
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "notes.txt").write_text("one\n")
    subprocess.run(["git", "add", "notes.txt"], cwd=tmp_path, check=True)
    (tmp_path / "notes.txt").write_text("two\n")
    return tmp_path


@pytest.fixture
def hub(chat_target: Path) -> Iterator[str]:
    """A stand-in for Hugging Face that has the repository of the README."""
    with Server() as server:
        offer(server, "org/repo", "model.gguf", chat_target.read_bytes())
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server.url
        server.shutdown()


@pytest.mark.models
@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_readme_works(
    command: str, folder: Path, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if "org/repo" in command:
        monkeypatch.setenv("HF_ENDPOINT", hub)
        monkeypatch.setenv("HF_HOME", str(folder / "hf"))
    if "org/repo" in command or "squeeze" in command:  # they leave files behind
        monkeypatch.setenv("PYSPEC_HOME", str(folder))
    run = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    # Without an input a chat has nothing to answer.
    assert run.stdout or command.startswith(("eval", "pyspec chat"))


def test_the_python_example_works(folder: Path) -> None:
    (example,) = blocks("python")
    run = subprocess.run(
        [sys.executable, "-c", example], cwd=folder, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r"\d\.\d+\n$", run.stdout)
