"""What policies of drafting would do on real texts: replayed, without the noise of a machine.

`python -m bench.replay` has the target write the benchmark's texts at temperature 0, and at each place of
them the draft continue, with its confidences. Any policy's rounds can then be replayed exactly: what it would
draft and how much of it the target would accept are known, and what that takes follows from what passes cost,
on this machine or another (`--costs`). It prints, by kind of text and as a multiple of plain decoding: the
planner; the planner whose draft takes no guesses from copies; copies alone; the fixed gamma that is best for
the kind, chosen afterwards; and the planner as a multiple of that.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bench import prompts
from bench.sampler import processor
from pyspec import chat
from pyspec.catalogue import resolve
from pyspec.costs import CostCurve, measured_costs
from pyspec.drafters.model import ModelDrafter
from pyspec.drafters.ngram import NgramDrafter
from pyspec.llama import Context, Model, default_threads
from pyspec.planner import Candidate, FixedGamma, Planner
from pyspec.sampling import Sampler, SamplingParams

N_CTX = 4096
MAX_DRAFT = 12
GAMMAS = range(1, MAX_DRAFT + 1)
_GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True)
class Drafted:
    """What the draft would write from a place on, MAX_DRAFT tokens, and its confidence in each."""

    tokens: list[int]
    confidence: list[float]


@dataclass(frozen=True)
class Trace:
    """A prompt, the target's greedy text, and what the draft would write from each place of it on."""

    kind: str
    prompt: list[int]
    text: list[int]
    drafted: list[Drafted]


@dataclass(frozen=True)
class Costs:
    """Seconds of passes by their tokens."""

    target: CostCurve
    draft: CostCurve


@dataclass(frozen=True)
class Replayed:
    """What a policy came to on a text."""

    seconds: float
    rounds: int
    drafted: int
    accepted: int


Policy = Callable[[Costs], "Planner | FixedGamma"]


# ---- recording ---------------------------------------------------------------------------------------


def record(kind: str, prompt: list[int], target: Context, draft: ModelDrafter, most: int) -> Trace:
    """Have both models write.

    Args:
        kind: Of the text.
        prompt: Token ids.
        target: Its cache is emptied first.
        draft: Likewise.
        most: Tokens of the text.
    """
    target.clear()
    draft.clear()
    text: list[int] = []
    while len(text) < most and not (text and target.model.is_end(text[-1])):
        target.evaluate([*prompt, *text][target.length :], n_logits=1)
        text.append(int(np.argmax(target.logits(-1))))
    sampler = Sampler(_GREEDY, target.model.n_vocab)
    drafted = []
    for place in range(len(text)):
        ids = [*prompt, *text[:place]]
        draft.roll_back(len(ids) - 1)
        proposal = draft.propose(ids, MAX_DRAFT, sampler, round_=0)
        drafted.append(Drafted(list(proposal.tokens), list(proposal.confidence)))
    return Trace(kind, prompt, text, drafted)


# ---- replaying ---------------------------------------------------------------------------------------


def replay(
    trace: Trace,
    costs: Costs,
    planner: Planner | FixedGamma,
    *,
    model: bool = True,
    copies: bool = True,
) -> Replayed:
    """Go through a text's rounds.

    Args:
        trace: The text.
        costs: Of the passes.
        planner: Of a request with as many drafters: the model first, then the copies.
        model: Draft with the model.
        copies: Propose copies, and have the model take them as guesses.
    """
    ngram = NgramDrafter()
    n_prompt, n_text = len(trace.prompt), len(trace.text)
    place = rounds = n_drafted = n_accepted = 0
    seconds, cached = 0.0, n_prompt - 1  # tokens that the draft's cache holds
    while place < n_text:
        ids, ahead = [*trace.prompt, *trace.text[:place]], trace.text[place:]
        room = min(len(ahead) - 1, MAX_DRAFT)
        copied = ngram.peek(ids, room) if copies and room > 0 else None
        candidates = [Candidate(room, len(ids) - cached, guided=copies)] if model else []
        if copies:
            candidates.append(Candidate(room, confidence=copied.confidence if copied else []))
        plan = planner.plan(candidates)
        tokens, confidence, draft_s = list[int](), list[float](), 0.0
        if plan.source == 0 and model:
            known, evaluated = trace.drafted[place], 0
            for index in range(plan.most):
                if index >= evaluated:
                    guess = ngram.guess([*ids, *tokens], plan.most - index - 1) if copies else []
                    pending = len(ids) - cached if index == 0 else 1
                    draft_s += costs.draft(pending + len(guess))
                    evaluated = index + 1 + _n_common(guess, known.tokens[index:])
                tokens.append(known.tokens[index])
                confidence.append(known.confidence[index])
                if index + 1 < plan.most and not plan.go_on(
                    confidence[-1], evaluated=evaluated > index + 1
                ):
                    break
            cached = len(ids) + len(tokens) - 1
        elif plan.source is not None and copied is not None:
            tokens = list(copied.tokens[: plan.most])
            confidence = list(copied.confidence[: plan.most])
        accepted = _n_common(tokens, ahead)
        verify_s = costs.target(len(tokens) + 1)
        planner.record(plan, confidence, accepted, draft_s=draft_s, verify_s=verify_s)
        seconds += draft_s + verify_s
        place, rounds = place + accepted + 1, rounds + 1
        n_drafted, n_accepted = n_drafted + len(tokens), n_accepted + accepted
        cached = min(cached, n_prompt + place)
    return Replayed(seconds, rounds, n_drafted, n_accepted)


