"""The report as a picture. Needs matplotlib, which `pip install pyspec[plot]` brings."""

from __future__ import annotations

from pathlib import Path

from pyspec.errors import UsageError
from pyspec.tune.report import Report


def check_matplotlib() -> None:
    """Refuse to go on without it.

    Raises:
        UsageError: It cannot be imported.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'pyspec[plot]'") from None


def draw(report: Report, title: str, path: Path) -> None:
    """Write a PNG: what passes cost, and the speed-up by draft length, measured and predicted."""
    # Figure and not pyplot, which would look for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    curve = report.costs.target
    left.plot(curve.widths, [1e3 * seconds for seconds in curve.seconds], "o-", label="target pass")
    left.axhline(1e3 * report.costs.draft, color="C1", linestyle="--", label="draft step")
    left.set(xlabel="tokens in the pass", ylabel="ms", ylim=(0, None))
    speeds = sorted(report.speeds, key=lambda speed: speed.gamma)
    gammas = [speed.gamma for speed in speeds]
    right.plot(gammas, [speed.speedup for speed in speeds], "o-", label="measured")
    right.plot(gammas, [speed.predicted for speed in speeds], "--", label="from the costs")
    right.plot(gammas, [speed.paper for speed in speeds], ":", label="paper's formula")
    right.axhline(report.auto.speedup, color="C3", linewidth=0.8, label="auto, the default")
    right.axhline(1, color="grey", linewidth=0.8)
    right.set(xlabel="tokens drafted a round", ylabel="speed-up", ylim=(0, None))
    for axes in (left, right):
        axes.legend(frameon=False)
    figure.savefig(path, format="png", dpi=150)
