"""Sockets, signals, and the end."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from types import FrameType

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from pyspec.engine import Engine
from pyspec.errors import PyspecError
from pyspec.server.app import create_app
from pyspec.server.scheduler import Scheduler
from pyspec.server.settings import Settings

# Seconds in which the line and the headers of a request must have come.
HEADER_TIMEOUT = 10.0
_MAX_HEADERS = 16 * 1024
_MAX_CONNECTIONS = 512
# Milliseconds after which a client that reads nothing of what is sent counts as gone.
_READ_TIMEOUT = 300_000
# Seconds, after the grace, in which connections are closed.
_CLOSING = 5


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one.

    Raises:
        PyspecError: The address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Accepted connections inherit it.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _READ_TIMEOUT)
        listener.bind(address)
        listener.listen(_MAX_CONNECTIONS)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PyspecError(
            f"cannot listen on {host}, port {port}: {reason}; choose others with --host and --port"
        ) from error
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def run(
    engine: Engine, settings: Settings, listener: socket.socket, on_start: Callable[[], None]
) -> None:
    """Serve until SIGTERM or SIGINT, then let running answers end within the grace.

    A second signal ends them at once.

    Args:
        engine: Used by nobody else meanwhile.
        settings: Limits and names.
        listener: Closed at the end.
        on_start: Called when requests are taken.
    """
    with Scheduler(engine, max_waiting=settings.max_waiting) as scheduler:
        config = configuration(create_app(scheduler, settings), settings.grace)
        _Server(config, scheduler, settings.grace, on_start).run([listener])


def configuration(app: ASGIApp, grace: float) -> uvicorn.Config:
    """How uvicorn is to run the application, whose answers get `grace` seconds at the end."""
    return uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=int(grace) + _CLOSING,
        h11_max_incomplete_event_size=_MAX_HEADERS,
    )


class _Protocol(H11Protocol):
    """Closes connections on which a request does not come to an end of its headers."""

    _headers_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._headers_due is not None:
            self._headers_due.cancel()

    def _watch_headers(self) -> None:
        waits = self.conn.their_state is h11.IDLE
        if waits and self._headers_due is None:
            self._headers_due = self.loop.call_later(HEADER_TIMEOUT, self.transport.close)
        elif not waits and self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None


class _Server(uvicorn.Server):
    """A server that tells the scheduler of its end, and whose process then exits as one that was asked to."""

    def __init__(
        self,
        config: uvicorn.Config,
        scheduler: Scheduler,
        grace: float,
        on_start: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._scheduler = scheduler
        self._grace = grace
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.force_exit = self.should_exit
        self._scheduler.drain(0.0 if self.should_exit else self._grace)
        self.should_exit = True
