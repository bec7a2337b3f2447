"""Whose turn it is, who is dropped, and that nobody holds up anybody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from pyspec.engine import Engine
from pyspec.errors import LogitsError, ModelError
from pyspec.llama import Model
from pyspec.output import Piece
from pyspec.sampling import Rule, SamplingParams
from pyspec.server.errors import ApiError
from pyspec.server.scheduler import Event, Job, Scheduler
from tests.server.fakes import FakeEngine, FakeGeneration


class Client:
    """Collects what comes of a job."""

    def __init__(self, prompt: int, most: int | None = None) -> None:
        self.events: list[Event] = []
        self.ended = threading.Event()
        params = SamplingParams(max_tokens=most)
        self.job = Job([prompt], params, None, Rule.BLOCK, self._take)

    def _take(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, BaseException) or event.statistics is not None:
            self.ended.set()

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Piece))

    @property
    def error(self) -> BaseException | None:
        last = self.events[-1]
        return last if isinstance(last, BaseException) else None


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def fake(chat_target: Path) -> Iterator[FakeEngine]:
    """Writes the prompt's number ten times; passes wait to be let through."""
    engine = FakeEngine(Model(chat_target), lambda prompt: f"{prompt[0]}" * 10)
    engine.rounds = threading.Semaphore(0)
    yield engine
    engine.target.close()


def let(engine: FakeEngine, rounds: int) -> None:
    """Let some passes through, and wait until they are done."""
    assert engine.rounds is not None
    done = len(engine.widths) + rounds
    engine.rounds.release(rounds)
    until(lambda: len(engine.widths) >= done)


def free(engine: FakeEngine) -> None:
    """Let all passes through from now on."""
    rounds, engine.rounds = engine.rounds, None
    assert rounds is not None
    rounds.release(1000)


def scheduling(engine: FakeEngine, max_waiting: int = 10) -> Scheduler:
    return Scheduler(cast(Engine, engine), max_waiting=max_waiting)


def test_running_answers_share_each_pass(fake: FakeEngine) -> None:
    one, two = Client(1), Client(2)
    with scheduling(fake) as scheduler:
        scheduler.submit("a", [one.job, two.job])
        free(fake)
        assert one.ended.wait(60)
        assert two.ended.wait(60)
    assert (one.text, two.text) == ("1" * 10, "2" * 10)
    assert fake.widths.count(2) >= 9


def test_clients_take_turns(fake: FakeEngine) -> None:
    fake.parallel = 1
    clients = [Client(number) for number in range(1, 7)]
    with scheduling(fake) as scheduler:
        scheduler.submit("greedy", [client.job for client in clients[:4]])
        scheduler.submit("modest", [clients[4].job])
        scheduler.submit("patient", [clients[5].job])
        free(fake)
        assert all(client.ended.wait(60) for client in clients)
    # The first may have begun before the others came.
    order = [generation.prompt[0] for generation in fake.started]
    assert order in ([1, 2, 5, 6, 3, 4], [1, 5, 6, 2, 3, 4])


def test_too_many_waiting_are_refused_all_together(fake: FakeEngine) -> None:
    with scheduling(fake, max_waiting=1) as scheduler:
        running = [Client(1), Client(2)]
        scheduler.submit("a", [client.job for client in running])
        until(lambda: scheduler.n_running == 2)
        with pytest.raises(ApiError, match="waiting") as caught:
            scheduler.submit("b", [Client(3).job, Client(4).job])
        assert caught.value.status == 503
        assert caught.value.headers == {"Retry-After": "1"}
        assert scheduler.n_waiting == 0
        scheduler.submit("b", [Client(5).job])
        assert scheduler.n_waiting == 1
        free(fake)


def test_a_cancelled_answer_frees_its_slot_before_the_next_round(fake: FakeEngine) -> None:
    gone, stays, waits = Client(1), Client(2), Client(3)
    with scheduling(fake) as scheduler:
        scheduler.submit("a", [gone.job, stays.job])
        let(fake, 3)
        scheduler.submit("b", [waits.job])
        scheduler.cancel([gone.job])
        # One pass was under way already.
        let(fake, 2)
        assert fake.started[0].closed
        assert [generation.prompt[0] for generation in fake.running] == [2, 3]
        free(fake)
        assert waits.ended.wait(60)
    assert stays.text == "2" * 10
    assert len(gone.text) <= 5
    assert not gone.ended.is_set()


