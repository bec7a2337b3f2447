"""Who may ask, and how much: checks before the endpoints see a request, and headers on every response."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from urllib.parse import quote

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyspec.server.errors import ApiError, as_api_error
from pyspec.server.monitoring import Monitoring
from pyspec.server.settings import Settings

log = logging.getLogger("pyspec.server")

# Neither tells anything that needs a key.
_OPEN_PATHS = frozenset({"/", "/docs", "/health", "/openapi.json"})
# Seconds in which a body must have come.
BODY_TIMEOUT = 30.0
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_CLOSE = {"Connection": "close"}


class Guard:
    """ASGI middleware: checks the host, the key and the body's size; reports each request.

    Args:
        app: What is guarded.
        settings: The limits.
        monitoring: Told of every request.
    """

    def __init__(self, app: ASGIApp, settings: Settings, monitoring: Monitoring) -> None:
        self._app = app
        self._settings = settings
        self._monitoring = monitoring
        self._digests = [_digest(key.encode()) for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self._check(scope)
            body = await self._read_body(Headers(scope=scope), receive)
            await self._app(scope, _replayed(body, receive), watched)
        except ClientDisconnect:
            status = status or 499
        except Exception as error:
            if not isinstance(error, ApiError):
                log.exception("a request failed")
            if status == 0:
                await as_api_error(error).response()(scope, receive, watched)
        finally:
            self._report(scope, status, time.perf_counter() - start)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        hosts = self._settings.hosts
        if hosts is not None and _host_name(headers.get("host", "")) not in hosts:
            raise ApiError(
                "this address is not one of the service's: allow its name with --allow-host",
                status=403,
                code="host_not_allowed",
            )
        if self._digests and scope["path"] not in _OPEN_PATHS:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not self._is_known(key.strip()):
                raise ApiError(
                    "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                    status=401,
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )

    def _is_known(self, key: str) -> bool:
        """Compare with all keys in a time that depends on none."""
        given = _digest(key.encode("latin-1"))
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return any(matches)

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes:
        most = self._settings.max_body
        too_large = ApiError(
            f"the request is larger than {most} bytes: shorten it",
            status=413,
            code="request_too_large",
            headers=_CLOSE,
        )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            raise too_large
        chunks, size, more = list[bytes](), 0, True
        try:
            with anyio.fail_after(BODY_TIMEOUT):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    if size > most:
                        raise too_large
                    more = message.get("more_body", False)
        except TimeoutError:
            raise ApiError(
                "the request's body did not come in time", status=408, headers=_CLOSE
            ) from None
        return b"".join(chunks)

    def _report(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"]
        self._monitoring.count_request(path, status, seconds)
        client = scope["client"][0] if scope.get("client") else "-"
        summary = scope.get("pyspec.summary", "")
        # Quoted, so that nothing that was sent can look like a line of its own.
        log.info(
            "%s %s %s %d in %.2f s%s",
            client,
            scope["method"],
            quote(path),
            status,
            seconds,
            summary,
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _host_name(host: str) -> str:
    """The name in a Host header, without the port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and (port.isdecimal() or not port) else host).strip("[]").lower()


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Give the body that was read, then what comes after it."""
    unread = True

    async def replay() -> Message:
        nonlocal unread
        if unread:
            unread = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay
