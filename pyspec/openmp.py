"""How OpenMP's threads, which llama.cpp computes with, wait for each other."""

import os

# About 0.2 ms of spinning, longer than within a pass; then they sleep. GCC's default is 3 ms, which is dear
# where another program has one of the cores: passes over 5 tokens took twice as long.
SPIN_COUNT = "20000"


def wait_briefly() -> None:
    """Set it, unless the user has said how to wait. Call before OpenMP is loaded."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def is_ours(name: str, value: str) -> bool:
    """Whether a variable of the environment has the value that wait_briefly gives it."""
    return (name, value) == ("GOMP_SPINCOUNT", SPIN_COUNT)
