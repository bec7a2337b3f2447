"""Whether texts are the same with any draft: greedy ones, and coupled ones of a seed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pyspec.drafters import Drafter, GoOn, Proposal, always
from pyspec.engine import MAX_WIDTH, Engine, Gamma
from pyspec.llama import Model
from pyspec.metrics import Statistics
from pyspec.sampling import Rule, Sampler, SamplingParams
from pyspec.verify.setup import Result, Setup


class RandomDrafter(Drafter):
    """Proposes random tokens, so that nearly every round rolls back all of them.

    Args:
        n_vocab: Size of the target's vocabulary.
        seed: Chooses the tokens.
    """

    def __init__(self, n_vocab: int, seed: int = 0) -> None:
        self.name = "random"
        self._n_vocab = n_vocab
        self._random = np.random.default_rng(seed)

    def room(self, ids: Sequence[int]) -> int:  # noqa: ARG002
        """As many as a pass takes."""
        return MAX_WIDTH

    def catch_up(self, ids: Sequence[int]) -> None:
        """It looks at no text."""

    def propose(
        self,
        ids: Sequence[int],  # noqa: ARG002
        gamma: int,
        sampler: Sampler,  # noqa: ARG002
        *,
        round_: int,  # noqa: ARG002
        go_on: GoOn = always,  # noqa: ARG002
    ) -> Proposal:
        """Draw gamma tokens, each with a one-hot q: whichever came, it was certain to come."""
        tokens: list[int] = self._random.integers(0, self._n_vocab, gamma).tolist()
        return Proposal(tokens, [None] * gamma, [1 / self._n_vocab] * gamma)

    def roll_back(self, length: int) -> None:
        """It holds nothing."""

    def clear(self) -> None:
        """It holds nothing."""

    def close(self) -> None:
        """It holds nothing."""


class _Text(NamedTuple):
    ids: list[int]
    text: str
    finish_reason: str


def check_texts(setup: Setup, check: str, params: SamplingParams, rule: Rule) -> Iterator[Result]:
    """Compare the texts that the target writes with drafts and without, which should be one.

    Args:
        setup: Models and settings; it has a draft.
        check: The results' name.
        params: Settings with which a text does not depend on the draft: greedy, or any with the coupled rule.
        rule: How drafted tokens are verified.
    """
    asked: list[Gamma] = [setup.gamma] if setup.gamma not in (0, *setup.effort.gammas) else []
    drafts: list[tuple[str, Model | Drafter | None, Sequence[Gamma]]] = [
        ("draft", setup.draft, [*setup.effort.gammas, *asked]),
        (
            "random tokens",
            RandomDrafter(setup.target.n_vocab, setup.seed),
            setup.effort.random_gammas,
        ),
    ]
    with setup.engine(None) as engine:
        prompts = setup.prompt_ids(setup.effort.max_tokens, engine.n_ctx)
        runs = 1 + sum(len(gammas) for _, _, gammas in drafts)
        advance = setup.counter(f"{check} texts", runs * len(prompts))
        expected = [_write(engine, ids, params, rule, 0, advance)[0] for ids in prompts]
    for name, draft, gammas in drafts:
        with setup.engine(draft) as engine:
            for gamma in gammas:
                written = [_write(engine, ids, params, rule, gamma, advance) for ids in prompts]
                subject = f"{name}, gamma {gamma}"
                yield _compare_texts(setup.target, check, subject, expected, written)


def _write(
    engine: Engine,
    ids: Sequence[int],
    params: SamplingParams,
    rule: Rule,
    gamma: Gamma,
    advance: Callable[[], None],
) -> tuple[_Text, Statistics]:
    pieces = list(engine.generate(ids, params, gamma=gamma, rule=rule))
    statistics = pieces[-1].statistics
    assert statistics is not None
    text = _Text(
        [token.id for piece in pieces for token in piece.tokens],
        "".join(piece.text for piece in pieces),
        statistics.finish_reason,
    )
    advance()
    return text, statistics


def _compare_texts(
    target: Model,
    check: str,
    subject: str,
    expected: Sequence[_Text],
    written: Sequence[tuple[_Text, Statistics]],
) -> Result:
    verified = sum(statistics.verified for _, statistics in written)
    accepted = sum(statistics.accepted for _, statistics in written)
    figures: dict[str, Any] = {
        "texts": len(expected),
        "tokens": sum(len(text.ids) for text in expected),
        "acceptance_rate": accepted / verified if verified else None,
        "first_difference": None,
    }
    for index, ((text, _), wanted) in enumerate(zip(written, expected, strict=True)):
        if text != wanted:
            pairs = itertools.zip_longest(text.ids, wanted.ids)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(wanted.ids))
            found, right = (_token_text(target, ids[at : at + 1]) for ids in (text.ids, wanted.ids))
            figures["first_difference"] = {
                "prompt": index + 1,
                "token": at + 1,
                "found": found,
                "expected": right,
            }
            detail = f"prompt {index + 1} differs from token {at + 1} on: {found} for {right}"
            return Result(check, subject, False, detail, figures)
    rate = figures["acceptance_rate"]
    detail = f"{figures['texts']} texts, {figures['tokens']} tokens are the same; " + (
        "nothing was drafted" if rate is None else f"{100 * rate:.0f} % of verified tokens accepted"
    )
    return Result(check, subject, True, detail, figures)


def _token_text(target: Model, ids: Sequence[int]) -> str:
    return ascii(target.piece(ids[0]).decode("utf-8", "replace")) if ids else "the end"
