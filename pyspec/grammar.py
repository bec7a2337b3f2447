"""Structured output: a grammar for the text, and the tokens that keep to it at each place.

Parsing is llguidance's. What is allowed at a place is exactly every token whose bytes leave a beginning of
one of the grammar's texts, and the end-of-generation tokens where the text is one. That is a function of the
tokens before the place alone. It applies to the target and the draft alike, and a text that was verified is
distributed as one without a draft.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pyspec.errors import ModelError, UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from pyspec.llama import Model

# Grammars come from strangers: a second or so of work is the most that one of this many bytes makes.
MAX_BYTES = 2**16

# A model that may write any whitespace between two values may go on with it until its tokens are used up.
_WHITESPACE = r"[ ]|\n[ \t]{0,20}"

# Places whose masks are kept: more than a round looks at.
_KEPT = 64

# What llguidance calls a place after which no token of the vocabulary can follow.
_DEAD_END = "NoExtensionBias"


@dataclass(frozen=True)
class Grammar:
    """What a text may be. Made by the class methods, which check it.

    Attributes:
        definition: The grammar as llguidance takes it.
    """

    definition: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any]) -> Grammar:
        """JSON that a schema describes. Objects have their properties in the schema's order.

        Nothing is fetched: a $ref must point into the schema. Between values there may be a space or an
        indented new line; "x-guidance" in the schema sets this and llguidance's other options.

        Raises:
            UsageError: The schema is wrong, too large, or has keywords that llguidance does not know how to
                enforce.
        """
        name = "JSON schema"
        if not isinstance(schema, Mapping):
            raise UsageError(f"the {name} must be an object, not {type(schema).__name__}")
        options = schema.get("x-guidance", {})
        if not isinstance(options, Mapping):
            raise UsageError(f"x-guidance in the {name} must be an object")
        options = {"whitespace_pattern": _WHITESPACE, **options}
        return cls._checked(name, {"json_schema": {**schema, "x-guidance": options}})

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """A grammar in llguidance's variant of Lark's language; the text is what its rule start produces.

        Raises:
            UsageError: The grammar is wrong or too large.
        """
        return cls._checked("grammar", {"lark_grammar": text})

    @classmethod
    def gbnf(cls, text: str) -> Grammar:
        """A grammar in llama.cpp's language; the text is what its rule root produces.

        Raises:
            UsageError: The grammar is wrong or too large.
        """
        from llguidance.gbnf_to_lark import gbnf_to_lark

        _check_size("grammar", text)
        try:
            lark = gbnf_to_lark(text)
        # It raises a type of its own, and whatever else Python does on deep nesting or odd texts.
        except Exception as error:
            raise UsageError(f"the grammar is not GBNF: {_one_line(str(error))}") from error
        return cls.lark(lark)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A regular expression, in Rust's syntax, for the whole text.

        Raises:
            UsageError: The expression is wrong or too large.
        """
        from llguidance import regex_to_lark

        _check_size("regular expression", pattern)
        lark = f"start: /{regex_to_lark(pattern, '')}/"
        return cls._checked("regular expression", {"lark_grammar": lark})

    @classmethod
    def _checked(cls, name: str, grammar: dict[str, Any]) -> Grammar:
        from llguidance import LLMatcher

        # Where only one text can follow, llguidance would force one tokenization of it. Which tokens a text
        # may be made of is not for a grammar to say; as one inside of another, it has no way to ask for it.
        outer = '%llguidance {"no_forcing": true}\nstart: @text'
        try:
            definition = json.dumps(
                {"grammars": [{"lark_grammar": outer}, {"name": "text", **grammar}]},
                allow_nan=False,
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"the {name} is not JSON: {error}") from error
        _check_size(name, definition)
        complaint = LLMatcher.validate_grammar(definition, limits=_limits())
        if complaint:
            raise UsageError(f"the {name} cannot be used: {_one_line(complaint)}")
        return cls(definition)


