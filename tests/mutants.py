"""Samplers and drafters that are wrong in one way each, as speculative decoders have been in public.

Their texts look right to a reader. A statistical test that passes them proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pyspec._cspec import ffi, lib

from pyspec.drafters import Proposal
from pyspec.drafters.model import ModelDrafter
from pyspec.sampling import Probabilities, Sampler, SamplingParams, Verdict
from tests.models import softmax

ACCEPT, DRAFT, TARGET = lib.CSPEC_STREAM_ACCEPT, lib.CSPEC_STREAM_DRAFT, lib.CSPEC_STREAM_TARGET


def draw(p: Probabilities, u: float, q: Probabilities | None = None, scale: float = 1.0) -> int:
    """Draw from max(scale p - q, 0)."""
    row = ffi.NULL if q is None else ffi.from_buffer("float[]", q)
    return int(lib.cspec_draw(ffi.from_buffer("float[]", p), row, scale, len(p), u))


# ---- the rule ----------------------------------------------------------------------------------------


class ResidualFromTarget(Sampler):
    """After a rejection the token is drawn from p, not from max(p - q, 0)."""

    def verify(
        self,
        p: Sequence[Probabilities],
        q: Sequence[Probabilities],
        drafted: Sequence[int],
        *,
        round_: int,
        position: int,
    ) -> Verdict:
        verdict = super().verify(p, q, drafted, round_=round_, position=position)
        return Verdict(
            verdict.accepted, draw(p[verdict.accepted], self._uniform(TARGET, round_, 0))
        )


class StopsAtFirstFailure(Sampler):
    """Block verification that ends at the first check that fails."""

    def verify(
        self,
        p: Sequence[Probabilities],
        q: Sequence[Probabilities],
        drafted: Sequence[int],
        *,
        round_: int,
        position: int,  # noqa: ARG002
    ) -> Verdict:
        gamma, n_vocab = len(drafted), len(p[0])
        a, b = (ffi.new("double[]", gamma + 1) for _ in range(2))
        rows = [
            ffi.new("float *[]", [ffi.from_buffer("float[]", row) for row in r]) for r in (p, q)
        ]
        lib.cspec_block_thresholds(*rows, list(drafted), gamma, n_vocab, a, b)
        t = 0
        while t < gamma and self._uniform(ACCEPT, round_, t) < b[t + 1]:
            t += 1
        residual = (None, 1.0) if t == gamma else (q[t], a[t])
        return Verdict(t, draw(p[t], self._uniform(TARGET, round_, 0), *residual))


# ---- what is compared --------------------------------------------------------------------------------


class UntransformedDraft(Sampler):
    """Drafted tokens come from the draft's distribution after the transforms, q is the one before."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.q: list[Probabilities] = []

    def distribution(
        self, logits: Probabilities, history: Sequence[int], out: Probabilities, *, source: str
    ) -> None:
        if source == "draft":
            self.q.append(softmax(logits).astype(np.float32))
        super().distribution(logits, history, out, source=source)

    def verify(
        self,
        p: Sequence[Probabilities],
        q: Sequence[Probabilities],
        drafted: Sequence[int],
        *,
        round_: int,
        position: int,
    ) -> Verdict:
        q, self.q = self.q[: len(drafted)], []
        return super().verify(p, q, drafted, round_=round_, position=position)


class TargetAtTemperatureOne(Sampler):
    """The target's distribution ignores the temperature that was asked for."""

    def __init__(self, params: SamplingParams, *args: Any) -> None:
        super().__init__(params, *args)
        self.target = Sampler(replace(params, temperature=1.0), *args)

    def distribution(
        self, logits: Probabilities, history: Sequence[int], out: Probabilities, *, source: str
    ) -> None:
        sampler = super() if source == "draft" else self.target
        sampler.distribution(logits, history, out, source=source)


class GreedyDraft(Sampler):
    """Drafted tokens are the draft's likeliest, with the draft's distribution for q."""

    def draw_draft(self, q: Probabilities, *, round_: int, index: int, position: int) -> int:  # noqa: ARG002
        return int(np.argmax(q))


class OneHotGreedyDraft(GreedyDraft):
    """No mutant: with a one-hot q, drafting the likeliest token is as right as any drafting."""

    def draw_draft(self, q: Probabilities, *, round_: int, index: int, position: int) -> int:
        token = super().draw_draft(q, round_=round_, index=index, position=position)
        q[:] = 0
        q[token] = 1
        return token


# ---- random numbers ----------------------------------------------------------------------------------


