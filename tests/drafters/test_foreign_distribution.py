"""What a draft of another vocabulary leaves as it is: the target's distribution.

The check and its threshold are those of tests/test_distribution.py, the right values the target's alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from pyspec import bridge
from pyspec.drafters import Proposal
from pyspec.drafters.foreign import ForeignDrafter
from pyspec.engine import Engine
from pyspec.llama import Context, Logits, Model
from pyspec.sampling import Rule, Sampler
from pyspec.vocab import SharedTokens
from tests import mutants
from tests.models import Reference, Vocabulary, byte_level, sentence_piece, softmax, write_llama
from tests.test_distribution import (
    FLASH_ATTENTION,
    OF_EVERY_PAIR,
    REJECTED,
    TEMPERATURES,
    THRESHOLD,
    Case,
    Pair,
    fit_of_short_outputs,
    use,
)

BLOCK, TOKEN, COUPLED = Rule.BLOCK, Rule.TOKEN, Rule.COUPLED

# 8 tokens: BOS, two ends, a b c d and a space.
FEW = byte_level(8)
# The same but for c, in another order, and tokens that the target lacks, which the draft finds likely.
OTHER = byte_level().reordered([9, 7, 2, 4, 0, 22, 3, 1, 6])
DRAFTS: dict[str, Vocabulary] = {"other": OTHER, "sentences": sentence_piece()}


def open_pair(folder: Path, draft: str) -> Iterator[Pair]:
    bridge.attach()
    vocabulary = DRAFTS[draft]
    biases = dict.fromkeys(range(len(vocabulary)), 0.0) | {vocabulary.bos: -1.0}
    target = write_llama(folder / "target.gguf", FEW, biases={0: -1.0})
    foreign = write_llama(
        folder / f"{draft}.gguf",
        vocabulary,
        biases=biases,
        width=32,
        layers=1,
        noise=0.3,
        rows=vocabulary.rows_like(FEW),
    )
    with ExitStack() as stack:
        p, q = (stack.enter_context(closing(Model(file))) for file in (target, foreign))
        context = Context(q, n_ctx=512, threads=1)
        drafter = ForeignDrafter(context, p, SharedTokens(p, q))
        stack.callback(drafter.close)
        engine = stack.enter_context(Engine(p, drafter, n_ctx=512, threads=1))
        references = (
            stack.enter_context(Reference(file, n_ctx=512, flash_attn_type=FLASH_ATTENTION))
            for file in (target, foreign)
        )
        yield Pair(engine, *references)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A byte-level draft whose tokens are partly others, in another order."""
    yield from open_pair(tmp_path_factory.mktemp("other"), "other")


@pytest.fixture(scope="module")
def sentence_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A SentencePiece draft of 271 tokens."""
    yield from open_pair(tmp_path_factory.mktemp("sentences"), "sentences")


CASES = [
    Case("none", 1.0, 4, BLOCK),
    Case("none", 1.0, 2, TOKEN),
    Case("presence", 0.6, 1, BLOCK),
    Case("all cuts", 1.5, 4, COUPLED),
]
OF_SENTENCES = [Case("everything", 0.6, 3, BLOCK), Case("top-p", 0.6, 4, TOKEN)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_have_the_targets_frequencies(pair: Pair, case: Case) -> None:
    assert fit_of_short_outputs(pair, case) > THRESHOLD


@pytest.mark.parametrize("case", OF_SENTENCES, ids=str)
def test_outputs_have_the_targets_frequencies_with_a_sentence_piece_draft(
    sentence_pair: Pair, case: Case
) -> None:
    assert fit_of_short_outputs(sentence_pair, case) > THRESHOLD


@pytest.mark.thorough
@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("transform", OF_EVERY_PAIR)
def test_many_outputs_have_the_targets_frequencies(pair: Pair, transform: str, rule: Rule) -> None:
    for temperature, gamma in zip(TEMPERATURES, (2, 3, 4), strict=True):
        case = Case(transform, temperature, gamma, rule)
        assert fit_of_short_outputs(pair, case, n=2000) > THRESHOLD, case


class NotRenormalised(ForeignDrafter):
    """q is the draft's distribution over all its tokens, of which those without a twin cannot be drawn."""

    def _in_targets_ids(self, logits: Logits) -> Logits:
        self.masses.append(float(softmax(logits)[self.shared.draft_ids].sum()))
        return super()._in_targets_ids(logits)

    def propose(
        self, ids: Sequence[int], gamma: int, sampler: Sampler, *, round_: int, **_: object
    ) -> Proposal:
        self.masses = list[float]()
        proposal = super().propose(ids, gamma, sampler, round_=round_)
        for q, mass in zip(proposal.q, self.masses, strict=True):
            q *= mass
        return proposal


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_the_check_rejects_a_q_that_is_not_renormalised(
    pair: Pair, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = pair.engine._slots[0]
    own = slot.drafters[0]
    assert isinstance(own, ForeignDrafter)
    wrong = NotRenormalised(own.context, pair.engine.target, own.shared)
    monkeypatch.setattr(slot, "drafters", [wrong])
    assert fit_of_short_outputs(pair, case) < REJECTED


def test_the_check_rejects_a_greedy_draft(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, pair, mutants.GreedyDraft)
    assert fit_of_short_outputs(pair, CASES[0]) < REJECTED
