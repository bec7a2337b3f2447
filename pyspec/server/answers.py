"""From pieces to what the API returns, in chunks and whole."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Protocol

from pyspec.llama import Model
from pyspec.metrics import Statistics
from pyspec.output import Piece, Source, Token
from pyspec.server.prepare import Plan
from pyspec.server.schemas import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    Extra,
    FinishReason,
    MadeToolCall,
    PromptDetails,
    TokenLogprob,
    ToolCallFunction,
    TopLogprob,
    Usage,
    WrittenToken,
)
from pyspec.server.tools import Call, ToolCallParser
from pyspec.vocab import TokenDecoder

_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class Answer(Protocol):
    """All choices of a request, fed with pieces. Each method returns JSON."""

    def beginning(self) -> list[str]:
        """Chunks that come before any piece."""

    def chunk(self, index: int, piece: Piece) -> str:
        """Take in a piece of a choice, and return it as a chunk."""

    def usage_chunk(self) -> str:
        """The chunk that only tells the usage."""

    def whole(self) -> str:
        """Everything that was taken in."""


class _Envelope:
    """What stands around the choices.

    Args:
        kind: How its id begins.
        model_name: What the model is called.
        plan: What is generated.
        show_usage: Whether the stream will end with the usage; its other chunks then say that it is null.
    """

    def __init__(self, kind: str, model_name: str, plan: Plan, *, show_usage: bool) -> None:
        self._fields: dict[str, Any] = {
            "id": f"{kind}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model_name,
            "system_fingerprint": "pyspec",
        }
        self._prompt_tokens = sum(map(len, plan.prompts))
        self._completion_tokens = self._cached_tokens = 0
        self._show_usage = show_usage

    def count(self, statistics: Statistics) -> None:
        self._completion_tokens += statistics.completion_tokens
        self._cached_tokens += statistics.cached_tokens

    def of_chunk(self) -> dict[str, Any]:
        return {**self._fields, "usage": None} if self._show_usage else self._fields

    def with_usage(self) -> dict[str, Any]:
        prompt, completion = self._prompt_tokens, self._completion_tokens
        # Of several answers to a prompt, all but the first find it evaluated.
        cached = min(prompt, self._cached_tokens)
        usage = Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptDetails(cached_tokens=cached),
        )
        return {**self._fields, "usage": usage}


class _TokenTexts:
    """The bytes of tokens, such that those of all make the text."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._decoder = TokenDecoder(model)

    def bytes_of(self, token: Token) -> bytes:
        """The token's bytes, without what a stop string cut off."""
        whole, text = self._model.piece(token.id), self._decoder.text(token.id)
        if text != token.text and text.startswith(token.text):
            whole = whole[: len(whole) - len(text[len(token.text) :].encode())]
        return whole

    def likely(self, token: int) -> bytes:
        """The bytes of a token that might have been; control tokens show their names."""
        return self._model.piece(token, special=True)


def _written(piece: Piece) -> list[WrittenToken]:
    return [
        WrittenToken(text=token.text, drafted=token.source is Source.DRAFT)
        for token in piece.tokens
    ]


# ---- chat --------------------------------------------------------------------------------------------


