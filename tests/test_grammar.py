"""Grammars, and the masks that follow a text. Distributions are in tests/test_distribution.py."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from pyspec import Engine, ModelError, SamplingParams, UsageError
from pyspec.grammar import MAX_BYTES, Constraint, Grammar
from pyspec.llama import Model
from tests.models import all_bytes, byte_level, sentence_piece, write_llama

PROMPT = [0, 3, 4]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 3},
        "name": {"type": "string", "maxLength": 5},
    },
    "required": ["colour", "sizes", "name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(chat_target: Path) -> Iterator[Model]:
    """Every byte is a token, and so are a few longer pieces."""
    loaded = Model(chat_target)
    yield loaded
    loaded.close()


def ids_of(mask: bytes | None, model: Model) -> set[int]:
    assert mask is not None
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    assert not bits[model.n_vocab :].any()
    return set(map(int, np.flatnonzero(bits)))


def ends_of(model: Model) -> set[int]:
    return {token for token in range(model.n_vocab) if model.is_end(token)}


# ---- grammars ------------------------------------------------------------------------------------------


def test_grammars_are_values() -> None:
    one, same = Grammar.json_schema(SCHEMA), Grammar.json_schema(dict(SCHEMA))
    assert one == same == pickle.loads(pickle.dumps(one))
    assert {one, same, Grammar.json_object()} == {one, Grammar.json_object()}
    params = SamplingParams(grammar=one)
    assert params == SamplingParams(grammar=same) != SamplingParams()
    with pytest.raises(UsageError, match="grammar must be a Grammar, not 'start"):
        SamplingParams(grammar='start: "a"')  # type: ignore[arg-type]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


CYCLE: dict[str, Any] = {}
CYCLE["items"] = CYCLE

WRONG_SCHEMAS = {
    "an unknown type": ({"type": "strin"}, "Invalid type: strin"),
    "no object": ([1], "must be an object, not list"),
    "not JSON": ({"const": {1, 2}}, "is not JSON: .*set"),
    "not a JSON number": ({"const": float("nan")}, "is not JSON"),
    "a cycle": (CYCLE, "is not JSON: "),
    "deep": (nested(400), "recursion limit exceeded"),
    "too deep for Python": (nested(5000), "is not JSON: maximum recursion"),
    "half a character": ({"const": "\ud800"}, "hex escape"),
    "not enforced": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "impossible": ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types"),
    "a remote reference": ({"$ref": "http://127.0.0.1:9/a.json"}, "does not fetch"),
    "a file's reference": ({"$ref": "file:///etc/passwd"}, "does not fetch"),
    "a wrong pattern": ({"type": "string", "pattern": "("}, "unclosed group"),
    "look-ahead": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "wrong options": ({"x-guidance": 1}, "x-guidance in the JSON schema must be an object"),
    "too large": ({"enum": ["x" * 100] * (MAX_BYTES // 100)}, f"at most {MAX_BYTES} are allowed"),
    "many combinations": (
        {
            "allOf": [
                {"anyOf": [{"properties": {f"{i}{j}": {"const": j}}} for j in range(6)]}
                for i in range(12)
            ]
        },
        "too large",
    ),
}


@pytest.mark.parametrize(("schema", "message"), WRONG_SCHEMAS.values(), ids=WRONG_SCHEMAS)
def test_a_wrong_schema_is_refused_in_one_line(schema: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        Grammar.json_schema(schema)
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("make", "text", "message"),
    [
        (Grammar.lark, "start: foo", 'unknown name: "foo"'),
        (Grammar.lark, 'foo: "a"', "no start rule"),
        (Grammar.lark, "start: " + "(" * 9999 + '"a"' + ")" * 9999, "too deeply nested"),
        (
            Grammar.lark,
            "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(40)) + 'A40: "a"',
            "too big",
        ),
        (Grammar.lark, 'start: "' + "a" * MAX_BYTES + '"', "at most"),
        (Grammar.lark, "%import .secret.NAME\nstart: NAME", "Unknown"),
        (Grammar.gbnf, 'root ::= "a', "not GBNF: "),
        (Grammar.gbnf, "root ::= " + "(" * 9999 + '"a"' + ")" * 9999, "not GBNF: "),
        (Grammar.gbnf, "root ::= x", "not GBNF|unknown name"),
        (Grammar.gbnf, "#" * (MAX_BYTES + 1), "at most"),
        (Grammar.regex, "(a", "unclosed group"),
        (Grammar.regex, r"(a)\1", "backreferences are not supported"),
        (Grammar.regex, "\udc80", "not a text"),
    ],
)
def test_a_wrong_grammar_is_refused_in_one_line(make: Any, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        make(text)
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 500


# Each a more may have come about in many more ways.
AMBIGUOUS = Grammar.lark(
    "start: r0\n" + "".join(f"r{i}: r{i + 1}? r{i + 1}?\n" for i in range(12)) + 'r12: "a"?'
)

# ---- masks ---------------------------------------------------------------------------------------------

TEXTS = {
    " ".join(words) + end
    for words in itertools.product(["the", "he", "iné"], repeat=2)
    for end in (".", "")
}
ALL_KINDS = {
    "lark": Grammar.lark('start: word " " word "."?\nword: "the" | "he" | "iné"'),
    "gbnf": Grammar.gbnf(
        '# words\nroot ::= word " " word [.]?\nword ::= "the" | "he" | "in" [é]\n'
    ),
    "regex": Grammar.regex(r"(the|he|iné) (the|he|iné)\.?"),
    "schema": Grammar.json_schema({"enum": sorted(TEXTS)}),
}


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_what_is_allowed_is_what_keeps_the_text_a_beginning(model: Model, kind: str) -> None:
    """At every place of every text, in every tokenization that a random walk meets."""
    texts = {json.dumps(text, ensure_ascii=False) if kind == "schema" else text for text in TEXTS}
    wanted = {text.encode() for text in texts}
    beginnings = {text[:n] for text in wanted for n in range(len(text) + 1)}
    pieces = {token: model.piece(token) for token in range(model.n_vocab)}
    constraint = Constraint(ALL_KINDS[kind], model, len(PROMPT))
    rng, seen = np.random.default_rng(0), set()
    for _ in range(30):
        ids: list[int] = []
        while True:
            text = b"".join(pieces[token] for token in ids)
            expected = {t for t, piece in pieces.items() if piece and text + piece in beginnings}
            if text in wanted:
                expected |= ends_of(model)
            if kind == "schema":
                # A character of a string may be escaped as well.
                assert expected <= ids_of(constraint.mask([*PROMPT, *ids]), model)
            else:
                assert ids_of(constraint.mask([*PROMPT, *ids]), model) == expected
            token = int(rng.choice(sorted(expected)))
            if token in ends_of(model):
                break
            ids.append(token)
        seen.add(text)
    assert len(seen) > 6


@pytest.mark.parametrize("grammar", [Grammar.json_schema(SCHEMA), Grammar.json_object()])
def test_a_mask_depends_on_the_history_alone(model: Model, grammar: Grammar) -> None:
    """However the places were come to: forward, back over rejected tokens, past forbidden ones, at once."""
    rng = np.random.default_rng(1)
    travelled = Constraint(grammar, model, len(PROMPT))
    ids: list[int] = []
    for _ in range(120):
        allowed = sorted(ids_of(travelled.mask([*PROMPT, *ids]), model))
        fresh = Constraint(grammar, model, len(PROMPT))
        assert ids_of(fresh.mask([*PROMPT, *ids]), model) == set(allowed)
        # A draft goes on from here, in part with tokens that are not allowed, and is looked at row by row.
        draft = [*ids]
        for _ in range(int(rng.integers(5))):
            now = travelled.mask([*PROMPT, *draft])
            anything = now is None or rng.random() < 0.2
            choice = range(model.n_vocab) if anything else sorted(ids_of(now, model))
            draft.append(int(rng.choice(choice)))
        for row in range(len(ids), len(draft) + 1):
            travelled.mask([*PROMPT, *draft[:row]])
        token = int(rng.choice(allowed))
        ids = ids[: int(rng.integers(len(ids) + 1))] if model.is_end(token) else [*ids, token]


def test_a_place_that_draft_and_target_both_ask_for_is_worked_out_once(model: Model) -> None:
    constraint = Constraint(Grammar.regex("[ab]+"), model, len(PROMPT))
    tokens = model.tokenize("abba", add_special=False)
    histories = [[*PROMPT, *tokens[:n]] for n in range(len(tokens) + 1)]
    first = [constraint.mask(history) for history in histories]
    assert all(a is constraint.mask(history) for a, history in zip(first, histories, strict=True))


def test_a_text_longer_than_what_is_kept_can_be_gone_back_in(model: Model) -> None:
    constraint = Constraint(Grammar.regex("(ab)+c"), model, len(PROMPT))
    a, b, c = (model.tokenize(letter, add_special=False)[0] for letter in "abc")
    text = [a, b] * 100
    for n in range(len(text) + 1):
        constraint.mask([*PROMPT, *text[:n]])
    assert ids_of(constraint.mask([*PROMPT, a]), model) == {b}
    assert ids_of(constraint.mask([*PROMPT, *text]), model) == {a, c}


def test_only_ends_follow_a_complete_text_and_nothing_is_forbidden_after_one(model: Model) -> None:
    constraint = Constraint(Grammar.lark('start: "a"'), model, len(PROMPT))
    (a,) = model.tokenize("a", add_special=False)
    assert ids_of(constraint.mask([*PROMPT, a]), model) == ends_of(model)
    assert len(ends_of(model)) > 1
    for end in ends_of(model):
        assert constraint.mask([*PROMPT, a, end]) is None
    assert constraint.mask([*PROMPT, a, a]) is None
    assert ids_of(constraint.mask(PROMPT), model) == {a}


def test_the_bytes_of_an_end_are_no_text(tmp_path: Path) -> None:
    """Some files have an end-of-generation token that spells text, such as </s>."""
    vocabulary = all_bytes()
    name = vocabulary.texts[vocabulary.eos]
    grammar = Grammar.json_schema({"type": "string"})
    model = Model(write_llama(tmp_path / "m.gguf", vocabulary))
    constraint = Constraint(grammar, model, 0)
    text = model.tokenize('"' + name[:2], add_special=False, parse_special=False)
    assert not ids_of(constraint.mask(text), model) & {*ends_of(model), *vocabulary.controls}
    model.close()


def test_the_byte_0xff_is_no_text(tmp_path: Path) -> None:
    for vocabulary in (byte_level(), sentence_piece()):
        model = Model(write_llama(tmp_path / f"{vocabulary.model}.gguf", vocabulary))
        (ff,) = [t for t in range(model.n_vocab) if model.piece(t) == b"\xff"]
        mask = ids_of(Constraint(Grammar.regex("(?s:.+)"), model, 0).mask([]), model)
        assert ff not in mask
        assert len(mask) > 5
        model.close()


def lacking(tmp_path: Path) -> Model:
    """Its tokens are a, b and c."""
    return Model(write_llama(tmp_path / "abc.gguf", byte_level(6)))


def test_a_text_that_the_vocabulary_cannot_go_on_with_ends(tmp_path: Path) -> None:
    model = lacking(tmp_path)
    a, b = 3, 4
    constraint = Constraint(Grammar.lark('start: "a" ("z" | "b" "z"?) | "b"'), model, 1)
    assert ids_of(constraint.mask([0, a, b]), model) == ends_of(model)
    constraint = Constraint(Grammar.lark('start: "a" "z" | "b" "c"'), model, 1)
    assert ids_of(constraint.mask([0, a]), model) == ends_of(model)
    # From such a place the way leads back.
    assert ids_of(constraint.mask([0, b]), model) == {5}
    assert ids_of(constraint.mask([0]), model) == {a, b}
    model.close()


def test_a_grammar_of_which_nothing_can_be_written_is_refused(tmp_path: Path) -> None:
    model = lacking(tmp_path)
    for grammar in (
        Grammar.lark('start: "z"'),
        Grammar.lark("start: start"),
        Grammar.json_object(),
    ):
        with pytest.raises(UsageError, match="no text that can be written with the model's tokens"):
            Constraint(grammar, model, 0)
    model.close()


def test_a_model_without_an_end_takes_no_grammar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "is_end", lambda *_: False)
    model = lacking(tmp_path)
    with pytest.raises(ModelError, match="no end-of-generation token"):
        Constraint(Grammar.regex("a"), model, 0)
    model.close()


def test_a_grammar_that_is_too_complex_says_so(model: Model) -> None:
    prime = Grammar.json_schema({"type": "integer", "multipleOf": 999999937})
    with pytest.raises(UsageError, match=r"the grammar is too complex: fuel exhausted") as error:
        Constraint(prime, model, 0)
    assert len(str(error.value).splitlines()) == 1
    # And one that becomes so as the text grows.
    constraint = Constraint(AMBIGUOUS, model, 0)
    text = model.tokenize("a", add_special=False) * 100
    with pytest.raises(UsageError, match="the grammar is too complex"):
        list(map(constraint.mask, itertools.accumulate([token] for token in text)))


# ---- requests ------------------------------------------------------------------------------------------


def outputs(engine: Engine, gamma: int, n: int, **settings: Any) -> list[tuple[str, str]]:
    """Texts and reasons of finishing, of n seeds."""
    found = []
    for seed in range(n):
        pieces = list(engine.generate(PROMPT, SamplingParams(seed=seed, **settings), gamma=gamma))
        statistics = pieces[-1].statistics
        assert statistics is not None
        found.append(("".join(piece.text for piece in pieces), statistics.finish_reason))
    return found


@pytest.fixture(scope="module")
def pair(chat_target: Path, chat_draft: Path) -> Iterator[Engine]:
    with Engine(chat_target, chat_draft, n_ctx=512, threads=1) as engine:
        yield engine


def test_output_keeps_to_a_schema_with_and_without_a_draft(pair: Engine) -> None:
    """Of models whose every token is as likely as any other."""
    settings: dict[str, Any] = {"grammar": Grammar.json_schema(SCHEMA), "max_tokens": 400}
    for gamma in (0, 4):
        for text, reason in outputs(pair, gamma, 15, temperature=1.0, **settings):
            if reason == "stop":
                jsonschema.validate(json.loads(text), SCHEMA)
    greedy = outputs(pair, 0, 1, temperature=0, **settings)
    assert greedy[0][1] == "stop"
    for gamma in (1, 4, 9):
        assert outputs(pair, gamma, 1, temperature=0, **settings) == greedy


def test_max_tokens_may_cut_a_text(pair: Engine) -> None:
    settings: dict[str, Any] = {"grammar": Grammar.regex("a{40}"), "max_tokens": 17}
    for gamma in (0, 4):
        assert outputs(pair, gamma, 1, **settings) == [("a" * 17, "length")]


def test_with_the_coupled_rule_a_seed_writes_the_same_with_any_draft(pair: Engine) -> None:
    params = SamplingParams(seed=3, grammar=Grammar.json_schema(SCHEMA), max_tokens=200)
    texts = {
        "".join(p.text for p in pair.generate(PROMPT, params, gamma=gamma, rule="coupled"))
        for gamma in (0, 2, 5)
    }
    assert len(texts) == 1


def test_where_the_bias_forbids_what_the_grammar_leaves_the_text_ends(pair: Engine) -> None:
    (a,) = pair.target.tokenize("a", add_special=False)
    bans = dict.fromkeys([*ends_of(pair.target), a], -np.inf)
    grammar = Grammar.regex("bca?d?")
    for gamma in (0, 4):
        for temperature in (0.0, 1.0):
            settings: dict[str, Any] = {"temperature": temperature, "grammar": grammar}
            for text, reason in outputs(pair, gamma, 3, logit_bias=bans, **settings):
                assert (text, reason) in (("bcd", "stop"), ("bc", "stop"))


def test_several_requests_keep_each_to_its_own_grammar(chat_target: Path, chat_draft: Path) -> None:
    with Engine(chat_target, chat_draft, n_ctx=256, threads=1, parallel=3) as engine:
        texts = ("a{9}", "b{15}", "(ab){5}")
        requests = [
            engine.start(PROMPT, SamplingParams(grammar=Grammar.regex(text), seed=1))
            for text in texts
        ]
        written = dict.fromkeys(requests, "")
        while under_way := [request for request in requests if not request.finished]:
            for request, piece in zip(under_way, engine.step(under_way), strict=True):
                written[request] += piece.text
        assert list(written.values()) == ["a" * 9, "b" * 15, "ab" * 5]


def test_a_grammar_that_becomes_too_complex_ends_its_request_alone(chat_target: Path) -> None:
    with Engine(chat_target, n_ctx=1024, threads=1, parallel=2) as engine:
        endless = SamplingParams(
            grammar=AMBIGUOUS,
            logit_bias=dict.fromkeys(ends_of(engine.target), -1000.0),
        )
        wrong, right = (
            engine.start(PROMPT, params)
            for params in (endless, SamplingParams(max_tokens=300, logit_bias=endless.logit_bias))
        )
        while under_way := [request for request in (wrong, right) if not request.finished]:
            engine.step(under_way)
        assert isinstance(wrong.error, UsageError)
        assert right.error is None
        assert right.statistics.completion_tokens == 300
