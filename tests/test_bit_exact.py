"""A position's logits are the same bits at every width, with real models and with the bridge attached."""

from __future__ import annotations

import argparse
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyspec import bridge
from pyspec.catalogue import models_folder
from pyspec.llama import Context, Model
from tests.bit_exact import (
    MOST,
    POSITIONS,
    Digest,
    differing_after_rollback,
    differing_widths,
    evaluate,
    one_by_one,
)
from tests.models import (
    Vocabulary,
    write_gemma3,
    write_jamba,
    write_lfm2,
    write_mamba,
    write_qwen35,
)

SMOLLM = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA = "gemma-3-270m-Q4_K_M.gguf"  # most layers see a window of 512 positions
QWEN_SMALL = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
QWEN = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
FILES = [SMOLLM, GEMMA, QWEN_SMALL, QWEN]

WIDTHS = range(2, MOST + 1)
N_CTX = POSITIONS[-1] + MOST + 8

pytestmark = pytest.mark.skipif(
    not bridge.attach().attached, reason=f"no bridge: {bridge.attach().reason}"
)


class Bench:
    """A model at work: one context for each number of threads, and what it said one by one."""

    def __init__(self, path: Path) -> None:
        self.model = Model(path)
        self.tokens = self.model.tokenize(inspect.getsource(argparse))[:N_CTX]
        self._contexts: dict[int, Context] = {}
        self._expected: dict[int, list[Digest]] = {}

    def context(self, threads: int) -> Context:
        if threads not in self._contexts:
            self._contexts[threads] = Context(
                self.model, n_ctx=N_CTX, n_logits=MOST, threads=threads
            )
        return self._contexts[threads]

    def expected(self, position: int) -> list[Digest]:
        if position not in self._expected:
            self._expected[position] = one_by_one(self.context(2), self.tokens, position)
        return self._expected[position]

    def close(self) -> None:
        for context in self._contexts.values():
            context.close()
        self.model.close()


@pytest.fixture(scope="module")
def open_bench() -> Iterator[dict[str, Bench]]:
    """At most one model is open at a time."""
    opened: dict[str, Bench] = {}
    yield opened
    for bench in opened.values():
        bench.close()


@pytest.fixture
def bench(request: pytest.FixtureRequest, open_bench: dict[str, Bench]) -> Bench:
    file: str = request.param
    if file not in open_bench:
        path = models_folder() / file
        if not path.exists():
            pytest.skip(f"{file} is not in {models_folder()}")
        while open_bench:
            open_bench.popitem()[1].close()
        open_bench[file] = Bench(path)
    return open_bench[file]


def check(
    bench: Bench, threads: int, position: int, widths: list[int], rejected: list[int]
) -> None:
    context, tokens, expected = bench.context(threads), bench.tokens, bench.expected(position)
    assert differing_widths(context, tokens, position, widths, expected) == []
    assert differing_after_rollback(context, tokens, position, rejected, expected) == []


# ---- real models -------------------------------------------------------------------------------------


@pytest.mark.models
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("bench", [SMOLLM, GEMMA, QWEN_SMALL], indirect=True)
def test_logits_do_not_depend_on_the_width(bench: Bench, position: int) -> None:
    check(bench, 2, position, [2, 5, 9, 16], [5])


@pytest.mark.models
@pytest.mark.parametrize("position", [200, 600])
@pytest.mark.parametrize("bench", [QWEN], indirect=True)
def test_nor_do_a_larger_model_s(bench: Bench, position: int) -> None:
    check(bench, 2, position, [3, 8, 16], [5])


@pytest.mark.models
@pytest.mark.parametrize("position", [200, 600])
@pytest.mark.parametrize("bench", [SMOLLM, GEMMA, QWEN_SMALL], indirect=True)
def test_nor_on_the_number_of_threads(bench: Bench, position: int) -> None:
    check(bench, 1, position, [5], [5])


@pytest.mark.thorough
@pytest.mark.models
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("threads", [2, 1])
@pytest.mark.parametrize("bench", FILES, indirect=True)
def test_every_width_at_every_position(bench: Bench, threads: int, position: int) -> None:
    check(bench, threads, position, list(WIDTHS), [2, 5, 9, 16])


# ---- prompts in pieces -------------------------------------------------------------------------------


def rows_after_prompt(bench: Bench, piece: int) -> list[Digest]:
    context = Context(bench.model, n_ctx=1024, n_batch=max(piece, 5), n_logits=5, threads=2)
    try:
        for start in range(0, 520, piece):
            context.evaluate(bench.tokens[start : min(start + piece, 520)])
        return evaluate(context, bench.tokens[520:525])
    finally:
        context.close()


