"""Tool calls in a model's text: a JSON object between two tags, as Qwen, Hermes and their like write them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# How an answer begins that must be a call.
FORCED_BEGINNING = f"{OPEN}\n"


@dataclass(frozen=True)
class Call:
    """A call of a tool.

    Attributes:
        name: Of the function.
        arguments: A JSON object, as text.
    """

    name: str
    arguments: str


def schema_of_call(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON schema of a call of one of the tools, which are as OpenAI's API describes them."""
    functions = [tool["function"] for tool in tools]
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    "arguments": {"$ref": f"#/$defs/{function['name']}"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for function in functions
        ],
        "$defs": {
            function["name"]: _moved(
                function.get("parameters") or {"type": "object"}, f"#/$defs/{function['name']}"
            )
            for function in functions
        },
    }


def _moved(schema: Any, to: str) -> Any:
    """A schema as it must be where it is no longer the root: its references to itself follow it."""
    if isinstance(schema, list):
        return [_moved(item, to) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: to + value.removeprefix("#")
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, to)
        for name, value in schema.items()
    }


class ToolCallParser:
    """Takes the calls out of a text as it comes.

    What looks like a call and is none (no JSON, an unknown name, cut short) stays text.

    Args:
        names: The functions that there are.
        begun: The part of the text that was there before the model wrote.
    """

    def __init__(self, names: Collection[str], begun: str = "") -> None:
        self._names = names
        self._text = begun
        self._after_call = False
        self.n_calls = 0

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Add text; returns what is surely no call, and the calls that are complete."""
        self._text += text
        content, calls = "", list[Call]()
        while True:
            if self._after_call:
                # The line break after a call belongs to the call.
                self._text = self._text.lstrip()
                self._after_call = not self._text
            before, opened, inside = self._text.partition(OPEN)
            if not opened:
                held = _possible_tag(before)
                content += before[: len(before) - held]
                self._text = before[len(before) - held :]
                break
            body, closed, after = inside.partition(CLOSE)
            content += before
            if not closed:
                self._text = OPEN + inside
                break
            content += self._take(body, calls, OPEN + body + CLOSE)
            self._text = after
        return content, calls

    def finish(self) -> tuple[str, list[Call]]:
        """The rest, when no more text will come. A call that lacks only its tag is one."""
        calls = list[Call]()
        rest, self._text = self._text, ""
        if rest.startswith(OPEN):
            rest = self._take(rest.removeprefix(OPEN), calls, rest)
        return rest, calls

    def _take(self, body: str, calls: list[Call], whole: str) -> str:
        """Add the call to calls, or return the whole as text."""
        call = _parse(body)
        if call is None or call.name not in self._names:
            return whole
        calls.append(call)
        self.n_calls += 1
        self._after_call = True
        return ""


def _parse(body: str) -> Call | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return Call(name, json.dumps(arguments, ensure_ascii=False))


def _possible_tag(text: str) -> int:
    """Length of the longest end of text that begins a tag."""
    for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if OPEN.startswith(text[-length:]):
            return length
    return 0
