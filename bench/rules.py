"""How many more drafted tokens the block rule accepts than the token rule, at temperature 1 without cuts.

`python -m bench.rules` prints a table of the mean number accepted a round under both, with 95 % intervals.

Both rules see the same rounds. The target writes a text for each prompt; from places spaced evenly along it
the draft draws as many tokens as the largest gamma, and one pass of the target gives p. Given p, q and the
drafted tokens x the expected numbers are known without a draw: with r_i = p_i(x_i) / q_i(x_i),

    token: sum over i <= gamma of the product over j <= i of min(1, r_j)
    block: sum over i <= gamma of a_i,  a_i = min(1, a_{i-1} r_i)

(cspec.h; tests/cspec enumerates that the rules accept with these probabilities). A smaller gamma's rounds are
the beginnings of the largest one's.

A round is taken from every part of a text alike. In a generation rounds begin where the last one ended, more
often than not at a rejection, so the numbers there are lower for both rules.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass

import llama_cpp
import numpy as np
import numpy.typing as npt
from pyspec._cspec import ffi, lib

from bench import prompts
from bench.sampler import processor
from pyspec import chat
from pyspec.catalogue import resolve
from pyspec.drafters.model import ModelDrafter
from pyspec.engine import Engine
from pyspec.llama import Context, Model, default_threads
from pyspec.sampling import Sampler, SamplingParams

GAMMAS = (2, 4, 8)
WIDEST = max(GAMMAS)
N_CTX = 1024
RESAMPLES = 10_000
WHOLE = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)

Accepted = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """Sums over the rounds of one prompt."""

    kind: str
    rounds: int
    token: Accepted  # [len(GAMMAS)] expected numbers of accepted tokens
    block: Accepted  # likewise


class Pair:
    """A target and its draft, and the contexts in which rounds are tried out along a text.

    Args:
        target: What to load.
        draft: Likewise.
        threads: Threads of each.
        seed: Of the texts and the drafted tokens.
    """

    def __init__(self, target: str, draft: str, *, threads: int, seed: int) -> None:
        self.target, self.draft = Model(resolve(target)), Model(resolve(draft))
        # Writes the texts, undrafted: nothing that is measured takes part.
        self._writer = Engine(self.target, n_ctx=N_CTX, threads=threads)
        self._context = Context(self.target, n_ctx=N_CTX, n_logits=WIDEST + 1, threads=threads)
        self._drafter = ModelDrafter(
            Context(self.draft, n_ctx=N_CTX, threads=threads),
            self.target.n_vocab,
            shortlist=None,
        )
        self._seed = seed

    def measure(self, kind: str, prompt: str, *, n_tokens: int, stride: int) -> Measured:
        """Try out a round at every stride-th token of a text."""
        ids = chat.prompt_ids(self.target, [{"role": "user", "content": prompt}])
        params = SamplingParams(**{**vars(WHOLE), "seed": self._seed, "max_tokens": n_tokens})
        written = [
            token.id for piece in self._writer.generate(ids, params) for token in piece.tokens
        ]
        sampler = Sampler(params, self.target.n_vocab)
        text = ids + written
        self._context.clear()
        self._drafter.clear()
        rounds = [
            self._round(text[:place], sampler) for place in range(len(ids), len(text) + 1, stride)
        ]
        token, block = np.sum(rounds, axis=0)
        return Measured(kind, len(rounds), token, block)

    def _round(self, ids: list[int], sampler: Sampler) -> tuple[Accepted, Accepted]:
        """The expected numbers of accepted tokens after ids, of the token rule and the block rule."""
        place = len(ids)
        proposal = self._drafter.propose(ids, WIDEST, sampler, round_=place)
        drafted = list(proposal.tokens)
        self._context.evaluate(ids[self._context.length : -1])
        self._context.evaluate([ids[-1], *drafted], n_logits=WIDEST + 1)
        p = [self._context.logits(row) for row in range(WIDEST + 1)]
        for row in p:
            sampler.distribution(row, (), row, source="target")
        ratios = [row[x] / q[x] for row, q, x in zip(p, proposal.q, drafted, strict=False)]
        a, b = (ffi.new("double[]", WIDEST + 1) for _ in range(2))
        p_rows, q_rows = (
            ffi.new("float *[]", [ffi.from_buffer("float[]", row) for row in rows])
            for rows in (p, proposal.q)
        )
        lib.cspec_block_thresholds(p_rows, q_rows, drafted, WIDEST, len(p[0]), a, b)
        token = np.cumsum(np.cumprod(np.minimum(1.0, np.array(ratios, float))))
        block = np.cumsum(list(a)[1:])
        self._context.truncate(place - 1)
        self._drafter.roll_back(place - 1)
        at = [gamma - 1 for gamma in GAMMAS]
        return token[at], block[at]

    def close(self) -> None:
        """Free everything, contexts before their models."""
        for owned in (self._writer, self._context, self._drafter, self.target, self.draft):
            owned.close()


# ---- the table -----------------------------------------------------------------------------------------


def means(prompts: list[Measured], weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[2, len(GAMMAS), ...] accepted tokens a round of both rules; weights: [len(prompts), ...]."""
    rounds = np.array([m.rounds for m in prompts]) @ weights
    sums = np.array([[m.token for m in prompts], [m.block for m in prompts]])
    result: npt.NDArray[np.float64] = np.einsum("rpg,p...->rg...", sums, weights) / rounds
    return result


