"""What a shortlist of the draft's tokens costs in acceptance and brings in time.

`python -m bench.shortlist` prints two tables by the size of the list. First the median milliseconds of a
draft step at position 256 and of drawing from its logits; all sizes take turns. Then, by kind of prompt,
how often a drafted token would be accepted along texts that the target writes: at temperature 0 the share of
places where both models' likeliest token is one, at temperature 1 the mean of the sum of min(p, q).

Every place of a text is asked, not only those that rounds reach. `--prompts 0` leaves out the second table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import islice

import llama_cpp
import numpy as np
import numpy.typing as npt

from bench import prompts
from bench.sampler import processor
from pyspec import bridge, chat
from pyspec.catalogue import resolve
from pyspec.drafters.shortlist import Shortlist
from pyspec.engine import Engine
from pyspec.llama import Context, Model, default_threads
from pyspec.sampling import Sampler, SamplingParams

SIZES = (65536, 49152, 32768, 16384, 8192)
N_CTX = 1024
POSITION = 256
ROWS = 64  # of logits at once

Floats = npt.NDArray[np.float64]


def step_times(draft: Model, threads: int, turns: int) -> Iterator[tuple[int, list[float]]]:
    """Size of the list, and milliseconds of a pass over one token, and of drawing at temperatures 0 and 1."""
    ids = draft.tokenize(prompts.load()["summary"]["glacier"] * 3)[:POSITION]
    sizes = (draft.n_vocab, *SIZES)
    lists = [Shortlist(draft, size).panels(ids) for size in sizes]
    samplers = [Sampler(SamplingParams(temperature=t, seed=1), draft.n_vocab) for t in (0.0, 1.0)]
    q = np.zeros(draft.n_vocab, np.float32)
    taken = [[list[float]() for _ in range(3)] for _ in sizes]
    with closing(Context(draft, n_ctx=N_CTX, threads=threads)) as context:
        context.evaluate(ids[:-1])
        for turn in range(turns):
            for times, context.panels in zip(taken, lists, strict=True):
                start = time.perf_counter()
                context.evaluate(ids[-1:], n_logits=1)
                times[0].append(time.perf_counter() - start)
                for sampler, of_temperature in zip(samplers, times[1:], strict=True):
                    start = time.perf_counter()
                    sampler.distribution(context.logits(-1), ids, q, source="draft")
                    sampler.draw_draft(q, round_=turn, index=0, position=len(ids))
                    of_temperature.append(time.perf_counter() - start)
                context.truncate(len(ids) - 1)
    for size, times in zip(sizes, taken, strict=True):
        yield size, [1e3 * statistics.median(each) for each in times]


def acceptance(p: Floats, q: Floats, temperature: float) -> float:
    """How likely a token drawn from q is accepted under p; both are logits [n_vocab]."""
    if temperature == 0:
        return float(p.argmax() == q.argmax())
    p, q = (np.exp(row - row.max()) for row in (p, q))
    return float(np.minimum(p / p.sum(), q / q.sum()).sum())


def overlaps(
    target: Context, draft: Context, n_prompt: int, ids: Sequence[int], temperature: float
) -> list[list[float]]:
    """[places][1 + sizes] the acceptance with the whole vocabulary and with each size, along a text."""
    lists = [Shortlist(draft.model, size) for size in SIZES]
    for context in (target, draft):
        context.clear()
        context.evaluate(ids[: n_prompt - 1])
    found = []
    for start in range(n_prompt - 1, len(ids) - 1, ROWS):
        chunk = ids[start : min(start + ROWS, len(ids) - 1)]
        for context in (target, draft):
            context.evaluate(chunk, n_logits=len(chunk))
        for row in range(len(chunk)):
            p, q = (context.logits(row).astype(np.float64) for context in (target, draft))
            rows = [q]
            for listed in lists:
                panels = listed.panels(ids[: start + row + 1])
                on_it = np.isin(np.arange(len(q)) // bridge.PANEL_ROWS, panels)
                rows.append(np.where(on_it, q, -np.inf))
            found.append([acceptance(p, row, temperature) for row in rows])
    return found


def acceptance_rows(
    target: Model, draft: Model, *, threads: int, n_prompts: int, n_tokens: int
) -> Iterator[str]:
    """Rows of the second table."""
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(target, draft, n_ctx=N_CTX, threads=threads))
        contexts = [
            stack.enter_context(
                closing(Context(model, n_ctx=N_CTX, n_logits=ROWS, threads=threads))
            )
            for model in (target, draft)
        ]
        for temperature in (0.0, 1.0):
            every = list[list[float]]()
            for kind, named in prompts.load().items():
                found = list[list[float]]()
                for text in islice(named.values(), n_prompts):
                    ids = chat.prompt_ids(target, [{"role": "user", "content": text}])
                    params = SamplingParams(
                        temperature=temperature,
                        top_k=0,
                        top_p=1,
                        min_p=0,
                        seed=1,
                        max_tokens=n_tokens,
                    )
                    pieces = engine.generate(ids, params)
                    whole = [*ids, *(token.id for piece in pieces for token in piece.tokens)]
                    found += overlaps(*contexts, len(ids), whole, temperature)
                yield _row(kind, temperature, found)
                every += found
            yield _row("all", temperature, every)


def _row(kind: str, temperature: float, found: list[list[float]]) -> str:
    means = " | ".join(f"{mean:.3f}" for mean in np.mean(found, axis=0))
    return f"| {kind} | {temperature:.0f} | {len(found)} | {means} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="What a shortlist costs and brings.")
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=2, help="of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="length of the texts")
    arguments = parser.parse_args()
    draft = Model(resolve(arguments.draft))
    print(f"{processor()}, {arguments.threads} threads; llama-cpp-python {llama_cpp.__version__}")
    print(
        f"draft {draft.name}\n\n| ids below | step, ms | drawing at 0, ms | at 1, ms |\n|---|---|---|---|"
    )
    for size, times in step_times(draft, arguments.threads, arguments.turns):
        name = "all" if size == draft.n_vocab else str(size)
        print(f"| {name} | {times[0]:.2f} | {times[1]:.2f} | {times[2]:.2f} |", flush=True)
    if arguments.prompts > 0:
        target = Model(resolve(arguments.model))
        print(f"\ntarget {target.name}\n\n| prompts | temperature | places | all | ", end="")
        print(" | ".join(map(str, SIZES)), "|\n|---|---|---|---|" + "---|" * len(SIZES))
        for row in acceptance_rows(
            target,
            draft,
            threads=arguments.threads,
            n_prompts=arguments.prompts,
            n_tokens=arguments.tokens,
        ):
            print(row, flush=True)
        target.close()
    draft.close()


if __name__ == "__main__":
    main()
