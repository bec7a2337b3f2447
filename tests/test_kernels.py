"""Models whose weights are in the kernels' layout."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
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
from pyspec.errors import ModelError
from pyspec.llama import Context, Model
from tests.bit_exact import MOST, differing_after_rollback, differing_widths, one_by_one
from tests.models import Vocabulary, misshapen, truncated, write_llama

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


def test_activations_are_quantised_once_for_all_their_products(quantised: Path) -> None:
    model = Model(quantised)
    context = Context(model, n_ctx=128, n_logits=1)
    for width in (1, 5, 20):  # each a graph of its own, and twice the same one
        for _ in range(2):
            before = bridge.counts()
            context.evaluate(TOKENS[:width], n_logits=1)
            after = bridge.counts()
            # Of each of 2 layers K and V after Q, and up after gate; 7 products, and the output.
            assert after.shared - before.shared == 2 * 3
            assert after.products - before.products == 2 * 7 + 1
    context.close()
    model.close()


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
assert lib.cspec_kernels_attach({LIBRARY!r}.encode(), {lib.CSPEC_MATMUL_AVX512}, check, reason, 256) == 0
bridge._kernels = bridge.KernelStatus("", ffi.string(reason).decode())
"""
    _, reason, logits = evaluate(quantised, attach + EVALUATE)
    assert reason == "a check was told to fail"
    assert logits == evaluate(quantised, UNPACKED)[2]


def test_weights_that_no_kernel_takes_stay_as_they_are(tiny_target: Path) -> None:
    assert evaluate(tiny_target)[2] == evaluate(tiny_target, UNPACKED)[2]  # F32


@pytest.mark.parametrize("threads", [7, 64])
def test_nor_on_many_threads(models: Path, vocabulary: Vocabulary, threads: int) -> None:
    path = write_llama(models / "threads.gguf", vocabulary, layers=1, weight_type=Type.Q5_0)
    model = Model(path)
    few = Context(model, n_ctx=64, n_logits=5, threads=1)
    many = Context(model, n_ctx=64, n_logits=5, threads=threads)
    for context in (few, many):
        context.evaluate(TOKENS[:20])
        context.evaluate(TOKENS[20:25], n_logits=5)
    for row in range(5):
        assert many.logits(row).tobytes() == few.logits(row).tobytes()
    few.close()
    many.close()
    model.close()


# ---- loading -----------------------------------------------------------------------------------------


def last_row(model: Model) -> bytes:
    context = Context(model, n_ctx=64, n_logits=1, threads=2)
    context.evaluate(TOKENS[:8], n_logits=1)
    row = context.logits(0).tobytes()
    context.close()
    return row


@pytest.mark.parametrize("freed_first", [0, 1])
def test_two_models_at_once_freed_in_any_order(
    models: Path, vocabulary: Vocabulary, freed_first: int
) -> None:
    paths = [
        write_llama(models / f"two-{kind.name}.gguf", vocabulary, weight_type=kind)
        for kind in (Type.Q8_0, Type.Q4_0)
    ]
    alone = []
    for path in paths:
        model = Model(path)
        alone.append(last_row(model))
        model.close()
    both = [Model(path) for path in paths]
    assert [last_row(model) for model in both] == alone
    both[freed_first].close()
    assert last_row(both[1 - freed_first]) == alone[1 - freed_first]
    both[1 - freed_first].close()


def test_a_hundred_loads_leave_nothing_behind(models: Path, vocabulary: Vocabulary) -> None:
    path = write_llama(models / "again.gguf", vocabulary, width=256, weight_type=Type.Q8_0)
    process = psutil.Process()

    def load(times: int) -> int:
        for _ in range(times):
            Model(path).close()
        return int(process.memory_info().rss)

    before = load(20)  # what is kept for good is there now
    # One that kept as little as a twentieth of its weights would exceed this.
    assert load(100) - before < 5 * path.stat().st_size


@pytest.mark.parametrize("share", [0.3, 0.9, 0.999])
def test_a_truncated_file(quantised: Path, tmp_path: Path, share: float) -> None:
    with pytest.raises(ModelError, match="is truncated"):
        Model(truncated(tmp_path / "part.gguf", quantised, share))


def test_a_matrix_of_another_shape(quantised: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot load this model: [^\n]+$"):
        Model(misshapen(tmp_path / "shape.gguf", quantised))


# Memory beyond a limit is refused while `failing` is set: with it, that of the packed weights.
ALLOCATOR = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>

int failing, failures;

int posix_memalign(void **memory, size_t alignment, size_t size)
{
    static int (*real)(void **, size_t, size_t);
    if (real == NULL) {
        *(void **)&real = dlsym(RTLD_NEXT, "posix_memalign");
    }
    if (failing && size > 100000) {
        failures++;
        return ENOMEM;
    }
    return real(memory, alignment, size);
}
"""

WITHOUT_MEMORY = """
import ctypes, sys
from pyspec import bridge
from pyspec.errors import ModelError
from pyspec.llama import Context, Model

assert bridge.attach_kernels().instructions
allocator = ctypes.CDLL(sys.argv[2])
failing = ctypes.c_int.in_dll(allocator, "failing")
for _ in range(3):
    failing.value = 1
    try:
        Model(sys.argv[1])
        print("loaded")
    except ModelError as error:
        print(error)
    failing.value = 0
print(ctypes.c_int.in_dll(allocator, "failures").value)
context = Context(Model(sys.argv[1]), n_ctx=64, n_logits=1)
context.evaluate([3, 4, 5], n_logits=1)
print(bool(abs(context.logits(0)).max() > 0))
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_no_memory_for_the_packed_weights(
    models: Path, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    path = write_llama(models / "memory.gguf", vocabulary, width=256, weight_type=Type.Q8_0)
    (tmp_path / "allocator.c").write_text(ALLOCATOR)
    allocator = str(tmp_path / "allocator.so")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", allocator, "allocator.c", "-ldl"], cwd=tmp_path, check=True
    )
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEMORY, str(path), allocator],
        env={**os.environ, "LD_PRELOAD": allocator},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    *errors, failures, works = result.stdout.splitlines()
    assert len(errors) == 3
    assert all(line.startswith(f"{path}: llama.cpp cannot load this model: ") for line in errors)
    assert (int(failures), works) == (3, "True")
