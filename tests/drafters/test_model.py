"""What the draft model says of its proposals, on a tiny one in real llama.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyspec.drafters.model import ModelDrafter
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
