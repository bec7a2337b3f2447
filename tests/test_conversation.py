"""Conversations: what a model sees of them, and their files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspec.chat import prompt_ids
from pyspec.conversation import Conversation, Turn
from pyspec.errors import ContextOverflowError, UsageError
from pyspec.llama import Model

TEXTS = st.text()
TURNS = st.lists(st.builds(Turn, TEXTS, TEXTS), max_size=5)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    turns = draw(TURNS)
    forgotten = draw(st.integers(0, len(turns)))
    return Conversation(draw(st.none() | TEXTS), turns, forgotten)


@pytest.fixture(scope="module")
def model(chat_target: Path) -> Iterator[Model]:
    loaded = Model(chat_target)
    yield loaded
    loaded.close()


def n_tokens(model: Model, *texts: str) -> int:
    """Tokens of a prompt of these messages, the user's and the assistant's in turn."""
    roles = ("user", "assistant") * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return len(prompt_ids(model, messages))


# ---- turns --------------------------------------------------------------------------------------------


def test_messages_are_those_of_chat_templates() -> None:
    conversation = Conversation("be brief", [Turn("hi", "Hello."), Turn("bye", "Bye.")])
    assert conversation.messages(start=1) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "bye"},
        {"role": "assistant", "content": "Bye."},
    ]
    assert len(conversation.messages()) == 5


def test_undo_takes_the_last_turn_back() -> None:
    conversation = Conversation(None, [Turn("hi", "Hello."), Turn("bye", "Bye.")], forgotten=2)
    assert conversation.undo() == Turn("bye", "Bye.")
    assert conversation == Conversation(None, [Turn("hi", "Hello.")], forgotten=1)
    conversation.undo()
    with pytest.raises(UsageError, match="no turn yet"):
        conversation.undo()


def test_reset_keeps_the_system_message() -> None:
    conversation = Conversation("be brief", [Turn("hi", "Hello.")], forgotten=1)
    conversation.reset()
    assert conversation == Conversation("be brief")


# ---- the context ----------------------------------------------------------------------------------------


def test_a_prompt_is_that_of_the_rendered_texts(model: Model) -> None:
    conversation = Conversation("be brief", [Turn("hi", "Hello.")])
    ids = conversation.prompt_ids(model, "bye", n_ctx=1000, room=100)
    messages = [*conversation.messages(), {"role": "user", "content": "bye"}]
    assert ids == prompt_ids(model, messages)


def test_the_oldest_turns_go_until_half_the_context_is_free(model: Model) -> None:
    turns = [Turn(f"question {n}", f"answer {n} " * 5) for n in range(8)]
    conversation = Conversation(None, turns)
    whole = n_tokens(model, *(text for t in turns for text in (t.user, t.assistant)), "more?")
    assert len(conversation.prompt_ids(model, "more?", n_ctx=whole + 20, room=20)) == whole
    assert conversation.forgotten == 0

    ids = conversation.prompt_ids(model, "more?", n_ctx=whole + 20, room=21)
    assert len(ids) <= (whole + 20) / 2
    # No more than that: with one turn more it would have been over half.
    kept = turns[conversation.forgotten - 1 :]
    with_one = [text for t in kept for text in (t.user, t.assistant)]
    assert n_tokens(model, *with_one, "more?") > (whole + 20) / 2
    assert conversation.turns == turns


def test_what_is_forgotten_stays_forgotten(model: Model) -> None:
    conversation = Conversation(None, [Turn("one", "1"), Turn("two", "2")], forgotten=1)
    ids = conversation.prompt_ids(model, "three", n_ctx=1000, room=10)
    assert len(ids) == n_tokens(model, "two", "2", "three")


def test_the_system_message_and_a_last_turn_that_fits_stay(model: Model) -> None:
    turns = [Turn("old " * 40, "older"), Turn("new " * 20, "newer")]
    conversation = Conversation("be brief", turns)
    least = Conversation("be brief", turns[1:]).prompt_ids(model, "more?", n_ctx=9999, room=0)
    n_ctx = len(least) + 10
    assert conversation.prompt_ids(model, "more?", n_ctx=n_ctx, room=10) == least
    assert conversation.prompt_ids(model, "more?", n_ctx=n_ctx, room=11) != least
    assert conversation.forgotten == 2


def test_a_message_that_is_too_long_is_refused_with_both_sizes(model: Model) -> None:
    conversation = Conversation(None, [Turn("hi", "Hello.")])
    size = n_tokens(model, "long " * 50)
    # It may use the room that an answer should have.
    assert len(conversation.prompt_ids(model, "long " * 50, n_ctx=size, room=50)) == size
    conversation.forgotten = 0
    with pytest.raises(ContextOverflowError, match=rf"\b{size} tokens .* {size - 1}: shorten"):
        conversation.prompt_ids(model, "long " * 50, n_ctx=size - 1, room=50)
    assert conversation == Conversation(None, [Turn("hi", "Hello.")])


# ---- files ------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(conversations())
def test_a_conversation_survives_its_json(conversation: Conversation) -> None:
    text = json.dumps(conversation.as_dict())
    assert Conversation.from_dict(json.loads(text)) == conversation


@settings(deadline=None)
@given(conversations(), conversations())
def test_a_conversation_survives_its_file(
    tmp_path_factory: pytest.TempPathFactory, first: Conversation, second: Conversation
) -> None:
    path = tmp_path_factory.mktemp("conversations") / "talk.json"
    for conversation in (first, second):
        conversation.save(path)
        assert Conversation.load(path) == conversation
    assert list(path.parent.iterdir()) == [path]


def test_a_person_can_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    Conversation("be brief", [Turn("wie geht's?", "Schön, 你好")]).save(path)
    assert path.read_text().splitlines()[:6] == [
        "{",
        '  "messages": [',
        "    {",
        '      "role": "system",',
        '      "content": "be brief"',
        "    },",
    ]
    assert '"content": "Schön, 你好"' in path.read_text()


def test_half_characters_do_not_stop_a_file_from_being_written(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    Conversation(None, [Turn("\ud800", "a")]).save(path)
    assert Conversation.load(path).turns == [Turn("?", "a")]


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt exists and is no saved conversation"):
        Conversation().save(path)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("name", ["nowhere/talk.json", "\0", "x" * 300])
def test_a_place_that_cannot_be_written_or_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        Conversation().save(tmp_path / name)
    with pytest.raises(UsageError, match="cannot read"):
        Conversation.load(tmp_path / name)


def messages(*roles: str) -> dict[str, object]:
    return {"messages": [{"role": role, "content": "a"} for role in roles]}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ([], 'an object with a list of "messages"'),
        ({"messages": {}}, 'an object with a list of "messages"'),
        ({"messages": [], "model": "x"}, "unknown field 'model'"),
        ({"messages": ["hi"]}, "message 1 must be an object"),
        ({"messages": [{"role": "user"}]}, "message 1 must be an object"),
        ({"messages": [{"role": "user", "content": 1}]}, "message 1: its content must be a text"),
        (messages("user", "tool"), "message 2 has the role 'tool'"),
        (messages("assistant"), "message 1 must be the user's, not the assistant's"),
        (messages("system", "user", "user"), "message 3 must be the assistant's, not the user's"),
        (messages("user", "assistant", "system"), "message 3 must be the user's"),
        (messages("user", "assistant", "user"), "the last message has no answer"),
        ({**messages("user", "assistant"), "forgotten": 2}, "from 0 to the number of turns, 1"),
        ({**messages("user", "assistant"), "forgotten": True}, "from 0 to the number of turns"),
    ],
)
def test_what_is_no_conversation_is_refused_in_one_line(
    tmp_path: Path, content: object, fault: str
) -> None:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError) as raised:
        Conversation.load(path)
    assert fault in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe\xfd", b"[" * 100_000])
def test_what_is_not_json_is_refused_in_one_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "talk.json"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"talk\.json is not JSON: [^\n]+$"):
        Conversation.load(path)
