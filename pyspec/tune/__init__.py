"""How fast a target and its draft are here, on given prompts, and why.

Measured are the costs of passes, how many drafted tokens are accepted, and the speed at several draft
lengths, which the first two predict. A draft length is called gamma, as in the papers.
"""

from __future__ import annotations

from pyspec.tune.measure import (
    GAMMAS,
    PROMPTS,
    Acceptance,
    Run,
    Setup,
    measure_costs,
    measure_runs,
    thread_counts,
)
from pyspec.tune.predict import Costs, paper_speedup, speedup, tokens_per_round
from pyspec.tune.report import Report, Speed, tune

__all__ = [
    "GAMMAS",
    "PROMPTS",
    "Acceptance",
    "Costs",
    "Report",
    "Run",
    "Setup",
    "Speed",
    "measure_costs",
    "measure_runs",
    "paper_speedup",
    "speedup",
    "thread_counts",
    "tokens_per_round",
    "tune",
]
