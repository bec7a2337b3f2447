"""The bridge attaches to a llama.cpp that it knows, and stays out of any other."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import llama_cpp
import pytest
from pyspec._cspec import lib

from pyspec import bridge
from pyspec.bridge import BridgeStatus, bit_exact_reason

SUPPORTED = sys.platform == "linux" and platform.machine() in {"x86_64", "aarch64"}
LIBRARY = llama_cpp.llama_cpp._lib._name

on_supported_platforms = pytest.mark.skipif(
    not SUPPORTED or os.environ.get("PYSPEC_BRIDGE") == "off",
    reason="the bridge is not meant to attach here",
)


def python(code: str, *arguments: str, **environment: str) -> str:
    """What a program prints, in a process that nothing is attached to yet."""
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


# ---- attaching ---------------------------------------------------------------------------------------


@on_supported_platforms
def test_attaches_and_stays_attached() -> None:
    assert bridge.attach() == BridgeStatus(attached=True)
    assert bridge.attach() is bridge.attach()


@on_supported_platforms
def test_llama_cpp_asks_it_about_attention_and_products(tiny_target: Path) -> None:
    from pyspec.llama import Context, Model

    assert bridge.attach().attached
    model = Model(tiny_target)
    context = Context(model, n_ctx=64, n_logits=1, threads=2)
    before = bridge.counts()
    context.evaluate([3, 4, 5], n_logits=1)
    narrow = bridge.counts()
    context.evaluate([3] * (bridge.EXACT_WIDTH + 1), n_logits=1)
    wide = bridge.counts()
    context.close()
    # Two layers, in each: one attention, four products before and after it, three of the feed-forward part;
    # and one product for the logits. The last row alone leaves the last layer's attention.
    assert replace(before, attention=before.attention + 2, products=before.products + 15) == narrow
    assert wide.wide > narrow.wide
    assert (wide.foreign, wide.unknown) == (0, 0)


@on_supported_platforms
@pytest.mark.parametrize("setting", ["OMP_THREAD_LIMIT", "OMP_NUM_THREADS"])
def test_attaches_with_a_single_thread(setting: str) -> None:
    code = "from pyspec import bridge; print(bridge.attach())"
    assert python(code, **{setting: "1"}) == "BridgeStatus(attached=True, reason='')"


# ---- staying out -------------------------------------------------------------------------------------

STATUS = """
import sys
from pyspec import bridge
print(bridge.attach().reason)
assert bridge.attach().attached is False
"""

# What must work whatever became of the bridge: the model of the first argument loads and answers.
ANSWER = """
from pyspec.llama import Context, Model
model = Model(sys.argv[1])
context = Context(model, n_ctx=64, n_logits=2)
context.evaluate([3, 4, 5], n_logits=2)
assert abs(context.logits(1)).max() > 0
context.close()
assert bridge.counts() == bridge.BridgeCounts(0, 0, 0, 0, 0, 0)
"""


def test_the_environment_turns_it_off(tiny_target: Path) -> None:
    reason = python(STATUS + ANSWER, str(tiny_target), PYSPEC_BRIDGE="off")
    assert reason == "PYSPEC_BRIDGE=off"


def test_another_version_is_left_alone(tiny_target: Path) -> None:
    other = "import llama_cpp; llama_cpp.__version__ = '0.3.37'\n"
    reason = python(other + STATUS + ANSWER, str(tiny_target))
    assert reason == "llama-cpp-python is 0.3.37, not 0.3.36"


# Past bridge.attach, which loading a model would call as well: run with PYSPEC_BRIDGE=off.
ATTACH = """
import ctypes, sys
from pyspec import bridge
from pyspec._cspec import ffi, lib
import llama_cpp

def attach(library, fail_at=0):
    reason = ffi.new("char[256]")
    attached = lib.cspec_bridge_attach(library.encode(), fail_at, reason, len(reason))
    return " ".join([str(bool(attached)), ffi.string(reason).decode()]).strip()
"""


@on_supported_platforms
def test_a_check_that_fails_leaves_llama_cpp_as_it_was(tiny_target: Path) -> None:
    code = """
class Vector(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("capacity", ctypes.c_void_p)]

list_of = llama_cpp.llama_cpp._lib._Z39ggml_backend_cpu_get_extra_buffer_typesv
list_of.restype = ctypes.POINTER(Vector)

def entries():
    vector = list_of().contents
    n = (vector.end - vector.begin) // 8 if vector.begin else 0
    return list((ctypes.c_void_p * n).from_address(vector.begin)) if n else []

before = entries()
for check in range(lib.CSPEC_CHECK_TENSORS, lib.CSPEC_CHECK_PRODUCTS + 1):
    print(attach(sys.argv[2], check))
    assert entries() == before
"""
    later = """
