"""What this machine can do at most, measured with plain loops in C (limits.c).

A rate of reading, or of multiplying, means something only beside the rate that was possible in the same
minutes: that of memory varies by half from hour to hour where the machine is shared.
"""

from __future__ import annotations

import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from cffi import FFI

# 8-bit multiply-adds: instruction set, what limits.c calls it, the instruction.
MULTIPLIERS = {"avx2": (0, "vpmaddubsw"), "avx512": (1, "vpdpbusd"), "amx": (2, "tdpbusd")}

_SIZE = 1 << 29  # bytes, far more than any cache


class Limits:
    """Threads that read, or multiply, as fast as they can.

    Raises:
        OSError: Not an x86-64, or there is no C compiler.
    """

    def __init__(self, threads: int) -> None:
        if platform.machine() != "x86_64":
            raise OSError("limits are measured on x86-64 only")
        self._threads = threads
        ffi = FFI()
        ffi.cdef(
            "unsigned char *limits_memory(size_t);"
            "double limits_read(const unsigned char *, size_t, int);"
            "double limits_multiply(int, int);"
        )
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "limits.so"
            source = Path(__file__).with_suffix(".c")
            subprocess.run(
                ["cc", "-O3", "-shared", "-fPIC", "-pthread", source, "-o", library], check=True
            )
            self._lib: Any = ffi.dlopen(str(library))
        self._memory = self._lib.limits_memory(_SIZE)
        if not self._memory:
            raise MemoryError(f"{_SIZE} bytes to read")

    def read(self) -> float:
        """Bytes a second that the threads read together."""
        return float(self._lib.limits_read(self._memory, _SIZE, self._threads))

    def multiply(self, instructions: str) -> float:
        """8-bit multiply-adds a second that the threads do together with an instruction set."""
        return float(self._lib.limits_multiply(MULTIPLIERS[instructions][0], self._threads))
