"""A cheaper copy of a draft: what its weights' precision changes is speed and never the text.

A draft is read whole for every token that it draws, so with fewer bits a step takes less time and is right
somewhat less often. Which copy is best for a pair is measured; what is kept replaces the draft where it
drafts for that target.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from pyspec.catalogue import models_folder
from pyspec.costs import CostCurve
from pyspec.engine import Engine
from pyspec.errors import UsageError
from pyspec.gguf_file import inspect_gguf
from pyspec.llama import Context, Model, default_threads
from pyspec.quantise import identity, quantise
from pyspec.sampling import Probabilities, Sampler
from pyspec.tune import Costs, Setup, measure_costs, speedup
from pyspec.vocab import check_same_vocabulary

# Types of most weights, and of the output matrix, which is a third of a small model. Where a row is no
# multiple of a type's block, llama.cpp takes a type of more bits.
VARIANTS = (("q4_0", "q4_0"), ("q4_0", "q5_0"), ("q3_k_m", "q4_0"), ("q2_k", "q4_0"))
AS_IT_IS = "as it is"
# A copy must promise more than this much speed to be worth its place on the disk.
_WORTH = 1.01


@dataclass(frozen=True)
class Variant:
    """A copy of a draft, and how it does.

    Attributes:
        name: Its types, or AS_IT_IS.
        path: Where it lies.
        bytes_read: In a step.
        c: A step as a share of a target pass over one token.
        acceptance: Probability that a token which it draws is accepted, on average over the texts.
        speedup: Predicted, at the best draft length, as a multiple of plain decoding.
    """

    name: str
    path: Path
    bytes_read: int
    c: float
    acceptance: float
    speedup: float

    @property
    def bytes_per_accepted(self) -> float:
        """Bytes read for each accepted token."""
        return self.bytes_read / self.acceptance if self.acceptance else float("inf")


def squeezed_path(target: Path, draft: Path) -> Path:
    """Where the copy of a draft lies that drafts for a target, if one was found to be better."""
    names = f"{draft.stem}-{identity(draft)}-for-{target.stem}-{identity(target)}"
    return models_folder() / "squeezed" / f"{names}.gguf"


def preferred_draft(target: Path, draft: Path) -> Path:
    """The squeezed copy of a draft for this target, or the draft itself where there is none."""
    copy = squeezed_path(target, draft)
    return copy if copy.is_file() else draft


def squeeze(setup: Setup) -> list[Variant]:
    """Make copies of a draft, measure them beside it, and keep the best if it is worth it.

    What was kept before for this pair is replaced, or removed if nothing is better than the draft itself.

    Args:
        setup: The pair, prompts and settings; the draft is the original and not a copy.

    Returns:
        The draft itself and the copies, the fastest first. The path of one that was not kept leads nowhere.

    Raises:
        UsageError: The prompts yield no text.
        ModelError: llama.cpp cannot quantise this draft, or there is no room for the copies.
        VocabularyMismatchError: The draft's token ids do not mean what the target's do.
    """
    check_same_vocabulary(setup.target, setup.draft)
    original, kept = setup.draft.path, squeezed_path(setup.target.path, setup.draft.path)
    kept.parent.mkdir(parents=True, exist_ok=True)
    done = itertools.count()

    def advance() -> None:
        setup.progress("copies", next(done), len(VARIANTS) + 2)

    advance()
    bench = _Bench(setup)
    advance()
    variants: list[Variant] = []
    with TemporaryDirectory(dir=kept.parent, prefix=".") as folder:
        for name, path in itertools.chain([(AS_IT_IS, original)], _copies(original, Path(folder))):
            variants.append(bench.measure(name, path))
            advance()
        as_it_is = variants[0]
        variants.sort(key=lambda variant: -variant.speedup)
        best = variants[0]
        if best.speedup > _WORTH * as_it_is.speedup:
            shutil.move(best.path, kept)
            variants[0] = replace(best, path=kept)
        else:
            kept.unlink(missing_ok=True)
    return variants


def _copies(original: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Make one copy after another; those that come out like an earlier one are left out."""
    seen = {_types(original)}
    for types, output_type in VARIANTS:
        path = folder / f"{types}-{output_type}.gguf"
        quantise(original, path, types, output_type)
        if _types(path) in seen:
            path.unlink()
            continue
        seen.add(_types(path))
        yield f"{types}, output {output_type}", path


