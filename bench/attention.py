"""What it costs that logits do not depend on the width: passes with the bridge on, over passes with it off.

Run as: python -m bench.attention [--model NAME] [--positions 512 2048 8192] [--widths 1 5 8]
"""

from __future__ import annotations

import argparse
import statistics
import time

from pyspec._cspec import lib

from pyspec import bridge
from pyspec.catalogue import resolve
from pyspec.llama import Context, Model


def pass_seconds(context: Context, tokens: list[int]) -> float:
    """Seconds of one pass, which is then rolled back."""
    length = context.length
    start = time.perf_counter()
    context.evaluate(tokens, n_logits=len(tokens))
    seconds = time.perf_counter() - start
    context.truncate(length)
    return seconds


def compare(context: Context, tokens: list[int], repetitions: int) -> tuple[float, float]:
    """Median seconds of a pass without and with the bridge, taken in turns."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for repetition in range(repetitions + 1):
        for on in (False, True):
            lib.cspec_bridge_enable(on)
            elapsed = pass_seconds(context, tokens)
            if repetition > 0:  # the first one builds the graph
                seconds[on].append(elapsed)
    return statistics.median(seconds[False]), statistics.median(seconds[True])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--positions", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 5, 8])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()

    status = bridge.attach()
    if not status.attached:
        parser.exit(1, f"the bridge is not attached: {status.reason}\n")
    model = Model(resolve(arguments.model))
    most = max(arguments.widths)
    context = Context(
        model, n_ctx=max(arguments.positions) + most, n_logits=most, threads=arguments.threads
    )
    text = model.tokenize("The quick brown fox jumps over the lazy dog. ") * (context.n_ctx // 8)
    print(f"{model.name}, {context.threads} threads, median of {arguments.repetitions}")
    print("position  width  stock ms  bridge ms  ratio")
    for position in sorted(arguments.positions):
        lib.cspec_bridge_enable(False)
        context.evaluate(text[context.length : position])
        for width in arguments.widths:
            stock, exact = compare(context, text[:width], arguments.repetitions)
            print(
                f"{position:8}  {width:5}  {stock * 1e3:8.1f}  {exact * 1e3:9.1f}  {exact / stock:5.2f}",
                flush=True,
            )
    context.close()


if __name__ == "__main__":
    main()
