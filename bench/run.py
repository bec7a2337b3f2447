"""What benchmarks that take long have in common: a log to continue from, and under what they ran."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from bench.sampler import processor
from pyspec.openmp import is_ours

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Row = TypeVar("_Row")


def read_log(path: Path | None, row: type[_Row]) -> list[_Row]:
    """The rows measured so far, of a dataclass whose fields JSON can hold."""
    if path is None or not path.exists():
        return []
    return [row(**json.loads(line)) for line in path.read_text().splitlines()]


def append_to_log(path: Path | None, row: DataclassInstance) -> None:
    """Keep a row, if there is a log."""
    if path is not None:
        with path.open("a") as log:
            log.write(json.dumps(asdict(row)) + "\n")


def command_line(module: str) -> str:
    """How this run was started, with what of the environment may change what is measured."""
    settings = [
        f"{name}={value}" for name, value in sorted(os.environ.items()) if _matters(name, value)
    ]
    return shlex.join([*settings, "python", "-m", module, *sys.argv[1:]])


def conditions(options: argparse.Namespace) -> str:
    """A sentence on the machine, the versions and the models; options: threads, model, draft."""
    return (
        f"{processor()}, {os.cpu_count()} cores, {options.threads} threads; llama-cpp-python "
        f"{metadata.version('llama-cpp-python')}, llama-server built from the same source; "
        f"target {options.model}, draft {options.draft}."
    )


def _matters(name: str, value: str) -> bool:
    if name in ("PYSPEC_HOME", "PYSPEC_OFFLINE", "GGML_NO_BACKTRACE") or is_ours(name, value):
        return False
    return name.startswith(("OMP_", "GOMP_", "GGML_", "PYSPEC_"))
