"""llama-server, built from the source that comes with the llama-cpp-python in use, and asked for texts.

It is the peer of bench.decode and bench.serve: the same llama.cpp that pyspec runs on, with its own kernels
and its own speculative decoding.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from pyspec.catalogue import models_folder
from pyspec.errors import PyspecError
from pyspec.openmp import is_ours

_CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    # GCC's _tile_loadconfig (12 at least) does not say that it reads all of the configuration: writes to it
    # are dropped as dead, and llama.cpp's kernels for AMX end the process with an invalid instruction.
    "-DCMAKE_CXX_FLAGS=-fno-dse -fno-tree-dse",
)
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_LONGEST_START = 300.0  # seconds; the weights may have to come from disk


# ---- building ----------------------------------------------------------------------------------------


def build() -> Path:
    """The program, built in the user's cache folder unless it is there.

    Raises:
        PyspecError: The source cannot be had, or does not compile.
    """
    version = metadata.version("llama-cpp-python")
    folder = models_folder().parent / "bench" / f"llama_cpp_python-{version}"
    program = folder / "build" / "bin" / "llama-server"
    if program.is_file():
        return program
    if shutil.which("cmake") is None:
        raise PyspecError(
            "building llama-server needs cmake, a C++ compiler and make: install them"
        )
    source = folder / "vendor" / "llama.cpp"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "build.log").open("w") as log:
        if not source.is_dir():
            _note(f"fetching the source of llama-cpp-python {version}")
            _fetch(version, folder, log)
        _note(f"building llama-server in {folder}, some minutes on a few cores")
        _run(["cmake", "-S", source, "-B", folder / "build", *_CMAKE_OPTIONS], log)
        _run(["cmake", "--build", folder / "build", "--target", "llama-server", "--parallel"], log)
    return program


def _fetch(version: str, folder: Path, log: IO[str]) -> None:
    """Unpack the llama.cpp of the source distribution into the folder."""
    name = "llama-cpp-python"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", name]
    _run([*pip, f"{name}=={version}", "-d", folder], log)
    (archive,) = folder.glob("*.tar.gz")
    # Unpacked beside its place and moved there, so that an interrupted run leaves nothing half done.
    partial = folder / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(archive) as tar:
        inside = [m for m in tar.getmembers() if "/vendor/llama.cpp/" in m.name]
        tar.extractall(partial, inside, filter="data")
    (folder / "vendor").mkdir(exist_ok=True)
    next(partial.glob("*/vendor/llama.cpp")).rename(folder / "vendor" / "llama.cpp")
    shutil.rmtree(partial)
    archive.unlink()


def _run(command: Sequence[str | Path], log: IO[str]) -> None:
    if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode != 0:
        raise PyspecError(f"{' '.join(map(str, command[:3]))} failed: see {log.name}")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- running -----------------------------------------------------------------------------------------


class ServerProcess:
    """A process that serves HTTP on a port of 127.0.0.1 and answers /health when it is ready.

    Args:
        command: The program with its arguments, without the port's.
        log: Where its output goes.

    Attributes:
        port: Where it listens.

    Raises:
        PyspecError: It did not start.
    """

    def __init__(self, command: Sequence[str | Path], log: Path) -> None:
        self.port = _free_port()
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", f"{self.port}"],
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=_end_with_parent,
                # What pyspec has set is not to be the peer's.
                env={k: v for k, v in os.environ.items() if not is_ours(k, v)},
            )
        try:
            self._wait_until_ready(log)
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self, log: Path) -> None:
        end = time.monotonic() + _LONGEST_START
        while time.monotonic() < end and self._process.poll() is None:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
                connection.request("GET", "/health")
                if connection.getresponse().status == http.client.OK:
                    return
            except OSError:
                pass
            time.sleep(0.2)
        raise PyspecError(f"a server did not start: {_last_line(log)}")

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()


def _last_line(log: Path) -> str:
    return (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]


class LlamaServer(ServerProcess):
    """A running llama-server.

    Args:
        program: The executable.
        target: The model.
        draft: Its draft, or None for plain decoding.
        n_max: Tokens that the draft proposes a round.
        threads: Threads of each model.
        n_ctx: Positions of context of each slot.
        log: Where its own log goes.
        slots: Answers at once.
        unified: Whether they share one cache.
    """

    def __init__(
        self,
        program: Path,
        target: Path,
        draft: Path | None = None,
        *,
        n_max: int = 0,
        threads: int,
        n_ctx: int,
        log: Path,
        slots: int = 1,
        unified: bool = False,
    ) -> None:
        command: list[str | Path] = [
            program,
            "-m",
            target,
            "-c",
            f"{n_ctx * slots}",
            "-np",
            f"{slots}",
        ]
        command += ["-t", f"{threads}", "-tb", f"{threads}", "--cache-ram", "0", "--no-webui"]
        if unified:
            command.append("--kv-unified")
        if draft is not None:
            command += ["-md", draft, "--spec-type", "draft-simple"]
            command += ["--spec-draft-n-max", f"{n_max}", "-td", f"{threads}", "-tbd", f"{threads}"]
        super().__init__(command, log)

    def stream(
        self, ids: Sequence[int], *, temperature: float, max_tokens: int, seed: int | None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Ask for a text.

        Yields:
            How many tokens came, and on the last occasion the server's timings.
        """
        body = {
            "prompt": list(ids),
            "n_predict": max_tokens,
            "temperature": temperature,
            "seed": -1 if seed is None else seed,
            # At temperature 0 the likeliest token without a look at the others; else nothing is cut off.
            "samplers": ["temperature"] if temperature > 0 else ["top_k"],
            "top_k": 1,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request(
            "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise PyspecError(f"llama-server refused a request: {response.read().decode()}")
        for line in response:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[len(b"data: ") :])
                yield len(chunk["tokens"]), chunk.get("timings", {}) if chunk["stop"] else {}
        connection.close()


def _end_with_parent() -> None:
    """Have Linux end this process when the one that started it ends, however it does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