class OneStream(Sampler):
    """The draft and the residual are drawn with the same random number."""

    def _uniform(self, stream: int, round_: int, index: int) -> float:
        return super()._uniform(DRAFT if stream == TARGET else stream, round_, index)


class SameNumbersEveryRound(Sampler):
    """Each round is drawn rightly, and all with the same random numbers."""

    def _uniform(self, stream: int, round_: int, index: int) -> float:
        return super()._uniform(stream, round_ % 2, index)


class NoiseByPlaceInRound(Sampler):
    """The coupled rule's noise belongs to a place in the round, not to a position in the text."""

    def draw_draft(self, q: Probabilities, *, round_: int, index: int, position: int) -> int:  # noqa: ARG002
        return super().draw_draft(q, round_=round_, index=index, position=index)

    def verify(
        self,
        p: Sequence[Probabilities],
        q: Sequence[Probabilities],
        drafted: Sequence[int],
        *,
        round_: int,
        position: int,  # noqa: ARG002
    ) -> Verdict:
        return super().verify(p, q, drafted, round_=round_, position=0)


# ---- what the penalties see --------------------------------------------------------------------------


class PenalisesRejected(Sampler):
    """Rejected tokens stay in the penalties' window."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rejected: list[int] = []

    def distribution(
        self, logits: Probabilities, history: Sequence[int], out: Probabilities, *, source: str
    ) -> None:
        super().distribution(logits, [*history, *self.rejected[-2:]], out, source=source)

    def verify(
        self,
        p: Sequence[Probabilities],
        q: Sequence[Probabilities],
        drafted: Sequence[int],
        *,
        round_: int,
        position: int,
    ) -> Verdict:
        verdict = super().verify(p, q, drafted, round_=round_, position=position)
        self.rejected += drafted[verdict.accepted :]
        return verdict


class PenalisesLastOfRound(Sampler):
    """Of the tokens that a round emitted, the penalties' window has the last one only."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.missing: set[int] = set()

    def distribution(
        self, logits: Probabilities, history: Sequence[int], out: Probabilities, *, source: str
    ) -> None:
        seen = [token for place, token in enumerate(history) if place not in self.missing]
        super().distribution(logits, seen, out, source=source)

    def verify(
        self,
        p: Sequence[Probabilities],
        q: Sequence[Probabilities],
        drafted: Sequence[int],
        *,
        round_: int,
        position: int,
    ) -> Verdict:
        verdict = super().verify(p, q, drafted, round_=round_, position=position)
        self.missing.update(range(position, position + verdict.accepted))
        return verdict


# ---- what the grammar sees ---------------------------------------------------------------------------


class MaskOfRound(Sampler):
    """All rows of a round of the target have the mask of the round's first place."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.first: Sequence[int] | None = None

    def distribution(
        self, logits: Probabilities, history: Sequence[int], out: Probabilities, *, source: str
    ) -> None:
        if source == "target":
            history = self.first = self.first or history
        super().distribution(logits, history, out, source=source)

    def verify(
        self,
        p: Sequence[Probabilities],
        q: Sequence[Probabilities | None],
        drafted: Sequence[int],
        *,
        round_: int,
        position: int,
    ) -> Verdict:
        self.first = None
        return super().verify(p, q, drafted, round_=round_, position=position)


class MaskAfterRejected(PenalisesRejected):
    """The grammar is not rolled back over rejected tokens: to it they are part of the text."""


# ---- drafters ----------------------------------------------------------------------------------------

# A drafted token of less probability than this is the last of its round.
UNSURE = 0.3


class StoppingDrafter(ModelDrafter):
    """No mutant: stops after a token that it was unsure of.

    Tokens drawn after that one are as good as never drawn, since nothing looked at them.
    """

    def propose(self, *args: Any, **kwargs: Any) -> Proposal:
        proposal = super().propose(*args, **kwargs)
        n = self.first_unsure(proposal) + 1
        return Proposal(proposal.tokens[:n], proposal.q[:n])

    @staticmethod
    def first_unsure(proposal: Proposal) -> int:
        for index, (q, token) in enumerate(zip(proposal.q, proposal.tokens, strict=True)):
            if q[token] < UNSURE:
                return index
        return len(proposal.tokens)


class DiscardingDrafter(StoppingDrafter):
    """Discards the token that it was unsure of, which it has drawn."""

    def propose(self, *args: Any, **kwargs: Any) -> Proposal:
        proposal = ModelDrafter.propose(self, *args, **kwargs)
        n = self.first_unsure(proposal)
        return Proposal(proposal.tokens[:n], proposal.q[:n])
