"""Builds pyspec._cspec from the C sources beside this file (cffi, API mode, stable ABI)."""

from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
# setuptools wants paths relative to the project, so that they mean the same in an sdist.
SOURCES = [
    f"cspec/{path.relative_to(HERE).as_posix()}"
    for pattern in ("*.c", "matmul/*.c")
    for path in sorted(HERE.glob(pattern))
]

# Contraction into fused multiply-adds would make results depend on the CPU's features. Nothing looks at
# floating-point exceptions, and loops that might raise them are not vectorised unless that is said.
FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-Wall", "-Wextra"]

# What cffi parses is the public header without its preprocessor lines: one declaration, one place.
DECLARATIONS = "\n".join(
    line for line in (HERE / "cspec.h").read_text().splitlines() if not line.startswith("#")
)

ffibuilder = FFI()
ffibuilder.cdef(DECLARATIONS)
ffibuilder.set_source(
    "pyspec._cspec",
    '#include "cspec.h"',
    sources=SOURCES,
    include_dirs=["cspec"],
    depends=[
        f"cspec/{path.relative_to(HERE).as_posix()}"
        for pattern in ("*.h", "matmul/*.h", "matmul/*.inc")
        for path in sorted(HERE.glob(pattern))
    ],
    libraries=["m"],
    extra_compile_args=FLAGS,
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
