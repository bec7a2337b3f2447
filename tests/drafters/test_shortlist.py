"""A draft that computes only some logits, on tiny models in real llama.cpp with packed weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from pyspec import bridge
from pyspec.drafters import GoOn, Proposal, always
from pyspec.drafters.model import ModelDrafter
from pyspec.drafters.shortlist import Shortlist
from pyspec.engine import Engine
from pyspec.llama import Context, Model
from pyspec.sampling import Rule, Sampler, SamplingParams
from tests.models import Reference, Vocabulary, all_bytes, byte_level, write_llama
from tests.test_distribution import (
    FLASH_ATTENTION,
    REJECTED,
    THRESHOLD,
    Case,
    Pair,
    fit_of_short_outputs,
)

pytestmark = pytest.mark.skipif(
    not bridge.attach_kernels().instructions, reason=bridge.attach_kernels().reason
)

PROMPT = [0, 30, 50, 70, 40]
GREEDY = SamplingParams(temperature=0, max_tokens=60)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return all_bytes()


@pytest.fixture(scope="module")
def files(models: Path, vocabulary: Vocabulary) -> tuple[Path, Path]:
    """A target and a draft for it, both packed."""
    target = write_llama(models / "packed-target.gguf", vocabulary, weight_type=Type.Q8_0)
    draft = write_llama(
        models / "packed-draft.gguf", vocabulary, weight_type=Type.Q8_0, width=32, layers=1
    )
    return target, draft


@pytest.fixture(scope="module")
def draft(files: tuple[Path, Path]) -> Iterator[Model]:
    model = Model(files[1])
    yield model
    model.close()


def panels_of(*ids: int) -> list[int]:
    return sorted({token // bridge.PANEL_ROWS for token in ids})


# ---- the list -----------------------------------------------------------------------------------------


def test_frequent_and_special_ids_and_those_of_the_text_are_on_it(
    draft: Model, vocabulary: Vocabulary
) -> None:
    special = [0, *vocabulary.controls]
    listed = Shortlist(draft, 33)
    assert listed.panels([]).tolist() == panels_of(0, 16, 32, *special)
    assert listed.panels([200, 201]).tolist() == panels_of(0, 16, 32, 200, *special)
    assert listed.panels([200, 201, 100]).tolist() == panels_of(0, 16, 32, 100, 200, *special)


def test_it_is_a_function_of_the_text_alone(draft: Model) -> None:
    listed = Shortlist(draft, 16)
    listed.panels([100, 120, 140, 160])
    listed.roll_back(4)
    listed.roll_back(2)
    text = [100, 120, 200]
    assert listed.panels(text).tolist() == Shortlist(draft, 16).panels(text).tolist()
    # A target with more ids than the draft may have written one that the draft does not have.
    assert Shortlist(draft, 16).panels([10**6]).tolist() == Shortlist(draft, 16).panels([]).tolist()


# ---- what is computed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kept", [[0], [1, 2, 7], [16], list(range(17))], ids=str)
def test_the_logits_on_it_are_the_same_bits(draft: Model, kept: list[int], threads: int) -> None:
    context = Context(draft, n_ctx=64, n_logits=3, threads=threads)
    context.evaluate(PROMPT, n_logits=3)
    whole = [context.logits(row).copy() for row in range(3)]
    context.clear()
    context.panels = np.array(kept, np.int32)
    context.evaluate(PROMPT, n_logits=3)
    on_it = np.isin(np.arange(draft.n_vocab) // bridge.PANEL_ROWS, kept)
    for row in range(3):
        assert np.array_equal(context.logits(row)[on_it], whole[row][on_it])
        assert np.all(context.logits(row)[~on_it] == -np.inf)
    # Another context of the same model, and then this one without the list, compute everything.
    other = Context(draft, n_ctx=64, n_logits=3, threads=threads)
    context.clear()
    context.panels = None
    for each in (other, context):
        each.evaluate(PROMPT, n_logits=3)
        assert np.array_equal(each.logits(2), whole[2])
        each.close()


def test_a_target_that_is_its_own_draft_computes_everything(files: tuple[Path, Path]) -> None:
    """One Model object in both places: the draft's passes have a list, the target's none."""
    model = Model(files[0])
    drafter = ModelDrafter(Context(model, n_ctx=128, threads=1), model.n_vocab, shortlist=16)
    rows = []

    class Watched(Sampler):
        def distribution(self, logits: np.ndarray, *arguments: object, source: str) -> None:
            rows.append((source, float(np.isneginf(logits).mean())))
            super().distribution(logits, *arguments, source=source)  # type: ignore[arg-type]

    sampler = Watched(GREEDY, model.n_vocab)
    with Engine(model, drafter, n_ctx=128, threads=1) as engine:
        plain = [piece.text for piece in engine.generate(PROMPT, GREEDY, gamma=0)]
        drafted = [piece.text for piece in engine.generate(PROMPT, GREEDY, gamma=3)]
        assert "".join(drafted) == "".join(plain)
        drafter.clear()
        drafter.propose(PROMPT, 2, sampler, round_=0)
        assert all(source == "draft" and share > 0.3 for source, share in rows)
    drafter.close()
    model.close()


# ---- what is drafted ----------------------------------------------------------------------------------


def test_nothing_off_it_is_drafted_and_q_is_zero_there(draft: Model) -> None:
    sampler = Sampler(
        SamplingParams(temperature=2, top_k=0, top_p=1, min_p=0, seed=1), draft.n_vocab
    )
    drafter = ModelDrafter(Context(draft, n_ctx=64, threads=1), draft.n_vocab, shortlist=16)
    on_it = set(Shortlist(draft, 16).panels(PROMPT).tolist())
    proposal = drafter.propose(PROMPT, 30, sampler, round_=0)
    assert {token // bridge.PANEL_ROWS for token in proposal.tokens} <= on_it
    for q in proposal.q:
        assert q is not None
        assert {int(token) // bridge.PANEL_ROWS for token in np.flatnonzero(q)} == on_it
        assert q.sum() == pytest.approx(1, abs=1e-5)
    drafter.close()


def test_a_request_that_forbids_all_of_it_is_decoded_without_drafts(
    files: tuple[Path, Path], draft: Model
) -> None:
    on_it = Shortlist(draft, 16).panels(PROMPT)
    bans = {
        token: -np.inf
        for token in range(draft.n_vocab)
        if token // bridge.PANEL_ROWS in on_it or 80 <= token < 96
    }
    params = SamplingParams(temperature=0, max_tokens=1, logit_bias=bans)
    drafter = ModelDrafter(Context(draft, n_ctx=64, threads=1), draft.n_vocab, shortlist=16)
    sampler = Sampler(params, draft.n_vocab)
    assert drafter.propose(PROMPT, 3, sampler, round_=0).tokens == []
    with Engine(files[0], drafter, n_ctx=64, threads=1) as engine:
        (piece,) = engine.generate(PROMPT, params, gamma=3)
        assert piece.tokens[0].id not in bans
    drafter.close()


@pytest.mark.parametrize("shortlist", [1, 48, None])
def test_greedy_text_is_the_same(
    files: tuple[Path, Path], draft: Model, shortlist: int | None
) -> None:
    drafter = ModelDrafter(Context(draft, n_ctx=128, threads=1), draft.n_vocab, shortlist=shortlist)
    with Engine(files[0], drafter, n_ctx=128, threads=1) as engine:
        texts = [
            "".join(piece.text for piece in engine.generate(PROMPT, GREEDY, gamma=gamma))
            for gamma in (0, 4)
        ]
    assert texts[0] == texts[1]
    drafter.close()


# ---- what is written ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short_pair(models: Path) -> Iterator[Pair]:
    """12 likely tokens, four of them not on the draft's list until the text has one."""
    vocabulary = byte_level(20)
    biases = {0: -1.0} | dict.fromkeys(range(8, 16), -40.0)
    target = write_llama(models / "listed.gguf", vocabulary, biases=biases)
    path = write_llama(
        models / "listed-draft.gguf",
        vocabulary,
        biases=biases,
        width=32,
        layers=1,
        noise=0.3,
        weight_type=Type.Q8_0,
    )
    with ExitStack() as stack:
        draft = stack.enter_context(closing(Model(path)))
        context = Context(draft, n_ctx=512, threads=1)
        drafter = ModelDrafter(context, draft.n_vocab, shortlist=16)
        stack.callback(drafter.close)
        engine = stack.enter_context(Engine(target, drafter, n_ctx=512, threads=1))
        references = (
            stack.enter_context(Reference(file, n_ctx=512, flash_attn_type=FLASH_ATTENTION))
            for file in (target, path)
        )
        yield Pair(engine, *references)