print(attach(sys.argv[2]))
assert entries()[1:] == before
"""
    lines = python(
        ATTACH + code + ANSWER + later, str(tiny_target), LIBRARY, PYSPEC_BRIDGE="off"
    ).splitlines()
    failures = lib.CSPEC_CHECK_PRODUCTS - lib.CSPEC_CHECK_TENSORS + 1
    assert lines == ["False a check was told to fail"] * failures + ["True"]


@on_supported_platforms
def test_a_library_that_is_not_loaded() -> None:
    out = python(ATTACH + "print(attach('/nowhere/libllama.so'))")
    assert out == "False llama.cpp's library is not loaded"


@on_supported_platforms
def test_a_library_without_the_symbols() -> None:
    code = "library = ctypes.CDLL('libm.so.6'); print(attach('libm.so.6'))"
    assert python(ATTACH + code) == "False llama.cpp does not export ggml_init"


# ---- a llama.cpp of another shape --------------------------------------------------------------------

# A library in front of the real one, which answers some questions in another way.
FRONTS = {
    "a longer tensor": (
        "size_t ggml_tensor_overhead(void) { return 376; }",
        "ggml's tensors are not laid out as expected",
    ),
    "a field moved": (
        "const char *ggml_get_name(const char *tensor) { return tensor + 264; }",
        "ggml's tensors are not laid out as expected",
    ),
    "another order of types": (
        'const char *ggml_type_name(int type) { (void)type; return "f32"; }',
        "ggml's tensors are not laid out as expected",
    ),
    "no list": (
        "void *LIST(void) { return 0; }",
        "the list of extra buffer types cannot be read",
    ),
    "no vector": (
        "static size_t words[3] = {48, 16, 8}; void *LIST(void) { return words; }",
        "the list of extra buffer types is not the vector expected",
    ),
    "a wild vector": (
        "static size_t words[3] = {8, 24, 32}; void *LIST(void) { return words; }",
        "the list of extra buffer types is not the vector expected",
    ),
    "a huge vector": (
        "static size_t words[3] = {8, 1 << 20, 1 << 20}; void *LIST(void) { return words; }",
        "the list of extra buffer types is not the vector expected",
    ),
    "a wild entry": (
        "static void *entry = (void *)8; static void *words[3] = {&entry, &entry + 1, &entry + 1};"
        "void *LIST(void) { return words; }",
        "an entry of the list of extra buffer types is not known",
    ),
    "an unknown entry": (
        "static void *buft[8]; static void *entry = buft;"
        "static void *words[3] = {&entry, &entry + 1, &entry + 1};"
        "void *LIST(void) { return words; }",
        "an entry of the list of extra buffer types is not known",
    ),
    "no call": (
        "int ggml_graph_compute(void *graph, void *plan) { (void)graph; (void)plan; return 0; }",
        "ggml does not call the bridge as expected",
    ),
    "an error": (
        "int ggml_graph_compute(void *graph, void *plan) { (void)graph; (void)plan; return -1; }",
        "ggml could not compute the probe",
    ),
}


@on_supported_platforms
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_llama_cpp_of_another_shape_is_left_alone(tmp_path: Path, tiny_target: Path) -> None:
    libraries = []
    for number, (source, _) in enumerate(FRONTS.values()):
        (tmp_path / "front.c").write_text(f"#include <stddef.h>\n{source}\n")
        libraries.append(str(tmp_path / f"libfront{number}.so"))
        subprocess.run(
            [
                *["cc", "-shared", "-fPIC", "-o", libraries[-1], "front.c"],
                *["-Wl,--no-as-needed", "-Wl,--unresolved-symbols=ignore-in-shared-libs", LIBRARY],
                "-DLIST=_Z39ggml_backend_cpu_get_extra_buffer_typesv",
            ],
            cwd=tmp_path,
            check=True,
        )
    code = """
for path in sys.argv[2:]:
    front = ctypes.CDLL(path)
    print(attach(path), flush=True)
"""
    answers = python(
        ATTACH + code + ANSWER, str(tiny_target), *libraries, PYSPEC_BRIDGE="off"
    ).splitlines()
    expected = {difference: f"False {reason}" for difference, (_, reason) in FRONTS.items()}
    assert dict(zip(FRONTS, answers, strict=True)) == expected


# ---- what is promised --------------------------------------------------------------------------------


@on_supported_platforms
def test_a_context_as_pyspec_makes_them_is_bit_exact() -> None:
    assert bit_exact_reason(width=9) is None


@on_supported_platforms
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"flash_attention": False}, "flash attention is off"),
        ({"extra_buffers": True}, "llama.cpp has repacked the weights (use_extra_bufts)"),
        ({"gpu_layers": 1}, "another device than the CPU takes part"),
        ({"swa_full": False}, "cells of the sliding window are reused (swa_full is off)"),
        ({"width": 40}, "passes of 40 tokens are wider than 32"),
    ],
)
def test_what_withdraws_the_promise(settings: dict[str, int], reason: str) -> None:
    assert bit_exact_reason(**{"width": 9, **settings}) == reason


def test_without_the_bridge_nothing_is_promised() -> None:
    code = "from pyspec.bridge import bit_exact_reason; print(bit_exact_reason(width=2))"
    expected = "the bridge is not attached: PYSPEC_BRIDGE=off"
    assert python(code, PYSPEC_BRIDGE="off") == expected