class Constraint:
    """The tokens that a grammar allows, place by place, in the text of one request.

    It follows the text wherever it is asked to look: forward token by token, back where tokens were rejected.

    Args:
        grammar: What the text may be.
        model: The target, whose tokens the text is made of. What is worked out about its vocabulary, in a
            second for 150000 tokens, is kept as long as the model.
        n_prompt: Tokens before the text begins.

    Attributes:
        end: An end-of-generation token.

    Raises:
        UsageError: No text of the grammar can be written with the model's tokens, or it is too complex.
        ModelError: The model has no end-of-generation token.
    """

    def __init__(self, grammar: Grammar, model: Model, n_prompt: int) -> None:
        self._grammar = grammar
        self._vocabulary = _vocabulary(model)
        self._n_prompt = n_prompt
        self.end = self._vocabulary.ends[0]
        self._matcher = self._beginning()
        self._text: list[int] = []  # what the matcher has taken in
        self._masks: dict[int, bytes] = {}  # by their place in that text
        self.mask([0] * n_prompt)
        if self._matcher.is_error():
            raise UsageError("the grammar has no text that can be written with the model's tokens")

    def mask(self, history: Sequence[int]) -> bytes | None:
        """What may follow the prompt and the text so far.

        Args:
            history: The prompt and the text, whatever is asked about next.

        Returns:
            A bit for each id, as cspec_probabilities takes it. None where all is allowed: after an end, or
            after a token that was not allowed.

        Raises:
            UsageError: The grammar is too complex to go on with this text.
        """
        text = list(history[self._n_prompt :])
        n = min(len(text), len(self._text))
        while text[:n] != self._text[:n]:
            n -= 1
        if n < len(text) or n not in self._masks:
            if not self._move(text, n):
                return None
            self._masks[len(text)] = self._allowed()
            if len(self._masks) > _KEPT:
                del self._masks[next(iter(self._masks))]
        return self._masks[len(text)]

    def _move(self, text: list[int], n: int) -> bool:
        """Have the matcher take in the text, of which it has the first n tokens. Whether it could."""
        for place in [place for place in self._masks if place > n]:
            del self._masks[place]
        if self._matcher.is_error():
            # A matcher does not come back from a dead end.
            self._matcher = self._beginning()
            self._text.clear()
            n = 0
        if n < len(self._text):
            self._matcher.rollback(len(self._text) - n)
            del self._text[n:]
        following = text[n:]
        n_ends = next((i for i, t in enumerate(following) if t in self._vocabulary.ends), None)
        taken = self._matcher.try_consume_tokens(following[:n_ends])
        self._text += following[:taken]
        self._check()
        return taken == len(following)

    def _allowed(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        self._check()
        # Where no token can follow, the text ends.
        return self._vocabulary.mask_of_ends if self._matcher.is_error() else mask

    def _beginning(self) -> LLMatcher:
        from llguidance import LLMatcher

        vocabulary, definition = self._vocabulary, self._grammar.definition
        matcher = LLMatcher(vocabulary.tokenizer, definition, log_level=0, limits=_limits())
        self._check(matcher)
        return matcher

    def _check(self, matcher: LLMatcher | None = None) -> None:
        error = (matcher or self._matcher).get_error()
        if error and not error.startswith(_DEAD_END):
            raise UsageError(f"the grammar is too complex: {_one_line(error)}")


@dataclass(frozen=True)
class _Vocabulary:
    """What llguidance has to know of a model's tokens."""

    tokenizer: LLTokenizer
    ends: Sequence[int]
    mask_of_ends: bytes


_vocabularies: WeakKeyDictionary[Model, _Vocabulary] = WeakKeyDictionary()
_vocabularies_lock = Lock()


def _vocabulary(model: Model) -> _Vocabulary:
    with _vocabularies_lock:
        if model not in _vocabularies:
            _vocabularies[model] = _read_vocabulary(model)
        return _vocabularies[model]


def _read_vocabulary(model: Model) -> _Vocabulary:
    from llguidance import LLTokenizer, TokenizerWrapper

    ids = range(model.n_vocab)
    ends = [token for token in ids if model.is_end(token)]
    if not ends:
        raise ModelError(
            f"{model.name} has no end-of-generation token, without which no grammar can end its text"
        )
    tokens = _Tokens(
        tokens=[b"" if token in ends else _text(model, token) for token in ids], ends=ends
    )
    mask = bytearray((model.n_vocab + 31) // 32 * 4)
    for token in ends:
        mask[token // 8] |= 1 << token % 8
    return _Vocabulary(LLTokenizer(TokenizerWrapper(tokens), eos_token=ends), ends, bytes(mask))


def _text(model: Model, token: int) -> bytes:
    # 0xFF is in no text, and marks special tokens in llguidance.
    piece = model.piece(token)
    return b"" if b"\xff" in piece else piece


class _Tokens:
    """The vocabulary in the form that llguidance wants from Python."""

    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokens: list[bytes], ends: list[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = ends[0]

    def __call__(self, text: bytes) -> list[int]:
        """Tokenize. Only forced texts are, and nothing is forced."""
        raise NotImplementedError


# Of the parser, at a place and in the search for what may follow. A grammar so ambiguous that it needs more
# takes longer for a token than a pass of the model; an object may have 200 optional properties.
_MAX_ITEMS = 1_000
_MAX_ITEMS_OF_SEARCH = 5_000


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    # The other limits are fit for strangers as they are. Verbose errors would have the whole grammar in them.
    return LLParserLimits(
        max_items_in_row=_MAX_ITEMS, step_max_items=_MAX_ITEMS_OF_SEARCH, verbose_errors=False
    )


def _check_size(name: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise UsageError(f"the {name} is not a text: {error}") from error
    if size > MAX_BYTES:
        raise UsageError(f"the {name} has {size} bytes: at most {MAX_BYTES} are allowed")


def _one_line(message: str) -> str:
    """The first line of a message, and what the regular expressions' parser says below the expression."""
    lines = message.replace("<non-verbose/>", "").strip().splitlines()
    told = [
        lines[0],
        *(line.removeprefix("error: ") for line in lines if line.startswith("error: ")),
    ]
    return " ".join(part if len(part) <= 200 else f"{part[:200]}..." for part in told)
