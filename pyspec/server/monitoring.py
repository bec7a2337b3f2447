"""Figures for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pyspec.metrics import Statistics
from pyspec.output import Piece, Source
from pyspec.server.scheduler import Scheduler

# Seconds; a CPU may take minutes for a long prompt.
_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class Monitoring:
    """Counts requests and tokens of one service.

    Args:
        scheduler: Asked for its state when the figures are read.
        paths: The service's own; requests for others are counted together.
    """

    def __init__(self, scheduler: Scheduler, paths: frozenset[str]) -> None:
        self._paths = paths
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "pyspec_requests",
            "Requests by path and status.",
            ("path", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "pyspec_request_seconds",
            "From a request to the end of its response.",
            ("path",),
            buckets=_BUCKETS,
            registry=registry,
        )
        self._first_text = Histogram(
            "pyspec_first_text_seconds",
            "From the beginning of an answer to its first text.",
            buckets=_BUCKETS,
            registry=registry,
        )
        self._tokens = Counter(
            "pyspec_tokens", "Tokens written, by who proposed them.", ("source",), registry=registry
        )
        self._prompt_tokens = Counter(
            "pyspec_prompt_tokens", "Tokens of the prompts of finished answers.", registry=registry
        )
        self._verified = Counter(
            "pyspec_verified_tokens",
            "Drafted tokens that were accepted or rejected, in finished answers.",
            registry=registry,
        )
        self._accepted = Counter(
            "pyspec_accepted_tokens",
            "Drafted tokens that were accepted, in finished answers.",
            registry=registry,
        )
        for name, text, value in (
            (
                "pyspec_slots",
                "Answers that can be written at once.",
                lambda: scheduler.engine.parallel,
            ),
            ("pyspec_running", "Answers that are being written.", lambda: scheduler.n_running),
            ("pyspec_waiting", "Answers that wait for a slot.", lambda: scheduler.n_waiting),
        ):
            Gauge(name, text, registry=registry).set_function(value)

    def count_request(self, path: str, status: int, seconds: float) -> None:
        """A request has ended."""
        path = path if path in self._paths else "other"
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def count_piece(self, piece: Piece) -> None:
        """A piece has come."""
        for source in Source:
            n = sum(token.source is source for token in piece.tokens)
            if n:
                self._tokens.labels(source.value).inc(n)
        if piece.statistics is not None:
            self._count_answer(piece.statistics)

    def _count_answer(self, statistics: Statistics) -> None:
        self._prompt_tokens.inc(statistics.prompt_tokens)
        self._verified.inc(statistics.verified)
        self._accepted.inc(statistics.accepted)
        if statistics.ttft_s is not None:
            self._first_text.observe(statistics.ttft_s)

    def text(self) -> bytes:
        """All figures, as Prometheus reads them."""
        return generate_latest(self._registry)
