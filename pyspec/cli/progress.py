"""How what takes long shows on stderr: bars on a terminal, else a line for each transfer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from pyspec.catalogue import Progress, format_size

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def prefill_progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar while the prompt is evaluated, on a terminal, gone when the text begins."""
    from rich import progress

    # Short: of a line that a narrower window has broken, only the last part would be taken away again.
    columns = (
        progress.TextColumn("reading"),
        progress.BarColumn(bar_width=10),
        progress.TaskProgressColumn(),
    )
    off = not console.is_terminal
    with progress.Progress(*columns, console=console, transient=True, disable=off) as bars:
        task = bars.add_task("", total=None)

        def update(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total)

        yield update


@contextmanager
def transfer_progress() -> Iterator[Progress]:
    """Provide what to pass as ``progress``; nothing shows before it is first called."""
    if sys.stderr.isatty():
        with _bars() as show:
            yield show
    else:
        yield _lines()


@contextmanager
def _bars() -> Iterator[Progress]:
    from rich import progress
    from rich.console import Console

    with progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bars:
        tasks: dict[str, progress.TaskID] = {}

        def show(activity: str, done: int, total: int | None) -> None:
            if total is None:
                bars.console.print(activity, highlight=False)
                return
            if activity not in tasks:
                tasks[activity] = bars.add_task(activity, total=total)
            bars.update(tasks[activity], completed=done)

        yield show


def _lines() -> Progress:
    shown: set[str] = set()

    def show(activity: str, done: int, total: int | None) -> None:  # noqa: ARG001
        if activity not in shown:
            shown.add(activity)
            size = "" if total is None else f" ({format_size(total)})"
            click.echo(f"{activity}{size}", err=True)

    return show


@contextmanager
def step_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Provide what to call with what is being done, the steps done and the steps in total.

    A bar for each on a terminal, gone when all are done; nothing elsewhere.
    """
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    with progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bars:
        tasks: dict[str, progress.TaskID] = {}

        def show(activity: str, done: int, total: int) -> None:
            if activity not in tasks:
                tasks[activity] = bars.add_task(activity, total=total)
            bars.update(tasks[activity], completed=done)

        yield show
