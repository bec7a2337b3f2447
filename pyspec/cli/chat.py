"""`pyspec chat`: a conversation on a terminal, or an answer to each line that comes through a pipe."""

from __future__ import annotations

import difflib
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pyspec import chat
from pyspec.cli.answer import answer_stream, printable
from pyspec.cli.interrupts import Interrupts, silent_keyboard
from pyspec.cli.options import debug_option, model_options, sampling_options
from pyspec.cli.pair import ModelChoice
from pyspec.cli.progress import prefill_progress
from pyspec.conversation import Conversation, Turn
from pyspec.engine import Engine, Gamma, checked_gamma
from pyspec.errors import PyspecError, UsageError
from pyspec.metrics import Statistics
from pyspec.sampling import Rule, SamplingParams

# The part of the context that is kept for an answer, unless fewer tokens are wanted at most.
_ROOM = 1 / 4
_ON_OFF = {"on": True, "off": False}
_NONE = "none"


@click.command(name="chat")
@model_options
@sampling_options
@click.option("--system", metavar="TEXT", help="A system message.")
@click.option("--stats", is_flag=True, help="Show a line of statistics after each answer.")
@click.option(
    "--show-drafts",
    is_flag=True,
    help="Colour accepted draft tokens on a terminal, instead of Markdown.",
)
@debug_option
def command(
    models: ModelChoice,
    system: str | None,
    stats: bool,
    show_drafts: bool,
    **sampling: Any,
) -> None:
    """Talk with a model.

    On a terminal /help lists the commands. Elsewhere each line of standard input is a message or a
    command; the answers, and nothing else, go to standard output, and the exit status is 1 if a line failed.
    """
    settings = _Settings(SamplingParams(**sampling), models.gamma, models.rule, stats, show_drafts)
    target_path, drafts = models.resolve()
    console = Console(stderr=True)
    with silent_keyboard(), console.status(f"loading {target_path.name}"):
        engine = models.engine(target_path, drafts)
    with engine:
        # So that a model that cannot chat says so before the first message.
        chat.render(engine.target, [{"role": "user", "content": "?"}])
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A terminal that cannot show a character shows a replacement, and the text goes on.
            sys.stdout.reconfigure(errors="replace")
        session = _Session(engine, settings, Conversation(system), console)
        if sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty()):
            session.greet(Path(draft).stem for draft in drafts)
            _talk(session)
        elif not _answer_lines(session):
            sys.exit(1)


def _talk(session: _Session) -> None:
    """Take what is typed until Ctrl-D or /quit."""
    # Only here, since a pipe does not need it and it takes a while to import.
    from pyspec.cli.prompt import typed_messages

    with session.interrupts.installed():
        for text in typed_messages(_candidates, _FILE_COMMANDS):
            try:
                session.take(text)
            except EOFError:
                break
            except PyspecError as error:
                session.say_error(error)
            session.say("")


def _answer_lines(session: _Session) -> bool:
    """Take each line of stdin; whether all went well."""
    went_well = True
    for line in sys.stdin.buffer:
        try:
            session.take(line.decode("utf-8", "replace").rstrip("\r\n"))
        except EOFError:
            break
        except PyspecError as error:
            went_well = False
            session.say_error(error, "pyspec: ")
    return went_well


def _name(option: click.Option) -> str:
    return option.opts[-1].removeprefix("--")


@dataclass
class _Settings:
    """What the user may change during the session."""

    params: SamplingParams
    gamma: Gamma
    rule: str
    stats: bool
    drafts: bool

    def value(self, option: click.Option) -> str:
        """A setting as it is typed."""
        name = str(option.name)
        value = getattr(self if hasattr(self, name) else self.params, name)
        return _NONE if value is None else str(value)

    def change(self, option: click.Option, text: str) -> None:
        """Give a setting the value that was typed.

        Raises:
            UsageError: It is none for this setting.
        """
        name = str(option.name)
        try:
            may_be_none = getattr(SamplingParams, name, 0) is None
            value: Any = None if text == _NONE and may_be_none else option.type(text)
        except click.BadParameter as error:
            raise UsageError(f"{_name(option)}: {error.message.rstrip('.')}") from error
        if name == "gamma":
            checked_gamma(value)
        if hasattr(self, name):
            setattr(self, name, value)
        else:
            self.params = replace(self.params, **{name: value})


