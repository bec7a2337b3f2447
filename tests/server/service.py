"""Services for tests: in a thread, or as a user starts one."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from pyspec.engine import Engine
from pyspec.server.app import create_app
from pyspec.server.run import configuration
from pyspec.server.scheduler import Scheduler
from pyspec.server.settings import Settings

MODEL = "tiny"


@contextmanager
def serving(engine: Engine, **settings: Any) -> Iterator[str]:
    """Serve in a thread; yields the address."""
    chosen = Settings(**{"model": MODEL, **settings})
    with (
        Scheduler(engine, max_waiting=chosen.max_waiting) as scheduler,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        server = uvicorn.Server(configuration(create_app(scheduler, chosen), chosen.grace))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            thread.join()


class Process:
    """`pyspec serve` in a process of its own, from when it takes requests until it is gone."""

    def __init__(self, *arguments: str | Path, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pyspec", "serve", "--port", "0", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
            text=True,
        )
        assert self._process.stderr is not None
        self.log = ""
        while "try: curl" not in self.log:
            line = self._process.stderr.readline()
            assert line, self.log
            self.log += line
        found = re.search(r"at (http://\S+)/v1", self.log)
        assert found
        self.url = found[1]
        # Whoever does not read the log must not hold up who writes it.
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log += line

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """Wait for the end; returns the exit status."""
        status = self._process.wait(timeout=120)
        self._reader.join(timeout=30)
        return status

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.wait()
        assert self._process.stdout is not None
        printed = self._process.stdout.read()
        self._process.stdout.close()
        assert printed == "", "what a service says goes to stderr"
