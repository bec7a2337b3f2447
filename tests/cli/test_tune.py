from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pyspec.cli import cli
from pyspec.errors import UsageError
from tests.cli.terminal import on_a_terminal

PNG = b"\x89PNG\r\n\x1a\n"  # how every file of that format begins


@pytest.fixture
def pair(chat_target: Path, chat_draft: Path, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ab cd\n\nbad cab\n")
    models = ["-m", str(chat_target), "-d", str(chat_draft), "--threads", "1", "--ctx", "256"]
    return [*models, "-n", "6", "--prompts", str(prompts)]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["tune", *arguments], catch_exceptions=False)


def test_tables_and_a_conclusion(pair: list[str]) -> None:
    result = run(*pair)
    assert result.exit_code == 0
    assert result.stderr == ""
    costs, threads, acceptance, gammas, conclusion = result.stdout.split("\n\n")
    assert costs.splitlines()[1] == "pass\tms\tof a plain pass"
    assert costs.splitlines()[2].startswith("target, 1 token\t")
    assert costs.splitlines()[-1].startswith("draft, a step\t")
    assert threads.splitlines()[2].startswith("1\t")
    assert [line.split("\t")[0] for line in acceptance.splitlines()[2:]] == [
        str(position) for position in range(1, 13)
    ]
    rows = [line.split("\t") for line in gammas.splitlines()[2:]]
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4", "6", "8", "12", "auto"]
    assert rows[0][3:] == ["1.00"] * 3, "plain decoding is the unit"
    assert "Drafting " in conclusion.splitlines()[1]


def test_as_json(pair: list[str], chat_target: Path, chat_draft: Path) -> None:
    report = json.loads(run(*pair, "--json", "--seed", "5", "--temp", "0").stdout)
    assert (report["target"], report["draft"]) == (chat_target.name, chat_draft.name)
    assert (report["prompts"], report["tokens"], report["seed"], report["temperature"]) == (
        2,
        6,
        5,
        0,
    )
    assert len(report["costs"]["target_ms"]) == 13
    assert report["costs"]["c"] == pytest.approx(
        report["costs"]["draft_ms"] / report["costs"]["target_ms"][0]
    )
    assert set(report["threads"][0]) == {"threads", "target_ms", "draft_ms"}
    examined, accepted = report["acceptance"]["examined"], report["acceptance"]["accepted"]
    assert report["acceptance"]["a"] == pytest.approx(sum(accepted) / sum(examined))
    plain, *drafted = report["gammas"]
    assert plain["gamma"] == 0
    assert plain["speedup"] == plain["predicted"] == plain["paper"] == 1
    best = max(drafted, key=lambda speed: float(speed["speedup"]))
    assert report["best_gamma"] == best["gamma"]
    assert report["auto"]["gamma"] == "auto"
    assert report["auto"]["speedup"] > 0
    assert report["pays"] == report["conclusion"].startswith("Drafting pays: ")


def test_a_picture(pair: list[str], tmp_path: Path) -> None:
    path = tmp_path / "pair.png"
    assert run(*pair, "--plot", str(path)).exit_code == 0
    assert path.read_bytes().startswith(PNG)


def test_a_picture_without_matplotlib(pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"--plot needs matplotlib: pip install 'pyspec\[plot\]'$"):
        run(*pair, "--plot", "x.png")


def test_mistakes_are_refused(pair: list[str], tmp_path: Path, chat_target: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*missing"):
        run(*pair, "--prompts", str(tmp_path / "missing"))
    with pytest.raises(UsageError, match="no draft to measure: name one with --draft"):
        run("-m", str(chat_target))
    with pytest.raises(UsageError, match="needs a larger context than 8"):
        run(*pair, "--ctx", "8")
    assert run(*pair, "-n", "1").exit_code == 2
    assert run(*pair, "--plot", str(tmp_path)).exit_code == 2


INTERRUPTED = """
import os, signal
from pyspec.tune import measure
from pyspec.cli import main

write = measure.Run.write

def interrupted(*arguments):
    os.kill(os.getpid(), signal.SIGINT)
    return write(*arguments)

measure.Run.write = interrupted
main()
"""


def test_an_interrupt_ends_it_without_a_traceback(pair: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "tune", *pair], capture_output=True, text=True
    )
    assert result.returncode == 130
    assert result.stdout == ""
    assert result.stderr.strip() == ""


def test_bars_and_tables_on_a_terminal(pair: list[str]) -> None:
    shown, status = on_a_terminal("tune", *pair)
    assert status == 0
    bars, _, tables = shown.partition("What passes cost")
    assert "costs" in bars
    assert "texts" in bars
    assert "What draft lengths bring" in tables
    assert "\t" not in tables
