from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import decode, decode_report, prompts
from bench.decode import Row
from bench.run import read_log

OPTIONS = argparse.Namespace(model="big", draft="small", threads=2, tokens=10)


def row(engine: str, prompt: str, rate: float, *, kind: str = "code", drafted: int = 0) -> Row:
    return Row(
        kind, prompt, 0.0, engine, 10, tokens=10, rate=rate, own_rate=2 * rate, seconds=1.0,
        drafted=drafted, accepted=drafted // 2, predicted=drafted,
    )  # fmt: skip


def cells(page: str, label: str) -> list[str]:
    """Of the first row of that label; several tables have rows of an engine."""
    line = next(line for line in page.splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_there_are_eight_prompts_of_each_kind() -> None:
    loaded = prompts.load()
    kinds = {"code", "edit", "arithmetic", "chat", "summary", "translation"}
    assert set(loaded) == kinds
    assert min(map(len, loaded.values())) >= 8
    texts = [text for of_kind in loaded.values() for text in of_kind.values()]
    assert len(set(texts)) == len(texts)


def test_ratios_are_geometric_means_over_the_prompts_that_both_answered() -> None:
    rows = [
        row("pyspec", "a", 20),
        row("pyspec-plain", "a", 10),
        row("pyspec", "b", 80, drafted=10),
        row("pyspec-plain", "b", 10),
        row("pyspec", "c", 1000),
    ]
    page = decode_report.markdown(rows, "python -m bench.decode", OPTIONS)
    # 2 and 8: a bootstrap sample of two is all of one, all of the other, or both.
    assert cells(page, "pyspec / plain") == ["4.00 (2.00 to 8.00)"] * 2
    assert cells(page, "pyspec")[0].startswith("80.0 "), "the median of 20, 80 and 1000"
    assert "    python -m bench.decode\n" in page
    assert "pyspec 2.000, pyspec-plain 2.000." in page
    assert "| pyspec | 50 of 10 | 50 of 10 |" in page
    assert "| pyspec | 16.00 | 16.00 |" in page, "160 where 10 were expected; no other row says so"


def test_the_best_of_several_is_found_for_each_kind() -> None:
    rows = [
        row("pyspec", "a", 30),
        row("llama-server-2", "a", 10),
        row("llama-server-4", "a", 15),
        row("llama-server", "a", 60),
        row("pyspec", "b", 30, kind="chat"),
        row("llama-server-2", "b", 30, kind="chat"),
        row("llama-server-4", "b", 5, kind="chat"),
    ]
    page = decode_report.markdown(rows, "", OPTIONS)
    code, chat, _ = cells(page, "pyspec / llama-server with draft, best n")
    assert code == "2.00 [4]"
    assert chat == "1.00 [2]"
    assert cells(page, "pyspec / llama-server")[1] == "", "not measured there"


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(3)
    inside = 0
    for _ in range(200):
        _, low, high = decode_report.interval(np.exp(random.normal(0.5, 0.2, 48)), "mean")
        inside += low < np.exp(0.5) < high
    # 190 of 200 are expected; fewer than 176 would come once in ten thousand runs, and the seed is fixed.
    assert 176 <= inside < 200


def test_a_run_on_a_tiny_pair_and_its_continuation(
    chat_target: Path, chat_draft: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"

    def run(*engines: str) -> str:
        command = [
            sys.executable,
            "-m",
            "bench.decode",
            "--model",
            chat_target,
            "--draft",
            chat_draft,
        ]
        command += ["--kinds", "chat", "--prompts", "1", "--tokens", "30", "--log", log]
        done = subprocess.run(
            [*command, "--engines", *engines], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("pyspec", "pyspec-plain", "pyspec-useless")
    measured = read_log(log, Row)
    page = run("pyspec-no-draft", "pyspec", "pyspec-plain", "pyspec-gamma-2")
    rows = read_log(log, Row)
    assert rows[:6] == measured, "what is in the log is not measured again"
    assert [(each.temperature, each.engine) for each in rows[6:]] == [
        (0.0, "pyspec-no-draft"),
        (0.0, "pyspec-gamma-2"),
        (1.0, "pyspec-gamma-2"),
        (1.0, "pyspec-no-draft"),
    ], "engines take turns in another order each time"
    assert all(each.tokens == 30 and each.rate > 0 for each in rows)
    drafted = {each.engine: each.drafted for each in rows}
    assert drafted["pyspec-plain"] == 0
    assert {each.engine for each in rows if each.predicted} == {
        "pyspec",
        "pyspec-no-draft",
        "pyspec-useless",
    }, "only where a planner plans"
    assert drafted["pyspec-gamma-2"] > 0
    assert "pyspec-useless" not in page, "not asked for this time"
    assert "| pyspec / best fixed gamma |" in page
    assert "of what the planner expected" in page
    assert json.loads(log.read_text().splitlines()[0])["kind"] == "chat"


@pytest.mark.parametrize("name", ["pyspec-gamma-x", "pyspec-gamma-0", "llama-server-", "other"])
def test_an_unknown_engine_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["decode", "--engines", "pyspec", name])
    with pytest.raises(SystemExit) as exit_:
        decode.main()
    assert exit_.value.code == 2
    assert f"no engine is called {name}" in capsys.readouterr().err
