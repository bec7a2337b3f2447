from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from bench import serve
from bench.run import read_log
from bench.serve import Row, markdown

OPTIONS = argparse.Namespace(model="big", draft="small", threads=2, slots=8, turns=2, tokens=10)


def row(server: str, clients: int, turn: int, rate: float) -> Row:
    return Row(server, 8, clients, turn, 10, tokens=10, rate=rate, ttft_s=0.5, gap_s=rate / 1e3)


def test_ratios_are_to_llama_server_in_the_same_turn() -> None:
    page = markdown(
        [
            row("pyspec", 1, 0, 20),
            row("llama-server", 1, 0, 10),
            row("pyspec", 1, 1, 160),
            row("llama-server", 1, 1, 20),
            row("pyspec", 4, 0, 30),
            row("llama-server", 4, 0, 60),
        ],
        "python -m bench.serve",
        OPTIONS,
    )
    assert "| pyspec | 90.0 | 30.0 |" in page, "tokens a second: the median of 20 and 160"
    assert "| pyspec | 500 | 500 |" in page
    # 2 and 8 by their geometric mean.
    assert "| pyspec | 4.00 (2.00 to 8.00) | 0.50 (0.50 to 0.50) |" in page
    assert "| llama-server | 15.0 | 60.0 |" in page


def test_without_llama_server_there_are_no_ratios() -> None:
    assert "multiple" not in markdown([row("pyspec", 1, 0, 20)], "", OPTIONS)


def test_a_run_on_a_tiny_pair_and_its_continuation(
    chat_target: Path, chat_draft: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"

    def run(turns: int) -> str:
        command = [sys.executable, "-m", "bench.serve", "--model", chat_target]
        command += ["--draft", chat_draft, "--clients", "1", "3", "--slots", "3", "--tokens", "8"]
        command += [
            "--threads",
            "1",
            "--servers",
            "pyspec",
            "pyspec-no-draft",
            "--turns",
            f"{turns}",
            "--log",
            log,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(1)
    measured = read_log(log, Row)
    assert [(each.clients, each.server) for each in measured] == [
        (1, "pyspec"),
        (1, "pyspec-no-draft"),
        (3, "pyspec"),
        (3, "pyspec-no-draft"),
    ]
    page = run(2)
    rows = read_log(log, Row)
    assert rows[:4] == measured, "what is in the log is not measured again"
    assert [each.server for each in rows[4:]] == ["pyspec-no-draft", "pyspec"] * 2
    assert all(0 < each.tokens <= 8 * each.clients and each.rate > 0 for each in rows)
    assert "| clients | 1 | 3 |" in page


def test_more_clients_than_slots_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve", "--clients", "4", "--slots", "2"])
    with pytest.raises(SystemExit) as exit_:
        serve.main()
    assert exit_.value.code == 2
    assert "raise --slots" in capsys.readouterr().err
