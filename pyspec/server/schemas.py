"""What the endpoints take and give: OpenAI's fields, those of llama.cpp's server, and our own.

A request may only have fields that are listed here, of the types that are given here. Where null is
allowed it means the default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from pyspec.engine import MAX_WIDTH
from pyspec.sampling import Rule, SamplingParams

_DEFAULTS = SamplingParams()
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16


class _Request(BaseModel):
    """Nothing unknown, no conversions, no infinities."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Response(BaseModel):
    """Only the fields that were given are sent."""

    def to_json(self) -> str:
        return self.model_dump_json(exclude_unset=True)


Text = Annotated[str, StringConstraints(min_length=1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
# The name of a token is a number, as keys of JSON objects are strings.
TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Ignored = Field(default=None, description="Accepted and ignored.")

# ---- what both endpoints take ------------------------------------------------------------------------


class Speculative(_Request):
    """Whether and how to draft. It changes the speed and never the distribution of the text."""

    enabled: bool = Field(default=True, description="Draft at all.")
    gamma: Annotated[int, Field(ge=0, lt=MAX_WIDTH)] | Literal["auto"] | None = Field(
        default=None,
        description="Tokens drafted a round, or auto to choose in each; by default the service's.",
    )
    rule: Literal["block", "token", "coupled"] | None = Field(
        default=None,
        description="How drafted tokens are verified. With coupled, a seed writes the same text with any "
        "draft or none.",
    )

    def chosen_rule(self, default: Rule) -> Rule:
        """The rule, or the service's."""
        return default if self.rule is None else Rule(self.rule)


class StreamOptions(_Request):
    """Options of a streamed answer."""

    include_usage: bool | None = Field(
        default=None, description="End with a chunk that has no choices and the usage."
    )
    include_obfuscation: bool | None = Ignored


class _Sampling(_Request):
    """How tokens are drawn. The defaults are llama.cpp's."""

    model: str | None = Field(
        default=None, description="A name that /v1/models lists; may be left out, as there is one."
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens to write; by default until the model or the context ends.",
    )
    n: int | None = Field(
        default=None, ge=1, description="Answers to write, each with a seed of its own."
    )
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOP_STRINGS)] | None = Field(
        default=None, description="The answer ends before any of these texts."
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**63,
        description="The same seed writes the same text; answer i of n has the seed plus i.",
    )
    temperature: float | None = Field(
        default=None, ge=0, le=2, description=f"0 is greedy. By default {_DEFAULTS.temperature}."
    )
    top_p: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description=f"Keep the likeliest tokens that reach p together. By default {_DEFAULTS.top_p}.",
    )
    top_k: int | None = Field(
        default=None,
        ge=0,
        lt=2**31,
        description=f"Keep the k likeliest tokens; 0 keeps all. By default {_DEFAULTS.top_k}.",
    )
    min_p: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description=f"Keep tokens p times as likely as the likeliest. By default {_DEFAULTS.min_p}.",
    )
    frequency_penalty: float | None = Field(
        default=None,
        ge=-2,
        le=2,
        description="Subtracted from a logit for each occurrence in the window.",
    )
    presence_penalty: float | None = Field(
        default=None,
        ge=-2,
        le=2,
        description="Subtracted from the logits of all tokens in the window.",
    )
    repeat_penalty: float | None = Field(
        default=None,
        ge=0.01,
        le=100,
        description="Divides logits of tokens in the window; 1 is off.",
    )
    repeat_last_n: int | None = Field(
        default=None,
        ge=-1,
        lt=2**31,
        description="The penalties' window: this many of the last tokens, prompt included; -1 is all. "
        f"By default {_DEFAULTS.repeat_last_n}.",
    )
    logit_bias: dict[TokenKey, Bias] | None = Field(
        default=None,
        description="Added to the logits of these token ids; -100 in effect bans a token.",
    )
    stream: bool | None = Field(
        default=None, description="Send the answer as it is written, as server-sent events."
    )
    stream_options: StreamOptions | None = None
    speculative: Speculative = Field(default_factory=lambda: Speculative())
    user: str | None = Ignored


# ---- chat --------------------------------------------------------------------------------------------


class TextPart(_Request):
    """A part of a message. Other kinds than text are refused: the models read text."""

    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class SystemMessage(_Request):
    """What the model is told about the conversation."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = Ignored


class UserMessage(_Request):
    """What the user said."""

    role: Literal["user"]
    content: Content
    name: str | None = Ignored


class CalledFunction(_Request):
    """A function and its arguments."""

    name: Text
    arguments: str = Field(description="A JSON object, as text.")


class ToolCall(_Request):
    """A call that the model made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Ignored


