"""The thread on which llama.cpp works."""

from __future__ import annotations

import threading

from pyspec import worker


def test_calls_run_on_one_thread_that_is_not_the_caller() -> None:
    threads = {worker.run(threading.get_ident) for _ in range(3)}
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_a_call_from_the_worker_runs_at_once() -> None:
    """Behind the one that makes it, it would wait for ever."""
    nested = worker.run(lambda: worker.run(threading.get_ident))
    assert nested == worker.run(threading.get_ident)