def _n_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens up to the first in which two texts differ."""
    return sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    )


def speedup(traces: Iterable[Trace], costs: Costs, policy: Policy, **sources: bool) -> float:
    """Geometric mean over texts of plain decoding's time by a policy's."""
    logs = [
        math.log(len(t.text) * costs.target(1) / replay(t, costs, policy(costs), **sources).seconds)
        for t in traces
    ]
    return math.exp(sum(logs) / len(logs))


def fixed(gamma: int) -> Policy:
    """Always as many."""
    return lambda _costs: FixedGamma(gamma)


# ---- the command -------------------------------------------------------------------------------------


def row(traces: Sequence[Trace], costs: Costs) -> list[str]:
    """Of the table."""
    planned = speedup(traces, costs, lambda c: Planner(c.target, [c.draft, None]))
    unguided = speedup(traces, costs, lambda c: Planner(c.target, [c.draft]), copies=False)
    copied = speedup(traces, costs, lambda c: Planner(c.target, [None]), model=False)
    by_gamma = {g: speedup(traces, costs, fixed(g), copies=False) for g in GAMMAS}
    best = max(by_gamma, key=by_gamma.__getitem__)
    figures = [f"{value:.2f}" for value in (planned, unguided, copied)]
    return [*figures, f"{by_gamma[best]:.2f} [{best}]", f"{planned / by_gamma[best]:.2f}"]


def curve(text: str) -> CostCurve:
    """Of the form 1:21,4:30,8:49, tokens and milliseconds."""
    pairs = [pair.split(":") for pair in text.split(",")]
    return CostCurve([int(n) for n, _ in pairs], [float(ms) / 1e3 for _, ms in pairs])


def shown(costs: CostCurve) -> str:
    """What `curve` reads."""
    return ",".join(f"{n}:{1e3 * s:.1f}" for n, s in zip(costs.widths, costs.seconds, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b")
    parser.add_argument("--kinds", nargs="+", default=list(prompts.load()), help="of prompts")
    parser.add_argument("--prompts", type=int, default=3, help="of each kind")
    parser.add_argument("--tokens", type=int, default=96, help="length of the texts")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument(
        "--costs",
        nargs=2,
        action="append",
        type=curve,
        default=[],
        metavar=("TARGET", "DRAFT"),
        help="milliseconds by tokens, as 1:21,4:30,8:49; may be repeated; default: this machine's",
    )
    options = parser.parse_args()
    model, small = Model(resolve(options.model)), Model(resolve(options.draft))
    settings = {"n_ctx": N_CTX, "threads": options.threads}
    target = Context(model, n_logits=32, **settings)
    draft = ModelDrafter(Context(small, n_logits=9, **settings), model.n_vocab)
    draft.measure()
    assert draft.costs is not None
    costs = [Costs(*pair) for pair in options.costs] or [Costs(measured_costs(target), draft.costs)]
    traces = [
        record(
            kind,
            chat.prompt_ids(model, [{"role": "user", "content": text}]),
            target,
            draft,
            options.tokens,
        )
        for kind in options.kinds
        for text in itertools.islice(prompts.load()[kind].values(), options.prompts)
    ]
    print(
        f"{processor()}, {options.threads} threads; target {options.model}, draft {options.draft}"
    )
    print(f"{len(traces)} texts of up to {options.tokens} tokens; multiples of plain decoding")
    for each in costs:
        print(f"\ntarget {shown(each.target)} ms; draft {shown(each.draft)} ms\n")
        print(
            "| kind | planned | without copies | copies alone | best gamma | planned by best gamma |"
        )
        print("|---|---|---|---|---|---|")
        for kind in [*options.kinds, "all"]:
            of_kind = [t for t in traces if kind in (t.kind, "all")]
            print(f"| {kind} | {' | '.join(row(of_kind, each))} |", flush=True)


if __name__ == "__main__":
    main()
