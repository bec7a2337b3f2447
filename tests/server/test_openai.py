"""The service as OpenAI's own client sees it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from pyspec import chat
from pyspec.engine import Engine
from pyspec.metrics import Statistics
from pyspec.output import Token
from pyspec.sampling import SamplingParams
from tests.server.service import MODEL

MESSAGES: Any = [
    {"role": "system", "content": "the other one"},
    {"role": "user", "content": "Where is the inner one?"},
]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
SAMPLED: dict[str, Any] = {"temperature": 1, "max_tokens": 40, "seed": 7}


def alone(engine: Engine, prompt: Sequence[int], **params: Any) -> tuple[str, list[Token]]:
    """What the engine writes by itself."""
    pieces = list(engine.generate(prompt, SamplingParams(**params)))
    return "".join(p.text for p in pieces), [token for p in pieces for token in p.tokens]


def prompt_of(engine: Engine, messages: Any = MESSAGES) -> list[int]:
    return chat.prompt_ids(engine.target, messages)


def ask(client: openai.OpenAI, messages: Any = MESSAGES, **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, **fields)


def complete(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    return client.completions.create(model=MODEL, prompt=prompt, **fields)


def statistics_of(choice: Any) -> dict[str, Any]:
    found: dict[str, Any] = choice.model_extra["pyspec"]["statistics"]
    return found


# ---- the text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_chat_answer_is_what_the_engine_writes(
    client: openai.OpenAI, reference: Engine, params: dict[str, Any]
) -> None:
    ids = prompt_of(reference)
    text, tokens = alone(reference, ids, **params)
    answer = ask(client, **params)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.completion_tokens == len(tokens) == 40
    assert answer.usage.total_tokens == len(ids) + 40
    assert answer.model == MODEL
    statistics = statistics_of(answer.choices[0])
    assert set(statistics) == set(Statistics().as_dict())
    assert statistics["accepted"] + statistics["rounds"] == 40
    assert statistics["accepted"] > 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_streamed_answer_is_the_same(
    client: openai.OpenAI, reference: Engine, params: dict[str, Any]
) -> None:
    text, tokens = alone(reference, prompt_of(reference), **params)
    stream = ask(client, stream=True, stream_options={"include_usage": True}, **params)
    *chunks, last = stream
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [
        "length"
    ]
    assert len({chunk.id for chunk in [*chunks, last]}) == 1
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == 40
    written = [
        token for chunk in chunks[1:] for token in chunk.choices[0].model_extra["pyspec"]["tokens"]
    ]
    assert [(token["text"], token["drafted"]) for token in written] == [
        (token.text, token.source.value == "draft") for token in tokens
    ]


def test_without_being_asked_a_stream_does_not_tell_the_usage(client: openai.OpenAI) -> None:
    chunks = list(ask(client, stream=True, **GREEDY))
    assert all(chunk.choices for chunk in chunks)
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


def test_each_round_comes_as_a_chunk_of_its_own(client: openai.OpenAI) -> None:
    chunks = list(ask(client, stream=True, **GREEDY))
    rounds = statistics_of(chunks[-1].choices[0])["rounds"]
    # One more says who speaks; a round may end within a character, and then shows nothing.
    assert rounds / 2 < len(chunks) - 1 <= rounds


def test_the_same_seed_writes_the_same_text(client: openai.OpenAI) -> None:
    first, again, other = (
        ask(client, **{**SAMPLED, "seed": seed}).choices[0].message.content for seed in (7, 7, 8)
    )
    assert first == again != other


def test_several_answers_have_seeds_of_their_own(client: openai.OpenAI, reference: Engine) -> None:
    ids = prompt_of(reference)
    expected = [alone(reference, ids, **{**SAMPLED, "seed": 7 + i})[0] for i in range(3)]
    answer = ask(client, n=3, **SAMPLED)
    assert [choice.message.content for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(expected)) == 3
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.completion_tokens == 120


def test_several_answers_stream_side_by_side(client: openai.OpenAI, reference: Engine) -> None:
    ids = prompt_of(reference)
    texts = ["", ""]
    order = []
    for chunk in ask(client, n=2, stream=True, **SAMPLED):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        order.append(choice.index)
    assert texts == [alone(reference, ids, **{**SAMPLED, "seed": 7 + i})[0] for i in range(2)]
    assert len(list(itertools.groupby(order))) > 4, "neither waited for the other's end"


# ---- the settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 7])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_limit_of_tokens_holds_inside_a_block(
    client: openai.OpenAI, reference: Engine, most: int, name: str
) -> None:
    text, _ = alone(reference, prompt_of(reference), **{**GREEDY, "max_tokens": most})
    answer = ask(client, temperature=0, extra_body={"speculative": {"gamma": 16}, name: most})
    assert answer.choices[0].message.content == text
    assert answer.usage.completion_tokens == most
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("streamed", [False, True])
def test_nothing_of_a_stop_string_appears(
    client: openai.OpenAI, reference: Engine, streamed: bool
) -> None:
    text, tokens = alone(reference, prompt_of(reference), **GREEDY)
    # The last characters of one token and the first of the next: it spans both.
    stop = tokens[20].text[-1:] + tokens[21].text[:1] + tokens[22].text[:1]
    assert len(stop) >= 2
    expected = text[: text.index(stop)]
    answer = ask(client, stop=["never", stop], stream=streamed, **GREEDY)
    if streamed:
        chunks = list(answer)
        shown = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        shown = answer.choices[0].message.content
        reason = answer.choices[0].finish_reason
    assert (shown, reason) == (expected, "stop")


@pytest.mark.parametrize(
    "speculative",
    [
        {"enabled": False},
        {"gamma": 0},
        {"gamma": 1},
        {"gamma": 16},
        {"rule": "token"},
        {"rule": "coupled"},
        {"gamma": 8, "rule": "block"},
    ],
)
def test_greedy_text_does_not_depend_on_how_it_was_drafted(
    client: openai.OpenAI, reference: Engine, speculative: dict[str, Any]
) -> None:
    ids = prompt_of(reference)
    text, _ = alone(reference, ids, **GREEDY)
    answer = ask(client, extra_body={"speculative": speculative}, **GREEDY)
    assert answer.choices[0].message.content == text
    assert answer.usage.prompt_tokens == len(ids)
    statistics = statistics_of(answer.choices[0])
    gamma = speculative.get("gamma", 4) if speculative.get("enabled", True) else 0
    assert len(statistics["accepted_histogram"]) == gamma + 1
    assert (statistics["drafted"] > 0) == (gamma > 0)


def test_the_draft_length_may_be_left_to_the_planner(
    client: openai.OpenAI, reference: Engine
) -> None:
    text, _ = alone(reference, prompt_of(reference), **GREEDY)
    answer = ask(client, extra_body={"speculative": {"gamma": "auto"}}, **GREEDY)
    assert answer.choices[0].message.content == text


def test_one_request_s_draft_length_is_not_the_next_one_s(client: openai.OpenAI) -> None:
    first = ask(client, **GREEDY)
    ask(client, extra_body={"speculative": {"gamma": 16}}, **GREEDY)
    again = ask(client, **GREEDY)
    histograms = [
        statistics_of(answer.choices[0])["accepted_histogram"] for answer in (first, again)
    ]
    assert histograms[0] == histograms[1]


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 1.5},
        {"presence_penalty": 1.5},
        {"top_p": 0.4, "temperature": 1, "seed": 3},
        {"top_k": 3, "temperature": 1, "seed": 3},
        {"min_p": 0.5, "temperature": 1, "seed": 3},
        {"repeat_penalty": 1.8, "repeat_last_n": -1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_setting_reaches_the_sampler(
    client: openai.OpenAI, reference: Engine, fields: dict[str, Any]
) -> None:
    ids = prompt_of(reference)
    without = {
        **GREEDY,
        **{name: fields[name] for name in ("temperature", "seed") if name in fields},
    }
    params = {**GREEDY, **fields}
    text, _ = alone(reference, ids, **params)
    assert text != alone(reference, ids, **without)[0]
    answer = ask(client, max_tokens=40, extra_body={"temperature": 0, **fields})
    assert answer.choices[0].message.content == text


def test_a_biased_token_is_all_that_is_written(client: openai.OpenAI, reference: Engine) -> None:
    (token,) = reference.target.tokenize("the", add_special=False)
    answer = ask(client, logit_bias={str(token): 100}, temperature=0, max_tokens=5)
    assert answer.choices[0].message.content == "the" * 5


def test_fields_that_change_nothing_are_accepted(client: openai.OpenAI) -> None:
    plain = ask(client, **GREEDY).choices[0].message.content
    answer = ask(
        client,
        user="somebody",
        metadata={"purpose": "a test"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        tool_choice="auto",
        n=None,
        stop=None,
        **GREEDY,
    )
    assert answer.choices[0].message.content == plain


def test_parts_of_a_message_are_one_text(client: openai.OpenAI) -> None:
    whole = ask(client, [{"role": "user", "content": "one two"}], **GREEDY)
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    joined = ask(client, [{"role": "user", "content": parts}], **GREEDY)
    assert joined.choices[0].message.content == whole.choices[0].message.content
    assert joined.usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_shared_beginning_is_evaluated_once(client: openai.OpenAI) -> None:
    system = {"role": "system", "content": "the beginning that all have in common " * 4}
    answers = [ask(client, [system, {"role": "user", "content": text}], **GREEDY) for text in "ab"]
    usage = answers[1].usage
    assert usage.prompt_tokens_details.cached_tokens > usage.prompt_tokens / 2


# ---- log probabilities -------------------------------------------------------------------------------


def near(logprobs: list[Any]) -> Any:
    """Unquantised products depend on how a prompt was split, and a service keeps beginnings of prompts."""
    return pytest.approx(logprobs, abs=1e-3)


@pytest.mark.parametrize("streamed", [False, True])
def test_log_probabilities_of_a_chat(
    client: openai.OpenAI, reference: Engine, streamed: bool
) -> None:
    text, tokens = alone(reference, prompt_of(reference), logprobs=3, **SAMPLED)
    answer = ask(client, logprobs=True, top_logprobs=3, stream=streamed, **SAMPLED)
    if streamed:
        content = [
            item
            for chunk in answer
            if chunk.choices[0].logprobs
            for item in chunk.choices[0].logprobs.content
        ]
    else:
        content = answer.choices[0].logprobs.content
    assert [item.logprob for item in content] == near([token.logprob for token in tokens])
    assert "".join(item.token for item in content) == text
    # Bytes that are no character show as U+FFFD in the text, and as they are here.
    joined = bytes(byte for item in content for byte in item.bytes)
    assert joined.decode("utf-8", "replace") == text
    for item, token in zip(content, tokens, strict=True):
        assert [top.logprob for top in item.top_logprobs] == near(
            [logprob for _, logprob in token.top_logprobs]
        )
        for top, (id_, _) in zip(item.top_logprobs, token.top_logprobs, strict=True):
            assert bytes(top.bytes) == reference.target.piece(id_, special=True)


def test_bytes_of_a_token_that_a_stop_string_cut(client: openai.OpenAI, reference: Engine) -> None:
    (token,) = reference.target.tokenize("the", add_special=False)
    fields = {"logit_bias": {str(token): 100}, "temperature": 0, "max_tokens": 9}
    answer = ask(client, stop="et", logprobs=True, **fields)
    assert answer.choices[0].message.content == "th"
    (item,) = answer.choices[0].logprobs.content
    assert (item.token, bytes(item.bytes), item.top_logprobs) == ("th", b"th", [])
    assert answer.usage.completion_tokens == 1


def test_log_probabilities_of_a_completion(client: openai.OpenAI, reference: Engine) -> None:
    ids = reference.target.tokenize("the inner one")
    text, tokens = alone(reference, ids, logprobs=2, **SAMPLED)
    choice = complete(client, "the inner one", logprobs=2, **SAMPLED).choices[0]
    assert choice.text == text
    assert choice.logprobs.token_logprobs == near([token.logprob for token in tokens])
    assert "".join(choice.logprobs.tokens) == text
    ends = [*choice.logprobs.text_offset[1:], len(text)]
    assert [
        text[start:end] for start, end in zip(choice.logprobs.text_offset, ends, strict=True)
    ] == choice.logprobs.tokens
    for top, token in zip(choice.logprobs.top_logprobs, tokens, strict=True):
        assert sorted(top.values(), reverse=True) == near(
            [logprob for _, logprob in token.top_logprobs]
        )


# ---- structured output -------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["inner", "outer"]},
        "number": {"type": "integer", "minimum": 0, "maximum": 99},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "number", "flags"],
    "additionalProperties": False,
}


def json_format(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "any", "strict": True, "schema": schema}}


@pytest.mark.parametrize(
    ("rule", "gamma", "streamed"),
    [("block", 0, True), ("block", 4, False), ("token", 12, True), ("coupled", 4, False)],
)
def test_an_answer_keeps_to_its_schema(
    client: openai.OpenAI, rule: str, gamma: int, streamed: bool
) -> None:
    answer = ask(
        client,
        response_format=json_format(SCHEMA),
        temperature=1.5,
        seed=5,
        max_tokens=300,
        stream=streamed,
        extra_body={"speculative": {"gamma": gamma, "rule": rule}},
    )
    if streamed:
        chunks = list(answer)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert reason == "stop"
    value = json.loads(text)
    assert list(value) == ["name", "number", "flags"]
    assert value["name"] in ("inner", "outer")
    assert 0 <= value["number"] <= 99
    assert set(map(type, value["flags"])) <= {bool}


def test_structured_text_is_the_same_with_and_without_a_draft(client: openai.OpenAI) -> None:
    texts = {
        ask(
            client,
            response_format=json_format(SCHEMA),
            temperature=0,
            max_tokens=300,
            extra_body={"speculative": {"gamma": gamma}},
        )
        .choices[0]
        .message.content
        for gamma in (0, 1, 4, 16)
    }
    assert len(texts) == 1


def test_any_json_object(client: openai.OpenAI) -> None:
    answers = ask(
        client,
        response_format={"type": "json_object"},
        temperature=0.7,
        seed=3,
        max_tokens=400,
        n=3,
    )
    complete = [choice for choice in answers.choices if choice.finish_reason == "stop"]
    assert all(isinstance(json.loads(choice.message.content), dict) for choice in complete)
    assert all(choice.message.content.lstrip()[0] == "{" for choice in answers.choices)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nothing"},
        {"$ref": "http://127.0.0.1:1/schema.json"},
        {"$ref": "file:///etc/passwd"},
    ],
    ids=["wrong", "elsewhere", "a file"],
)
def test_a_schema_that_cannot_be_kept_is_refused(client: openai.OpenAI, schema: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, response_format=json_format(schema))
    assert caught.value.param == "response_format.json_schema.schema"


# ---- completions, models -----------------------------------------------------------------------------


def test_several_prompts_have_answers_in_their_order(
    client: openai.OpenAI, reference: Engine
) -> None:
    prompts = ["the one", "another"]
    expected = [
        alone(reference, reference.target.tokenize(prompt), **{**SAMPLED, "seed": 7 + i})[0]
        for prompt in prompts
        for i in range(2)
    ]
    answer = complete(client, prompts, n=2, best_of=2, **SAMPLED)
    assert [choice.text for choice in answer.choices] == expected
    streamed = [""] * 4
    for chunk in complete(client, prompts, n=2, stream=True, **SAMPLED):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == expected


def test_a_prompt_of_token_ids_is_taken_as_it_is(client: openai.OpenAI, reference: Engine) -> None:
    ids = reference.target.tokenize("the one")
    expected = alone(reference, ids, **GREEDY)[0]
    assert complete(client, ids, **GREEDY).choices[0].text == expected
    assert complete(client, [ids], **GREEDY).choices[0].text == expected
    assert complete(client, "the one", **GREEDY).choices[0].text == expected


def test_the_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "pyspec"
    with pytest.raises(openai.NotFoundError, match="'other'"):
        client.models.retrieve("other")


# ---- refusals ----------------------------------------------------------------------------------------

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 9}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"seed": -1}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"speculative": {"gamma": 32}}, "speculative.gamma"),
        ({"speculative": {"rule": "luck"}}, "speculative.rule"),
        ({"speculative": {"depth": 1}}, "speculative.depth"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": []}, "functions"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "king", "content": ""}]}, "messages[1].role"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{**USER, "mood": 1}]}, "messages[0].mood"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages[0].content[0].type",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_refusal_names_the_field(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    messages = fields.pop("messages", [USER])
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages, extra_body=fields)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert param.split(".")[0].split("[")[0] in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": ["a"] * 9}, "prompt"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "messages": []}, "messages"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_refused_completion_names_the_field(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, fields.pop("prompt"), extra_body=fields)
    assert caught.value.param == param


def test_a_prompt_that_does_not_fit_names_both_sizes(client: openai.OpenAI) -> None:
    with pytest.raises(
        openai.BadRequestError, match=r"has 5\d\d tokens, and at most 512"
    ) as caught:
        complete(client, "x" * 520)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_model_without_tools_refuses_them(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "look"}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, tools=[tool])
    assert caught.value.param == "tools"


def test_what_is_not_there_is_said_in_the_same_shape(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model=MODEL, input="x")
    assert json.loads(caught.value.response.text)["error"]["type"] == "invalid_request_error"
