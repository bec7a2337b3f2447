"""The prompts of the benchmarks."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def load() -> dict[str, dict[str, str]]:
    """Prompts by kind and name."""
    text = (Path(__file__).parent / "prompts.toml").read_text(encoding="utf-8")
    prompts: dict[str, dict[str, str]] = tomllib.loads(text)
    return prompts
