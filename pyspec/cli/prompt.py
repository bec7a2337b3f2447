"""What a user types in a chat: editing, completion, and a history that outlasts the session."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import platformdirs
from prompt_toolkit import PromptSession
from prompt_toolkit.application import create_app_session, get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.defaults import create_output
from prompt_toolkit.styles import Style

# What may come next on a command's line, each with a word about it.
Candidates = Callable[[str], Iterable[tuple[str, str]]]

_PROMPT, _CONTINUATION = "> ", "  "
_STYLE = Style.from_dict({"prompt": "bold ansigreen"})


def typed_messages(candidates: Candidates, file_commands: Collection[str]) -> Iterator[str]:
    """Messages and commands as they are typed, until Ctrl-D.

    Args:
        candidates: Completes the beginning of a command's line.
        file_commands: Commands whose argument is a file.
    """
    # Where stdout is a file, the prompt is drawn on stderr.
    with create_app_session(output=create_output(always_prefer_tty=True)):
        session: PromptSession[str] = PromptSession(
            [("class:prompt", _PROMPT)],
            style=_STYLE,
            multiline=True,
            prompt_continuation=_CONTINUATION,
            history=_history(),
            completer=_CommandCompleter(candidates, file_commands),
            # Only then is room made for a menu.
            complete_while_typing=Condition(lambda: get_app().current_buffer.text.startswith("/")),
            key_bindings=_key_bindings(),
        )
        while True:
            try:
                text = session.prompt()
            except EOFError:
                return
            except KeyboardInterrupt:  # on a terminal that cannot be drawn on
                continue
            yield text


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def break_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    @bindings.add("<sigint>")
    def clear(event: KeyPressEvent) -> None:
        event.current_buffer.reset()

    return bindings


# ---- history -------------------------------------------------------------------------------------------


class _History(FileHistory):
    """Goes on without the file when that can no longer be written."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string)


def history_file() -> Path:
    """Where messages are kept for the next session: in $PYSPEC_HOME, else in the user's state folder."""
    home = os.environ.get("PYSPEC_HOME")
    folder = Path(home).absolute() if home else platformdirs.user_state_path("pyspec")
    return folder / "chat-history"


def _history() -> History:
    path = history_file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # What was said is nobody else's business, whatever the umask.
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
    except OSError:
        return InMemoryHistory()
    return _History(path)


# ---- completion ----------------------------------------------------------------------------------------


class _CommandCompleter(Completer):
    """Completes commands, their arguments and names of files; in a message nothing."""

    def __init__(self, candidates: Candidates, file_commands: Collection[str]) -> None:
        self._candidates = candidates
        self._file_commands = file_commands
        self._files = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        line = document.text_before_cursor
        if not line.startswith("/") or "\n" in line:
            return
        command, space, rest = line.partition(" ")
        if space and command in self._file_commands:
            yield from self._files.get_completions(Document(rest.lstrip()), event)
            return
        word = line.rpartition(" ")[2]
        for candidate, about in self._candidates(line):
            if candidate.startswith(word):
                yield Completion(candidate, -len(word), display_meta=about)
