"""Whether a position's logits are the same bits however many tokens are evaluated together."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from pyspec.llama import Context

MOST = 16  # tokens of the widest pass

# Where passes over the prefix end. From 512 cells on, llama.cpp's attention of a single token is split among
# threads.
POSITIONS = [1, 200, 511, 512, 600, 1500, 3000]

Digest = bytes  # of a row of logits


def evaluate(context: Context, tokens: Sequence[int]) -> list[Digest]:
    """Evaluate tokens in one pass; digests of their rows."""
    context.evaluate(tokens, n_logits=len(tokens))
    return [blake2b(context.logits(row)).digest() for row in range(len(tokens))]


def go_to(context: Context, tokens: Sequence[int], position: int) -> None:
    """Make the context hold tokens[:position].

    The prefix is always cut in the same pieces: those wider than the exact width are llama.cpp's own.
    """
    kept = max([0, *(end for end in POSITIONS if end <= min(context.length, position))])
    context.truncate(kept)
    for end in [*(end for end in POSITIONS if kept < end < position), position]:
        context.evaluate(tokens[context.length : end])


def one_by_one(context: Context, tokens: Sequence[int], position: int) -> list[Digest]:
    """Digests of the MOST rows from a position on, each from a pass of its own."""
    go_to(context, tokens, position)
    return [evaluate(context, [token])[0] for token in tokens[position : position + MOST]]


def differing_widths(
    context: Context,
    tokens: Sequence[int],
    position: int,
    widths: Sequence[int],
    expected: Sequence[Digest],
) -> list[int]:
    """The widths at which some row from a position on is not the one expected."""
    wrong = []
    for width in widths:
        go_to(context, tokens, position)
        if evaluate(context, tokens[position : position + width]) != list(expected[:width]):
            wrong.append(width)
    return wrong


def differing_after_rollback(
    context: Context,
    tokens: Sequence[int],
    position: int,
    widths: Sequence[int],
    expected: Sequence[Digest],
) -> list[int]:
    """The widths after whose rejection a different continuation is not what is expected.

    A pass of `width` tokens is right in its first half; the rest is rolled back, and the right tokens
    follow in one pass of the same width.
    """
    wrong = []
    for width in widths:
        go_to(context, tokens, position)
        kept = min(width // 2, MOST - width)
        rejected = [tokens[position - 1]] * (width - kept)
        context.evaluate([*tokens[position : position + kept], *rejected])
        context.truncate(position + kept)
        start = position + kept
        if evaluate(context, tokens[start : start + width]) != list(expected[kept : kept + width]):
            wrong.append(width)
    return wrong
