"""The C sources under strict warnings, under sanitizers, and at every vector width."""

import platform
import runpy
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cffi import FFI

ROOT = Path(__file__).resolve().parents[2]
BUILD = runpy.run_path(str(ROOT / "cspec/build.py"))
SAMPLER = [ROOT / f"cspec/{name}.c" for name in ("distribution", "random", "verify")]
COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def compile_c(compiler, *arguments):
    command = [compiler, *BUILD["FLAGS"], f"-I{ROOT / 'cspec'}", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "source", sorted((ROOT / "cspec").glob("**/*.c")), ids=lambda path: path.name
)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiles_without_a_warning(compiler, source, tmp_path):
    compile_c(compiler, "-Werror", "-c", source, "-o", tmp_path / "object.o")


# Programs that call every function of some sources, with what else they need.
WATCHED = {
    "sanitize.c": [*SAMPLER, "-lm"],
    "sanitize_ngram.c": [
        ROOT / "cspec/ngram.c",
        ROOT / "cspec/random.c",
        "-Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc",
    ],
    "sanitize_kernels.c": [
        *sorted((ROOT / "cspec").glob("matmul/*.c")),
        *sorted((ROOT / "cspec").glob("attention*.c")),
        "-DCSPEC_EVEX",
        "-O0",  # gcc takes many minutes to optimise what it has instrumented in attention_c.c
        "-lm",
    ],
}
SLOW = {"sanitize_kernels.c"}  # a minute of compiling


@needs_cc
@pytest.mark.skipif(platform.system() != "Linux", reason="names GNU's linker options")
@pytest.mark.parametrize(
    "source",
    [pytest.param(name, marks=pytest.mark.thorough if name in SLOW else ()) for name in WATCHED],
)
def test_sanitizers_find_nothing(source, tmp_path):
    sanitizers = "-fsanitize=address,undefined,float-cast-overflow"
    program = tmp_path / "sanitize"
    options = [
        "-DCSPEC_ONE_CLONE",
        "-O1",
        "-g",
        sanitizers,
        "-fno-sanitize-recover=all",
        "-UNDEBUG",
    ]
    watched = ROOT / "tests/cspec" / source
    compile_c("cc", *options, watched, *WATCHED[source], "-o", program)
    result = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr[-4000:]


def cpu_flags():
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    return set(next((line for line in text.splitlines() if line.startswith("flags")), "").split())


@needs_cc
@pytest.mark.skipif(
    not {"avx512vl", "avx512_vnni"} <= cpu_flags(), reason="no CPU to run AVX-VNNI's operations on"
)
def test_avx_vnni_gives_the_bits_of_plain_c(tmp_path):
    """AVX-VNNI's instruction in the encoding that CPUs with AVX-512 know: all else is the same source."""
    library = tmp_path / "matmul.so"
    sources = sorted((ROOT / "cspec").glob("matmul/*.c"))
    compile_c("cc", "-O1", "-DCSPEC_EVEX", "-shared", "-fPIC", *sources, "-lm", "-o", library)
    ffi = FFI()
    ffi.cdef(BUILD["DECLARATIONS"])
    lib = ffi.dlopen(str(library))
    assert lib.cspec_matmul_has(lib.CSPEC_MATMUL_AVXVNNI)
    rng = np.random.default_rng(0)
    n_rows, n_k, compared = 40, 512, 0
    for kind in range(64):
        size = lib.cspec_matmul_packed_size(kind, n_rows, n_k)
        if size == 0:
            continue
        for n_tokens in range(1, 10):
            # Bytes above 63 would make scales that are not numbers.
            packed = ffi.from_buffer(rng.integers(64, size=size, dtype=np.uint8))
            x = rng.standard_normal((n_tokens, n_k)).astype(np.float32)
            scratch = ffi.new("char[]", lib.cspec_matmul_activations_size(kind, n_k, n_tokens))
            results = []
            for instructions in (lib.CSPEC_MATMUL_C, lib.CSPEC_MATMUL_AVXVNNI):
                out = np.empty((n_tokens, n_rows), np.float32)
                lib.cspec_matmul(
                    instructions,
                    kind,
                    n_rows,
                    n_k,
                    n_tokens,
                    packed,
                    ffi.from_buffer("float[]", x),
                    scratch,
                    ffi.from_buffer("float[]", out),
                    ffi.NULL,
                    0,
                    2,
                )
                assert np.isfinite(out).all()
                assert out.any()
                results.append(out.tobytes())
            assert results[0] == results[1], (kind, n_tokens)
            compared += 1
    assert compared == 14 * 9  # the types that docs/kernels.md lists