CASES = [
    Case("none", 1.0, 3, Rule.BLOCK),
    Case("top-p", 0.6, 2, Rule.BLOCK),
    Case("none", 1.0, 1, Rule.TOKEN),
    Case("frequency", 1.0, 2, Rule.TOKEN),
    Case("none", 1.5, 2, Rule.COUPLED),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_have_the_targets_frequencies(short_pair: Pair, case: Case) -> None:
    assert fit_of_short_outputs(short_pair, case, length=2, n=800) > THRESHOLD


class NotRenormalised(ModelDrafter):
    """q as if a part of it were off the list, where nothing is drawn from."""

    def propose(
        self,
        ids: Sequence[int],
        gamma: int,
        sampler: Sampler,
        *,
        round_: int,
        go_on: GoOn = always,
    ) -> Proposal:
        proposal = super().propose(ids, gamma, sampler, round_=round_, go_on=go_on)
        for q in proposal.q:
            assert q is not None
            q *= 0.6
        return proposal


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_the_check_rejects_a_q_that_is_not_renormalised(
    short_pair: Pair, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = short_pair.engine._slots[0]
    (own,) = slot.drafters
    assert isinstance(own, ModelDrafter)
    context = own.context
    wrong = NotRenormalised(context, context.model.n_vocab, shortlist=16)
    monkeypatch.setattr(slot, "drafters", [wrong])
    assert fit_of_short_outputs(short_pair, case, length=2, n=800) < REJECTED