class _ChatWriter:
    """One answer of a chat."""

    def __init__(self, index: int, model: Model, plan: Plan) -> None:
        self._index = index
        self._texts = _TokenTexts(model)
        self._wants_logprobs = plan.params[0].logprobs is not None
        self._parser = (
            None if plan.tool_names is None else ToolCallParser(plan.tool_names, plan.begun)
        )
        self._content = ""
        self._calls: list[MadeToolCall] = []
        self._logprobs: list[TokenLogprob] = []
        self._statistics = Statistics()

    def push(self, piece: Piece) -> ChatChunkChoice:
        """Take in a piece; returns what it adds."""
        delta: dict[str, Any] = {}
        content, calls = self._split(piece)
        if content:
            delta["content"] = content
        if calls:
            delta["tool_calls"] = calls
        logprobs = [self._logprob(token) for token in piece.tokens] if self._wants_logprobs else []
        self._content += content
        self._calls += calls
        self._logprobs += logprobs
        extra = Extra(tokens=_written(piece))
        finish_reason = None
        if piece.statistics is not None:
            self._statistics = piece.statistics
            finish_reason = self._finish_reason()
            extra = Extra(tokens=extra.tokens, statistics=piece.statistics.as_dict())
        return ChatChunkChoice(
            index=self._index,
            delta=Delta(**delta),
            logprobs=ChatLogprobs(content=logprobs, refusal=None) if logprobs else None,
            finish_reason=finish_reason,
            pyspec=extra,
        )

    def whole(self) -> ChatChoice:
        """All that was taken in, at the end."""
        message: dict[str, Any] = {"role": "assistant", "content": self._content, "refusal": None}
        if self._calls:
            message["content"] = self._content if self._content.strip() else None
            message["tool_calls"] = self._calls
        return ChatChoice(
            index=self._index,
            message=Delta(**message),
            logprobs=ChatLogprobs(content=self._logprobs, refusal=None)
            if self._wants_logprobs
            else None,
            finish_reason=self._finish_reason(),
            pyspec=Extra(statistics=self._statistics.as_dict()),
        )

    def _split(self, piece: Piece) -> tuple[str, list[MadeToolCall]]:
        """The piece's text, and the tool calls that it completes."""
        if self._parser is None:
            return piece.text, []
        first = self._parser.n_calls
        content, calls = self._parser.push(piece.text)
        if piece.statistics is not None:
            rest, last = self._parser.finish()
            content, calls = content + rest, calls + last
        return content, [_made(call, first + i) for i, call in enumerate(calls)]

    def _finish_reason(self) -> FinishReason:
        reason = _FINISH_REASONS[self._statistics.finish_reason]
        return "tool_calls" if self._calls and reason == "stop" else reason

    def _logprob(self, token: Token) -> TokenLogprob:
        assert token.logprob is not None
        likely = [(self._texts.likely(id_), logprob) for id_, logprob in token.top_logprobs]
        return TokenLogprob(
            token=token.text,
            logprob=token.logprob,
            bytes=list(self._texts.bytes_of(token)),
            top_logprobs=[
                TopLogprob(token=text.decode("utf-8", "replace"), logprob=logprob, bytes=list(text))
                for text, logprob in likely
            ],
        )


def _made(call: Call, index: int) -> MadeToolCall:
    return MadeToolCall(
        index=index,
        id=f"call_{secrets.token_hex(12)}",
        type="function",
        function=ToolCallFunction(name=call.name, arguments=call.arguments),
    )


class ChatAnswer:
    """The answers to a conversation."""

    def __init__(self, model: Model, model_name: str, plan: Plan, *, show_usage: bool) -> None:
        self._envelope = _Envelope("chatcmpl", model_name, plan, show_usage=show_usage)
        self._writers = [_ChatWriter(index, model, plan) for index in range(len(plan.params))]

    def beginning(self) -> list[str]:
        """Who speaks."""
        return [
            self._chunk(
                [
                    ChatChunkChoice(
                        index=index,
                        delta=Delta(role="assistant", content=""),
                        logprobs=None,
                        finish_reason=None,
                    )
                ]
            )
            for index in range(len(self._writers))
        ]

    def chunk(self, index: int, piece: Piece) -> str:
        """Take in a piece of a choice, and return it as a chunk."""
        if piece.statistics is not None:
            self._envelope.count(piece.statistics)
        return self._chunk([self._writers[index].push(piece)])

    def _chunk(self, choices: list[ChatChunkChoice]) -> str:
        return ChatChunk(
            object="chat.completion.chunk", choices=choices, **self._envelope.of_chunk()
        ).to_json()

    def usage_chunk(self) -> str:
        """The chunk that only tells the usage."""
        return ChatChunk(
            object="chat.completion.chunk", choices=[], **self._envelope.with_usage()
        ).to_json()

    def whole(self) -> str:
        """Everything that was taken in."""
        return ChatCompletion(
            object="chat.completion",
            choices=[writer.whole() for writer in self._writers],
            **self._envelope.with_usage(),
        ).to_json()


