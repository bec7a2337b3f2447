"""What the documentation tells users to type, typed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pyspec.server.schemas import ChatRequest, CompletionRequest
from pyspec.server.settings import Settings
from tests.server.service import Process

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs" / "service.md").read_text()
ADDRESS = "http://127.0.0.1:8080"


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", README + PAGE, re.DOTALL)
    lines = "".join(blocks).replace("\\\n", "").splitlines()
    return [line.partition("  #")[0].strip() for line in lines]


SERVE = [line for line in commands() if line.startswith("pyspec serve")]
CURL = [line for line in commands() if line.startswith("curl")]


def test_all_commands_are_tried() -> None:
    assert len(SERVE) == 3
    assert len(CURL) == 1
    assert sorted(SERVE + CURL) == sorted(commands())


@pytest.mark.models
@pytest.mark.parametrize("line", SERVE)
def test_the_service_starts(line: str, chat_target: Path, chat_draft: Path) -> None:
    arguments = shlex.split(line)[2:]
    files = {"big.gguf": str(chat_target), "small.gguf": str(chat_draft)}
    # The last --port counts: the tests' machine may have another service on that one.
    with Process(*(files.get(word, word) for word in arguments), "--port", "0"):
        pass


def test_the_examples_get_an_answer(chat_target: Path, chat_draft: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with Process("-m", chat_target, "-d", chat_draft, "--threads", "1") as process:
        for command in (
            ["bash", "-c", CURL[0].replace(ADDRESS, process.url)],
            [sys.executable, "-c", example.replace(ADDRESS, process.url)],
        ):
            run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
            assert run.returncode == 0, run.stderr
            assert run.stdout
            assert '"error"' not in run.stdout


def test_every_field_is_listed() -> None:
    section = PAGE.partition("## Fields")[2].partition("## Several")[0]
    listed = set(re.findall(r"`([a-z_]+)`", section))
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert fields - listed == {"echo", "suffix"}, "these can only be left out"


def test_the_limits_are_those_that_are_told() -> None:
    settings = Settings(model="any")
    assert settings.max_body == 1 << 20
    assert "`--max-body` (1 MiB)" in PAGE
