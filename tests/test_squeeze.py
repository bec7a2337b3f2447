from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pyspec import squeeze
from pyspec.engine import Engine
from pyspec.errors import VocabularyMismatchError
from pyspec.gguf_file import inspect_gguf
from pyspec.llama import Model
from pyspec.sampling import SamplingParams
from pyspec.squeeze import AS_IT_IS, preferred_draft, squeezed_path
from pyspec.tune import Setup
from tests.models import byte_level, write_llama


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(squeeze, "VARIANTS", (("q4_0", "q4_0"),))


@pytest.fixture
def setup(tiny_target: Path, tiny_draft: Path) -> Setup:
    target = Model(tiny_target)
    return Setup(
        target=target,
        draft=Model(tiny_draft),
        prompts=[target.tokenize("ab cd"), target.tokenize("bad cab")],
        params=SamplingParams(temperature=1.0, seed=1),
        tokens=16,
        gammas=(0, 1, 4),
        n_ctx=256,
        threads=1,
    )


def with_costs(monkeypatch: pytest.MonkeyPatch, original: Path, copies: float) -> None:
    """Have a draft step of the original take half as long as a target pass, one of a copy so long."""

    def measured(setup: Setup, widths: Iterable[int], **_: int) -> dict[int, float]:
        step = 0.5 if setup.draft.path == original else copies
        return {0: step, **dict.fromkeys(widths, 1.0)}

    monkeypatch.setattr(squeeze, "measure_costs", measured)


def test_the_fastest_copy_is_kept_and_drafts(
    setup: Setup, tiny_target: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert preferred_draft(tiny_target, tiny_draft) == tiny_draft
    with_costs(monkeypatch, tiny_draft, copies=0.1)
    best, *others = variants = squeeze.squeeze(setup)
    kept = squeezed_path(tiny_target, tiny_draft)
    assert best.path == kept == preferred_draft(tiny_target, tiny_draft)
    assert best.name != AS_IT_IS
    assert best.bytes_read == inspect_gguf(kept).bytes_read < inspect_gguf(tiny_draft).bytes_read
    assert [path.name for path in kept.parent.iterdir()] == [kept.name], "the others are gone"
    (as_it_is,) = [variant for variant in others if variant.name == AS_IT_IS]
    assert as_it_is.path == tiny_draft
    assert preferred_draft(tiny_draft, tiny_draft) == tiny_draft, "for another target it is not"

    for variant in variants:
        a, c = variant.acceptance, variant.c
        assert c == (0.5 if variant.name == AS_IT_IS else 0.1)
        # The costs are flat, so that the paper's formula holds; gammas 0, 1 and 4 are tried.
        expected = max(1.0, (1 + a) / (1 + c), (1 - a**5) / ((1 - a) * (1 + 4 * c)))
        assert variant.speedup == pytest.approx(expected)
        assert variant.bytes_per_accepted == pytest.approx(variant.bytes_read / a)
    assert best.speedup > as_it_is.speedup

    params = SamplingParams(temperature=0.0, max_tokens=40)
    texts = set()
    for draft in (None, tiny_draft, kept):
        with Engine(setup.target, draft, n_ctx=256, threads=1) as engine:
            pieces = engine.generate("ab cd", params)
            texts.add("".join(piece.text for piece in pieces))
    assert len(texts) == 1


def test_a_draft_that_is_best_as_it_is_stays(
    setup: Setup, tiny_target: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = squeezed_path(tiny_target, tiny_draft)
    earlier.parent.mkdir(parents=True)
    earlier.touch()
    with_costs(monkeypatch, tiny_draft, copies=0.9)
    best, *_ = squeeze.squeeze(setup)
    assert best.name == AS_IT_IS
    assert preferred_draft(tiny_target, tiny_draft) == tiny_draft, (
        "and what was kept before is gone"
    )
    assert tiny_draft.exists()


def test_acceptance_is_the_overlap_of_the_distributions(setup: Setup) -> None:
    p = np.array([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]], np.float32)
    q = np.array([[0.25, 0.5, 0.25], [0.0, 0.0, 1.0]], np.float32)
    assert squeeze._overlap(p, q).tolist() == [0.75, 0.5]
    prompt, text = setup.prompts[0], setup.prompts[1]
    rows = squeeze._distributions(setup, setup.target, prompt, text)
    assert rows.sum(axis=1).tolist() == pytest.approx([1.0] * len(text))
    assert squeeze._overlap(rows, rows).tolist() == pytest.approx([1.0] * len(text))


def test_copies_that_come_out_alike_are_measured_once(
    setup: Setup, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The usual reason is rows that are no multiple of a type's block, for which llama.cpp takes another.
    monkeypatch.setattr(squeeze, "VARIANTS", (("q4_0", "q4_0"), ("Q4_0", "q4_0")))
    with_costs(monkeypatch, tiny_draft, copies=0.1)
    names = {variant.name for variant in squeeze.squeeze(setup)}
    assert names == {AS_IT_IS, "q4_0, output q4_0"}


def test_a_draft_of_another_vocabulary_is_refused(setup: Setup, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "a.gguf", byte_level().spelled(9, "zz"), width=32, layers=1)
    with pytest.raises(VocabularyMismatchError):
        squeeze.squeeze(replace(setup, draft=Model(other)))