# ---- completions -------------------------------------------------------------------------------------


class _TextWriter:
    """One continuation of a text."""

    def __init__(self, index: int, model: Model, plan: Plan) -> None:
        self._index = index
        self._texts = _TokenTexts(model)
        self._wants_logprobs = plan.params[0].logprobs is not None
        self._text = ""
        self._logprobs = _no_logprobs()
        self._statistics = Statistics()

    def push(self, piece: Piece) -> CompletionChoice:
        """Take in a piece; returns what it adds."""
        logprobs = self._read_logprobs(piece) if self._wants_logprobs else None
        self._text += piece.text
        extra = Extra(tokens=_written(piece))
        finish_reason = None
        if piece.statistics is not None:
            self._statistics = piece.statistics
            finish_reason = _FINISH_REASONS[piece.statistics.finish_reason]
            extra = Extra(tokens=extra.tokens, statistics=piece.statistics.as_dict())
        return CompletionChoice(
            index=self._index,
            text=piece.text,
            logprobs=logprobs,
            finish_reason=finish_reason,
            pyspec=extra,
        )

    def whole(self) -> CompletionChoice:
        """All that was taken in, at the end."""
        return CompletionChoice(
            index=self._index,
            text=self._text,
            logprobs=self._logprobs if self._wants_logprobs else None,
            finish_reason=_FINISH_REASONS[self._statistics.finish_reason],
            pyspec=Extra(statistics=self._statistics.as_dict()),
        )

    def _read_logprobs(self, piece: Piece) -> CompletionLogprobs:
        added, offset = _no_logprobs(), len(self._text)
        for token in piece.tokens:
            assert token.logprob is not None
            added.tokens.append(token.text)
            added.token_logprobs.append(token.logprob)
            added.top_logprobs.append(
                {
                    _as_key(self._texts.likely(id_)): logprob
                    for id_, logprob in reversed(token.top_logprobs)
                }
            )
            added.text_offset.append(offset)
            offset += len(token.text)
        whole = self._logprobs
        whole.tokens += added.tokens
        whole.token_logprobs += added.token_logprobs
        whole.top_logprobs += added.top_logprobs
        whole.text_offset += added.text_offset
        return added


def _no_logprobs() -> CompletionLogprobs:
    return CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])


def _as_key(text: bytes) -> str:
    """A token's text; part of a character is spelled as OpenAI does, so that tokens stay apart."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


class CompletionAnswer:
    """The continuations of one or several texts."""

    def __init__(self, model: Model, model_name: str, plan: Plan, *, show_usage: bool) -> None:
        self._envelope = _Envelope("cmpl", model_name, plan, show_usage=show_usage)
        n_choices = len(plan.prompts) * len(plan.params)
        self._writers = [_TextWriter(index, model, plan) for index in range(n_choices)]

    def beginning(self) -> list[str]:
        """Nothing comes before the text."""
        return []

    def chunk(self, index: int, piece: Piece) -> str:
        """Take in a piece of a choice, and return it as a chunk."""
        if piece.statistics is not None:
            self._envelope.count(piece.statistics)
        choice = self._writers[index].push(piece)
        return self._completion([choice], self._envelope.of_chunk())

    def usage_chunk(self) -> str:
        """The chunk that only tells the usage."""
        return self._completion([], self._envelope.with_usage())

    def whole(self) -> str:
        """Everything that was taken in."""
        choices = [writer.whole() for writer in self._writers]
        return self._completion(choices, self._envelope.with_usage())

    def _completion(self, choices: Sequence[CompletionChoice], fields: dict[str, Any]) -> str:
        return Completion(object="text_completion", choices=list(choices), **fields).to_json()
