"""What the draft model says of its proposals, on a tiny one in real llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from pyspec.drafters.model import ModelDrafter
from pyspec.drafters.ngram import NgramDrafter
from pyspec.llama import Context, Model
from pyspec.sampling import Sampler, SamplingParams
from tests.models import Reference, softmax

PROMPT = [0, 3, 5, 7, 4]


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_the_confidence_is_the_probability_at_temperature_one(
    tiny_draft: Path, temperature: float
) -> None:
    model = Model(tiny_draft)
    drafter = ModelDrafter(Context(model, n_ctx=64, threads=1), model.n_vocab)
    sampler = Sampler(SamplingParams(temperature=temperature, top_k=5, seed=3), model.n_vocab)
    proposal = drafter.propose(PROMPT, 6, sampler, round_=0)
    with Reference(tiny_draft) as reference:
        rows = softmax(reference.evaluate([*PROMPT, *proposal.tokens[:-1]]))[len(PROMPT) - 1 :]
    expected = [row[token] for row, token in zip(rows, proposal.tokens, strict=True)]
    assert proposal.confidence == pytest.approx(expected, abs=1e-3)
    assert proposal.match_length == 0
    drafter.close()
    model.close()


class Guesses(NgramDrafter):
    """Guesses that are right, wrong from some token on, or of no vocabulary at all."""

    def __init__(self, after: Mapping[int, Sequence[int]]) -> None:
        super().__init__()
        self._after = after

    def guess(self, ids: Sequence[int], most: int) -> list[int]:
        return list(self._after.get(len(ids), ()))[:most]


def guessed(right: Sequence[int], place: int, n_right: int, n: int) -> list[int]:
    """n tokens to follow the first `place` of a text, of which the first n_right are the text's."""
    ahead = list(right[place : place + n])
    return ahead[:n_right] + [(token + 1) % 16 for token in ahead[n_right:]]


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("n_right", [0, 1, 3, 7])
@pytest.mark.parametrize("n_logits", [2, 5, 9])
def test_what_is_drawn_does_not_depend_on_the_guesses(
    tiny_draft: Path, temperature: float, n_right: int, n_logits: int
) -> None:
    model = Model(tiny_draft)
    sampler = Sampler(SamplingParams(temperature=temperature, seed=3), model.n_vocab)
    with ExitStack() as stack:
        alone, guided = (
            ModelDrafter(Context(model, n_ctx=64, n_logits=n, threads=1), model.n_vocab)
            for n in (1, n_logits)
        )
        stack.callback(model.close)
        stack.callback(alone.close)
        stack.callback(guided.close)
        expected = alone.propose(PROMPT, 8, sampler, round_=0)
        rows = [q.copy() for q in expected.q if q is not None]
        text = [*PROMPT, *expected.tokens]
        guided.guide = Guesses(
            {place: guessed(text, place, n_right, 7) for place in range(len(PROMPT), len(text))}
        )
        for _ in range(2):  # the second time after a rollback
            proposal = guided.propose(PROMPT, 8, sampler, round_=0)
            assert proposal.tokens == expected.tokens
            assert proposal.confidence == pytest.approx(expected.confidence, abs=1e-5)
            for q, row in zip(proposal.q, rows, strict=True):
                assert q == pytest.approx(row, abs=1e-5)
            # Nothing that was guessed and not drawn stays in the cache.
            assert guided.context.length <= len(text)
            guided.roll_back(len(PROMPT) - 1)


def test_tokens_that_were_guessed_take_no_pass(
    tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(tiny_draft)
    sampler = Sampler(SamplingParams(temperature=0), model.n_vocab)
    drafter = ModelDrafter(Context(model, n_ctx=64, n_logits=9, threads=1), model.n_vocab)
    text = [*PROMPT, *drafter.propose(PROMPT, 8, sampler, round_=0).tokens]
    drafter.roll_back(len(PROMPT) - 1)
    widths, told = list[int](), list[bool]()
    evaluate = drafter.context.evaluate

    def counted(tokens: Sequence[int], *, n_logits: int = 0) -> None:
        widths.append(len(tokens))
        evaluate(tokens, n_logits=n_logits)

    def go_on(_confidence: float, *, evaluated: bool = False) -> bool:
        told.append(evaluated)
        return True

    monkeypatch.setattr(drafter.context, "evaluate", counted)
    # After the prompt three tokens are guessed, and the third is wrong; then none until the seventh.
    place = len(PROMPT)
    drafter.guide = Guesses({place: guessed(text, place, 2, 3), place + 6: text[place + 6 :]})
    drafter.propose(PROMPT, 8, sampler, round_=0, go_on=go_on)
    assert widths == [4, 1, 1, 1, 2]
    assert told == [True, True, False, False, False, False, True]
    drafter.close()
    model.close()


def test_a_guess_that_the_draft_has_no_token_for_ends_the_guesses(tiny_draft: Path) -> None:
    model = Model(tiny_draft)
    sampler = Sampler(SamplingParams(temperature=0), model.n_vocab)
    drafter = ModelDrafter(Context(model, n_ctx=64, n_logits=9, threads=1), model.n_vocab)
    expected = drafter.propose(PROMPT, 4, sampler, round_=0).tokens
    drafter.roll_back(len(PROMPT) - 1)
    drafter.guide = Guesses({len(PROMPT): [expected[0], model.n_vocab, 1]})
    assert drafter.propose(PROMPT, 4, sampler, round_=0).tokens == expected
    drafter.close()
    model.close()
