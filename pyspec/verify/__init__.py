"""Checks that a target and its draft, on this machine, write what the target alone would write.

Three kinds, from the ground up: the logits of a position are the same bits whatever is evaluated with it;
greedy and coupled texts are the same with any draft; drawn tokens have the target's distribution. Each
result carries its figures. docs/verify.md says what a failure means.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyspec.errors import UsageError
from pyspec.sampling import Rule, SamplingParams
from pyspec.verify.bits import check_bits
from pyspec.verify.distribution import SIGNIFICANCE, check_distribution, chi_square_tail
from pyspec.verify.setup import QUICK, THOROUGH, Effort, Progress, Result, Setup
from pyspec.verify.texts import RandomDrafter, check_texts

__all__ = [
    "QUICK",
    "SIGNIFICANCE",
    "THOROUGH",
    "Effort",
    "Progress",
    "RandomDrafter",
    "Result",
    "Setup",
    "check_bits",
    "check_distribution",
    "check_texts",
    "chi_square_tail",
    "verify",
]

_SMALLEST_CONTEXT = 16


def verify(setup: Setup) -> Iterator[Result]:
    """Run all checks, yielding each result as it comes.

    Without a draft only the target's bits are checked.

    Raises:
        UsageError: A setting is outside its range.
        VocabularyMismatchError: The draft shares next to no tokens with the target.
        ModelError: A model cannot do what a check needs.
        LogitsError: A model produced logits from which no distribution follows.
    """
    if setup.n_ctx is not None and setup.n_ctx < _SMALLEST_CONTEXT:
        raise UsageError(
            f"the checks need a context of {_SMALLEST_CONTEXT} or more, not {setup.n_ctx}"
        )
    # What the engine refuses is refused now, in its own words.
    setup.engine(setup.draft).close()
    yield from check_bits(setup, setup.target, "target")
    if setup.draft is None:
        for check in ("greedy", "coupled", "distribution"):
            yield Result(check, "draft", None, "there is no draft")
        return
    if setup.effort.bits_of_draft:
        yield from check_bits(setup, setup.draft, "draft")
    greedy = SamplingParams(temperature=0, max_tokens=setup.effort.max_tokens, seed=setup.seed)
    yield from check_texts(setup, "greedy", greedy, setup.rule)
    drawn = SamplingParams(max_tokens=setup.effort.max_tokens, seed=setup.seed)
    yield from check_texts(setup, "coupled", drawn, Rule.COUPLED)
    yield from check_distribution(setup)
