"""Costs that are measured once and remembered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyspec import costs
from pyspec.llama import Context, Model


@pytest.fixture
def context(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Context]:
    monkeypatch.setattr(costs, "cache_folder", lambda: tmp_path)
    model = Model(tiny_target)
    context = Context(model, n_ctx=64, n_logits=8, threads=1)
    yield context
    context.close()
    model.close()


def passes(context: Context, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the widths of the passes from now on."""
    widths: list[int] = []
    original = Context.evaluate

    def recorded(self: Context, tokens: list[int], *, n_logits: int = 0) -> None:
        assert self is context
        widths.append(len(tokens))
        original(self, tokens, n_logits=n_logits)

    monkeypatch.setattr(Context, "evaluate", recorded)
    return widths


def test_costs_are_measured_once_and_again_when_forgotten(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "_TOO_DEAR", 1e9)
    widths = passes(context, monkeypatch)
    first = costs.measured_costs(context)
    assert context.length == 0
    assert first.widths == (1, 2, 4, 6, 8, 12, 16, 32)
    assert set(widths) == set(first.widths)
    n_passes = len(widths)
    again = costs.measured_costs(context)
    assert set(widths[n_passes:]) == {1}  # whether what is remembered can be believed
    n_looks = len(widths) - n_passes
    assert (again.widths, again.seconds) == (first.widths, first.seconds)
    costs.forget_costs(context)
    costs.forget_costs(context)
    costs.measured_costs(context)
    assert len(widths) == 2 * n_passes + n_looks


def test_costs_of_a_busier_machine_are_measured_anew(context: Context, tmp_path: Path) -> None:
    first = costs.measured_costs(context)
    (path,) = (tmp_path / "costs").iterdir()
    dear = [100 * seconds for seconds in first.seconds]
    path.write_text(json.dumps({"widths": first.widths, "seconds": dear}))
    assert costs.measured_costs(context)(1) < dear[0] / 10
    assert json.loads(path.read_text())["seconds"] != dear


def test_costs_in_a_cache_that_cannot_be_changed_stay(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "_TOO_DEAR", 1e9)
    before = costs.measured_costs(context)

    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    costs.forget_costs(context)
    assert costs.measured_costs(context).seconds == before.seconds


def test_a_damaged_memory_is_measured_anew(context: Context, tmp_path: Path) -> None:
    costs.measured_costs(context)
    (file,) = (tmp_path / "costs").iterdir()
    for damage in ("", "[]", '{"widths": [1], "seconds": "x"}', '{"widths": []}'):
        file.write_text(damage)
        assert costs.measured_costs(context)(32) > 0
        assert file.read_text() != damage


def test_a_pass_that_was_held_up_does_not_bend_the_curve(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs never fall with the width."""
    # Every pass takes a second, but those over 2 and 6 tokens ten.
    clock, held_up = [0.0], (2, 6)
    original = Context.evaluate

    def slow(self: Context, tokens: list[int], *, n_logits: int = 0) -> None:
        original(self, tokens, n_logits=n_logits)
        clock[0] += 10 if len(tokens) in held_up else 1

    monkeypatch.setattr(Context, "evaluate", slow)
    monkeypatch.setattr("pyspec.costs.time.perf_counter", lambda: clock[0])
    assert costs.measured_costs(context).seconds == (1,) * 8


def test_other_circumstances_are_other_costs(context: Context) -> None:
    key = costs._key(context)
    other = Context(context.model, n_ctx=64, n_logits=8, threads=2)
    assert costs._key(other) != key
    other.close()
    same = Context(context.model, n_ctx=32, n_logits=8, threads=1)
    assert costs._key(same) == key
    same.close()