@pytest.mark.models
@pytest.mark.parametrize("bench", [SMOLLM, GEMMA], indirect=True)
def test_pieces_of_a_prompt_no_wider_than_the_exact_width_do_not_matter(bench: Bench) -> None:
    assert rows_after_prompt(bench, 7) == rows_after_prompt(bench, bridge.EXACT_WIDTH)


@pytest.mark.models
@pytest.mark.parametrize("bench", [SMOLLM, GEMMA], indirect=True)
def test_without_a_limit_no_pieces_of_a_prompt_matter(bench: Bench) -> None:
    bridge.set_exact_width(None)
    try:
        assert rows_after_prompt(bench, 7) == rows_after_prompt(bench, 64)
        assert rows_after_prompt(bench, 7) == rows_after_prompt(bench, 512)
    finally:
        bridge.set_exact_width(bridge.EXACT_WIDTH)


# ---- tiny models -------------------------------------------------------------------------------------


def tiny_tokens(count: int) -> list[int]:
    return [3 + (7 * i + i // 11) % 20 for i in range(count)]


@pytest.mark.parametrize("position", [40, 600])
def test_a_tiny_model(tiny_target: Path, position: int) -> None:
    tokens = tiny_tokens(position + MOST)
    model = Model(tiny_target)
    context = Context(model, n_ctx=position + MOST, n_logits=MOST, threads=2)
    expected = one_by_one(context, tokens, position)
    assert differing_widths(context, tokens, position, WIDTHS, expected) == []
    assert differing_after_rollback(context, tokens, position, WIDTHS, expected) == []
    context.close()


def in_passes(context: Context, prefix: list[int], tokens: list[int], width: int) -> list[Digest]:
    context.clear()
    context.evaluate(prefix)
    passes = [tokens[start : start + width] for start in range(0, len(tokens), width)]
    return [row for each in passes for row in evaluate(context, each)]


@pytest.mark.parametrize(
    "writer", [write_gemma3, write_mamba, write_jamba, write_lfm2, write_qwen35]
)
def test_tiny_models_of_other_kinds(
    models: Path, vocabulary: Vocabulary, writer: Callable[..., Path]
) -> None:
    tokens = tiny_tokens(600 + MOST)
    prefix, tokens = tokens[:600], tokens[600:]
    context = Context(
        Model(writer(models / f"bits-{writer.__name__}.gguf", vocabulary)),
        n_ctx=600 + MOST,
        n_logits=MOST,
        threads=2,
    )
    expected = in_passes(context, prefix, tokens, 1)
    assert [w for w in (2, 5, 9, 16) if in_passes(context, prefix, tokens, w) != expected] == []
    context.close()


@pytest.mark.parametrize("writer", [write_lfm2, write_qwen35])
def test_a_recurrent_state_taken_back(
    models: Path, vocabulary: Vocabulary, writer: Callable[..., Path]
) -> None:
    tokens = tiny_tokens(50)
    context = Context(
        Model(writer(models / f"back-{writer.__name__}.gguf", vocabulary)),
        n_ctx=64,
        n_logits=5,
        threads=2,
    )
    expected = in_passes(context, tokens[:40], tokens[40:], 1)
    context.clear()
    context.evaluate(tokens[:40])
    context.evaluate([*tokens[40:42], 3, 3, 3])
    context.truncate(42)
    assert evaluate(context, tokens[42:47]) == expected[2:7]
    context.close()


# ---- negative controls -------------------------------------------------------------------------------

CONTROL = """
import sys
from pyspec import bridge
from pyspec.llama import Context, Model
from tests.bit_exact import differing_widths, one_by_one

assert not bridge.attach().attached
model = Model(sys.argv[1])
tokens = [3 + 7 * i % 20 for i in range(620)]
context = Context(model, n_ctx=640, n_logits=16, threads=2)
print(differing_widths(context, tokens, 600, [2, 5], one_by_one(context, tokens, 600)))
context.close()
"""


def widths_that_differ_without_the_bridge(path: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-c", CONTROL, str(path)],
        env={**os.environ, "PYSPEC_BRIDGE": "off"},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.strip()


def test_without_the_bridge_the_same_check_finds_differences(tiny_target: Path) -> None:
    assert widths_that_differ_without_the_bridge(tiny_target) == "[2, 5]"


@pytest.mark.models
@pytest.mark.parametrize("bench", [GEMMA], indirect=True)
def test_without_the_bridge_a_real_model_differs(bench: Bench) -> None:
    assert widths_that_differ_without_the_bridge(bench.model.path) == "[2, 5]"
