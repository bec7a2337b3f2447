"""How OpenMP's threads are told to wait."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHOW = "import os, pyspec; print(os.environ.get('GOMP_SPINCOUNT'))"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [({}, "20000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_threads_sleep_soon_unless_the_user_says_otherwise(
    setting: dict[str, str], expected: str
) -> None:
    kept = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    shown = subprocess.run(
        [sys.executable, "-c", SHOW],
        env={**kept, **setting},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.strip() == expected
