"""Whether the logits of a position are the same bits whatever is evaluated with it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from pyspec.llama import Context, Logits, Model
from pyspec.verify.setup import Result, Setup


@dataclass
class _Comparison:
    """Rows of logits that should be equal."""

    rows: int = 0
    different: int = 0
    largest: float = 0.0
    position: int | None = None
    width: int | None = None

    def add(self, found: Logits, expected: Logits, position: int, width: int) -> None:
        """Compare the row of a position that was evaluated in a pass of some width."""
        self.rows += 1
        if np.array_equal(found.view(np.uint32), expected.view(np.uint32)):
            return
        self.different += 1
        difference = float(np.max(np.abs(found - expected)))
        if self.position is None or difference > self.largest:
            self.largest, self.position, self.width = difference, position, width

    def result(self, subject: str, reason: str | None) -> Result:
        """The result; reason says why the engine itself does not promise the same bits, if it does not."""
        detail = f"{self.rows} rows of logits have the same bits"
        if self.different:
            detail = (
                f"{self.different} of {self.rows} rows of logits differ, at most by {self.largest:.3g}: "
                f"position {self.position}, width {self.width}"
                + (f" (expected: {reason})" if reason else "")
            )
        figures = {
            "rows": self.rows,
            "rows_different": self.different,
            "largest_difference": self.largest if math.isfinite(self.largest) else None,
            "position": self.position,
            "width": self.width,
            "bit_exact_reason": reason,
        }
        return Result("bits", subject, self.different == 0, detail, figures)


def check_bits(setup: Setup, model: Model, name: str) -> Iterator[Result]:
    """Compare the logits of wide passes, and of passes after a rollback, with those of one token a pass."""
    wide, rolled_back = _Comparison(), _Comparison()
    random = np.random.default_rng(setup.seed)
    with closing(setup.context(model)) as context:
        n_widest = min(context.n_logits, context.n_ctx - 1)
        asked = {setup.gamma + 1} if isinstance(setup.gamma, int) else set()
        widths = sorted({*setup.effort.widths, *asked} - {1})
        widths = [width for width in widths if width <= n_widest]
        positions = [n for n in setup.effort.positions if n + widths[-1] <= context.n_ctx]
        prompts = itertools.chain(*setup.prompt_ids(0, context.n_ctx))
        text = itertools.cycle([token for token in prompts if token < model.n_vocab])
        tokens = list(itertools.islice(text, positions[-1] + widths[-1]))
        advance = setup.counter(f"bits of the {name}", len(positions))
        for start in positions:
            end = start + widths[-1]
            cover(context, tokens[:start])
            expected = {}
            for position in range(start, end):
                context.evaluate(tokens[position : position + 1], n_logits=1)
                expected[position] = context.logits(-1).copy()
            for width in widths:
                cover(context, tokens[:start])
                context.evaluate(tokens[start : start + width], n_logits=width)
                for row in range(width):
                    wide.add(context.logits(row), expected[start + row], start + row, width)
                dropped = min(width // 2, context.max_rollback)
                if dropped == 0:
                    continue
                # A round: the first tokens stand, the others are wrong and rolled back.
                kept = start + width - dropped
                wrong = random.integers(0, model.n_vocab, dropped).tolist()
                cover(context, tokens[:start])
                context.evaluate([*tokens[start:kept], *wrong], n_logits=width)
                context.truncate(kept)
                context.evaluate(tokens[kept : kept + 1], n_logits=1)
                rolled_back.add(context.logits(-1), expected[kept], kept, width)
            advance()
        reason = context.bit_exact_reason(widths[-1])
    yield wide.result(f"{name}, widths {widths[0]} to {widths[-1]}", reason)
    subject = f"{name}, after a rollback"
    if rolled_back.rows:
        yield rolled_back.result(subject, reason)
    else:
        yield Result("bits", subject, None, "its memory cannot roll back")


def cover(context: Context, ids: Sequence[int]) -> None:
    """Have the cache hold exactly ids, of which it holds a beginning, or more than all.

    A recurrent memory goes back no further than one pass: there it starts again, always with the same passes.
    """
    if context.model.is_recurrent:
        context.clear()
    else:
        context.truncate(min(len(ids), context.length))
    context.evaluate(ids[context.length :])
