"""An engine that writes what it is told to, when it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pyspec.errors import SlotsBusyError
from pyspec.llama import Model
from pyspec.metrics import Statistics
from pyspec.output import Piece, Source, Token
from pyspec.sampling import SamplingParams

Script = Callable[[Sequence[int]], str]


class FakeGeneration:
    """Writes a text, a character a round."""

    def __init__(self, engine: FakeEngine, prompt: Sequence[int], text: str, most: int) -> None:
        self._engine = engine
        self.prompt = prompt
        self._text = text[:most]
        self._reason = "length" if most < len(text) else "stop"
        self._at = 0
        self.finished = False
        self.closed = False
        self.error: Exception | None = None

    def round(self) -> Piece:
        """The next character."""
        text = self._text[self._at : self._at + 1]
        self._at += 1
        self.finished = self._at >= len(self._text)
        tokens = (Token(0, text, Source.TARGET),) if text else ()
        if not self.finished:
            return Piece(tokens)
        statistics = Statistics(
            prompt_tokens=len(self.prompt),
            completion_tokens=len(self._text),
            finish_reason=self._reason,
        )
        return Piece(tokens, statistics)

    def close(self) -> None:
        """Free the slot."""
        if not self.closed:
            self.closed = True
            self._engine.running.remove(self)


class FakeEngine:
    """As much of an engine as a service uses.

    Args:
        target: Tokenizes and has the template.
        script: What to write after a prompt.
        parallel: Slots.

    Attributes:
        running: Generations that hold a slot.
        started: All generations, in the order in which they began.
        widths: How many generations shared each pass.
        rounds: If it is set, each pass waits to take one from it.
        failure: If it is set, the next pass raises it.
    """

    draft = None
    n_ctx = 4096

    def __init__(self, target: Model, script: Script, *, parallel: int = 2) -> None:
        self.target = target
        self.script = script
        self.parallel = parallel
        self.running: list[FakeGeneration] = []
        self.started: list[FakeGeneration] = []
        self.widths: list[int] = []
        self.rounds: threading.Semaphore | None = None
        self.failure: Exception | None = None

    def start(self, prompt: Sequence[int], params: SamplingParams, **_: object) -> FakeGeneration:
        """Take a slot."""
        if len(self.running) == self.parallel:
            raise SlotsBusyError("all slots are taken")
        most = params.max_tokens or self.n_ctx
        generation = FakeGeneration(self, prompt, self.script(prompt), most)
        self.running.append(generation)
        self.started.append(generation)
        return generation

    def step(self, generations: Sequence[FakeGeneration]) -> list[Piece]:
        """One round of each."""
        if self.rounds is not None:
            self.rounds.acquire()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        assert not any(generation.closed for generation in generations)
        self.widths.append(len(generations))
        return [Piece(()) if generation.error else generation.round() for generation in generations]
