from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from pyspec import squeeze
from pyspec.catalogue import load_catalogue, models_folder
from pyspec.cli import cli
from pyspec.cli.pair import resolve_pair
from pyspec.errors import ModelError, UsageError
from tests.models import CHATML, all_bytes, write_llama


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPEC_HOME", str(tmp_path))
    monkeypatch.setenv("PYSPEC_OFFLINE", "1")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["models", *arguments], catch_exceptions=False)


def pretend_downloaded(name: str) -> Path:
    """Put a file of the right size there, which takes no room."""
    model = load_catalogue().find(name)
    model.path.parent.mkdir(exist_ok=True)
    with model.path.open("wb") as file:
        file.truncate(model.bytes)
    return model.path


def test_list_is_tab_separated_when_piped() -> None:
    pretend_downloaded("smollm2-135m")
    header, *rows = (line.split("\t") for line in run("list").stdout.splitlines())
    assert header == ["name", "size", "quantised", "licence", "downloaded", "draft for"]
    assert rows[:3] == [
        ["qwen2.5-coder-1.5b", "1.12 GB", "Q4_K_M", "Apache-2.0", "no", ""],
        ["qwen2.5-coder-0.5b", "491 MB", "Q4_K_M", "Apache-2.0", "no", "qwen2.5-coder-1.5b"],
        ["smollm2-135m", "98.4 MB", "Q4_1", "Apache-2.0", "yes", ""],
    ]


def test_list_as_json() -> None:
    path = pretend_downloaded("smollm2-135m")
    entries = {entry["name"]: entry for entry in json.loads(run("list", "--json").stdout)}
    assert entries["smollm2-135m"]["downloaded"] is True
    assert entries["smollm2-135m"]["path"] == str(path)
    assert entries["qwen2.5-coder-0.5b"]["draft_for"] == ["qwen2.5-coder-1.5b"]
    assert [name for name, entry in entries.items() if entry["default_target"]] == [
        "qwen2.5-coder-1.5b"
    ]


def test_path_prints_the_path_alone() -> None:
    path = pretend_downloaded("smollm2-135m")
    result = run("path", "smollm2-135m")
    assert (result.stdout, result.stderr) == (f"{path}\n", "")


def test_path_of_what_is_not_downloaded_names_the_command() -> None:
    with pytest.raises(ModelError, match="run: pyspec models pull smollm2-135m"):
        run("path", "smollm2-135m")


def test_a_file_of_the_wrong_size_is_not_downloaded() -> None:
    pretend_downloaded("smollm2-135m").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="is not downloaded"):
        run("path", "smollm2-135m")


def test_pull_knows_every_name_before_it_fetches_any() -> None:
    with pytest.raises(UsageError, match="no model is called smollm3"):
        run("pull", "smollm2-135m", "smollm3")
    assert not models_folder().exists()


def test_inspect(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", all_bytes())
    shown = run("inspect", str(path)).stdout
    for line in (
        f"file:           {path}",
        "architecture:   llama",
        "context length: 8192",
        f"vocabulary:     {len(all_bytes().texts)}",
        "tokenizer:      gpt2 llama-bpe",
        f"chat template:  {CHATML.splitlines()[0][:80]}",
    ):
        assert line in shown.splitlines()


def test_inspect_as_json(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", all_bytes())
    info = json.loads(run("inspect", "--json", str(path)).stdout)
    assert info["path"] == str(path)
    assert info["bytes"] == path.stat().st_size
    assert info["tensor_types"].keys() == {"F32"}
    assert info["chat_template"] == CHATML


def test_inspect_shows_no_escape_sequences(tmp_path: Path) -> None:
    vocabulary = dataclasses.replace(all_bytes(), chat_template="\x1b[2Jbad\u202e\nline")
    shown = run("inspect", str(write_llama(tmp_path / "tiny.gguf", vocabulary))).stdout
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "[2Jbad" in shown


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("inspect", __file__), 1, "is not a GGUF file: it begins with"),
        (("inspect", "missing.gguf"), 1, "missing.gguf: no such file"),
        (("path", "smollm2"), 2, "did you mean smollm2-135m?"),
        (("pull",), 2, "Missing argument 'NAME...'"),
    ],
)
def test_a_mistake_gets_a_line_and_a_status(
    arguments: tuple[str, ...], status: int, message: str
) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pyspec", "models", *arguments], capture_output=True, text=True
    )
    assert result.returncode == status
    assert result.stdout == ""
    assert message in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("incomplete", "names"),
    [
        ("q", ["qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"]),
        ("Smol", ["smollm2-135m"]),
        ("./", ["./"]),
    ],
)
def test_names_are_completed(incomplete: str, names: list[str]) -> None:
    completion = ShellComplete(cli, {}, "pyspec", "_PYSPEC_COMPLETE")
    items = completion.get_completions(["models", "inspect"], incomplete)
    assert [item.value for item in items] == names
    assert {item.type for item in items} == {"file" if incomplete == "./" else "plain"}


def test_every_command_and_option_has_help() -> None:
    group = cli.get_command(click.Context(cli), "models")
    assert isinstance(group, click.Group)
    for command in group.commands.values():
        assert command.help
        for parameter in command.params:
            assert not isinstance(parameter, click.Option) or parameter.help


# ---- squeeze -----------------------------------------------------------------------------------------


def test_squeeze_and_undo(
    chat_target: Path, chat_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ab cd\n")
    monkeypatch.setattr(squeeze, "VARIANTS", (("q4_0", "q4_0"),))
    # On a model this small copies are no faster, so the times are given.
    monkeypatch.setattr(
        squeeze,
        "measure_costs",
        lambda setup, widths, **_: {
            0: 0.5 if setup.draft.path == chat_draft else 0.1,
            **dict.fromkeys(widths, 1.0),
        },
    )
    pair = ("squeeze", str(chat_draft), "--for", str(chat_target))
    settings = ("--prompts", str(prompts), "-n", "8", "--threads", "1", "--temp", "1")
    header, first, second, explanation, kept = run(*pair, *settings).stdout.splitlines()
    copy = squeeze.squeezed_path(chat_target, chat_draft)
    assert header.split("\t") == [
        "weights",
        "reads",
        "a step",
        "accepted",
        "per accepted token",
        "speed-up",
    ]
    assert first.split("\t")[0] == "q4_0, output q4_0"
    assert first.split("\t")[2] == "0.10"
    assert second.split("\t")[0] == "as it is"
    assert "share of a plain pass" in explanation
    assert kept == f"kept: {copy}"
    assert resolve_pair(str(chat_target), str(chat_draft), no_draft=False) == (chat_target, copy)

    report = json.loads(run(*pair, *settings, "--json").stdout)
    assert (report["draft"], report["kept"]) == (str(chat_draft), str(copy))
    assert [variant["path"] for variant in report["variants"]] == [str(copy), str(chat_draft)]
    assert report["variants"][0]["bytes_read"] < report["variants"][1]["bytes_read"]

    assert run(*pair, "--undo").exit_code == 0
    assert resolve_pair(str(chat_target), str(chat_draft), no_draft=False)[1] == chat_draft


def test_squeeze_needs_to_know_the_target(chat_draft: Path) -> None:
    with pytest.raises(UsageError, match=r"which target does .* draft for"):
        run("squeeze", str(chat_draft))
    with pytest.raises(ModelError, match=r"qwen2\.5-coder-1\.5b is not downloaded"):
        run("squeeze", "qwen2.5-coder-0.5b")