class _Session:
    """A conversation with an engine, and the commands on it.

    Args:
        engine: What answers.
        settings: How.
        conversation: What was said before.
        console: Where all but the answers goes.
    """

    def __init__(
        self, engine: Engine, settings: _Settings, conversation: Conversation, console: Console
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.conversation = conversation
        self.interrupts = Interrupts()
        self._console = console
        self._last: Statistics | None = None
        self._is_forgetting_known = False

    def say(self, text: str, style: str = "dim") -> None:
        """Print what is no answer."""
        is_file = not self._console.is_terminal  # where a line stays a line
        self._console.print(
            printable(text), style=style, markup=False, highlight=False, soft_wrap=is_file
        )

    def say_error(self, error: PyspecError, prefix: str = "") -> None:
        """Print one line on what could not be done."""
        self.say(prefix + " ".join(str(error).split()), "red")

    def greet(self, drafts: Iterable[str]) -> None:
        """Say what is here and how to leave."""
        self.say(f"{self.engine.target.path.stem}, {self.engine.n_ctx} tokens of context")
        self.say(f"draft: {', '.join(drafts) or 'none'}")
        self.say("/help lists the commands, Alt-Enter breaks a line, Ctrl-D leaves\n")

    def take(self, text: str) -> None:
        """Answer a message or do what a command says.

        Raises:
            EOFError: The user wants to leave.
            PyspecError: It cannot be done; nothing has changed.
        """
        text = text.strip("\n")
        if match := re.match(r"/([a-z]*)(?:\s+|$)", text, re.IGNORECASE):
            self._command(match[1].lower(), text[match.end() :].strip())
        elif text.strip():
            self._answer(text)

    # ---- answers ---------------------------------------------------------------------------------------

    def _answer(self, question: str) -> None:
        """Write the answer to a message; the two are then the last turn."""
        engine, settings, conversation = self.engine, self.settings, self.conversation
        forgotten, room = conversation.forgotten, int(engine.n_ctx * _ROOM)
        ids = conversation.prompt_ids(
            engine.target,
            question,
            n_ctx=engine.n_ctx,
            room=min(room, settings.params.max_tokens or room),
        )
        if conversation.forgotten > forgotten and not self._is_forgetting_known:
            self._is_forgetting_known = True
            self.say(
                f"the context of {engine.n_ctx} tokens is full: from here on the model forgets "
                "the oldest turns"
            )
        text, statistics = "", None
        shown, interrupts = answer_stream(drafts=settings.drafts), self.interrupts
        with interrupts.answering():
            try:
                with prefill_progress(self._console) as on_prefill:
                    pieces = engine.generate(
                        ids,
                        settings.params,
                        gamma=settings.gamma,
                        rule=settings.rule,
                        on_prefill=on_prefill,
                    )
                    piece = interrupts.wait(pieces)
                while piece is not None:
                    text += piece.text
                    statistics = piece.statistics
                    shown.show(piece)
                    piece = interrupts.wait(pieces)
            finally:
                shown.finish()
        if statistics is None and not text:
            self.say("stopped before there was an answer: nothing has changed")
            return
        conversation.turns.append(Turn(question, text))
        if statistics is None:
            self.say("stopped: the answer stays as far as it was written")
            return
        self._last = statistics
        if statistics.prompt_tokens + statistics.completion_tokens > engine.n_ctx:
            self.say(f"the context of {engine.n_ctx} tokens is full: the answer ends here")
        if settings.stats:
            self.say(_line(statistics))

    # ---- commands --------------------------------------------------------------------------------------

    def _command(self, name: str, argument: str) -> None:
        if name not in _COMMANDS:
            near = difflib.get_close_matches(name, _COMMANDS, 1, cutoff=0.5)
            hint = f"did you mean /{near[0]}?" if near else "/help lists them"
            raise UsageError(f"no command /{name}; {hint} (a message may begin with a space)")
        command = _COMMANDS[name]
        if argument and not command.argument:
            raise UsageError(f"/{name} stands alone")
        if not argument and command.argument and not command.argument.startswith("["):
            raise UsageError(f"what is meant? /{name} {command.argument}")
        command.run(self, argument)

    def help(self, _: str) -> None:
        """List the commands."""
        usages = {f"/{name} {c.argument}".rstrip(): c.about for name, c in _COMMANDS.items()}
        self._table(usages)
        self.say(
            "\nAlt-Enter breaks a line, Ctrl-C stops an answer or clears the line, Ctrl-D leaves"
        )

    def _table(self, rows: Mapping[str, str]) -> None:
        """Print rows of two columns, on a terminal with the second one filled to its edge."""
        if not self._console.is_terminal:
            width = max(map(len, rows))
            for first, second in rows.items():
                self.say(f"{first:<{width}}  {second}", "")
            return
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column()
        for cells in rows.items():
            table.add_row(*map(Text, cells))
        self._console.print(table)

    def system(self, text: str) -> None:
        """Set, drop or show the system message."""
        if text:
            self.conversation.system = None if text == _NONE else text
        else:
            self.say(self.conversation.system or "no system message", "")

    def reset(self, _: str) -> None:
        """Forget all turns."""
        self.conversation.reset()
        self._is_forgetting_known = False
        self.say("all turns are forgotten")

    def undo(self, _: str) -> None:
        """Forget the last turn."""
        turn = self.conversation.undo()
        self.say(f"taken back: {_first_line(turn.user)}")

    def retry(self, _: str) -> None:
        """Answer the last message anew; if that fails, the turn stays."""
        turn = self.conversation.undo()
        n_turns = len(self.conversation.turns)
        try:
            self._answer(turn.user)
        finally:
            if len(self.conversation.turns) == n_turns:
                self.conversation.turns.append(turn)

    def save(self, name: str) -> None:
        """Write the conversation to a file."""
        path = Path(os.path.expanduser(name))
        self.conversation.save(path)
        self.say(f"{_turns(len(self.conversation.turns))} in {path}")

    def load(self, name: str) -> None:
        """Go on with the conversation of a file."""
        path = Path(os.path.expanduser(name))
        self.conversation = Conversation.load(path)
        self._is_forgetting_known = self.conversation.forgotten > 0
        self.say(f"{_turns(len(self.conversation.turns))} from {path}")
        if self.conversation.turns:
            self.say(f"the last: {_first_line(self.conversation.turns[-1].user)}")

    def stats(self, argument: str) -> None:
        """Switch the line of statistics, or show that of the last answer."""
        if argument:
            self.settings.stats = _switched(argument)
        else:
            self.say(_line(self._last) if self._last else "there is no whole answer yet", "")

    def drafts(self, argument: str) -> None:
        """Switch the colouring of accepted draft tokens."""
        self.settings.drafts = _switched(argument)

    def set(self, argument: str) -> None:
        """Change a setting, or show all."""
        name, _, text = argument.partition(" ")
        if name and name not in _SETTABLE:
            near = difflib.get_close_matches(name, _SETTABLE, 1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_SETTABLE)}"
            raise UsageError(f"no setting {name}; {hint}")
        if text:
            self.settings.change(_SETTABLE[name], text.strip())
        shown = [name] if name else _SETTABLE
        self._table(
            {f"{n} {self.settings.value(_SETTABLE[n])}": _SETTABLE[n].help or "" for n in shown}
        )

    def quit(self, _: str) -> None:
        """Leave."""
        raise EOFError