def _types(path: Path) -> tuple[int, tuple[tuple[str, int], ...]]:
    info = inspect_gguf(path)
    return info.bytes_read, tuple(sorted(info.tensor_types.items()))


# ---- measuring ---------------------------------------------------------------------------------------


class _Bench:
    """What every copy is measured on: texts of the target and its distributions along them, and its costs."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._texts = _write_texts(setup)
        self._p = [_distributions(setup, setup.target, *text) for text in self._texts]
        threads = setup.threads or default_threads()
        self._threads = {"threads": threads, "draft_threads": setup.draft_threads or threads}
        costs = measure_costs(setup, range(1, max(setup.gammas) + 2), **self._threads)
        del costs[0]
        self._target_costs = CostCurve(list(costs), list(costs.values()))

    def measure(self, name: str, path: Path) -> Variant:
        """See how one does."""
        setup = self._setup
        with closing(Model(path)) as model:
            taken = measure_costs(replace(setup, draft=model), (1,), **self._threads)
            overlaps = [
                _overlap(p, _distributions(setup, model, *text))
                for p, text in zip(self._p, self._texts, strict=True)
            ]
        acceptance = float(np.concatenate(overlaps).mean())
        # Of passes at the same time, which what else runs slows down alike.
        c = taken[0] / taken[1]
        costs = Costs(self._target_costs, c * self._target_costs(1))
        predicted = max(speedup([acceptance] * gamma, gamma, costs) for gamma in setup.gammas)
        return Variant(name, path, inspect_gguf(path).bytes_read, c, acceptance, predicted)


def _write_texts(setup: Setup) -> list[tuple[Sequence[int], list[int]]]:
    """The prompts, and what the target alone writes after each.

    Raises:
        UsageError: They are all empty.
    """
    params = replace(setup.params, max_tokens=setup.tokens)
    with Engine(setup.target, n_ctx=setup.n_ctx, threads=setup.threads) as engine:
        texts = [
            (
                prompt,
                [token.id for piece in engine.generate(prompt, params) for token in piece.tokens],
            )
            for prompt in setup.prompts
        ]
    if not any(text for _, text in texts):
        raise UsageError("the texts end at once: give prompts with longer answers")
    return texts


def _distributions(
    setup: Setup, model: Model, prompt: Sequence[int], text: Sequence[int]
) -> Probabilities:
    """[len(text), n_vocab] what a model expects at each place of a text that it is shown."""
    rows: Probabilities = np.zeros((len(text), setup.target.n_vocab), np.float32)
    if not text:
        return rows
    sampler = Sampler(setup.params, setup.target.n_vocab)
    n_common = min(setup.target.n_vocab, model.n_vocab)
    ids = [*prompt, *text]
    with closing(
        Context(model, n_ctx=len(ids), n_logits=len(text), threads=setup.threads)
    ) as context:
        context.evaluate(ids[: len(prompt) - 1])
        context.evaluate(ids[len(prompt) - 1 : -1], n_logits=len(text))
        for place, row in enumerate(rows):
            logits = context.logits(place)[:n_common]
            history = ids[: len(prompt) + place]
            sampler.distribution(logits, history, row[:n_common], source="model")
    return rows


def _overlap(p: Probabilities, q: Probabilities) -> Probabilities:
    """[n] probability that a token drawn from q is accepted: the sum of min(p, q) of each row."""
    result: Probabilities = np.minimum(p, q).sum(axis=1)
    return result
