"""The asyncio side of a request's generations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

from starlette.requests import ClientDisconnect, Request

from pyspec.output import Piece
from pyspec.server.prepare import Plan
from pyspec.server.scheduler import Event, Job, Scheduler


class Delivery:
    """Runs a plan, and hands over its pieces as they come.

    Pieces wait in memory as long as the client does not read them: no more than the answer is long. Entering
    submits the jobs; leaving cancels what still runs. A client that hangs up ends it with ClientDisconnect.

    Args:
        scheduler: Where the jobs run.
        plan: What to generate. Answer i to prompt k has the index k * answers + i.
        request: Whose client is watched; its body must have been read.
    """

    def __init__(self, scheduler: Scheduler, plan: Plan, request: Request) -> None:
        self._scheduler = scheduler
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        answers = [(prompt, params) for prompt in plan.prompts for params in plan.params]
        self._jobs = [
            Job(prompt, params, plan.gamma, plan.rule, partial(self._deliver, index))
            for index, (prompt, params) in enumerate(answers)
        ]
        self._watch: asyncio.Task[None] | None = None

    def _deliver(self, index: int, event: Event) -> None:
        # After the loop's end nobody is left to tell.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    def __enter__(self) -> Delivery:
        self._scheduler.submit(_client(self._request), self._jobs)
        self._watch = self._loop.create_task(self._watch_client())
        return self

    def __exit__(self, *_: object) -> None:
        self._scheduler.cancel(self._jobs)
        if self._watch is not None:
            self._watch.cancel()

    async def _watch_client(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._events.put_nowait((0, ClientDisconnect()))

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Pieces with the index of their answer, until all answers have ended.

        Raises:
            ClientDisconnect: The client has gone.
            Exception: What ended an answer, and with it the request.
        """
        unfinished = len(self._jobs)
        while unfinished:
            index, event = await self._events.get()
            if isinstance(event, BaseException):
                raise event
            unfinished -= event.statistics is not None
            yield index, event


def _client(request: Request) -> str:
    """Who takes turns with others: an address with its key."""
    address = request.client.host if request.client else ""
    return f"{address} {request.headers.get('authorization', '')}"
