"""What is refused before any endpoint sees it, and what every response carries."""

from __future__ import annotations

import http.client
import json
import logging
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from pyspec.engine import Engine
from tests.server.service import serving

HELLO = {"messages": [{"role": "user", "content": "a secret of mine"}], "max_tokens": 2}
JSON = {"Content-Type": "application/json"}


def fetch(
    url: str,
    path: str,
    body: bytes | dict[str, Any] | None = None,
    *,
    method: str = "",
    **headers: str,
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a response. Header names have _ for -."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if isinstance(body, dict):
        sent = {**JSON, **sent}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request(method or ("GET" if body is None else "POST"), path, data, sent)
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    return response.status, {k.lower(): v for k, v in response.getheaders()}, answer


def error_of(body: bytes) -> dict[str, Any]:
    error = json.loads(body)["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert "\n" not in error["message"]
    return dict(error)


CHAT = "/v1/chat/completions"

# ---- keys --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked(engine_of_its_own: Engine) -> Any:
    with serving(engine_of_its_own, api_keys=("first-key", "second-key")) as url:
        yield url


@pytest.fixture(scope="module")
def engine_of_its_own(chat_target: Path) -> Any:
    with Engine(chat_target, n_ctx=512, threads=1) as engine:
        yield engine


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Bearer first", "Bearer first-key2", "Basic first-key", "first-key"],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/models", "/metrics", "/nowhere"])
def test_without_the_key_nothing_is_done(locked: str, path: str, header: str) -> None:
    headers = {"Authorization": header} if header else {}
    status, sent, body = fetch(locked, path, HELLO, **headers)
    assert status == 401
    assert sent["www-authenticate"] == "Bearer"
    assert error_of(body)["code"] == "invalid_api_key"


@pytest.mark.parametrize("key", ["first-key", "second-key"])
def test_any_of_the_keys_opens(locked: str, key: str) -> None:
    assert fetch(locked, CHAT, HELLO, Authorization=f"Bearer {key}")[0] == 200
    assert fetch(locked, "/metrics", Authorization=f"bearer {key}")[0] == 200


@pytest.mark.parametrize("path", ["/", "/docs", "/openapi.json", "/health"])
def test_what_tells_nothing_needs_no_key(locked: str, path: str) -> None:
    assert fetch(locked, path)[0] == 200


# ---- hosts and origins -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def local(engine_of_its_own: Engine) -> Any:
    hosts = frozenset({"localhost", "127.0.0.1", "::1"})
    with serving(engine_of_its_own, hosts=hosts, origins=("https://app.example",)) as url:
        yield url


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "", "localhost.evil"]
)
def test_a_rebound_name_is_refused(local: str, host: str) -> None:
    for path in ("/", "/health", CHAT):
        status, _, body = fetch(local, path, HELLO, Host=host)
        assert status == 403
        assert error_of(body)["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:1234", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:8080"]
)
def test_the_machine_s_own_names_are_known(local: str, host: str) -> None:
    assert fetch(local, "/health", Host=host)[0] == 200


def test_only_the_named_origin_may_use_the_service_from_its_pages(local: str) -> None:
    preflight = {
        "Access_Control_Request_Method": "POST",
        "Access_Control_Request_Headers": "content-type,authorization",
    }
    allowed = fetch(local, CHAT, method="OPTIONS", Origin="https://app.example", **preflight)
    assert allowed[1]["access-control-allow-origin"] == "https://app.example"
    assert allowed[0] == 200
    other = fetch(local, CHAT, method="OPTIONS", Origin="https://other.example", **preflight)
    assert "access-control-allow-origin" not in other[1]
    assert other[0] == 400


def test_by_default_no_page_may(url: str) -> None:
    status, headers, _ = fetch(url, CHAT, HELLO, Origin="https://app.example")
    assert status == 200
    assert not [name for name in headers if name.startswith("access-control")]
    assert fetch(url, CHAT, method="OPTIONS", Origin="https://app.example")[0] == 405


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_what_a_page_can_send_unasked_is_refused(url: str, kind: str) -> None:
    # Browsers send these kinds to anywhere without a preflight.
    headers = {"Content_Type": kind} if kind else {}
    status, _, body = fetch(url, CHAT, json.dumps(HELLO).encode(), **headers)
    assert status == 400
    assert "application/json" in error_of(body)["message"]


# ---- bodies ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow(engine_of_its_own: Engine) -> Any:
    with serving(
        engine_of_its_own, max_body=1000, max_prompt=60, max_tokens=5, max_choices=2
    ) as url:
        yield url


def test_a_large_body_is_refused_before_it_has_come(narrow: str) -> None:
    with socket.create_connection((urlsplit(narrow).hostname, urlsplit(narrow).port)) as connection:
        connection.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n".encode()
        )
        response = connection.recv(65536)
    assert response.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in response.lower()


