"""Clients that go away, that read slowly, and texts that come round by round."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import pytest

from pyspec.engine import Engine
from pyspec.errors import LogitsError
from pyspec.llama import Model
from tests.server.fakes import FakeEngine
from tests.server.service import serving
from tests.server.test_guard import CHAT, fetch
from tests.server.test_scheduler import until


@pytest.fixture
def fake(chat_target: Path) -> Iterator[FakeEngine]:
    engine = FakeEngine(Model(chat_target), lambda _: "0123456789" * 20, parallel=1)
    yield engine
    engine.target.close()


def post(url: str, **fields: object) -> socket.socket:
    """Send a request, and leave the response to be read."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()
    connection = socket.create_connection((urlsplit(url).hostname, urlsplit(url).port))
    connection.settimeout(60)
    connection.sendall(
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return connection


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_goes_frees_its_slot_within_a_round(
    fake: FakeEngine, fake_url: str, streamed: bool
) -> None:
    fake.rounds = threading.Semaphore(3)
    connection = post(fake_url, stream=streamed)
    until(lambda: len(fake.widths) == 3)
    connection.close()
    # The fourth pass is waiting to begin with this answer, and no later one may have it.
    until(lambda: fake.rounds is not None and json_of(fake_url)["running"] == 1)
    for _ in range(200):
        if not fake.running:
            break
        fake.rounds.release()
        threading.Event().wait(0.01)
    assert fake.running == []
    assert len(fake.widths) < 200, "the answer would have ended by itself"
    assert fake.started[0].closed


def json_of(url: str) -> dict[str, int]:
    found: dict[str, int] = json.loads(fetch(url, "/health")[2])
    return found


def test_a_client_that_goes_while_it_waits_is_forgotten(fake: FakeEngine, fake_url: str) -> None:
    fake.rounds = threading.Semaphore(0)
    running = post(fake_url)
    until(lambda: json_of(fake_url)["running"] == 1)
    waiting = post(fake_url)
    until(lambda: json_of(fake_url)["waiting"] == 1)
    waiting.close()
    until(lambda: json_of(fake_url)["waiting"] == 0)
    running.close()
    fake.rounds.release(10_000)
    until(lambda: not fake.running)
    assert len(fake.started) == 1


def test_each_round_s_text_comes_at_once(fake: FakeEngine, fake_url: str) -> None:
    fake.rounds = threading.Semaphore(0)
    with post(fake_url, stream=True, max_tokens=5) as connection:
        received = b""
        for digit in range(5):
            # Nothing of the next round can be there, for it has not begun.
            fake.rounds.release()
            while f'"content":"{digit}"'.encode() not in received:
                received += connection.recv(65536)
            assert f'"content":"{digit + 1}"'.encode() not in received


def test_a_client_that_does_not_read_holds_up_nobody(fake: FakeEngine, fake_url: str) -> None:
    fake.parallel = 2
    fake.script = lambda _: "x" * 4000
    with post(fake_url, stream=True) as idle:
        until(lambda: len(fake.widths) > 10)
        status, _, body = fetch(
            fake_url, CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
        )
        assert status == 200
        assert json.loads(body)["choices"][0]["message"]["content"] == "x" * 50
        # All of it is written, though nothing of it has been read.
        until(lambda: not fake.running)
        received = b""
        while b"[DONE]" not in received:
            received += idle.recv(1 << 20)
        assert received.count(b'"content":"x"') == 4000


def test_an_error_in_a_stream_comes_as_an_event(fake: FakeEngine, fake_url: str) -> None:
    fake.rounds = threading.Semaphore(2)
    with post(fake_url, stream=True) as connection:
        received = b""
        while b'"content":"1"' not in received:
            received += connection.recv(65536)
        fake.failure = LogitsError("the target's logits are NaN")
        fake.rounds.release()
        while b"error" not in received:
            received += connection.recv(65536)
        (event,) = [line for line in received.splitlines() if b'"error"' in line]
        assert json.loads(event.removeprefix(b"data: "))["error"]["message"].endswith("are NaN")
        assert b"[DONE]" not in received


def test_an_error_before_the_text_has_a_status(fake: FakeEngine, fake_url: str) -> None:
    fake.failure = LogitsError("the target's logits are NaN")
    asked = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    status, _, body = fetch(fake_url, CHAT, asked)
    assert status == 500
    assert json.loads(body)["error"]["message"].endswith("are NaN")


def test_an_error_of_the_program_tells_nothing_of_its_inside(
    fake: FakeEngine, fake_url: str
) -> None:
    fake.failure = RuntimeError("at line 7 of a file of mine")
    status, _, body = fetch(fake_url, CHAT, {"messages": [{"role": "user", "content": "hi"}]})
    assert status == 500
    assert "mine" not in body.decode()
    assert json.loads(body)["error"]["code"] == "internal_error"
    assert fetch(fake_url, "/health")[0] == 200


def test_a_full_queue_says_when_to_come_again(fake: FakeEngine) -> None:
    fake.rounds = threading.Semaphore(0)
    with serving(cast(Engine, fake), max_waiting=1) as url:
        running = post(url)
        until(lambda: json_of(url)["running"] == 1)
        waiting = post(url)
        until(lambda: json_of(url)["waiting"] == 1)
        status, headers, body = fetch(url, CHAT, {"messages": [{"role": "user", "content": "x"}]})
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(body)["error"]["code"] == "overloaded"
        rounds, fake.rounds = fake.rounds, None
        rounds.release(10_000)
        running.close()
        waiting.close()
