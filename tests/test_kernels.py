"""Models whose weights are in the kernels' layout."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import llama_cpp
import numpy as np
import psutil
import pytest
from gguf import GGMLQuantizationType as Type
from pyspec._cspec import lib

from pyspec import bridge
from pyspec.llama import Context, Model
from tests.bit_exact import MOST, differing_after_rollback, differing_widths, one_by_one
from tests.models import Vocabulary, write_llama

pytestmark = pytest.mark.skipif(
    not bridge.attach_kernels().instructions, reason=bridge.attach_kernels().reason
)

TOKENS = [3 + (7 * i + i // 11) % 20 for i in range(40 + MOST)]
LIBRARY = llama_cpp.llama_cpp._lib._name


@pytest.fixture(
    scope="module", params=[Type.Q8_0, Type.Q5_0, Type.Q4_1, Type.F16], ids=lambda t: t.name
)
def quantised(request: pytest.FixtureRequest, models: Path, vocabulary: Vocabulary) -> Path:
    kind: Type = request.param
    return write_llama(models / f"{kind.name}.gguf", vocabulary, weight_type=kind)


# In a process of its own: the last row of logits, and what became of the kernels.
EVALUATE = """
import hashlib, json, sys
from pyspec import bridge
from pyspec.llama import Context, Model
model = Model(sys.argv[1])
context = Context(model, n_ctx=128, n_logits=1, threads=2)
context.evaluate(json.loads(sys.argv[2]), n_logits=1)
status = bridge.attach_kernels()
print(json.dumps([status.instructions, status.reason, context.logits(0).tolist()]))
"""


# The same with llama.cpp's layout, and with whatever else the bridge does.
UNPACKED = (
    """
from pyspec import bridge
bridge.attach()
bridge._kernels = bridge.KernelStatus("", "not wanted")
"""
    + EVALUATE
)


def evaluate(path: Path, code: str = EVALUATE, **environment: str) -> tuple[str, str, list[float]]:
    result = subprocess.run(
        [sys.executable, "-c", code, str(path), json.dumps(TOKENS)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    instructions, reason, logits = json.loads(result.stdout)
    return instructions, reason, logits


def test_logits_do_not_depend_on_the_width(quantised: Path) -> None:
    model = Model(quantised)
    expected = None
    for threads in (1, 2, 3):
        context = Context(model, n_ctx=128, n_logits=MOST, threads=threads)
        expected = expected or one_by_one(context, TOKENS, 40)
        widths = range(2, MOST + 1)
        assert differing_widths(context, TOKENS, 40, widths, expected) == []
        assert differing_after_rollback(context, TOKENS, 40, widths, expected) == []
        context.close()
    model.close()


def test_nor_on_the_instruction_set_and_are_llama_cpps(quantised: Path) -> None:
    stock = np.array(evaluate(quantised, PYSPEC_KERNELS="off")[2])
    results = {}
    for name in bridge.INSTRUCTIONS[1:]:
        instructions, _, logits = evaluate(quantised, PYSPEC_KERNELS=name)
        results[instructions] = hashlib.sha256(np.array(logits)).hexdigest()
        assert np.abs(np.array(logits) - stock).max() < 0.1 * np.abs(stock).max()
    assert len(set(results.values())) == 1
    assert "c" in results


@pytest.mark.parametrize("value", ["off", "sse"])
def test_the_environment_keeps_them_out(quantised: Path, value: str) -> None:
    instructions, reason, _ = evaluate(quantised, PYSPEC_KERNELS=value)
    assert instructions == ""
    assert reason


@pytest.mark.parametrize("check", ["BUFFERS", "KERNELS", "PACKED"])
def test_a_failing_check_keeps_them_out(quantised: Path, check: str) -> None:
    attach = f"""
from pyspec import bridge
from pyspec._cspec import ffi, lib
bridge.attach()
reason = ffi.new("char[256]")
check = {getattr(lib, "CSPEC_CHECK_" + check)}
assert lib.cspec_kernels_attach({LIBRARY!r}.encode(), 3, check, reason, 256) == 0
bridge._kernels = bridge.KernelStatus("", ffi.string(reason).decode())
"""
    _, reason, logits = evaluate(quantised, attach + EVALUATE)
    assert reason == "a check was told to fail"
    assert logits == evaluate(quantised, UNPACKED)[2]


def test_weights_that_no_kernel_takes_stay_as_they_are(tiny_target: Path) -> None:
    assert evaluate(tiny_target)[2] == evaluate(tiny_target, UNPACKED)[2]  # F32


def test_models_come_and_go(models: Path, vocabulary: Vocabulary) -> None:
    path = write_llama(models / "again.gguf", vocabulary, width=256, weight_type=Type.Q8_0)
    first, second = Model(path), Model(path)
    first.close()
    context = Context(second, n_ctx=64, n_logits=1)
    context.evaluate(TOKENS[:8], n_logits=1)
    context.close()
    second.close()
    process = psutil.Process()
    before = process.memory_info().rss
    for _ in range(100):
        Model(path).close()
    assert process.memory_info().rss - before < 10 * path.stat().st_size
