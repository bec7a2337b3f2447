"""Many clients at once, some of which behave badly."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from pyspec import chat
from pyspec.engine import Engine
from pyspec.sampling import SamplingParams
from tests.server.service import Process
from tests.server.test_disconnect import json_of, post
from tests.server.test_guard import CHAT, fetch
from tests.server.test_scheduler import until

QUESTIONS = [f"{'the beginning ' * (i % 4)}question {i}" for i in range(12)]
MOST = 48
# What a process may grow by while nothing leaks: heaps keep some of what was freed.
SLACK = 16e6


@pytest.fixture(scope="module")
def expected(reference: Engine) -> dict[str, str]:
    """The greedy answer to each question, by an engine that had one at a time."""
    params = SamplingParams(temperature=0, max_tokens=MOST)
    answers = {}
    for question in QUESTIONS:
        ids = chat.prompt_ids(reference.target, [{"role": "user", "content": question}])
        answers[question] = "".join(piece.text for piece in reference.generate(ids, params))
    return answers


def fields(question: str, chance: random.Random) -> dict[str, Any]:
    """A request whose answer is known, made in one of several ways."""
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": MOST,
    }
    if chance.random() < 0.5:
        asked["speculative"] = {"gamma": chance.choice([0, 1, 4, 12])}
    return asked


def answer(url: str, asked: dict[str, Any], chance: random.Random) -> str:
    """The whole answer, streamed or not."""
    streamed = chance.random() < 0.5
    status, _, body = fetch(url, CHAT, {**asked, "stream": streamed})
    assert status == 200, body
    if not streamed:
        return str(json.loads(body)["choices"][0]["message"]["content"])
    *events, done, rest = body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def misbehave(url: str, asked: dict[str, Any], chance: random.Random) -> str:
    """Do what a client should not; returns what that was."""
    kind = chance.choice(["go at once", "go later", "malformed", "unknown field", "sampled"])
    if kind == "malformed":
        body = chance.randbytes(chance.randrange(200))
        assert fetch(url, CHAT, body, Content_Type="application/json")[0] == 400
    elif kind == "unknown field":
        assert fetch(url, CHAT, {**asked, "no": 1})[0] == 400
    elif kind == "sampled":
        sampled = {**asked, "temperature": 1.5, "n": 2, "logprobs": True, "top_logprobs": 3}
        assert fetch(url, CHAT, sampled)[0] == 200
    else:
        with post(url, **{**asked, "stream": chance.random() < 0.5, "max_tokens": 400}) as going:
            if kind == "go later":
                going.settimeout(60)
                going.recv(1)
    return kind


def load(
    url: str, expected: dict[str, str], *, clients: int, requests: int, seed: int
) -> Counter[str]:
    """Have clients ask side by side; returns how often what was done."""
    done: Counter[str] = Counter()
    lock = threading.Lock()

    def client(number: int) -> None:
        chance = random.Random(seed * 1000 + number)
        for _ in range(requests // clients):
            question = chance.choice(QUESTIONS)
            asked = fields(question, chance)
            if chance.random() < 0.5:
                assert answer(url, asked, chance) == expected[question]
                kind = f"answered to {number}"
            else:
                kind = misbehave(url, asked, chance)
            with lock:
                done[kind] += 1

    with ThreadPoolExecutor(clients) as pool:
        for result in [pool.submit(client, number) for number in range(clients)]:
            result.result()
    return done


def exercise(pair: list[Any], expected: dict[str, str], *, clients: int, requests: int) -> None:
    with Process(*pair, "--threads", "1", "--ctx", "512", "--parallel", "4") as process:
        memory = psutil.Process(process.pid)
        # What the first requests of each kind load and keep is no leak.
        load(process.url, expected, clients=clients, requests=requests, seed=1)
        before = memory.memory_info().rss
        files = memory.num_fds()
        done = load(process.url, expected, clients=clients, requests=requests, seed=2)
        until(lambda: json_of(process.url)["running"] + json_of(process.url)["waiting"] == 0)
        assert memory.memory_info().rss - before < SLACK
        until(lambda: memory.num_fds() <= files + 2)
        assert memory.num_threads() < 40
        assert sum(done.values()) == requests
        assert all(done[f"answered to {number}"] for number in range(clients)), "one was starved"
        assert "Traceback" not in process.log
        assert " 500 " not in process.log


def test_clients_that_misbehave_change_no_answer(
    chat_target: Path, chat_draft: Path, expected: dict[str, str]
) -> None:
    exercise(["-m", chat_target, "-d", chat_draft], expected, clients=4, requests=20)


@pytest.mark.thorough
def test_many_clients_that_misbehave_change_no_answer(
    chat_target: Path, chat_draft: Path, expected: dict[str, str]
) -> None:
    exercise(["-m", chat_target, "-d", chat_draft], expected, clients=8, requests=200)
