"""The keyboard while no prompt is shown: Ctrl-C stops an answer and keeps the session."""

from __future__ import annotations

import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

_Item = TypeVar("_Item")


class _StopError(KeyboardInterrupt):
    """Raised where Interrupts.wait waits, and only there."""


class Interrupts:
    """Makes Ctrl-C end a wait and never strike while something is shown or stored.

    Attributes:
        stopped: Ctrl-C was pressed since the answer began.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._is_waiting = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """For a session. Outside of an answer and of the prompt, Ctrl-C does nothing."""
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _handle(self, _signal: int, _frame: object) -> None:
        self.stopped = True
        if self._is_waiting:
            self._is_waiting = False
            raise _StopError

    @contextmanager
    def answering(self) -> Iterator[None]:
        """For an answer, which what is typed meanwhile does not disturb."""
        self.stopped = False
        with silent_keyboard():
            yield

    def wait(self, items: Iterator[_Item]) -> _Item | None:
        """The next item; None if there is no more, or when Ctrl-C is pressed."""
        try:
            self._is_waiting = True
            item = None if self.stopped else next(items, None)
            self._is_waiting = False
        except _StopError:
            return None
        finally:
            self._is_waiting = False
        return item


@contextmanager
def silent_keyboard() -> Iterator[None]:
    """What is typed is not shown and waits, whole lines or not, for the next prompt."""
    if not sys.stdin.isatty():
        yield
        return
    keyboard = sys.stdin.fileno()
    settings = termios.tcgetattr(keyboard)
    silent = termios.tcgetattr(keyboard)
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    silent[3] |= termios.NOFLSH  # Ctrl-C leaves what was typed before
    termios.tcsetattr(keyboard, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, settings)
