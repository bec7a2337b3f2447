from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pyspec import verify as checks
from pyspec.cli import cli
from pyspec.cli import verify as command
from pyspec.errors import UsageError
from pyspec.llama import Context, Logits
from pyspec.sampling import Probabilities, Sampler, Verdict
from tests.cli.terminal import on_a_terminal


@pytest.fixture(autouse=True)
def _little(monkeypatch: pytest.MonkeyPatch) -> None:
    effort = replace(checks.QUICK, positions=(1, 100), max_tokens=16, samples=600)
    monkeypatch.setattr(command, "QUICK", effort)


@pytest.fixture
def pair(tiny_target: Path, tiny_draft: Path) -> list[str]:
    return ["-m", str(tiny_target), "-d", str(tiny_draft), "--threads", "1", "--ctx", "256"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["verify", *arguments], catch_exceptions=False)


def lines_of(result: Result) -> list[list[str]]:
    return [line.split("\t") for line in result.stdout.splitlines()]


# ---- what is printed ---------------------------------------------------------------------------------


def test_a_right_engine_passes(pair: list[str]) -> None:
    result = run(*pair)
    *checks, (conclusion,) = lines_of(result)
    assert {line[0] for line in checks} == {
        "bits",
        "greedy",
        "coupled",
        "distribution",
        "broken rule",
    }
    assert [line[2] for line in checks] == ["ok"] * 14
    assert conclusion.startswith("All 14 checks passed, in ")
    assert result.exit_code == 0
    assert result.stderr == ""


def test_as_json(pair: list[str], tiny_target: Path, tiny_draft: Path) -> None:
    result = run(*pair, "--json", "--seed", "7", "--gamma", "3", "--rule", "token")
    report = json.loads(result.stdout)
    assert report["passed"] is True
    assert (report["target"], report["draft"]) == (tiny_target.name, tiny_draft.name)
    assert (report["effort"], report["seed"], report["gamma"], report["rule"]) == (
        "quick",
        7,
        3,
        "token",
    )
    assert report["versions"]["llama-cpp-python"] == "0.3.36"
    assert len(report["results"]) == 14
    by_subject = {entry["subject"]: entry for entry in report["results"]}
    assert by_subject["target, widths 2 to 8"]["rows_different"] == 0
    assert by_subject["draft, gamma 3"]["acceptance_rate"] > 0
    assert by_subject["block rule"]["two_tokens"]["degrees_of_freedom"] > 5
    assert by_subject["block rule"]["threshold"] == 1e-6


def test_without_a_draft(pair: list[str]) -> None:
    result = run(*pair[:2], "--no-draft", *pair[4:])
    assert [line[2] for line in lines_of(result)[:-1]] == ["ok"] * 2 + ["skipped"] * 3
    assert "All 2 checks passed, 3 skipped, in" in result.stdout
    assert result.exit_code == 0


def test_prompts_of_the_user(pair: list[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("ab cd\nabc\n\n  \nfeed\n\n\n\nbad cab\n\ndad\n")
    report = json.loads(run(*pair, "--json", "--prompts", str(file)).stdout)
    texts = {entry["texts"] for entry in report["results"] if entry["check"] == "greedy"}
    assert texts == {4}


def test_a_table_on_a_terminal(pair: list[str]) -> None:
    shown, status = on_a_terminal("verify", *pair[:2], "--no-draft", *pair[4:])
    assert status == 0
    assert "bits of the target" in shown, "the progress bar"
    table = shown[shown.rindex("detail") :]
    assert "target, after a rollback" in table
    assert "there is no draft" in table
    assert "\t" not in table


# ---- what fails --------------------------------------------------------------------------------------


def test_logits_that_depend_on_the_width_fail(
    pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Context.logits

    def perturbed(self: Context, row: int) -> Logits:
        logits = original(self, row)
        if self._last_width > 1:
            logits[5] += 0.5
        return logits

    monkeypatch.setattr(Context, "logits", perturbed)
    result = run(*pair)
    assert result.exit_code == 1
    first, *_, (conclusion,) = lines_of(result)
    assert first[2] == "FAILED"
    assert "30 of 30 rows of logits differ, at most by 0.5: position" in first[3]
    assert conclusion.startswith("FAILED: ")
    assert "bits (target, widths 2 to 8)" in conclusion


def test_a_residual_drawn_from_p_fails(pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    original = Sampler.verify

    def from_p(
        self: Sampler,
        p: Sequence[Probabilities],
        q: Sequence[Probabilities],
        drafted: Sequence[int],
        *,
        round_: int,
        position: int,
    ) -> Verdict:
        accepted = original(self, p, q, drafted, round_=round_, position=position).accepted
        token = self.draw_draft(p[accepted], round_=round_, index=99, position=position + accepted)
        return Verdict(accepted, token)

    monkeypatch.setattr(Sampler, "verify", from_p)
    result = run(*pair, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["passed"] is False
    failed = {entry["subject"] for entry in report["results"] if entry["passed"] is False}
    assert failed == {"block rule", "token rule"}


# ---- mistakes and interruptions ----------------------------------------------------------------------


def test_mistakes_are_refused(pair: list[str], tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n\n")
    for arguments, message in (
        (["--prompts", str(empty)], "has no prompts"),
        (["--prompts", str(tmp_path / "missing.txt")], "cannot read .*missing"),
        (["--no-draft"], "exclude each other"),
        (["--ctx", "8"], "context of 16 or more"),
        (["--gamma", "-1"], "gamma must be auto, or from 0"),
    ):
        with pytest.raises(UsageError, match=message):
            run(*pair, *arguments)
    assert run(*pair, "--seed", "-1").exit_code == 2


INTERRUPTED = """
import os, signal
from pyspec.verify import distribution
from pyspec.cli import main

played = distribution._two_tokens

def interrupted(*arguments):
    os.kill(os.getpid(), signal.SIGINT)
    return played(*arguments)

distribution._two_tokens = interrupted
main()
"""


def test_an_interrupt_ends_it_without_a_traceback(pair: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "verify", *pair], capture_output=True, text=True
    )
    assert result.returncode == 130
    assert result.stdout.splitlines()[-1].startswith("coupled\t"), "what was found so far"
    assert result.stderr.strip() == ""
