"""From a request to the generations that answer it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspec import chat
from pyspec.engine import Engine, Gamma
from pyspec.errors import ModelError, UsageError
from pyspec.grammar import Constraint, Grammar
from pyspec.sampling import Rule, SamplingParams
from pyspec.server import tools
from pyspec.server.errors import ApiError
from pyspec.server.schemas import (
    AssistantMessage,
    ChatRequest,
    CompletionRequest,
    Content,
    JsonSchemaFormat,
    Message,
    NamedTool,
    TextFormat,
    ToolMessage,
)
from pyspec.server.settings import Settings


@dataclass(frozen=True)
class Plan:
    """What to generate.

    Attributes:
        prompts: Token ids of each prompt.
        params: Sampling settings of each answer to a prompt; answers to the first prompt come first.
        gamma: Tokens drafted a round; None leaves it to the engine.
        rule: How drafted tokens are verified.
        tool_names: Functions that may be called; None if there are no tools.
        begun: The part of the answer that was written for the model.
    """

    prompts: list[list[int]]
    params: list[SamplingParams]
    gamma: Gamma | None
    rule: Rule
    tool_names: frozenset[str] | None = None
    begun: str = ""


class Preparer:
    """Reads requests for one engine. Its methods are slow on long texts: call them off the event loop."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    def chat_plan(self, request: ChatRequest) -> Plan:
        """Read a chat request.

        Raises:
            ApiError: A field has a value that does not fit the model or the limits.
        """
        if request.top_logprobs is not None and not request.logprobs:
            raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
        if self._engine.target.chat_template is None:
            raise ApiError(
                "the model has no chat template: use /v1/completions", code="no_chat_template"
            )
        limit_name = (
            "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        )
        max_tokens = request.max_completion_tokens or request.max_tokens
        n_top = (request.top_logprobs or 0) if request.logprobs else None
        offered = self._tools(request)
        forced = offered if offered and _is_forced(request) else None
        begun = tools.FORCED_BEGINNING if forced else ""
        params = self._params(request, max_tokens, limit_name, n_top)
        ids = self._chat_prompt(request, offered, begun)
        grammar = self._grammar(request, offered, forced)
        if grammar is not None:
            params = replace(params, grammar=grammar)
        elif offered and request.parallel_tool_calls is False:
            params = replace(params, stop=[*params.stop, tools.CLOSE])
        names = frozenset(tool["function"]["name"] for tool in offered) if offered else None
        return self._plan(request, [ids], params, names, begun)

    def completion_plan(self, request: CompletionRequest) -> Plan:
        """Read a completion request. Raises as chat_plan does."""
        if request.best_of not in (None, request.n or 1):
            raise ApiError("best_of can only be the same as n", param="best_of")
        params = self._params(request, request.max_tokens, "max_tokens", request.logprobs)
        prompts = [
            self._engine.target.tokenize(prompt) if isinstance(prompt, str) else prompt
            for prompt in _prompts(request.prompt)
        ]
        for ids in prompts or [[]]:
            self._check_length(ids, "prompt")
        return self._plan(request, prompts, params)

    def _plan(
        self,
        request: ChatRequest | CompletionRequest,
        prompts: list[list[int]],
        params: SamplingParams,
        tool_names: frozenset[str] | None = None,
        begun: str = "",
    ) -> Plan:
        n, most = request.n or 1, self._settings.max_choices
        if n * len(prompts) > most:
            name = "n" if n > most or len(prompts) == 1 else "prompt"
            raise ApiError(f"at most {most} answers can be asked for at once", param=name)
        speculative = request.speculative
        return Plan(
            prompts=prompts,
            params=[
                params if params.seed is None else replace(params, seed=(params.seed + i) % 2**64)
                for i in range(n)
            ],
            gamma=speculative.gamma if speculative.enabled else 0,
            rule=speculative.chosen_rule(self._settings.rule),
            tool_names=tool_names,
            begun=begun,
        )

    def _params(
        self,
        request: ChatRequest | CompletionRequest,
        max_tokens: int | None,
        limit_name: str,
        logprobs: int | None,
    ) -> SamplingParams:
        settings = self._settings
        if request.model not in (None, settings.model):
            raise ApiError(
                f"no model is called {request.model!r} here: use {settings.model!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        if request.stream_options is not None and not request.stream:
            raise ApiError("stream_options needs stream to be true", param="stream_options")
        most = settings.max_tokens
        if most is not None and (max_tokens or 0) > most:
            raise ApiError(f"{limit_name} can be at most {most} here", param=limit_name)
        n_vocab = self._engine.target.n_vocab
        bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
        for token in bias:
            if token >= n_vocab:
                raise ApiError(
                    f"logit_bias has token {token}, and the last one is {n_vocab - 1}",
                    param="logit_bias",
                )
        stop = request.stop or []
        given = {
            name: value for name in _SAME_NAMES if (value := getattr(request, name)) is not None
        }
        return SamplingParams(
            logit_bias=bias,
            max_tokens=max_tokens or most,
            stop=[stop] if isinstance(stop, str) else stop,
            logprobs=logprobs,
            **given,
        )

    def _check_length(self, ids: Sequence[int], param: str) -> None:
        most = min(self._engine.n_ctx, self._settings.max_prompt or self._engine.n_ctx)
        if not ids:
            raise ApiError("the prompt is empty: there is nothing to continue", param=param)
        if len(ids) > most:
            raise ApiError(
                f"the prompt has {len(ids)} tokens, and at most {most} fit here: shorten it",
                param=param,
                code="context_length_exceeded",
            )
        n_vocab = self._engine.target.n_vocab
        if max(ids) >= n_vocab:
            raise ApiError(
                f"the prompt has token {max(ids)}, and the last one is {n_vocab - 1}", param=param
            )

    def _tools(self, request: ChatRequest) -> list[dict[str, Any]] | None:
        """The tools to show to the model; of several, only the one that must be called."""
        if not request.tools:
            if request.tool_choice not in (None, "none", "auto"):
                raise ApiError("tool_choice needs tools", param="tool_choice")
            return None
        if request.tool_choice == "none":
            return None
        if isinstance(request.tool_choice, NamedTool):
            name = request.tool_choice.function.name
            chosen = [tool for tool in request.tools if tool.function.name == name]
            if not chosen:
                raise ApiError(
                    f"tool_choice names {name!r}, which is not in tools", param="tool_choice"
                )
            return [tool.model_dump(exclude_none=True) for tool in chosen]
        return [tool.model_dump(exclude_none=True) for tool in request.tools]

    def _grammar(
        self,
        request: ChatRequest,
        offered: Sequence[Mapping[str, Any]] | None,
        forced: Sequence[Mapping[str, Any]] | None,
    ) -> Grammar | None:
        """What the answer must be, if anything: a call of one of the forced tools, or JSON."""
        wanted = request.response_format
        if isinstance(wanted, TextFormat):
            wanted = None
        if wanted is not None and offered:
            raise ApiError(
                "an answer cannot be of a format and call tools: leave one of them out",
                param="response_format",
            )
        if not forced and wanted is None:
            return None
        at = "tools" if forced else "response_format"
        try:
            if forced:
                grammar = Grammar.json_schema(tools.schema_of_call(forced))
            elif isinstance(wanted, JsonSchemaFormat):
                at = "response_format.json_schema.schema"
                grammar = Grammar.json_schema(wanted.json_schema.schema_)
            else:
                grammar = Grammar.json_object()
            # Tried here, where the answers that are being written do not wait for it.
            Constraint(grammar, self._engine.target, n_prompt=0)
        except (UsageError, ModelError) as error:
            raise ApiError(str(error), param=at) from error
        return grammar

    def _chat_prompt(
        self, request: ChatRequest, offered: Sequence[Mapping[str, Any]] | None, begun: str
    ) -> list[int]:
        messages = [_for_template(message) for message in request.messages]
        try:
            if offered and not self._knows_tools(messages, offered):
                raise ApiError(
                    "the model's chat template has no tools that are understood here: leave them out",
                    param="tools",
                )
            ids = chat.prompt_ids(self._engine.target, messages, tools=offered, begun=begun)
        except (ModelError, UsageError) as error:
            raise ApiError(
                f"the messages do not fit the model's chat template: {error.__cause__ or error}",
                param="messages",
            ) from error
        self._check_length(ids, "messages")
        return ids

    def _knows_tools(
        self, messages: Sequence[chat.Message], offered: Sequence[Mapping[str, Any]]
    ) -> bool:
        target = self._engine.target
        return tools.OPEN in (target.chat_template or "") and chat.render(
            target, messages, tools=offered
        ) != chat.render(target, messages)


# Fields that SamplingParams has under the same name.
_SAME_NAMES = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "frequency_penalty",
    "presence_penalty",
    "repeat_last_n",
    "seed",
)


def _is_forced(request: ChatRequest) -> bool:
    """Whether a tool must be called."""
    return request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One prompt or several, as a list of them."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [item for item in prompt if not isinstance(item, int)]


def _for_template(message: Message) -> dict[str, Any]:
    """A message as chat templates expect it."""
    seen: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message.content),
    }
    if isinstance(message, AssistantMessage) and message.tool_calls:
        seen["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _as_object(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    if isinstance(message, ToolMessage):
        seen["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            seen["name"] = message.name
    return seen


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def _as_object(arguments: str) -> Any:
    """Templates write arguments as JSON themselves; what is none is passed on as it is."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
