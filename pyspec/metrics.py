"""What a request reports."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class SourceCounts:
    """What came of one drafter's proposals: rounds, and tokens as in Statistics."""

    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0

    def add(self, drafted: int, verified: int, accepted: int) -> None:
        """Add a round."""
        self.rounds += 1
        self.drafted += drafted
        self.verified += verified
        self.accepted += accepted


@dataclass
class Statistics:
    """Counts and times of one request. Times are wall-clock seconds.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        cached_tokens: How many of them the target's cache held from an earlier request.
        completion_tokens: Tokens of the output, after any cut.
        rounds: Passes of the target after the prefill.
        drafted: Tokens that the draft drew.
        verified: Drafted tokens that a decision was reached on: the accepted ones and, in each round that
            did not accept all, the first that was not.
        accepted: Drafted tokens that were accepted, before any cut; accepted + rounds tokens were written.
        sources: Of each drafter that drafted: rounds, and drafted, verified and accepted tokens.
        accepted_histogram: [gamma + 1] how many rounds accepted 0, 1, ... gamma tokens.
        predicted_tokens_per_second: What the planner expected of the rounds, where it chose gamma.
        ttft_s: From the request to the first text.
        prefill_s: Evaluating the prompt, with both models.
        draft_s: Drawing drafted tokens.
        verify_s: The target's passes.
        sample_s: Distributions, the rule, and rollback.
        decode_s: All rounds.
        finish_reason: "stop" (end of generation or a stop string) or "length" (max_tokens or a full
            context).
        seed: What the random numbers were made from.
        bit_exact_reason: Why the target's logits may not be the same bits as in plain decoding; None if
            they are.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    sources: dict[str, SourceCounts] = field(default_factory=dict)
    accepted_histogram: list[int] = field(default_factory=lambda: [0])
    predicted_tokens_per_second: float | None = None
    ttft_s: float | None = None
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    sample_s: float = 0.0
    decode_s: float = 0.0
    finish_reason: str = ""
    seed: int = 0
    bit_exact_reason: str | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens a second of decoding, the prefill excluded."""
        return self.completion_tokens / self.decode_s if self.decode_s else None

    @property
    def tokens_per_round(self) -> float | None:
        """Tokens that a pass of the target yielded."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of the verified drafted tokens."""
        return self.accepted / self.verified if self.verified else None

    @property
    def bit_exact(self) -> bool:
        """Whether the target's logits are the same bits as in plain decoding."""
        return self.bit_exact_reason is None

    def count_round(self, drafted: int, accepted: int, source: str | None) -> None:
        """Add the outcome of a round, and who drafted in it."""
        verified = accepted + (accepted < drafted)
        self.rounds += 1
        self.drafted += drafted
        self.verified += verified
        self.accepted += accepted
        if source is not None:
            self.sources.setdefault(source, SourceCounts()).add(drafted, verified, accepted)
        histogram = self.accepted_histogram
        histogram.extend([0] * (drafted + 1 - len(histogram)))
        histogram[accepted] += 1

    @contextmanager
    def timed(self, *names: str) -> Iterator[None]:
        """Add the time spent inside to each of the named attributes."""
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            for name in names:
                setattr(self, name, getattr(self, name) + elapsed)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the attributes and the rates."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "ttft_s": self.ttft_s,
            "tokens_per_second": self.tokens_per_second,
            "predicted_tokens_per_second": self.predicted_tokens_per_second,
            "rounds": self.rounds,
            "tokens_per_round": self.tokens_per_round,
            "drafted": self.drafted,
            "verified": self.verified,
            "accepted": self.accepted,
            "acceptance_rate": self.acceptance_rate,
            "sources": {name: asdict(counts) for name, counts in self.sources.items()},
            "accepted_histogram": self.accepted_histogram,
            "prefill_s": self.prefill_s,
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "sample_s": self.sample_s,
            "decode_s": self.decode_s,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "bit_exact": self.bit_exact,
            "bit_exact_reason": self.bit_exact_reason,
        }
