"""The public names."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pyspec


@pytest.mark.parametrize("name", pyspec.__all__)
def test_every_public_name_is_there_and_described(name: str) -> None:
    assert getattr(pyspec, name).__doc__


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engines'"):
        _ = pyspec.Engines


def test_importing_the_command_line_does_not_load_llama_cpp() -> None:
    code = "import sys, pyspec.cli; sys.exit('llama_cpp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
