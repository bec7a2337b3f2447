"""What only real models show: the default pair, fetched once into the user's cache."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from bench.prompts import load
from pyspec import Engine, Grammar, SamplingParams, bridge
from pyspec.catalogue import load_catalogue, resolve
from pyspec.chat import prompt_ids
from pyspec.drafters import Drafter
from pyspec.drafters.model import DEFAULT_SHORTLIST
from pyspec.drafters.shortlist import Shortlist
from pyspec.llama import Context
from pyspec.verify import RandomDrafter

pytestmark = pytest.mark.models

GAMMAS = range(1, 13)


def prompts() -> list[str]:
    """The benchmarks' prompts, one of each kind after the other."""
    kinds = [list(named.values()) for named in load().values()]
    return [text for texts in zip(*kinds, strict=False) for text in texts]


def harbour_log(n_days: int) -> str:
    """A long text whose continuation depends on all of it."""
    return "Which day had the most ships?\n" + "".join(
        f"Day {day}: {7 * day % 11} ships came in, {5 * day % 7} left, wind {3 * day % 9}.\n"
        for day in range(1, n_days + 1)
    )


@pytest.fixture(scope="module")
def files() -> tuple[Path, Path]:
    catalogue = load_catalogue()
    target = catalogue.default_target
    draft = catalogue.draft_for(target)
    assert draft is not None
    return resolve(target.name), resolve(draft.name)


@pytest.fixture(scope="module")
def engine(files: tuple[Path, Path]) -> Iterator[Engine]:
    with Engine(*files, n_ctx=2600) as loaded:
        yield loaded


def greedy(engine: Engine, text: str, n: int, **request: int) -> tuple[list[int], str]:
    """Exactly n tokens: ending is forbidden, so that every comparison is of full length."""
    ids = prompt_ids(engine.target, [{"role": "user", "content": text}])
    bans = {t: -math.inf for t in range(engine.target.n_vocab) if engine.target.is_end(t)}
    params = SamplingParams(temperature=0, max_tokens=n, logit_bias=bans)
    pieces = list(engine.generate(ids, params, **request))
    tokens = [token.id for piece in pieces for token in piece.tokens]
    statistics = pieces[-1].statistics
    assert statistics is not None
    assert len(tokens) == statistics.accepted + statistics.rounds == n
    assert statistics.bit_exact, statistics.bit_exact_reason
    return tokens, "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("index", range(20))
def test_300_greedy_tokens_are_the_same_with_a_draft(engine: Engine, index: int) -> None:
    """Each gamma from 1 to 12 on one or two of the prompts."""
    text, gamma = prompts()[index], GAMMAS[index % len(GAMMAS)]
    assert greedy(engine, text, 300, gamma=gamma) == greedy(engine, text, 300, gamma=0)


@pytest.mark.thorough
@pytest.mark.parametrize("index", range(20))
def test_300_greedy_tokens_are_the_same_at_every_gamma(engine: Engine, index: int) -> None:
    text = prompts()[index]
    plain = greedy(engine, text, 300, gamma=0)
    for gamma in GAMMAS:
        assert greedy(engine, text, 300, gamma=gamma) == plain


def test_greedy_tokens_after_2000_are_the_same_with_a_draft(engine: Engine) -> None:
    text = harbour_log(110)
    assert len(engine.target.tokenize(text)) > 2000
    assert greedy(engine, text, 100, gamma=5) == greedy(engine, text, 100, gamma=0)


@pytest.mark.thorough
def test_2000_greedy_tokens_are_the_same_at_several_gammas(engine: Engine) -> None:
    text = prompts()[0]
    plain = greedy(engine, text, 2000, gamma=0)
    for gamma in (1, 4, 12):
        assert greedy(engine, text, 2000, gamma=gamma) == plain


def test_greedy_tokens_are_the_same_with_a_random_draft(engine: Engine) -> None:
    drafter: Drafter = RandomDrafter(engine.target.n_vocab)
    with Engine(engine.target, drafter, n_ctx=512) as random:
        for text, gamma in zip(prompts()[:3], (1, 5, 12), strict=True):
            expected = greedy(engine, text, 60, gamma=0)
            assert greedy(random, text, 60, gamma=gamma) == expected


