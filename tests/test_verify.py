"""Each check passes on a right engine, and fails on one that is broken in the way it is there to catch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from pyspec import verify
from pyspec.engine import Engine
from pyspec.errors import ModelError, UsageError
from pyspec.generation import Generation
from pyspec.llama import Context, Logits, Model
from pyspec.sampling import Probabilities, Rule, Sampler, SamplingParams, Verdict
from pyspec.verify import QUICK, RandomDrafter, Result, Setup, distribution
from tests.models import Vocabulary, byte_level, write_lfm2, write_llama, write_mamba

EFFORT = replace(QUICK, positions=(1, 40, 520), max_tokens=24, samples=1500)
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def setup(tiny_target: Path, tiny_draft: Path) -> Iterator[Setup]:
    target, draft = Model(tiny_target), Model(tiny_draft)
    yield Setup(target=target, draft=draft, effort=EFFORT, threads=1)
    draft.close()
    target.close()


def outcomes(results: Iterator[Result]) -> dict[str, bool | None]:
    return {f"{result.check}: {result.subject}": result.passed for result in results}


# ---- bits --------------------------------------------------------------------------------------------


def test_bits_are_the_same(setup: Setup) -> None:
    wide, rolled_back = verify.check_bits(setup, setup.target, "target")
    assert (wide.subject, wide.passed) == ("target, widths 2 to 8", True)
    assert wide.figures["rows"] == 3 * (2 + 5 + 8)
    assert wide.figures["largest_difference"] == 0
    assert (rolled_back.subject, rolled_back.passed) == ("target, after a rollback", True)
    assert rolled_back.figures["rows"] == 3 * 3


def test_the_width_of_a_round_is_among_those_compared(setup: Setup) -> None:
    wide, _ = verify.check_bits(replace(setup, gamma=11), setup.target, "target")
    assert wide.subject == "target, widths 2 to 12"


def test_positions_beyond_the_context_are_left_out(setup: Setup) -> None:
    wide, _ = verify.check_bits(replace(setup, n_ctx=64), setup.target, "target")
    assert wide.figures["rows"] == 2 * (2 + 5 + 8)
    wide, _ = verify.check_bits(replace(setup, n_ctx=16, gamma=40), setup.target, "target")
    assert wide.figures["rows"] == 2 + 5 + 8


def test_logits_that_depend_on_the_width_are_caught(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Context.logits

    def perturbed(self: Context, row: int) -> Logits:
        logits = original(self, row)
        if self._last_width == 5 and self.length > 520 and row == 3:
            logits[7] += 0.25
        return logits

    monkeypatch.setattr(Context, "logits", perturbed)
    wide, rolled_back = verify.check_bits(setup, setup.target, "target")
    assert not wide.passed
    assert wide.figures["rows_different"] == 1
    assert wide.figures["largest_difference"] == pytest.approx(0.25, rel=1e-4)
    assert (wide.figures["position"], wide.figures["width"]) == (523, 5)
    assert "at most by 0.25: position 523, width 5" in wide.detail
    assert rolled_back.passed


def test_one_bit_is_a_difference(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Context.logits

    def perturbed(self: Context, row: int) -> Logits:
        logits = original(self, row)
        if self._last_width > 1:
            logits.view(np.uint32)[7] ^= 1
        return logits

    monkeypatch.setattr(Context, "logits", perturbed)
    wide, _ = verify.check_bits(setup, setup.target, "target")
    assert wide.figures["rows_different"] == wide.figures["rows"]


def test_what_a_rollback_leaves_behind_is_caught(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Context.truncate

    def keeps_one_too_many(self: Context, length: int) -> None:
        original(self, min(length + (self._last_width > 1), self.length))

    monkeypatch.setattr(Context, "truncate", keeps_one_too_many)
    _, rolled_back = verify.check_bits(setup, setup.target, "target")
    assert not rolled_back.passed


@pytest.mark.parametrize(("write", "can_roll_back"), [(write_lfm2, True), (write_mamba, False)])
def test_a_recurrent_memory_is_compared_from_the_beginning_each_time(
    tmp_path: Path, vocabulary: Vocabulary, write: object, can_roll_back: bool
) -> None:
    path = write(tmp_path / "recurrent.gguf", vocabulary)  # type: ignore[operator]
    target = Model(path)
    wide, rolled_back = verify.check_bits(
        Setup(target=target, effort=replace(EFFORT, positions=(1, 40)), threads=1), target, "target"
    )
    target.close()
    assert (wide.passed, wide.figures["bit_exact_reason"]) == (True, None), wide.detail
    if can_roll_back:
        assert rolled_back.passed, rolled_back.detail
    else:
        assert rolled_back.passed is None


# ---- texts -------------------------------------------------------------------------------------------


def test_texts_are_the_same_with_any_draft(setup: Setup) -> None:
    results = list(verify.check_texts(setup, "greedy", GREEDY, Rule.BLOCK))
    assert [result.subject for result in results] == [
        "draft, gamma 1",
        "draft, gamma auto",
        "random tokens, gamma 2",
    ]
    assert all(result.passed for result in results)
    rates = [result.figures["acceptance_rate"] for result in results]
    assert rates[0] > rates[2]
    assert rates[2] < 0.2, "random tokens must be rejected, or nothing is rolled back"


def test_coupled_texts_are_the_same_with_any_draft(setup: Setup) -> None:
    params = SamplingParams(temperature=1, max_tokens=24, seed=3)
    results = list(verify.check_texts(setup, "coupled", params, Rule.COUPLED))
    assert len(results) == 3
    assert all(result.passed for result in results)


def test_texts_of_another_rule_differ_and_are_reported(setup: Setup) -> None:
    params = SamplingParams(temperature=1, max_tokens=24, seed=3)
    result = next(verify.check_texts(setup, "coupled", params, Rule.BLOCK))
    assert not result.passed
    difference = result.figures["first_difference"]
    assert difference["found"] != difference["expected"]
    assert f"prompt {difference['prompt']} differs from token {difference['token']} on" in (
        result.detail
    )


def test_an_engine_that_does_not_roll_back_is_caught(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keeps_one_too_many(self: Generation, length: int) -> None:
        slot = self.slot
        slot.context.truncate(min(length + 1, slot.context.length))
        for drafter in slot.drafters:
            drafter.roll_back(length)

    monkeypatch.setattr(Generation, "_roll_back", keeps_one_too_many)
    results = list(verify.check_texts(setup, "greedy", GREEDY, Rule.BLOCK))
    assert not any(result.passed for result in results)


def test_a_random_drafter_was_certain_of_what_it_drew() -> None:
    drafter = RandomDrafter(24, seed=1)
    proposal = drafter.propose([0], 6, Sampler(GREEDY, 24), round_=0)
    assert len(set(proposal.tokens)) > 1
    assert proposal.q == [None] * len(proposal.tokens) == [None] * 6


def test_an_engine_leaves_a_ready_drafter_open(setup: Setup) -> None:
    class Counted(RandomDrafter):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    drafter = Counted(setup.target.n_vocab)
    for _ in range(2):
        with Engine(setup.target, drafter, n_ctx=64, threads=1) as engine:
            pieces = list(engine.generate([0, 3], GREEDY))
            assert pieces[-1].statistics.drafted > 0
    assert drafter.closed == 0


def test_a_ready_drafter_is_refused_where_nothing_can_be_rolled_back(
    tmp_path: Path, vocabulary: Vocabulary
) -> None:
    path = write_mamba(tmp_path / "t.gguf", vocabulary)
    with pytest.raises(ModelError, match="cannot roll back"):
        Engine(path, RandomDrafter(len(vocabulary)), n_ctx=64, threads=1)


# ---- distributions -----------------------------------------------------------------------------------


def test_every_rule_fits_and_every_broken_one_is_caught(setup: Setup) -> None:
    results = list(verify.check_distribution(setup))
    assert outcomes(iter(results)) == {
        "distribution: block rule": True,
        "distribution: token rule": True,
        "distribution: coupled rule": True,
        "broken rule: residual drawn from p": True,
        "broken rule: greedy draft scored with q": True,
        "broken rule: shared random numbers": True,
    }
    for result in results:
        assert result.figures["samples"] == 2 * EFFORT.samples
        fits = [result.figures[name]["p_value"] for name in ("next_token", "two_tokens")]
        assert (min(fits) < verify.SIGNIFICANCE) == (result.check == "broken rule")


def test_a_residual_drawn_from_p_is_caught(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
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
    found = outcomes(verify.check_distribution(setup))
    assert found["distribution: block rule"] is False
    assert found["distribution: token rule"] is False


def test_a_token_that_the_target_cannot_write_is_caught(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Sampler.verify

    def writes_zero_sometimes(self: Sampler, *args: object, round_: int, **kw: object) -> Verdict:
        verdict = original(self, *args, round_=round_, **kw)  # type: ignore[arg-type]
        return Verdict(0, 0) if self.seed == 5 and round_ == 0 else verdict

    monkeypatch.setattr(Sampler, "verify", writes_zero_sometimes)
    result = next(verify.check_distribution(setup))
    assert not result.passed
    assert result.figures["two_tokens"]["impossible"] == 1
    assert "1 impossible" in result.detail


def test_a_broken_rule_that_is_not_caught_fails_the_check(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distribution, "_BROKEN", [("nothing wrong", Sampler)])
    *_, result = verify.check_distribution(setup)
    assert (result.check, result.subject, result.passed) == ("broken rule", "nothing wrong", False)
    assert "not caught" in result.detail


def test_a_draft_that_is_the_target_leaves_no_rejection_to_break(setup: Setup) -> None:
    results = list(verify.check_distribution(replace(setup, draft=setup.target)))
    assert outcomes(iter(results)) == {
        "distribution: block rule": True,
        "distribution: token rule": True,
        "distribution: coupled rule": True,
        "broken rule: residual drawn from p": None,
        "broken rule: greedy draft scored with q": True,
        "broken rule: shared random numbers": None,
    }


def test_ids_that_the_draft_lacks_are_not_shown_to_it(tiny_draft: Path, tmp_path: Path) -> None:
    padded = byte_level().padded(40)
    likely = dict.fromkeys(range(24, 40), 3.0)
    target = Model(write_llama(tmp_path / "t.gguf", padded, biases=likely))
    draft = Model(tiny_draft)
    setup = Setup(target=target, draft=draft, effort=replace(EFFORT, samples=200), threads=1)
    results = list(verify.check_distribution(setup))
    assert all(result.passed for result in results if result.check == "distribution")
    draft.close()
    target.close()


def test_a_draft_of_another_vocabulary_is_checked_too(setup: Setup, tmp_path: Path) -> None:
    tiny = byte_level()
    other = tiny.reordered([23, 9, 2, 1, 0, *range(3, 9), *range(10, 23)])
    rows = other.rows_like(tiny)
    path = write_llama(tmp_path / "d.gguf", other, width=32, layers=1, rows=rows)
    with closing(Model(path)) as draft:
        results = list(verify.check_distribution(replace(setup, draft=draft)))
    assert len(results) == 6
    assert all(result.passed for result in results)


@pytest.mark.parametrize("degrees", [1, 2, 3, 10, 71, 400])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0, 1.7, 6.0])
def test_the_tail_of_chi_square(degrees: int, ratio: float) -> None:
    expected = stats.chi2.sf(ratio * degrees, degrees)
    assert verify.chi_square_tail(ratio * degrees, degrees) == pytest.approx(expected, rel=1e-9)


def test_rare_outcomes_are_pooled() -> None:
    fit = distribution._Fit()
    fit.add(
        {"a": 60, "b": 34, "c": 4, "d": 2}, {"a": 0.6, "b": 0.3, "c": 0.04, "d": 0.03, "e": 0.03}
    )
    # Expected 3 + 3, 4 + 30 and 60, seen 2, 38 and 60.
    assert fit.chi_square == pytest.approx(16 / 6 + 16 / 34)
    assert fit.degrees_of_freedom == 2
    fit.add({"f": 1}, {"a": 1.0})
    assert fit.p_value == 0


# ---- all of it ---------------------------------------------------------------------------------------


def test_without_a_draft_the_bits_are_checked_and_the_rest_is_skipped(setup: Setup) -> None:
    results = list(verify.verify(replace(setup, draft=None)))
    assert [(result.check, result.passed) for result in results] == [
        ("bits", True),
        ("bits", True),
        ("greedy", None),
        ("coupled", None),
        ("distribution", None),
    ]


def test_a_seed_repeats_the_checks(setup: Setup) -> None:
    small = replace(setup, effort=replace(EFFORT, samples=200, positions=(1,)), n_ctx=128)
    # How far the planner drafts follows the clock.
    first, again, other = (
        [result.figures for result in verify.verify(replace(small, seed=seed, gamma=4))]
        for seed in (5, 5, 2**64 - 1)
    )
    assert first == again != other


def test_progress_counts_to_the_end(setup: Setup) -> None:
    reports: dict[str, list[tuple[int, int]]] = {}
    small = replace(
        setup,
        effort=replace(EFFORT, samples=50, positions=(1,)),
        prompts=["ab", "cd"],
        n_ctx=128,
        progress=lambda check, done, total: reports.setdefault(check, []).append((done, total)),
    )
    list(verify.verify(small))
    assert reports == {
        "bits of the target": [(n, 1) for n in range(2)],
        "greedy texts": [(n, 8) for n in range(9)],
        "coupled texts": [(n, 8) for n in range(9)],
        "distributions": [(n, 12) for n in range(13)],
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_ctx": 15}, "need a context of 16 or more, not 15"),
        ({"gamma": 64}, "gamma must be auto, or from 0 to"),
        ({"threads": 0}, "threads must be from 1 to"),
    ],
)
def test_what_cannot_be_checked_is_refused_first(
    setup: Setup, change: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        next(verify.verify(replace(setup, **change)))  # type: ignore[arg-type]


def test_a_prompt_without_tokens_is_refused(tmp_path: Path) -> None:
    target = Model(write_llama(tmp_path / "t.gguf", replace(byte_level(), add_bos=False)))
    with pytest.raises(UsageError, match=r"prompt 2 has no tokens of t\.gguf"):
        list(verify.verify(Setup(target=target, prompts=["ab", "XYZ"], threads=1)))
    target.close()