def results_of(library):
    """Bytes of everything that the library computes in vectors, on a fixed input."""
    ffi = FFI()
    ffi.cdef(BUILD["DECLARATIONS"])
    lib = ffi.dlopen(str(library))
    rng = np.random.default_rng(0)
    results = []
    for n_vocab in (1000, 4099):
        rows = []
        allowed = ffi.new("uint32_t[]", rng.integers(2**32, size=(n_vocab + 31) // 32).tolist())
        for cuts in ((0, 1.0, 0.0), (0, 0.95, 0.05), (40, 1.0, 0.0), (500, 0.9, 0.0)):
            for temperature in (0.7, 1.0):
                logits = rng.normal(0, 4, n_vocab).astype(np.float32)
                row = np.empty_like(logits)
                lib.cspec_probabilities(
                    ffi.from_buffer("float[]", logits),
                    ffi.from_buffer("float[]", row),
                    n_vocab,
                    ffi.new("cspec_sampling *", [temperature, *cuts, 1.0, 0.0, 0.0]),
                    ffi.NULL,
                    ffi.NULL,
                    0,
                    ffi.NULL,
                    ffi.NULL,
                    0,
                    allowed if len(rows) % 2 else ffi.NULL,
                )
                rows.append(row)
        results += [row.tobytes() for row in rows]
        gamma = 4
        p = ffi.new("float *[]", [ffi.from_buffer("float[]", row) for row in rows[: gamma + 1]])
        q = ffi.new("float *[]", [ffi.from_buffer("float[]", row) for row in rows[-gamma:]])
        drafted = [int(row.argmax()) for row in rows[-gamma:]]
        a, b = ffi.new("double[]", gamma + 1), ffi.new("double[]", gamma + 1)
        lib.cspec_block_thresholds(p, q, drafted, gamma, n_vocab, a, b)
        results += [list(a), list(b)]
        for i in range(200):
            u = (i + 0.5) / 200
            results.append(lib.cspec_draw(p[0], q[0], 0.9, n_vocab, u))
            results.append(lib.cspec_coupled_choice(p[0], n_vocab, i, 2**40 + i))
    return results


@needs_cc
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86's instruction sets")
def test_every_vector_width_gives_the_same_bits(tmp_path):
    variants = {
        "scalar": ["-fno-tree-vectorize"],
        "sse2": [],
        "avx2": ["-mavx2"],
        "avx512": ["-mavx512f"],
    }
    supported = {"scalar", "sse2"}
    supported |= {
        name for name, flag in (("avx2", "avx2"), ("avx512", "avx512f")) if flag in cpu_flags()
    }
    results = {}
    for name in supported:
        library = tmp_path / f"{name}.so"
        options = ["-DCSPEC_ONE_CLONE", "-shared", "-fPIC", *variants[name]]
        compile_c("cc", *options, *SAMPLER, "-lm", "-o", library)
        results[name] = results_of(library)
    clones = tmp_path / "clones.so"
    compile_c("cc", "-shared", "-fPIC", *SAMPLER, "-lm", "-o", clones)
    results["clones"] = results_of(clones)
    for name, result in results.items():
        assert result == results["scalar"], name
