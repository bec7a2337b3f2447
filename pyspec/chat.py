"""Conversations to prompts, with the chat template that a model carries."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pyspec.errors import ModelError, UsageError
from pyspec.llama import Model

Message = Mapping[str, Any]


class _RefusalError(Exception):
    """What a template says of a conversation that it does not take."""


def _raise_exception(message: str) -> NoReturn:
    raise _RefusalError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own tojson escapes for HTML, which is not what models were trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(format_: str) -> str:
    return datetime.datetime.now().strftime(format_)


def render(
    model: Model,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt that a conversation is to this model.

    The template comes from the model's file, so it runs sandboxed: it sees the conversation and nothing
    else of the program or the machine.

    Args:
        model: Whose template to use.
        messages: Each with "role" and "content", oldest first.
        tools: Functions that the model may call, as OpenAI's API describes them; None for none.
        add_generation_prompt: End with the beginning of the assistant's turn.

    Raises:
        ModelError: The model has no template, or one that does not work.
        UsageError: The template refuses this conversation.
    """
    source = model.chat_template
    if source is None:
        raise ModelError(
            f"{model.name} has no chat template: it continues a text with `pyspec generate --raw`"
        )
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        template = environment.from_string(source)
    # Whatever a damaged or hostile template makes Jinja or Python raise.
    except Exception as error:
        raise _does_not_work(model, error) from error
    try:
        return template.render(
            messages=messages,
            # Templates ask whether it is none, as transformers always passes it.
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            bos_token=_text(model, model.bos),
            eos_token=_text(model, model.eos),
        )
    except _RefusalError as error:
        raise UsageError(
            f"{model.name}: its chat template refuses the messages: {error}"
        ) from error
    except Exception as error:
        raise _does_not_work(model, error) from error


def _does_not_work(model: Model, error: Exception) -> ModelError:
    return ModelError(
        f"{model.name}: its chat template does not work: {type(error).__name__}: {error}; "
        "continue a text with `pyspec generate --raw`"
    )


def prompt_ids(
    model: Model,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    begun: str = "",
) -> list[int]:
    """Token ids of a conversation, ready for the assistant's turn. Raises as render does.

    Args:
        model: Whose template and vocabulary to use.
        messages: As for render.
        tools: As for render.
        begun: How the assistant's answer begins, for the model to go on from.
    """
    text = render(model, messages, tools=tools) + begun
    bos = _text(model, model.bos)
    if model.adds_bos and bos:
        # The tokenizer adds it as well, and a model must not see it twice.
        text = text.removeprefix(bos)
    return model.tokenize(text)


def message_ids(model: Model, text: str) -> list[int]:
    """Token ids of a user's message, or of the text as it is where the model has no template."""
    if model.chat_template is None:
        return model.tokenize(text)
    return prompt_ids(model, [{"role": "user", "content": text}])


def _text(model: Model, token: int) -> str:
    return model.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""
