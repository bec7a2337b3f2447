"""The n-gram drafter: what it proposes, and that a tiny target's text stays its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyspec._cspec import lib

from pyspec.drafters import Proposal, ngram
from pyspec.drafters.ngram import NgramDrafter
from pyspec.engine import MAX_WIDTH, Engine
from pyspec.errors import PyspecError, UsageError
from pyspec.metrics import Statistics
from pyspec.sampling import Rule, Sampler, SamplingParams

SAMPLER = Sampler(SamplingParams(), 100)
# Much repeats, and two ways go on from (3, 4).
PROMPT = [0, 3, 4, 5, 6, 3, 4, 7, 8, 3, 4, 5, 6, 3, 4]


def written(
    engine: Engine, prompt: list[int], params: SamplingParams, **request: object
) -> tuple[list[int], Statistics]:
    pieces = list(engine.generate(prompt, params, **request))  # type: ignore[arg-type]
    statistics = pieces[-1].statistics
    assert statistics is not None
    return [token.id for piece in pieces for token in piece.tokens], statistics


# ---- proposals ----------------------------------------------------------------------------------------


def test_a_proposal_follows_the_longest_match_and_says_how_long_it_is() -> None:
    proposal = NgramDrafter().propose(PROMPT, 4, SAMPLER, round_=0)
    # (3, 4, 5, 6, 3, 4) occurred once before, and (7, 8, 3, 4) followed.
    assert proposal.tokens == [7, 8, 3, 4]
    assert proposal.q == [None] * 4
    assert proposal.match_length == 6
    # Nothing but a single place speaks for each token, with a match that is one longer each time.
    assert proposal.confidence == pytest.approx([1 / (1 + 2.5 / m) for m in (6, 7, 8, 9)])


def test_confidence_is_less_where_the_context_went_on_otherwise() -> None:
    [certain] = NgramDrafter().peek([1, 2, 3, 1, 2, 3, 1, 2], 1).confidence
    [contested] = NgramDrafter().peek([9, 1, 2, 4, 8, 1, 2, 3, 7, 1, 2], 1).confidence
    assert contested == pytest.approx(1 / (2 + 2.5 / 2))
    assert 0 < contested < certain < 1


def test_nothing_is_proposed_where_nothing_repeats() -> None:
    drafter = NgramDrafter()
    assert drafter.peek(list(range(50)), 8) == Proposal()
    # A single token that occurred before is no match, unless that is asked for.
    assert drafter.peek([*range(50), 7], 8) == Proposal()
    assert NgramDrafter(min_match=1).peek([*range(50), 7], 2).tokens == [8, 9]


@pytest.mark.parametrize(
    ("match", "reach", "most"), [(2, 2, 4), (3, 2, 6), (3, 0.1, 1), (2, 9, 18)]
)
def test_a_proposal_is_as_long_as_its_match_lets_it(match: int, reach: float, most: int) -> None:
    text = [*range(100), 200, *range(20, 20 + match)]
    assert len(NgramDrafter(reach=reach).peek(text, 99).tokens) == most
    assert len(NgramDrafter(reach=reach).peek(text, 1).tokens) == 1


def test_looking_does_not_change_what_is_proposed() -> None:
    drafter = NgramDrafter()
    looks = [drafter.peek(PROMPT, 4) for _ in range(3)]
    assert looks == [NgramDrafter().peek(PROMPT, 4)] * 3


def test_a_text_is_forgotten_from_where_it_is_rolled_back() -> None:
    drafter = NgramDrafter()
    drafter.catch_up([0, 1, 2, 9, 9])
    drafter.roll_back(3)
    drafter.roll_back(3)
    assert drafter.peek([0, 1, 2, 5, 1, 2], 2).tokens == [5, 1]
    drafter.clear()
    assert drafter.peek([1, 2], 2) == Proposal()


def test_a_corpus_is_copied_from_and_outlives_the_texts() -> None:
    drafter = NgramDrafter([[1, 2, 3, 4], [5, 1, 2, 6]])
    for _ in range(2):
        assert drafter.peek([9, 1, 2], 9).tokens == [6], "the most recent one, up to its end"
        assert drafter.peek([0, 1, 2, 3], 9).tokens == [4]
        assert drafter.peek([4, 5], 9) == Proposal(), "no match goes over the end of a text"
        drafter.clear()
    # The text's own match goes first, unless the corpus has a longer one.
    assert drafter.peek([1, 2, 8, 1, 2], 1).tokens == [8]
    drafter.clear()
    assert drafter.peek([1, 2, 8, 5, 1, 2], 1).tokens == [6]


def test_arguments_out_of_range_are_refused() -> None:
    for arguments in ({"min_match": 0}, {"min_match": 5, "max_match": 4}, {"max_match": 2**21}):
        with pytest.raises(UsageError, match="matches must be from 1"):
            NgramDrafter(**arguments)
    with pytest.raises(UsageError, match="reach must be over 0"):
        NgramDrafter(reach=0)


def test_too_little_memory_is_an_error_and_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = NgramDrafter()
    monkeypatch.setattr(
        ngram,
        "lib",
        SimpleNamespace(
            CSPEC_OK=lib.CSPEC_OK,
            cspec_ngram_length=lib.cspec_ngram_length,
            cspec_ngram_push=lambda *_: lib.CSPEC_NO_MEMORY,
        ),
    )
    with pytest.raises(PyspecError, match="not enough memory"):
        drafter.catch_up([1])


# ---- texts --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tiny_target: Path) -> Iterator[Engine]:
    with Engine(tiny_target, NgramDrafter(), n_ctx=512, threads=1) as loaded:
        yield loaded


@pytest.mark.parametrize("gamma", [1, 4, MAX_WIDTH - 1])
@pytest.mark.parametrize("penalty", [0.0, 0.2])
def test_greedy_text_is_the_same(engine: Engine, gamma: int, penalty: float) -> None:
    params = SamplingParams(temperature=0, max_tokens=150, frequency_penalty=penalty)
    plain, _ = written(engine, PROMPT, params, gamma=0)
    drafted, statistics = written(engine, PROMPT, params, gamma=gamma)
    assert drafted == plain
    assert 0 < statistics.accepted < statistics.drafted


@pytest.mark.parametrize("gamma", [1, 5])
def test_coupled_text_depends_on_the_seed_alone(engine: Engine, gamma: int) -> None:
    params = SamplingParams(temperature=1, top_k=4, seed=11, max_tokens=100)
    plain, _ = written(engine, PROMPT, params, gamma=0, rule=Rule.COUPLED)
    drafted, statistics = written(engine, PROMPT, params, gamma=gamma, rule=Rule.COUPLED)
    assert drafted == plain
    assert statistics.accepted > 0


def test_every_proposed_token_is_verified(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is dropped after it was proposed, however short the proposal."""
    proposed = []
    original = NgramDrafter.propose

    def counted(self: NgramDrafter, *arguments: object, **options: object) -> object:
        proposal = original(self, *arguments, **options)  # type: ignore[arg-type]
        proposed.append(len(proposal.tokens))
        return proposal

    monkeypatch.setattr(NgramDrafter, "propose", counted)
    _, statistics = written(engine, PROMPT, SamplingParams(seed=1, max_tokens=80), gamma=6)
    assert sum(proposed) == statistics.drafted
    assert {4, 6} <= set(proposed)


def test_a_text_without_repeats_is_decoded_plainly(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, frequency_penalty=1000, repeat_last_n=-1)
    _, statistics = written(engine, list(range(20)), params, gamma=8)
    assert statistics.drafted == 0
    assert statistics.rounds == 3


def test_nothing_of_a_request_is_copied_into_the_next(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    first = written(engine, PROMPT, params, gamma=4)
    written(engine, [0, *[9, 3, 4] * 20], params, gamma=4)
    again = written(engine, PROMPT, params, gamma=4)
    assert again[0] == first[0]
    assert again[1].drafted == first[1].drafted
