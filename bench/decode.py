"""How fast texts are written: pyspec beside llama-server, both with and without a draft.

`python -m bench.decode` asks every engine for an answer to every prompt of bench/prompts.toml, greedily and
at temperature 1 without cuts, and prints Markdown: tokens a second by kind of prompt, and the ratios of
interest with 95 % intervals. A short run: `python -m bench.decode --prompts 2 --temperatures 0 --tokens 100`.

Engines, by name:

    pyspec               the default settings with target and draft
    pyspec-plain         the same with gamma 0: nothing is drafted
    pyspec-gamma-N       the same with a fixed gamma of N (--sweep adds several)
    pyspec-no-draft      the default settings without a draft model: copying from the text
    pyspec-squeezed      the default settings with the copy of the draft that `pyspec models squeeze` kept
    pyspec-useless       the default settings with a draft model of random weights
    llama-server         without a draft
    llama-server-N       with the draft, at most N tokens a round

All get the same token ids and sampling settings, and stop at the end of the answer or after --tokens.
pyspec's engines share a process, each llama-server has its own; they take turns prompt by prompt and only one
works at a time. Tokens a second are measured here, alike for all: from the arrival of the first tokens to
that of the last, the first not counted; so the prompt's evaluation is left out.

With --log a run can be interrupted and continued: what is in the file is not measured again.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from bench import decode_report, llama_server, prompts, useless_draft
from bench.run import append_to_log, command_line, read_log
from pyspec.catalogue import load_catalogue, resolve
from pyspec.errors import PyspecError
from pyspec.squeeze import squeezed_path

ENGINES = (
    "pyspec",
    "pyspec-plain",
    "pyspec-no-draft",
    "pyspec-useless",
    "llama-server",
    *(f"llama-server-{n}" for n in (2, 3, 4, 8)),
)
ON_DEMAND = ("pyspec-squeezed",)
SWEEP = (1, 2, 3, 4, 6, 8, 12)
WARM_UP = 24  # tokens, before anything is measured
N_CTX = 4096  # of every engine


# Kind and name of a prompt, temperature, engine, most tokens.
Key = tuple[str, str, float, str, int]


@dataclass(frozen=True)
class Row:
    """What one engine did with one prompt.

    Attributes:
        max_tokens: Tokens after which it had to stop.
        tokens: Tokens written.
        rate: Tokens a second between the first and the last arrival; 0 if all came at once.
        own_rate: Tokens a second as the engine reports them.
        seconds: From the request to the last token.
        drafted: Tokens drafted.
        accepted: Drafted tokens that were accepted.
        predicted: Tokens a second that the planner expected of its rounds; 0 where there was none.
    """

    kind: str
    prompt: str
    temperature: float
    engine: str
    max_tokens: int
    tokens: int
    rate: float
    own_rate: float
    seconds: float
    drafted: int
    accepted: int
    predicted: float = 0.0

    @property
    def key(self) -> Key:
        """What is measured once."""
        return self.kind, self.prompt, self.temperature, self.engine, self.max_tokens


# ---- pyspec's process --------------------------------------------------------------------------------


def serve(target: Path, draft: Path, useless: Path, threads: int) -> None:
    """Answer each line of JSON on stdin: a prompt with its ids, a request with its text as it comes."""
    from pyspec import chat
    from pyspec.engine import Engine
    from pyspec.llama import Model
    from pyspec.sampling import SamplingParams
    from pyspec.squeeze import preferred_draft

    # Ctrl-C reaches every process of a terminal; the one that asks ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    model = Model(target)
    drafts = {"no-draft": "ngram", "useless": useless, "squeezed": preferred_draft(target, draft)}
    engines: dict[str, Engine] = {}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "prompt" in asked:
            messages = [{"role": "user", "content": asked["prompt"]}]
            print(json.dumps(chat.prompt_ids(model, messages)), flush=True)
            continue
        _, _, variant = asked["engine"].partition("-")
        which = variant if variant in drafts else "draft"
        if which not in engines:
            engines[which] = Engine(model, drafts.get(which, draft), n_ctx=N_CTX, threads=threads)
        gamma = {"plain": 0}.get(variant)
        if variant.startswith("gamma-"):
            gamma = int(variant.removeprefix("gamma-"))
        params = SamplingParams(
            temperature=asked["temperature"],
            top_k=0,
            top_p=1,
            min_p=0,
            max_tokens=asked["max_tokens"],
            seed=asked["seed"],
        )
        for piece in engines[which].generate(asked["ids"], params, gamma=gamma):
            statistics = piece.statistics.as_dict() if piece.statistics else None
            print(json.dumps([len(piece.tokens), statistics]), flush=True)


class Pyspec:
    """The process of pyspec's engines."""

    def __init__(self, target: Path, draft: Path, useless: Path, threads: int) -> None:
        command = [sys.executable, "-m", "bench.decode", "--serve", target, draft, useless]
        command += ["--threads", f"{threads}"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def _ask(self, **asked: Any) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise PyspecError("pyspec's process has ended")
        return json.loads(line)

    def prompt_ids(self, prompt: str) -> list[int]:
        """The ids of a user's message in the target's chat template."""
        self._ask(prompt=prompt)
        ids: list[int] = self._answer()
        return ids

    def stream(
        self,
        ids: Sequence[int],
        *,
        engine: str,
        temperature: float,
        max_tokens: int,
        seed: int | None,
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """As LlamaServer.stream, by the engine of that name."""
        self._ask(engine=engine, ids=ids, temperature=temperature, max_tokens=max_tokens, seed=seed)
        statistics = None
        while statistics is None:
            n, statistics = self._answer()
            yield n, statistics or {}

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


# ---- the measurement ---------------------------------------------------------------------------------


class Bench:
    """The processes that the named engines need."""

    def __init__(self, engines: Iterable[str], options: argparse.Namespace, folder: Path) -> None:
        self._stack = ExitStack()
        self._options = options
        target, draft = resolve(options.model), resolve(options.draft)
        if "pyspec-squeezed" in engines and not squeezed_path(target, draft).exists():
            raise PyspecError(f"there is no copy yet: run pyspec models squeeze {options.draft}")
        useless = folder / "useless.gguf"
        if "pyspec-useless" in engines:
            useless_draft.write(useless, target)
        self._pyspec = self._open(Pyspec(target, draft, useless, options.threads))
        self._servers: dict[str, llama_server.LlamaServer] = {}
        for name in engines:
            if name.startswith("llama-server"):
                program = options.llama_server or llama_server.build()
                n_max = int(name.removeprefix("llama-server").removeprefix("-") or 0)
                self._servers[name] = self._open(
                    llama_server.LlamaServer(
                        program,
                        target,
                        draft if n_max else None,
                        n_max=n_max,
                        threads=options.threads,
                        n_ctx=N_CTX,
                        log=folder / f"{name}.log",
                    )
                )

    def _open(self, process: Any) -> Any:
        return self._stack.enter_context(closing(process))

    def measure(self, kind: str, prompt: str, text: str, temperature: float, engine: str) -> Row:
        """Have an engine answer a prompt."""
        ids = self._pyspec.prompt_ids(text)
        settings = {
            "temperature": temperature,
            "max_tokens": self._options.tokens,
            "seed": self._options.seed,
        }
        start = time.perf_counter()
        if engine in self._servers:
            chunks = self._servers[engine].stream(ids, **settings)
        else:
            chunks = self._pyspec.stream(ids, engine=engine, **settings)
        arrivals, counts, report = [], [], dict[str, Any]()
        for n, told in chunks:
            if n:
                arrivals.append(time.perf_counter())
                counts.append(n)
            report.update(told)
        decoding = arrivals[-1] - arrivals[0]
        return Row(
            kind=kind,
            prompt=prompt,
            temperature=temperature,
            engine=engine,
            max_tokens=self._options.tokens,
            tokens=sum(counts),
            rate=sum(counts[1:]) / decoding if decoding else 0.0,
            own_rate=report.get("predicted_per_second") or report.get("tokens_per_second") or 0.0,
            seconds=arrivals[-1] - start,
            drafted=report.get("draft_n") or report.get("drafted") or 0,
            accepted=report.get("draft_n_accepted") or report.get("accepted") or 0,
            predicted=report.get("predicted_tokens_per_second") or 0.0,
        )

    def warm_up(self, engines: Iterable[str]) -> None:
        """Have every engine write something, so that all is loaded and paged in."""
        for engine in engines:
            self.measure("", "", "Count from one to a hundred in words.", 0.0, engine)

    def close(self) -> None:
        """End all processes."""
        self._stack.close()


def measure_all(options: argparse.Namespace, engines: Sequence[str]) -> list[Row]:
    """A row for every prompt, temperature and engine; those in the log are taken from there."""
    todo = [
        (kind, name, text, temperature)
        for kind, of_kind in prompts.load().items()
        if kind in options.kinds
        for name, text in list(of_kind.items())[: options.prompts]
        for temperature in options.temperatures
    ]
    rows = {row.key: row for row in read_log(options.log, Row)}
    wanted = [
        (kind, name, temperature, engine, options.tokens)
        for kind, name, _, temperature in todo
        for engine in engines
    ]
    if any(key not in rows for key in wanted):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            bench = stack.enter_context(closing(Bench(engines, options, folder)))
            console = Console(stderr=True)
            bars = stack.enter_context(Progress(console=console, disable=not console.is_terminal))
            task = bars.add_task("warming up", total=len(todo) * len(engines))
            bench.warm_up(engines)
            for turn, (kind, name, text, temperature) in enumerate(todo):
                bars.update(task, description=f"{kind}, {name}, temperature {temperature:g}")
                # Nobody is always the one that comes after a certain other.
                shift = turn % len(engines)
                for engine in [*engines[shift:], *engines[:shift]]:
                    if (kind, name, temperature, engine, options.tokens) not in rows:
                        row = bench.measure(kind, name, text, temperature, engine)
                        rows[row.key] = row
                        append_to_log(options.log, row)
                    bars.advance(task)
    return [rows[key] for key in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    target = load_catalogue().default_target
    kinds = list(prompts.load())
    parser.add_argument("--model", default=target.name, help="target: a file or a name")
    parser.add_argument("--draft", default=target.draft, help="its draft")
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, help="of prompts")
    parser.add_argument("--prompts", type=int, default=8, help="how many of each kind")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--tokens", type=int, default=200, help="most tokens of an answer")
    parser.add_argument(
        "--engines",
        nargs="+",
        default=list(ENGINES),
        metavar="NAME",
        help="all but pyspec-squeezed if none are named",
    )
    parser.add_argument(
        "--sweep",
        nargs="*",
        type=int,
        metavar="GAMMA",
        help=f"fixed gammas to measure too; {' '.join(map(str, SWEEP))} if none are named",
    )
    parser.add_argument("--threads", type=int, default=2, help="of every model of every engine")
    parser.add_argument("--seed", type=int, help="of every text; each has its own otherwise")
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep what is measured here")
    parser.add_argument(
        "--llama-server", type=Path, metavar="FILE", help="the program, instead of building it"
    )
    parser.add_argument("--serve", nargs=3, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve, threads=options.threads)
        return
    swept = options.sweep if options.sweep != [] else SWEEP
    engines = [*options.engines, *(f"pyspec-gamma-{gamma}" for gamma in swept or ())]
    known = (*ENGINES, *ON_DEMAND)
    unknown = [name for name in engines if name not in known and not _is_numbered(name)]
    if unknown:
        parser.error(f"no engine is called {unknown[0]}; known: {', '.join(known)}")
    try:
        rows = measure_all(options, engines)
    except PyspecError as error:
        parser.exit(1, f"{error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "\n")
    print(decode_report.markdown(rows, command_line("bench.decode"), options))


def _is_numbered(name: str) -> bool:
    stem, _, number = name.rpartition("-")
    return stem in ("pyspec-gamma", "llama-server") and number.isdecimal() and int(number) > 0


if __name__ == "__main__":
    main()
