"""One thread that owns the engine and runs the answers of all clients, a round of each at a time.

What a client does never holds it up: pieces are handed over without waiting, and an answer whose client has
gone is dropped before the next round.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

from pyspec.engine import Engine, Gamma
from pyspec.generation import Generation
from pyspec.output import Piece
from pyspec.sampling import Rule, SamplingParams
from pyspec.server.errors import ApiError, busy

log = logging.getLogger("pyspec.server")

# What comes of an answer: its pieces, or why there are no more.
Event = Piece | BaseException


@dataclass(eq=False)
class Job:
    """One answer to write.

    Attributes:
        prompt: Token ids.
        params: Sampling settings.
        gamma: Tokens drafted a round; None leaves it to the engine.
        rule: How drafted tokens are verified.
        deliver: Called on the scheduler's thread with each event; it must not wait.
        cancelled: Nobody wants the answer any more.
    """

    prompt: Sequence[int]
    params: SamplingParams
    gamma: Gamma | None
    rule: Rule
    deliver: Callable[[Event], None]
    cancelled: bool = False


class _FairQueue:
    """Jobs that wait: clients take turns, and each one's jobs are served in their order."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, deque[Job]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def push(self, client: str, job: Job) -> None:
        self._clients.setdefault(client, deque()).append(job)

    def pop(self) -> Job:
        """Take the next job; its client's turn comes again after the others'."""
        client, jobs = self._clients.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._clients[client] = jobs
        return job

    def remove(self, unwanted: Iterable[Job]) -> None:
        gone = set(unwanted)
        for client, jobs in list(self._clients.items()):
            kept = deque(job for job in jobs if job not in gone)
            if kept:
                self._clients[client] = kept
            else:
                del self._clients[client]

    def pop_all(self) -> list[Job]:
        return [self.pop() for _ in range(len(self))]


class Scheduler:
    """Runs jobs on an engine, as many at once as it has slots.

    Its methods may be called from any thread. Use it as a context manager: the thread runs inside.

    Args:
        engine: Used by nobody else as long as the scheduler runs.
        max_waiting: Jobs that may wait for a slot.
    """

    def __init__(self, engine: Engine, *, max_waiting: int) -> None:
        self.engine = engine
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting = _FairQueue()
        self._running: dict[Job, Generation] = {}
        self._ends_at: float | None = None  # of time.monotonic(); no new jobs once it is set
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="pyspec-scheduler", daemon=True)

    @property
    def n_running(self) -> int:
        """Answers that are being written."""
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        """Answers that wait for a slot."""
        with self._changed:
            return len(self._waiting)

    @property
    def is_draining(self) -> bool:
        """Whether the end has been announced."""
        return self._ends_at is not None

    def submit(self, client: str, jobs: Sequence[Job]) -> None:
        """Queue all of the jobs, or none.

        Args:
            client: Whose jobs they are: clients take turns.
            jobs: Their events come in any order among each other.

        Raises:
            ApiError: Too many are waiting, or the service is ending.
        """
        with self._changed:
            if self._ends_at is not None:
                raise _ending()
            free = self.engine.parallel - len(self._running)
            if len(self._waiting) + len(jobs) > self._max_waiting + free:
                raise busy("too many requests are waiting: try again in a moment")
            for job in jobs:
                self._waiting.push(client, job)
            self._changed.notify()

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Forget jobs: those that run end within a round. Finished ones do not mind."""
        jobs = list(jobs)
        with self._changed:
            for job in jobs:
                job.cancelled = True
            self._waiting.remove(jobs)
            self._changed.notify()

    def drain(self, grace: float) -> None:
        """Refuse what waits and what comes, and end what still runs after `grace` seconds."""
        with self._changed:
            refused = [] if self._closed else self._waiting.pop_all()
            self._ends_at = time.monotonic() + grace
            self._changed.notify()
        for job in refused:
            job.deliver(_ending())

    def __enter__(self) -> Scheduler:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.drain(0.0)
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._next_round():
            self._admit()
            self._step()
        for generation in self._running.values():
            generation.close()

    def _next_round(self) -> bool:
        """Wait for something to do; False when the scheduler is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting or self._running)
            closed = self._closed
        for job in [job for job in self._running if job.cancelled]:
            self._end(job)
        if self._ends_at is not None and time.monotonic() >= self._ends_at:
            for job in list(self._running):
                self._end(job, _ending())
        return not closed

    def _admit(self) -> None:
        """Give free slots to those who wait."""
        while len(self._running) < self.engine.parallel:
            with self._changed:
                if not self._waiting:
                    return
                job = self._waiting.pop()
            try:
                self._running[job] = self.engine.start(
                    job.prompt, job.params, gamma=job.gamma, rule=job.rule
                )
            except Exception as error:
                job.deliver(error)

    def _step(self) -> None:
        """One round of every running answer."""
        if not self._running:
            return
        jobs = list(self._running)
        try:
            pieces = self.engine.step([self._running[job] for job in jobs])
        except Exception as error:
            # A failed pass fails all that shared it; the next request finds free slots.
            log.error("a pass failed: %s", error)
            for job in jobs:
                self._end(job, error)
            return
        for job, piece in zip(jobs, pieces, strict=True):
            generation = self._running[job]
            if generation.error is not None:
                self._end(job, generation.error)
                continue
            if generation.finished:
                self._end(job)
            job.deliver(piece)

    def _end(self, job: Job, error: BaseException | None = None) -> None:
        """Free a job's slot, and tell the client why if that is not its own doing."""
        self._running.pop(job).close()
        if error is not None:
            job.deliver(error)


def _ending() -> ApiError:
    return busy("the service is shutting down")
