"""`pyspec chat` on a real terminal: tmux, with the keys that a user would press."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyspec.chat import prompt_ids
from pyspec.conversation import Conversation
from pyspec.engine import Engine
from pyspec.sampling import SamplingParams
from tests.models import all_bytes, write_llama

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")

PATIENCE_S = 120


class Terminal:
    """A terminal of its own in which `pyspec chat` runs, in a folder."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        socket = folder / f"tmux-{time.monotonic_ns()}"
        self._server = ["tmux", "-S", str(socket), "-f", os.devnull]
        self.folder = folder
        command = shlex.join([sys.executable, "-m", "pyspec", "chat", *arguments])
        self._run(
            *("new-session", "-d", "-x", "80", "-y", "24", "-c", str(folder)),
            *("-e", f"PYSPEC_HOME={folder / 'home'}", "-e", f"PYTHONPATH={os.getcwd()}"),
            f"{command}; echo status $?; exec sleep 1000",
        )

    def _run(self, *arguments: str, text: str | None = None) -> str:
        return subprocess.run(
            [*self._server, *arguments], input=text, capture_output=True, text=True, check=True
        ).stdout

    def press(self, *keys: str) -> None:
        """Press keys by tmux's names; other text is typed."""
        self._run("send-keys", *keys)

    def paste(self, text: str) -> None:
        """Paste as a terminal does for programs that want to know what is pasted."""
        self._run("load-buffer", "-", text=text)
        self._run("paste-buffer", "-p")

    def resize(self, columns: int) -> None:
        self._run("resize-window", "-x", str(columns), "-y", "24")

    def screen(self, *options: str) -> str:
        return self._run("capture-pane", "-p", *options)

    def wait(self, pattern: str, *options: str) -> str:
        """Wait until something stands on the screen."""
        end = time.monotonic() + PATIENCE_S
        while not re.search(pattern, shown := self.screen(*options), re.MULTILINE):
            assert time.monotonic() < end, f"no {pattern!r} in:\n{shown}"
            time.sleep(0.05)
        return shown

    def ask(self, text: str) -> None:
        """Type a line and wait until the prompt is back."""
        n = len(re.findall("^>", self.screen("-S", "-"), re.MULTILINE))
        self.press(text, "Enter")
        self.wait(f"(?s)(^>.*){{{n + 1}}}", "-S", "-")

    def saved(self) -> Conversation:
        """The conversation, which the session is told to save."""
        path = self.folder / f"{time.monotonic_ns()}.json"
        self.ask(f"/save {path.name}")
        return Conversation.load(path)

    def close(self) -> None:
        self._run("kill-server")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_(*options: str | Path) -> Terminal:
        opened.append(Terminal(tmp_path, [*map(str, options), "--threads", "1"]))
        opened[-1].wait("^>")
        return opened[-1]

    yield open_
    for one in opened:
        one.close()


@pytest.fixture
def pair(chat_target: Path, chat_draft: Path) -> list[str | Path]:
    return ["-m", chat_target, "-d", chat_draft]


def test_typing_pasting_completing_and_leaving(
    terminal: Callable[..., Terminal], pair: list[str | Path]
) -> None:
    session = terminal(*pair, "-n", "4", "--temp", "0")
    assert "chat-target, 4096 tokens of context\ndraft: chat-draft\n" in session.screen()
    session.press("one", "M-Enter", "two")
    session.ask("")
    session.press("not this", "C-c")
    session.paste("def f():\n    return 1\n\nprint(f())")
    session.wait(r"^  print\(f\(\)\)")
    session.ask(" # ok")
    # Completed: a command, a setting, and the name of a file.
    session.press("/s")
    session.wait("/set .*change a setting")
    session.press("y")
    session.wait(r"^> /sy\n.*/system .*the system message")
    session.press("Tab")
    session.wait("^> /system")
    session.ask(" be brief")
    session.press("/set max-t")
    session.wait("max-tokens .*Most tokens")
    session.press("Tab")
    session.wait("^> /set max-tokens")
    session.ask(" 3")
    (session.folder / "talk-of-today.json").write_text('{"messages": []}')
    conversation = session.saved()
    session.press("/load talk-")
    session.wait(r"of-today\.json")
    session.press("Tab")
    session.wait(r"^> /load talk-of-today\.json")
    session.ask("")
    session.wait(r"^0 turns from talk-of-today\.json")
    assert [turn.user for turn in conversation.turns] == [
        "one\ntwo",
        "def f():\n    return 1\n\nprint(f()) # ok",
    ]
    assert conversation.system == "be brief"
    session.press("C-d")
    session.wait("^status 0")

    # The next session has what was typed, a message of several lines as one.
    again = terminal(*pair, "-n", "4")
    again.press(*["Up"] * 3)
    again.wait("^> /set max-tokens 3")
    again.press("Up", "Up")
    again.wait(r"^> def f\(\):\n.*return 1\n\n +print\(f\(\)\) # ok")
    again.press("C-c")
    again.wait("^>$")
    history = again.folder / "home" / "chat-history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_ctrl_c_stops_the_answer_and_keeps_the_session(
    terminal: Callable[..., Terminal], chat_draft: Path, tmp_path: Path
) -> None:
    # Large enough that its answer takes minutes.
    target = write_llama(tmp_path / "t.gguf", all_bytes(), width=256, layers=12, context=1 << 17)
    session = terminal(
        "-m", target, "-d", chat_draft, "--ctx", "40000", "--show-drafts", "--temp", "0"
    )
    session.press("hi", "Enter")
    # Some text is there when the answer is stopped, and what is typed meanwhile waits for the prompt.
    session.wait(r"^> hi\n\s*(?!reading|\s)\S", "-S", "-")
    session.press("what is typed")
    session.press("C-c")
    session.wait("^stopped: the answer stays as far as it was written")
    session.wait("^> what is typed")
    session.press("C-c")
    (turn,) = session.saved().turns
    assert turn.user == "hi"
    assert turn.assistant
    session.ask("/set max-tokens 4")
    session.ask("bye")
    conversation = session.saved()
    assert [t.user for t in conversation.turns] == ["hi", "bye"]
    assert conversation.turns[0] == turn
    # What was under way when it was stopped is in no answer that follows.
    messages = conversation.messages()[:3]
    with Engine(target, n_ctx=40000, threads=1) as engine:
        ids = prompt_ids(engine.target, messages)
        pieces = engine.generate(ids, SamplingParams(temperature=0, max_tokens=4))
        assert conversation.turns[1].assistant == "".join(piece.text for piece in pieces)
    session.press("/quit", "Enter")
    session.wait("^status 0")
    assert "\x1b[32m" in session.screen("-e", "-S", "-")


def test_a_window_that_changes_its_width_loses_nothing(
    terminal: Callable[..., Terminal], pair: list[str | Path]
) -> None:
    session = terminal(*pair, "-n", "1500", "--seed", "1")
    session.press("hi", "Enter")
    for columns in (50, 100, 30, 80):
        session.resize(columns)
        time.sleep(0.05)
    session.wait(r"^> hi\n(?s:.*)^>$", "-S", "-")
    (turn,) = session.saved().turns
    shown = session.screen("-J", "-S", "-").partition("> hi\n")[2].partition("\n> /save")[0]
    letters = [c for c in turn.assistant if c.isascii() and c.isalnum()]
    assert len(letters) > 50
    assert [c for c in shown if c.isascii() and c.isalnum()] == letters