@pytest.mark.skipif(not bridge.attach_kernels().instructions, reason="needs packed weights")
def test_the_draft_computes_few_logits_and_those_with_the_same_bits(engine: Engine) -> None:
    assert engine.draft is not None
    ids = engine.target.tokenize(prompts()[0])
    panels = Shortlist(engine.draft, DEFAULT_SHORTLIST).panels(ids)
    context = Context(engine.draft, n_ctx=512)
    rows = []
    for context.panels in (None, panels):
        context.clear()
        context.evaluate(ids, n_logits=1)
        rows.append(context.logits(-1).copy())
    context.close()
    on_it = np.isin(np.arange(engine.draft.n_vocab) // bridge.PANEL_ROWS, panels)
    assert np.array_equal(rows[1][on_it], rows[0][on_it])
    assert np.all(np.isneginf(rows[1][~on_it]))
    assert on_it.mean() < 0.5


def test_two_processes_write_the_same_bytes_with_and_without_a_draft() -> None:
    command = [sys.executable, "-m", "pyspec", "generate", "--temp", "0", "-n", "200"]
    prompt = "Write a Python class for a binary search tree with insert, find and in-order walk."
    runs = [
        subprocess.run(
            [*command, *options, "--stats", "json", prompt], capture_output=True, check=True
        )
        for options in ([], ["--gamma", "4"], ["--no-draft"])
    ]
    assert runs[0].stdout == runs[1].stdout == runs[2].stdout != b""
    _, drafted, plain = (json.loads(run.stderr) for run in runs)
    assert plain["drafted"] == 0
    assert drafted["accepted"] + drafted["rounds"] >= drafted["completion_tokens"]
    assert drafted["acceptance_rate"] > 0.8, "this pair agrees on code"


MEMORY = """
import itertools, sys
from bench.prompts import load
from pyspec import Engine, SamplingParams

def anonymous():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return 1024 * int(lines["RssAnon"].split()[0])

gamma = 4
with Engine(sys.argv[1], sys.argv[2], n_ctx=4096) as engine:
    ids = engine.target.tokenize("Once upon a time there was " * 20)
    # llama.cpp's buffers come into memory as passes first use them: one of each kind before counting.
    for context, width in ((engine._slots[0].context, gamma + 1), (engine._slots[0].drafters[0].context, 1)):
        for n, n_logits in ((len(ids), 0), (width, width), (1, 1)):
            context.evaluate(ids[:n], n_logits=n_logits)
        context.clear()
    before = anonymous()
    params = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, seed=1, max_tokens=40)
    pieces = engine.generate(ids, params, gamma=gamma)
    peak = max(anonymous() for piece in pieces)
    row = 4 * engine.target.n_vocab
    print((peak - before) / row, gamma + 1)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_generation_needs_no_more_memory_than_its_rows_of_logits(
    files: tuple[Path, Path],
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, *files], capture_output=True, text=True, check=True
    )
    rows, allowed = map(float, run.stdout.split())
    assert 0 < rows <= allowed


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "born": {"type": "integer", "minimum": 1700, "maximum": 2000},
        "fields": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 4},
        "alive": {"type": "boolean"},
    },
    "required": ["name", "born", "fields", "alive"],
    "additionalProperties": False,
}


def answer_in_json(engine: Engine, gamma: int, **settings: Any) -> str:
    question = "Who was Ada Lovelace? Answer in JSON with name, born, fields and alive."
    ids = prompt_ids(engine.target, [{"role": "user", "content": question}])
    params = SamplingParams(grammar=Grammar.json_schema(PERSON), max_tokens=300, **settings)
    pieces = list(engine.generate(ids, params, gamma=gamma))
    text = "".join(piece.text for piece in pieces)
    statistics = pieces[-1].statistics
    assert statistics is not None
    assert statistics.finish_reason == "stop"
    assert (statistics.drafted > 0) == (gamma > 0)
    jsonschema.validate(json.loads(text), PERSON)
    return text


def test_greedy_json_of_a_schema_is_the_same_with_a_draft(engine: Engine) -> None:
    plain = answer_in_json(engine, 0, temperature=0)
    assert "Lovelace" in plain
    for gamma in (1, 4, 9):
        assert answer_in_json(engine, gamma, temperature=0) == plain


@pytest.mark.parametrize("gamma", [0, 4])
def test_json_of_a_schema_at_a_high_temperature(engine: Engine, gamma: int) -> None:
    texts = {answer_in_json(engine, gamma, temperature=1.2, seed=seed) for seed in range(5)}
    assert len(texts) > 1


@pytest.mark.parametrize(
    ("draft", "n_shared"),
    # The texts that are in both files, read with the gguf package, and controls: <|im_start|>, <|im_end|> and
    # <|endoftext|> in one, the end of a turn in the other.
    [("smollm2-135m", 39234 + 3), ("gemma-3-270m", 95968 + 1)],
)
def test_greedy_tokens_are_the_same_with_a_draft_of_another_vocabulary(
    engine: Engine, draft: str, n_shared: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Byte-level and smaller, and SentencePiece."""
    with (
        caplog.at_level("DEBUG", "pyspec.vocab"),
        Engine(engine.target, resolve(draft), n_ctx=512) as foreign,
    ):
        assert f"through the {n_shared} tokens" in caplog.text
        for text, gamma in zip(prompts()[:3], (1, 4, 8), strict=True):
            expected = greedy(engine, text, 60, gamma=0)
            assert greedy(foreign, text, 60, gamma=gamma) == expected
        # Also where a grammar leaves little of what the two vocabularies share.
        assert answer_in_json(foreign, 4, temperature=0) == answer_in_json(engine, 0, temperature=0)


def test_every_byte_of_a_text_in_many_scripts_survives_the_tokens(engine: Engine) -> None:
    text = "naïve café — Zürich, Ελλάδα, Москва, 東京, नमस्ते, 🧑‍🚀🏳️‍🌈, ⛵︎ \t end"
    ids = engine.target.tokenize(text, add_special=False)
    assert b"".join(map(engine.target.piece, ids)).decode() == text
