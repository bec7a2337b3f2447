"""How often drafts agree with a target along the texts that it writes, token by token.

`python -m bench.agreement --drafts smollm2-135m qwen2.5-coder-0.5b` prints a table by kind of text: at
temperature 0 how often the draft's choice is the target's, at temperature 1 the mean of
sum_x min(p(x), q(x)). Either is the probability that a token drafted there is accepted.

The target alone writes each text, so all drafts are asked at the same places. A draft that can propose
nothing at a place agrees not at all there.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import llama_cpp
import numpy as np

from bench import prompts
from bench.sampler import processor
from pyspec import chat
from pyspec.catalogue import resolve
from pyspec.drafters import Drafter
from pyspec.drafters.foreign import drafter_of
from pyspec.llama import Context, Model, default_threads
from pyspec.sampling import Sampler, SamplingParams
from pyspec.vocab import shared_tokens

N_CTX = 2048
TEMPERATURES = (0, 1)


@dataclass(frozen=True)
class Models:
    """A target and its drafts, each with a context."""

    target: Context
    drafters: Sequence[Drafter]


def load(target: str, drafts: Sequence[str], threads: int) -> Models:
    model = Model(resolve(target))
    drafters = []
    for name in drafts:
        draft = Model(resolve(name))
        context = Context(draft, n_ctx=N_CTX, threads=threads)
        drafters.append(drafter_of(context, model, shared_tokens(model, draft)))
    return Models(Context(model, n_ctx=N_CTX, threads=threads), drafters)


def agreement(models: Models, text: str, params: SamplingParams) -> list[list[float]]:
    """At each place of the answer to a prompt, sum_x min(p(x), q(x)) of each draft."""
    context, model = models.target, models.target.model
    sampler = Sampler(params, model.n_vocab)
    ids = chat.prompt_ids(model, [{"role": "user", "content": text}])
    context.clear()
    context.evaluate(ids[:-1])
    for drafter in models.drafters:
        drafter.clear()
    found: list[list[float]] = []
    for place in range(params.max_tokens or 0):
        context.evaluate(ids[-1:], n_logits=1)
        p = context.logits(-1)
        sampler.distribution(p, ids, p, source="target")
        overlaps = []
        for drafter in models.drafters:
            drafter.roll_back(len(ids) - 1)
            overlap = 0.0
            if drafter.room(ids) > 0:
                (q,) = drafter.propose(ids, 1, sampler, round_=place).q
                overlap = float(np.minimum(p, q).sum())
            overlaps.append(overlap)
        found.append(overlaps)
        ids.append(sampler.draw_draft(p, round_=place, index=1, position=len(ids)))
        if model.is_end(ids[-1]):
            break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="How often drafts agree with a target.")
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--drafts", nargs="+", default=["smollm2-135m", "qwen2.5-coder-0.5b"])
    parser.add_argument("--kinds", nargs="+", default=list(prompts.load()), help="of prompts")
    parser.add_argument("--prompts", type=int, default=3, help="of each kind")
    parser.add_argument("--tokens", type=int, default=100, help="length of the texts")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    models = load(arguments.model, arguments.drafts, arguments.threads)
    print(f"{processor()}; llama-cpp-python {llama_cpp.__version__}; target {arguments.model}\n")
    columns = [f"{draft}, T={t}" for t in TEMPERATURES for draft in arguments.drafts]
    print("| kind | tokens | " + " | ".join(columns) + " |")
    print("|---|---|" + "---|" * len(columns))
    for kind in arguments.kinds:
        of_kind = prompts.load()[kind]
        means, tokens = list[float](), list[int]()
        for temperature in TEMPERATURES:
            params = SamplingParams(
                temperature=temperature,
                top_k=0,
                top_p=1,
                min_p=0,
                seed=arguments.seed,
                max_tokens=arguments.tokens,
            )
            texts = itertools.islice(of_kind.values(), arguments.prompts)
            places = [place for text in texts for place in agreement(models, text, params)]
            means += np.mean(places, axis=0).tolist()
            tokens.append(len(places))
        shown = " | ".join(f"{mean:.3f}" for mean in means)
        print(f"| {kind} | {tokens[0]}, {tokens[1]} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