class AssistantMessage(_Request):
    """What the model said."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: list[ToolCall] | None = None
    name: str | None = Ignored
    refusal: str | None = Ignored
    annotations: list[Any] | None = Ignored
    reasoning_content: str | None = Ignored
    audio: None = Ignored
    function_call: None = Ignored


class ToolMessage(_Request):
    """What a tool gave back."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = Ignored


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class Function(_Request):
    """A function that the model may call."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="A JSON schema.")
    strict: bool | None = Ignored


class Tool(_Request):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


class NamedFunction(_Request):
    """The name of a function."""

    name: str


class NamedTool(_Request):
    """The one tool that the model must use."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(_Request):
    """What the answer must look like."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(default=None, description="Always so.")


class TextFormat(_Request):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(_Request):
    """A JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(_Request):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class ChatRequest(_Sampling):
    """A conversation to continue."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="The newer name of max_tokens, and goes before it."
    )
    logprobs: bool | None = Field(
        default=None,
        description="Report log probabilities: the model's own, before any sampling setting.",
    )
    top_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Likeliest tokens to report; needs logprobs.",
    )
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(
        default=None, description="false ends the answer after the first call."
    )
    metadata: dict[str, Any] | None = Ignored
    modalities: list[Literal["text"]] | None = Ignored
    prediction: dict[str, Any] | None = Ignored
    prompt_cache_key: str | None = Ignored
    reasoning_effort: str | None = Ignored
    safety_identifier: str | None = Ignored
    service_tier: str | None = Ignored
    store: bool | None = Ignored
    verbosity: str | None = Ignored


class CompletionRequest(_Sampling):
    """Texts to continue."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] = Field(
        description="A text, token ids, or several of either."
    )
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Report log probabilities of each token and of this many likeliest ones.",
    )
    best_of: int | None = Field(default=None, ge=1, description="Only the same as n.")
    echo: Literal[False] | None = None
    suffix: None = None


# ---- answers -----------------------------------------------------------------------------------------


class ErrorDetail(_Response):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(_Response):
    """A refused or failed request."""

    error: ErrorDetail


class PromptDetails(_Response):
    """What of the prompts was evaluated before."""

    cached_tokens: int


class Usage(_Response):
    """Tokens of a request; the prompt of several answers counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class WrittenToken(_Response):
    """A token of the answer, as it was written."""

    text: str
    drafted: bool = Field(description="Proposed by the draft and accepted.")


class Extra(_Response):
    """What pyspec adds to a choice."""

    tokens: list[WrittenToken] = Field(
        default=[], description="In chunks of a stream: the tokens of a round."
    )
    statistics: dict[str, Any] = Field(
        default={},
        description="At the end: times and acceptance, as `pyspec generate --stats json` prints them.",
    )


class TopLogprob(_Response):
    """A likely token and its log probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer; the bytes of all make the text."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Response):
    """Log probabilities of a chat answer."""

    content: list[TokenLogprob]
    refusal: None = None


class ToolCallFunction(_Response):
    """A function and its arguments, a JSON object as text."""

    name: str
    arguments: str


class MadeToolCall(_Response):
    """A call that the model makes."""

    index: int = Field(default=0, description="In chunks of a stream.")
    id: str
    type: Literal["function"]
    function: ToolCallFunction


class Delta(_Response):
    """What a chunk adds to an answer, or in whole answers all of it."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: None = None
    tool_calls: list[MadeToolCall] = []


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(_Response):
    """A whole answer."""

    index: int
    message: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    pyspec: Extra


class ChatChunkChoice(_Response):
    """What a chunk adds to one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    pyspec: Extra = Field(default_factory=lambda: Extra())


class CompletionLogprobs(_Response):
    """Log probabilities of a completion, a list item for each token; the tokens joined are the text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(_Response):
    """A text, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    pyspec: Extra = Field(default_factory=lambda: Extra())


class _Answer(_Response):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = None


class ChatCompletion(_Answer):
    """All answers to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatChunk(_Answer):
    """A piece of a streamed answer."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class Completion(_Answer):
    """All continuations of a text, or a piece of them."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ModelCard(_Response):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int
    draft: str | None


class ModelList(_Response):
    """The models that are served: one."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(_Response):
    """Whether the service takes requests."""

    status: Literal["ok", "stopping"]
    model: str
    slots: int
    running: int
    waiting: int
