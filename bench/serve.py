"""What clients get of a service: `pyspec serve` beside llama-server, at several clients at once.

`python -m bench.serve` starts the servers, all with the same number of slots, and has one at a time answer
some clients at once over HTTP, greedily and streamed. It prints Markdown: tokens a second of
all clients together, the time to the first token, the time between tokens, and the ratios to llama-server.
A short run: `python -m bench.serve --clients 1 4 --turns 1 --tokens 32`.

Servers, by name:

    pyspec               the default settings with target and draft
    pyspec-no-draft      the same without a draft
    llama-server         without a draft, a cache for each slot as pyspec has
    llama-server-unified the same with one cache that all slots share (not measured unless named)

In a turn every server answers the same prompts, a different one for each client; the next turn has others.
With --log a run can be interrupted and continued: what is in the file is not measured again.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from bench import prompts
from bench.decode_report import geometric_mean, table
from bench.llama_server import LlamaServer, ServerProcess, build
from bench.run import append_to_log, command_line, conditions, read_log
from pyspec.catalogue import load_catalogue, resolve
from pyspec.errors import PyspecError

SERVERS = ("pyspec", "pyspec-no-draft", "llama-server")
ON_DEMAND = ("llama-server-unified",)
PEER = "llama-server"
N_CTX = 1024  # of each slot
WARM_UP = -1  # the turn before anything is measured, so that all is loaded and paged in

# Server, slots, clients, turn, most tokens.
Key = tuple[str, int, int, int, int]


@dataclass(frozen=True)
class Row:
    """What one server did for several clients at once.

    Attributes:
        slots: Answers that it could write at once.
        clients: How many asked at once, for one answer each.
        turn: Which prompts they had.
        max_tokens: Tokens after which an answer had to stop.
        tokens: Tokens of all answers.
        rate: Tokens of all answers a second, from the requests to the end of the last answer.
        ttft_s: Seconds to the first text, median over clients.
        gap_s: Seconds from an answer's first text to its last, by the tokens after the first; the median.
    """

    server: str
    slots: int
    clients: int
    turn: int
    max_tokens: int
    tokens: int
    rate: float
    ttft_s: float
    gap_s: float

    @property
    def key(self) -> Key:
        """What is measured once."""
        return self.server, self.slots, self.clients, self.turn, self.max_tokens


@dataclass(frozen=True)
class Answer:
    """What one client saw: seconds from its request, and how many tokens it is said to have got."""

    first_s: float
    last_s: float
    tokens: int


def ask(port: int, text: str, salt: str, max_tokens: int) -> Answer:
    """Ask for a streamed answer.

    Args:
        port: The server's.
        text: The user's message.
        salt: Part of the system message, so that no server finds the prompt in its cache.
        max_tokens: Most tokens of the answer.
    """
    body = {
        "messages": [
            {"role": "system", "content": f"{salt}: you are a helpful assistant."},
            {"role": "user", "content": text},
        ],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    if response.status != http.client.OK:
        raise PyspecError(f"a server refused a request: {response.read().decode()}")
    arrivals, tokens = [], 0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[len(b"data: ") :])
        if any(choice["delta"].get("content") for choice in chunk["choices"]):
            arrivals.append(time.perf_counter() - start)
        if chunk.get("usage"):
            tokens = chunk["usage"]["completion_tokens"]
    connection.close()
    return Answer(arrivals[0], arrivals[-1], tokens)


class Bench:
    """The named servers."""

    def __init__(self, names: Sequence[str], options: argparse.Namespace, folder: Path) -> None:
        self._stack = ExitStack()
        self._options = options
        self._servers: dict[str, ServerProcess] = {}
        target, slots, threads = resolve(options.model), options.slots, options.threads
        for name in names:
            log = folder / f"{name}.log"
            server: ServerProcess
            if name.startswith(PEER):
                server = LlamaServer(
                    options.llama_server or build(),
                    target,
                    threads=threads,
                    n_ctx=N_CTX,
                    log=log,
                    slots=slots,
                    unified=name.endswith("-unified"),
                )
            else:
                draft = ["--no-draft"] if name == "pyspec-no-draft" else ["-d", options.draft]
                command = [sys.executable, "-m", "pyspec", "serve", "-m", f"{target}", *draft]
                command += [
                    "--parallel",
                    f"{slots}",
                    "--ctx",
                    f"{N_CTX}",
                    "--threads",
                    f"{threads}",
                ]
                server = ServerProcess(command, log)
            self._servers[name] = self._stack.enter_context(closing(server))

    def measure(self, name: str, clients: int, turn: int) -> Row:
        """Have a server answer some clients at once."""
        texts = list(_texts())
        first = turn * self._options.slots
        asked = [texts[(first + i) % len(texts)] for i in range(clients)]
        port, most = self._servers[name].port, self._options.tokens
        salt = f"{turn}-{clients}"
        start = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            answers = list(pool.map(lambda text: ask(port, text, salt, most), asked))
        seconds = time.perf_counter() - start
        tokens = sum(answer.tokens for answer in answers)
        return Row(
            server=name,
            slots=self._options.slots,
            clients=clients,
            turn=turn,
            max_tokens=most,
            tokens=tokens,
            rate=tokens / seconds,
            ttft_s=statistics.median(answer.first_s for answer in answers),
            gap_s=statistics.median(
                (answer.last_s - answer.first_s) / max(1, answer.tokens - 1) for answer in answers
            ),
        )

    def close(self) -> None:
        """End all processes."""
        self._stack.close()


def _texts() -> Iterator[str]:
    """The prompts, one of each kind after the other."""
    return chain.from_iterable(zip(*map(dict.values, prompts.load().values()), strict=False))


def measure_all(options: argparse.Namespace) -> list[Row]:
    """A row for every server, number of clients and turn; those in the log are taken from there."""
    rows = {row.key: row for row in read_log(options.log, Row)}
    todo: list[Key] = []
    for turn in range(options.turns):
        # No server is always the one that comes after a certain other.
        shift = turn % len(options.servers)
        for clients in options.clients:
            for server in [*options.servers[shift:], *options.servers[:shift]]:
                todo.append((server, options.slots, clients, turn, options.tokens))
    missing = [key for key in todo if key not in rows]
    if missing:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            console = Console(stderr=True)
            bars = stack.enter_context(Progress(console=console, disable=not console.is_terminal))
            task = bars.add_task("starting the servers", total=len(missing))
            names = [name for name in options.servers if any(name == key[0] for key in missing)]
            bench = stack.enter_context(closing(Bench(names, options, folder)))
            for name in names:
                bench.measure(name, 1, WARM_UP)
            for server, _, clients, turn, _ in missing:
                bars.update(task, description=f"turn {turn + 1}, {clients} clients, {server}")
                row = bench.measure(server, clients, turn)
                rows[row.key] = row
                append_to_log(options.log, row)
                bars.advance(task)
    return [rows[key] for key in todo]


# ---- the page ----------------------------------------------------------------------------------------


def markdown(rows: Sequence[Row], command: str, options: argparse.Namespace) -> str:
    """What was measured, where and how, as a page of bench/results."""
    header = ["clients", *(f"{n}" for n in dict.fromkeys(row.clients for row in rows))]
    lines = [
        "# What clients get of a service",
        "",
        f"    {command}",
        "",
        conditions(options),
        f"{options.slots} slots of {N_CTX} positions; {options.turns} turns, each with prompts of its "
        f"own, one answer of up to {options.tokens} tokens for each client, temperature 0, streamed.",
    ]
    for title, value, digits in (
        ("Tokens a second of all clients together", lambda row: row.rate, 1),
        ("Milliseconds to the first text", lambda row: 1e3 * row.ttft_s, 0),
        ("Milliseconds a token after that, of one client", lambda row: 1e3 * row.gap_s, 1),
    ):
        lines += ["", f"{title}, median over turns:", ""]
        lines += table(header, _medians(rows, value, digits))
    ratios = list(_ratios(rows))
    if ratios:
        lines += [
            "",
            f"Tokens a second as a multiple of {PEER}'s in the same turn, geometric mean over turns, "
            "lowest and highest in brackets:",
            "",
            *table(header, ratios),
        ]
    return "\n".join(lines)


def _medians(
    rows: Sequence[Row], value: Callable[[Row], float], digits: int
) -> Iterator[list[str]]:
    for server, cells in _by_server(rows):
        yield [server, *(f"{statistics.median(map(value, of)):.{digits}f}" for of in cells)]


def _ratios(rows: Sequence[Row]) -> Iterator[list[str]]:
    peer = {(row.clients, row.turn): row.rate for row in rows if row.server == PEER}
    for server, cells in _by_server(rows):
        if peer and server != PEER:
            found = [
                np.array([row.rate / peer[row.clients, row.turn] for row in of]) for of in cells
            ]
            yield [
                server,
                *(f"{geometric_mean(of):.2f} ({of.min():.2f} to {of.max():.2f})" for of in found),
            ]


def _by_server(rows: Sequence[Row]) -> Iterator[tuple[str, list[list[Row]]]]:
    """Of each server its rows by number of clients."""
    counts = list(dict.fromkeys(row.clients for row in rows))
    for server in dict.fromkeys(row.server for row in rows):
        mine = [row for row in rows if row.server == server]
        yield server, [[row for row in mine if row.clients == n] for n in counts]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    target = load_catalogue().default_target
    parser.add_argument("--model", default=target.name, help="target: a file or a name")
    parser.add_argument("--draft", default=target.draft, help="its draft")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 2, 4, 8], metavar="N")
    parser.add_argument("--slots", type=int, default=8, help="answers at once, of every server")
    parser.add_argument("--turns", type=int, default=6, help="each with other prompts")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument(
        "--servers",
        nargs="+",
        choices=(*SERVERS, *ON_DEMAND),
        default=list(SERVERS),
        metavar="NAME",
        help=f"all but {ON_DEMAND[0]} if none are named",
    )
    parser.add_argument("--threads", type=int, default=2, help="of every model of every server")
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep what is measured here")
    parser.add_argument(
        "--llama-server", type=Path, metavar="FILE", help="the program, instead of building it"
    )
    options = parser.parse_args()
    if max(options.clients) > options.slots:
        parser.error("clients without a slot would wait: raise --slots")
    try:
        rows = measure_all(options)
    except PyspecError as error:
        parser.exit(1, f"{error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "\n")
    print(markdown(rows, command_line("bench.serve"), options))


if __name__ == "__main__":
    main()