def gains(accepted: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[2, len(GAMMAS), ...] percent gained in accepted tokens, and in emitted ones, one more a round."""
    token, block = accepted
    more = np.maximum(block - token, 0.0)  # block is never behind, except by rounding
    return np.array([100 * more / token, 100 * more / (token + 1)])


def lines(name: str, prompts: list[Measured]) -> Iterator[str]:
    """Rows of the table. The bootstrap draws prompts, since rounds of one text resemble each other."""
    n = len(prompts)
    random = np.random.default_rng(0)
    drawn = random.multinomial(n, [1 / n] * n, size=RESAMPLES).T.astype(float)
    accepted = means(prompts, np.ones(n))
    gained = gains(accepted)
    low, high = np.quantile(gains(means(prompts, drawn)), [0.025, 0.975], axis=-1)
    rounds = sum(m.rounds for m in prompts)
    for g, gamma in enumerate(GAMMAS):
        intervals = [
            f"{gained[of][g]:.1f} % ({low[of][g]:.1f} to {high[of][g]:.1f})" for of in (0, 1)
        ]
        yield (
            f"| {name} | {n} | {rounds} | {gamma} | {accepted[0][g]:.3f} | {accepted[1][g]:.3f} "
            f"| {intervals[0]} | {intervals[1]} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="What the block rule gains over the token rule.")
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b")
    parser.add_argument("--tokens", type=int, default=64, help="length of the texts")
    parser.add_argument("--stride", type=int, default=8, help="tokens from a round to the next")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    start, cpu_start = time.perf_counter(), time.process_time()
    pair = Pair(arguments.model, arguments.draft, threads=arguments.threads, seed=arguments.seed)
    measured = [
        pair.measure(kind, text, n_tokens=arguments.tokens, stride=arguments.stride)
        for kind, of_kind in prompts.load().items()
        for text in of_kind.values()
    ]
    print(f"{processor()}, {arguments.threads} threads; llama-cpp-python {llama_cpp.__version__}")
    print(f"target {pair.target.name}, draft {pair.draft.name}; temperature 1, nothing cut off")
    pair.close()
    print("| prompts | | rounds | gamma | token | block | accepted, gain | emitted, gain |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in prompts.load():
        print("\n".join(lines(kind, [m for m in measured if m.kind == kind])))
    print("\n".join(lines("all", measured)))
    elapsed, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    print(f"\n{elapsed:.0f} s, {cpu:.0f} s of processor time")


if __name__ == "__main__":
    main()