@dataclass(frozen=True)
class _Command:
    """What a command takes, in brackets if it may be left out, what is said of it, and what it does."""

    argument: str
    about: str
    run: Callable[[_Session, str], None]


_COMMANDS = {
    "help": _Command("", "show this", _Session.help),
    "system": _Command("[TEXT]", f"set the system message ({_NONE}: drop it)", _Session.system),
    "reset": _Command("", "forget all turns", _Session.reset),
    "undo": _Command("", "forget the last turn", _Session.undo),
    "retry": _Command("", "answer the last message anew", _Session.retry),
    "save": _Command("FILE", "write the conversation to a file", _Session.save),
    "load": _Command("FILE", "go on with the conversation of a file", _Session.load),
    "stats": _Command("[on|off]", "show statistics after each answer", _Session.stats),
    "set": _Command("[NAME VALUE]", "change a setting, or show all", _Session.set),
    "drafts": _Command("on|off", "show accepted draft tokens in colour", _Session.drafts),
    "quit": _Command("", "leave, as Ctrl-D does", _Session.quit),
}
_FILE_COMMANDS = ("/save", "/load")
# By the names that the command line has for them; --stop, of which there may be several, stays there.
_SETTABLE = {
    _name(option): option
    for option in command.params
    if isinstance(option, click.Option)
    and option.name
    in {"gamma", "rule", *(field.name for field in fields(SamplingParams))} - {"stop"}
}


def _candidates(line: str) -> Iterable[tuple[str, str]]:
    """What may stand at the end of a command's line, with a word about each."""
    words = line.split(" ")
    if len(words) == 1:
        return [(f"/{name}", c.about) for name, c in _COMMANDS.items()]
    if words[0] in ("/stats", "/drafts") and len(words) == 2:
        return [(word, "") for word in _ON_OFF]
    if words[0] == "/set" and len(words) == 2:
        return [(name, option.help or "") for name, option in _SETTABLE.items()]
    if words[:2] == ["/set", "rule"] and len(words) == 3:
        return [(rule.value, "") for rule in Rule]
    return []


def _switched(word: str) -> bool:
    if word not in _ON_OFF:
        raise UsageError(f"on or off, not {word}")
    return _ON_OFF[word]


def _line(statistics: Statistics) -> str:
    """One line for a person."""
    s = statistics
    parts = [f"{s.completion_tokens} tokens"]
    if s.tokens_per_second is not None:
        parts.append(f"{s.tokens_per_second:.1f} a second")
    if s.tokens_per_round is not None and s.drafted:
        parts.append(f"{s.tokens_per_round:.1f} a round")
    if s.acceptance_rate is not None:
        parts.append(f"{s.acceptance_rate:.0%} of drafts accepted")
    kept = f" ({s.cached_tokens} kept)" if s.cached_tokens else ""
    parts.append(f"prompt of {s.prompt_tokens}{kept}")
    if s.ttft_s is not None:
        parts.append(f"first text after {s.ttft_s:.2f} s")
    return ", ".join(parts)


def _turns(n: int) -> str:
    return "1 turn" if n == 1 else f"{n} turns"


def _first_line(text: str) -> str:
    line, _, more = text.partition("\n")
    return f"{line} ..." if more else line
