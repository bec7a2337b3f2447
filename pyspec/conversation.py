"""A conversation: a system message and turns, what of it a model sees, and its form in a file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspec import chat
from pyspec.errors import ContextOverflowError, UsageError
from pyspec.llama import Model

_FIELDS = {"messages", "forgotten"}


@dataclass(frozen=True)
class Turn:
    """A message of the user and the answer to it, whole or as far as it was written."""

    user: str
    assistant: str


@dataclass
class Conversation:
    """What has been said.

    Attributes:
        system: The system message, if there is one.
        turns: All turns, oldest first.
        forgotten: How many of the oldest turns the model no longer sees, since the context is too small.
    """

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    forgotten: int = 0

    def undo(self) -> Turn:
        """Take the last turn back and return it.

        Raises:
            UsageError: There is none.
        """
        if not self.turns:
            raise UsageError("the conversation has no turn yet")
        turn = self.turns.pop()
        self.forgotten = min(self.forgotten, len(self.turns))
        return turn

    def reset(self) -> None:
        """Take all turns back; the system message stays."""
        self.turns.clear()
        self.forgotten = 0

    def messages(self, *, start: int = 0) -> list[dict[str, str]]:
        """The system message and the turns from `start` on, as chat templates and OpenAI's API have them."""
        messages = [] if self.system is None else [_message("system", self.system)]
        for turn in self.turns[start:]:
            messages += [_message("user", turn.user), _message("assistant", turn.assistant)]
        return messages

    def prompt_ids(self, model: Model, question: str, *, n_ctx: int, room: int) -> list[int]:
        """The prompt with which the model answers a new message.

        It follows from the texts alone, not from the ids that answers were generated as, so that a saved
        conversation goes on as this one does. When it leaves too little room for the answer, the oldest turns
        are forgotten until it fills half the context: a few turns at once, since each time all that
        remains must be evaluated anew. The last turn is kept if it fits.

        Args:
            model: Whose chat template and vocabulary.
            question: The user's new message, which is not yet a turn.
            n_ctx: Positions of the context.
            room: Tokens that the answer should have; a long message may leave it fewer.

        Returns:
            Token ids, from 1 to n_ctx of them.

        Raises:
            ContextOverflowError: The message does not fit even by itself.
            ModelError: The model has no chat template, or one that does not work.
            UsageError: The template refuses the conversation.
        """
        start, limit = self.forgotten, n_ctx - room
        ids = self._ids(model, question, start)
        while len(ids) > limit and start < len(self.turns):
            start += 1
            ids = self._ids(model, question, start)
            limit = n_ctx - room if start == len(self.turns) - 1 else min(limit, n_ctx // 2)
        if len(ids) > n_ctx:
            also = "" if self.system is None else " with the system message"
            raise ContextOverflowError(
                f"the message has {len(ids)} tokens{also} and the context {n_ctx}: "
                "shorten it or ask for a larger context"
            )
        self.forgotten = start
        return ids

    def _ids(self, model: Model, question: str, start: int) -> list[int]:
        return chat.prompt_ids(model, [*self.messages(start=start), _message("user", question)])

    # ---- files ---------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the messages in OpenAI's form."""
        content: dict[str, Any] = {"messages": self.messages()}
        if self.forgotten:
            content["forgotten"] = self.forgotten
        return content

    @classmethod
    def from_dict(cls, content: object) -> Conversation:
        """The inverse of as_dict, for what a person may have edited.

        Raises:
            UsageError: It is no conversation; the message names the place.
        """
        if not isinstance(content, dict) or not isinstance(content.get("messages"), list):
            raise UsageError('there must be an object with a list of "messages"')
        if unknown := set(content) - _FIELDS:
            raise UsageError(f"unknown field {min(unknown)!r}")
        messages = [_checked(number, item) for number, item in enumerate(content["messages"], 1)]
        has_system = bool(messages) and messages[0][0] == "system"
        system = messages.pop(0)[1] if has_system else None
        for index, (role, _) in enumerate(messages):
            expected = ("user", "assistant")[index % 2]
            if role != expected:
                number = index + 1 + has_system
                raise UsageError(f"message {number} must be the {expected}'s, not the {role}'s")
        if len(messages) % 2:
            raise UsageError("the last message has no answer: write one or leave it out")
        texts = [text for _, text in messages]
        turns = [Turn(*pair) for pair in zip(texts[::2], texts[1::2], strict=True)]
        forgotten = content.get("forgotten", 0)
        if type(forgotten) is not int or not 0 <= forgotten <= len(turns):
            raise UsageError(f'"forgotten" must be from 0 to the number of turns, {len(turns)}')
        return cls(system, turns, forgotten)

    def save(self, path: Path) -> None:
        """Write the conversation to a file, which may already hold one.

        Raises:
            UsageError: The file cannot be written, or it holds something else.
        """
        if os.path.exists(path):
            try:
                self.load(path)
            except UsageError as error:
                raise UsageError(
                    f"{path} exists and is no saved conversation: choose another name"
                ) from error
        text = json.dumps(self.as_dict(), ensure_ascii=False, indent=2) + "\n"
        # Beside it first, so that what was saved before survives a full disk.
        staged = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            try:
                staged.write_bytes(text.encode("utf-8", "replace"))
                staged.replace(path)
            finally:
                staged.unlink(missing_ok=True)
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot write {path}: {_reason(error)}") from error

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """Read what save wrote.

        Raises:
            UsageError: The file cannot be read or holds no conversation.
        """
        try:
            data = path.read_bytes()
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {path}: {_reason(error)}") from error
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is not JSON: {error}") from error
        try:
            return cls.from_dict(content)
        except UsageError as error:
            raise UsageError(f"{path} is not a conversation: {error}") from error


def _reason(error: OSError | ValueError) -> str:
    """Why a file cannot be used; a ValueError tells of a name that cannot be one."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _checked(number: int, message: object) -> tuple[str, str]:
    """Role and text of a message of a file."""
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
        raise UsageError(f'message {number} must be an object with "role" and "content"')
    role, text = message["role"], message["content"]
    if role not in ("system", "user", "assistant"):
        raise UsageError(
            f"message {number} has the role {role!r}: user, assistant, or first system"
        )
    if not isinstance(text, str):
        raise UsageError(f"message {number}: its content must be a text")
    return role, text