def test_a_cancelled_answer_that_waits_never_begins(fake: FakeEngine) -> None:
    running, gone = [Client(1), Client(2)], Client(3)
    with scheduling(fake) as scheduler:
        scheduler.submit("a", [client.job for client in running])
        until(lambda: scheduler.n_running == 2)
        scheduler.submit("a", [gone.job])
        scheduler.cancel([gone.job])
        assert scheduler.n_waiting == 0
        free(fake)
        assert all(client.ended.wait(60) for client in running)
    assert len(fake.started) == 2


def test_a_failed_pass_ends_its_answers_and_no_others(fake: FakeEngine) -> None:
    failing, later = [Client(1), Client(2)], Client(3)
    fake.failure = ModelError("a pass failed")
    with scheduling(fake) as scheduler:
        scheduler.submit("a", [client.job for client in failing])
        free(fake)
        assert all(client.ended.wait(60) for client in failing)
        assert fake.running == []
        scheduler.submit("a", [later.job])
        assert later.ended.wait(60)
    assert [str(client.error) for client in failing] == ["a pass failed"] * 2
    assert later.text == "3" * 10


def test_one_answer_s_error_is_its_own(fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def round_(self: FakeGeneration) -> Piece:
        if self.prompt == [1]:
            self.error = LogitsError("NaN")
            self.close()
            return Piece(())
        return whole_round(self)

    whole_round = FakeGeneration.round
    monkeypatch.setattr(FakeGeneration, "round", round_)
    broken, fine = Client(1), Client(2)
    with scheduling(fake) as scheduler:
        scheduler.submit("a", [broken.job, fine.job])
        free(fake)
        assert broken.ended.wait(60)
        assert fine.ended.wait(60)
    assert isinstance(broken.error, LogitsError)
    assert fine.text == "2" * 10


def test_a_refused_start_is_told_and_the_next_one_begins(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = fake.start

    def refusing(prompt: Any, params: Any, **others: Any) -> FakeGeneration:
        if prompt == [1]:
            raise ModelError("no")
        return start(prompt, params, **others)

    monkeypatch.setattr(fake, "start", refusing)
    refused, fine = Client(1), Client(2)
    with scheduling(fake) as scheduler:
        scheduler.submit("a", [refused.job, fine.job])
        free(fake)
        assert fine.ended.wait(60)
    assert str(refused.error) == "no"


def test_draining_lets_running_answers_end_and_refuses_the_rest(fake: FakeEngine) -> None:
    running, waiting = [Client(1), Client(2)], Client(3)
    with scheduling(fake) as scheduler:
        scheduler.submit("a", [client.job for client in running])
        until(lambda: scheduler.n_running == 2)
        scheduler.submit("a", [waiting.job])
        scheduler.drain(grace=60)
        assert waiting.ended.wait(60)
        assert "shutting down" in str(waiting.error)
        with pytest.raises(ApiError, match="shutting down"):
            scheduler.submit("a", [Client(4).job])
        free(fake)
        assert all(client.ended.wait(60) for client in running)
    assert [client.text for client in running] == ["1" * 10, "2" * 10]


def test_the_grace_has_an_end(fake: FakeEngine) -> None:
    client = Client(1)
    with scheduling(fake) as scheduler:
        scheduler.submit("a", [client.job])
        let(fake, 2)
        scheduler.drain(grace=0)
        free(fake)
        assert client.ended.wait(60)
        until(lambda: scheduler.n_running == 0)
    assert "shutting down" in str(client.error)
    assert len(client.text) <= 4
    assert fake.running == []


def test_closing_frees_every_slot(fake: FakeEngine) -> None:
    client = Client(1)
    with scheduling(fake) as scheduler:
        scheduler.submit("a", [client.job])
        let(fake, 1)
        free(fake)
    assert fake.running == []
    assert client.ended.is_set()
