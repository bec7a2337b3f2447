"""A command on a terminal of its own."""

from __future__ import annotations

import os
import subprocess
import sys


def on_a_terminal(*arguments: str) -> tuple[str, int]:
    """Everything that `pyspec ARGUMENTS` shows, and its exit status."""
    outer, inner = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "pyspec", *arguments],
        stdout=inner,
        stderr=inner,
        env={**os.environ, "COLUMNS": "120", "TERM": "xterm"},
    )
    os.close(inner)
    shown = b""
    try:
        while chunk := os.read(outer, 4096):
            shown += chunk
    except OSError:  # what Linux says when the other side is closed
        pass
    os.close(outer)
    return shown.decode(), process.wait()
