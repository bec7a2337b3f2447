"""Tools: what the model is shown, and its calls found in what it writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from pyspec.engine import Engine
from pyspec.llama import Model
from pyspec.server.tools import Call, ToolCallParser
from tests.server.fakes import FakeEngine
from tests.server.service import MODEL, serving

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look somewhere.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"where": "Zürich"}}\n</tool_call>'
ARGUMENTS = '{"where": "Zürich"}'

# ---- the parser --------------------------------------------------------------------------------------


def parse(text: str, size: int, begun: str = "") -> tuple[str, list[Call]]:
    """Feed a text in parts of one size."""
    parser = ToolCallParser({"look"}, begun)
    content, calls = "", list[Call]()
    for start in range(0, len(text), size):
        more, found = parser.push(text[start : start + size])
        content, calls = content + more, calls + found
    more, found = parser.finish()
    assert parser.n_calls == len(calls + found)
    return content + more, calls + found


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "content", "n_calls"),
    [
        ("no call at all", "no call at all", 0),
        (CALL, "", 1),
        (f"I look.\n{CALL}\n{CALL}\n", "I look.\n", 2),
        (CALL.removesuffix("\n</tool_call>"), "", 1),
        ("a <b and <tool", "a <b and <tool", 0),
        ("<tool_call>not JSON</tool_call> x", "<tool_call>not JSON</tool_call> x", 0),
        (CALL.replace("look", "jump"), CALL.replace("look", "jump"), 0),
        (CALL[:40], CALL[:40], 0),
        ('<tool_call>{"name": "look"}</tool_call>', "", 1),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", 0),
    ],
)
def test_calls_are_found_however_the_text_is_cut(
    text: str, content: str, n_calls: int, size: int
) -> None:
    found_content, calls = parse(text, size)
    assert found_content == content
    assert len(calls) == n_calls
    assert all(call.name == "look" for call in calls)
    if CALL in text:
        assert json.loads(calls[0].arguments) == {"where": "Zürich"}


def test_a_call_whose_beginning_was_written_for_the_model() -> None:
    begun, text = '<tool_call>\n{"name": "look", "arguments": ', '{"where": "up"}}\n'
    assert parse(text, 3, begun) == ("", [Call("look", '{"where": "up"}')])


# ---- the service -------------------------------------------------------------------------------------


class Author:
    """Decides what a fake engine writes, and keeps the prompts that it got."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.text = ""
        self.prompts: list[str] = []

    def __call__(self, prompt: Sequence[int]) -> str:
        pieces = [self.model.piece(token, special=True) for token in prompt]
        self.prompts.append(b"".join(pieces).decode())
        return self.text


@pytest.fixture(scope="module")
def author(tools_model: Model) -> Author:
    return Author(tools_model)


@pytest.fixture(scope="module")
def tool_client(author: Author) -> Iterator[openai.OpenAI]:
    engine = FakeEngine(author.model, author)
    with (
        serving(cast(Engine, engine)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ask(client: openai.OpenAI, messages: Any = None, **fields: Any) -> Any:
    messages = messages or [{"role": "user", "content": "Where?"}]
    return client.chat.completions.create(
        model=MODEL, messages=messages, **{"tools": [TOOL], **fields}
    )


def test_a_call_is_a_call(author: Author, tool_client: openai.OpenAI) -> None:
    author.text = CALL
    (choice,) = ask(tool_client).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.id.startswith("call_")
    assert (call.type, call.function.name, call.function.arguments) == (
        "function",
        "look",
        ARGUMENTS,
    )
    assert json.dumps(TOOL) in author.prompts[-1]


def test_a_streamed_call_comes_whole(author: Author, tool_client: openai.OpenAI) -> None:
    author.text = f"Wait. {CALL}"
    chunks = list(ask(tool_client, stream=True))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls] == [(0, "look")]
    assert calls[0].function.arguments == ARGUMENTS
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert content == "Wait. "


def test_text_is_text(author: Author, tool_client: openai.OpenAI) -> None:
    author.text = "Here < there."
    (choice,) = ask(tool_client).choices
    assert (choice.message.content, choice.finish_reason) == ("Here < there.", "stop")
    assert choice.message.tool_calls is None


def test_a_result_goes_back_to_the_model(author: Author, tool_client: openai.OpenAI) -> None:
    author.text = CALL
    message = ask(tool_client).choices[0].message
    author.text = "It is there."
    answer = ask(
        tool_client,
        [
            {"role": "user", "content": "Where?"},
            message.model_dump(),
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "north"},
        ],
    )
    assert answer.choices[0].message.content == "It is there."
    # The template's own form: arguments are JSON there, and not a text of JSON.
    assert f'"arguments": {ARGUMENTS}}}</tool_call>' in author.prompts[-1]
    assert "<|im_start|>tool\nnorth<|im_end|>" in author.prompts[-1]


def test_no_tools_are_shown_if_none_may_be_called(
    author: Author, tool_client: openai.OpenAI
) -> None:
    author.text = CALL
    (choice,) = ask(tool_client, tool_choice="none").choices
    assert choice.message.content == CALL
    assert "look" not in author.prompts[-1]


def test_a_required_call_is_begun_for_the_model(author: Author, tool_client: openai.OpenAI) -> None:
    author.text = '{"name": "look", "arguments": {"where": "Zürich"}}'
    (choice,) = ask(tool_client, tool_choice="required").choices
    assert author.prompts[-1].endswith("<|im_start|>assistant\n<tool_call>\n")
    assert choice.message.tool_calls[0].function.arguments == ARGUMENTS
    assert choice.finish_reason == "tool_calls"


PLACE = {
    "type": "function",
    "function": {
        "name": "go",
        "parameters": {
            "type": "object",
            "properties": {"to": {"$ref": "#/$defs/Place"}, "n": {"type": "integer", "maximum": 9}},
            "required": ["to", "n"],
            "additionalProperties": False,
            "$defs": {"Place": {"enum": ["north", "south"]}},
        },
    },
}


@pytest.fixture(scope="module")
def real_client(tools_target: Path, chat_draft: Path) -> Iterator[openai.OpenAI]:
    """The tiny model that can be shown tools, which by itself writes nothing like a call."""
    with (
        Engine(tools_target, chat_draft, gamma=4, n_ctx=1024, threads=1) as engine,
        serving(engine) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "go"}}])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_forced_call_fits_the_tool_s_schema(
    real_client: openai.OpenAI, choice: Any, seed: int
) -> None:
    other = {"type": "function", "function": {"name": "stop", "parameters": {"enum": [{}]}}}
    answer = ask(
        real_client,
        tools=[PLACE, other],
        tool_choice=choice,
        seed=seed,
        temperature=1.5,
        max_tokens=300,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    arguments = json.loads(call.function.arguments)
    if call.function.name == "go":
        assert arguments["to"] in ("north", "south")
        assert arguments["n"] <= 9
        assert set(arguments) == {"to", "n"}
    else:
        assert (call.function.name, arguments) == ("stop", {})
        assert choice == "required"


def test_a_schema_that_cannot_be_kept_is_refused(real_client: openai.OpenAI) -> None:
    broken = {"type": "function", "function": {"name": "go", "parameters": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(real_client, tools=[broken], tool_choice="required")
    assert caught.value.param == "tools"


def test_without_being_forced_nothing_is_a_call(real_client: openai.OpenAI) -> None:
    (choice,) = ask(real_client, temperature=0, max_tokens=20).choices
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "length"


def test_a_tool_that_is_not_there_cannot_be_named(tool_client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "jump"}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(tool_client, tool_choice=named)
    assert caught.value.param == "tool_choice"