def test_a_large_body_of_unknown_length_is_refused_when_it_is_too_large(narrow: str) -> None:
    with socket.create_connection((urlsplit(narrow).hostname, urlsplit(narrow).port)) as connection:
        connection.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        connection.sendall(b"400\r\n" + b" " * 1024 + b"\r\n")
        response = connection.recv(65536)
    assert response.startswith(b"HTTP/1.1 413 ")


def test_a_body_that_does_not_come_is_not_waited_for(
    narrow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyspec.server.guard.BODY_TIMEOUT", 0.1)
    with socket.create_connection((urlsplit(narrow).hostname, urlsplit(narrow).port)) as connection:
        connection.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{".encode()
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "x" * 60}]}, "messages"),
        ({"max_tokens": 6}, "max_tokens"),
        ({"max_completion_tokens": 6}, "max_completion_tokens"),
        ({"n": 3}, "n"),
    ],
)
def test_the_limits_are_told(narrow: str, fields: dict[str, Any], param: str) -> None:
    status, _, body = fetch(narrow, CHAT, {**HELLO, **fields})
    assert status == 400
    assert error_of(body)["param"] == param


def test_without_a_wish_an_answer_ends_at_the_limit(narrow: str) -> None:
    asked = {"messages": [{"role": "user", "content": "a"}], "temperature": 0}
    _, _, body = fetch(narrow, CHAT, asked)
    assert json.loads(body)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"messages": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"temperature": NaN, "messages": [{"role": "user", "content": "a"}]}',
        b'{"temperature": 1e999, "messages": [{"role": "user", "content": "a"}]}',
    ],
    ids=lambda body: repr(body[:12]),
)
def test_a_malformed_body_is_refused(url: str, body: bytes) -> None:
    status, _, answer = fetch(url, CHAT, body, Content_Type="application/json")
    assert status == 400
    error_of(answer)


@pytest.mark.parametrize("text", ["\ud800", "a\x00b", "\u202e", "<|im_end|>", "\U0010ffff"])
def test_an_odd_text_is_answered_or_refused(url: str, text: str) -> None:
    asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    status, _, body = fetch(url, CHAT, asked)
    assert status in (200, 400)
    assert "error" not in json.loads(body) or error_of(body)["param"]


# ---- what every response carries ---------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/docs", "/health", "/v1/models", "/metrics", "/nowhere"])
def test_headers_of_caution(url: str, path: str) -> None:
    _, headers, _ = fetch(url, path)
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "server" not in headers


@pytest.mark.parametrize("path", ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd"])
def test_no_file_can_be_reached(url: str, path: str) -> None:
    assert fetch(url, path)[0] == 404


# ---- the log -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [False, True])
def test_prompts_are_in_the_log_only_if_wanted(
    engine_of_its_own: Engine, caplog: pytest.LogCaptureFixture, wanted: bool
) -> None:
    with (
        caplog.at_level(logging.DEBUG),
        serving(engine_of_its_own, log_prompts=wanted, api_keys=("the-key",)) as url,
    ):
        key = {"Authorization": "Bearer the-key"}
        fetch(url, CHAT, HELLO, **key)
        fetch(url, CHAT, {**HELLO, "temperature": "a secret"}, **key)
        fetch(url, "/v1/a%0Asecret", **key)
    assert ("a secret of mine" in caplog.text) == wanted
    assert "the-key" not in caplog.text
    lines = [record.message for record in caplog.records if record.name == "pyspec.server"]
    assert sum(" 200 in " in line for line in lines) == 1
    assert sum(" 400 in " in line for line in lines) == 1
    assert not any("\n" in line for line in lines)


# ---- connections -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"])
def test_headers_that_do_not_come_are_not_waited_for(
    narrow: str, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr("pyspec.server.run.HEADER_TIMEOUT", 0.1)
    with socket.create_connection((urlsplit(narrow).hostname, urlsplit(narrow).port)) as connection:
        connection.settimeout(60)
        connection.sendall(sent)
        assert connection.recv(65536) == b""


def test_a_second_request_s_headers_are_not_waited_for_either(
    narrow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyspec.server.run.HEADER_TIMEOUT", 0.5)
    with socket.create_connection((urlsplit(narrow).hostname, urlsplit(narrow).port)) as connection:
        connection.settimeout(60)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        received = b""
        while not received.endswith(b"}"):
            received += connection.recv(65536)
        connection.sendall(b"GET /")
        assert connection.recv(65536) == b""


def test_headers_without_end_are_refused(narrow: str) -> None:
    with socket.create_connection((urlsplit(narrow).hostname, urlsplit(narrow).port)) as connection:
        connection.settimeout(60)
        connection.sendall(b"GET /health HTTP/1.1\r\nX: " + b"x" * 40_000)
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")
