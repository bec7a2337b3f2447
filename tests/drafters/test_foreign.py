"""A draft of another vocabulary: its view of the text, and the same text with and without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from gguf import TokenType
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspec.drafters.foreign import ForeignDrafter, Retelling
from pyspec.engine import Engine
from pyspec.llama import Context, Model
from pyspec.sampling import Rule, Sampler
from pyspec.vocab import SharedTokens, Speller
from tests.models import Vocabulary, all_bytes, byte_level, sentence_piece, write_llama
from tests.test_engine import GREEDY, SAMPLED, finish, with_params

# "few" lacks most bytes; "other" is it in another order, with less and more.
FEW = byte_level()
OTHER = FEW.reordered([23, 9, 2, 1, 0, 13, 12, *range(3, 9), *range(16, 20), 10]).spelled(15, "x")
KINDS = {"bytes": all_bytes(), "sentences": sentence_piece(), "few": FEW, "other": OTHER}
PAIRS = [(target, draft) for target in KINDS for draft in KINDS if target != draft]
of_every_pair = pytest.mark.parametrize(
    ("target", "draft"), PAIRS, ids=[f"{draft} for {target}" for target, draft in PAIRS]
)


@pytest.fixture(scope="module")
def loaded(models: Path) -> Iterator[dict[str, Model]]:
    found = {
        name: Model(write_llama(models / f"kind-{i}.gguf", vocabulary, width=32, layers=1))
        for i, (name, vocabulary) in enumerate(KINDS.items())
    }
    yield found
    for model in found.values():
        model.close()


# ---- the text in the draft's tokens --------------------------------------------------------------------


@pytest.fixture(scope="module")
def retelling(loaded: dict[str, Model]) -> Callable[[str, str], Retelling]:
    """Makes an empty retelling of a kind of target in a kind of draft."""
    shared = {(t, d): SharedTokens(loaded[t], loaded[d]) for t, d in PAIRS}
    return lambda t, d: Retelling(loaded[t], loaded[d], shared[t, d])


def parts(vocabulary: Vocabulary, ids: Sequence[int]) -> list[bytes | str]:
    """The text of ids, and the names of controls between it.

    The tokenizer's own additions are left out: BOS, and SentencePiece's space before a text.
    """
    found: list[bytes | str] = [b""]
    for place, token in enumerate(ids):
        meaning = vocabulary.meaning(token)
        if isinstance(meaning, bytes):
            found[-1] += meaning  # type: ignore[operator]
        elif place > 0 or token != vocabulary.bos:
            found += [meaning, b""]
    if vocabulary.model == "llama":
        found[::2] = [text.removeprefix(b" ") for text in found[::2]]  # type: ignore[arg-type]
    return found


def expected_parts(
    target: Vocabulary, draft: Vocabulary, shared: SharedTokens, ids: Sequence[int]
) -> list[bytes | str]:
    """What a draft is to be told: names of twins, other names as text, and the bytes that it has."""
    twins = {
        target.texts[token]: draft.texts[shared.to_draft[token]]
        for token in target.controls
        if shared.to_draft[token] >= 0
    }
    meanings = draft.ids_of_meanings()
    found: list[bytes | str] = [b""]
    for part in parts(target, ids):
        if part in twins:
            found += [twins[part], b""]  # type: ignore[index]
        else:
            text = part if isinstance(part, bytes) else part.encode()
            found[-1] += bytes(byte for byte in text if bytes([byte]) in meanings)  # type: ignore[operator]
    return found


# What the engine does with a drafter between requests' beginnings.
STEPS = st.lists(
    st.tuples(
        st.integers(0, 5),  # tokens drafted
        st.integers(0, 5),  # of which so many stay
        st.lists(st.integers(0, 2**16), min_size=1, max_size=6),  # tokens that follow
    ),
    max_size=6,
)


@of_every_pair
@settings(max_examples=25, deadline=None)
@given(first=st.lists(st.integers(0, 2**16), max_size=12), steps=STEPS, likely=st.booleans())
def test_the_tokens_spell_the_committed_text(
    retelling: Callable[[str, str], Retelling],
    target: str,
    draft: str,
    first: list[int],
    steps: list[tuple[int, int, list[int]]],
    likely: bool,
) -> None:
    """At every step, whatever was drafted, taken back or is the half of a character."""
    vocabulary, text = KINDS[target], retelling(target, draft)
    ids_of = token_choice(vocabulary, likely)
    ids = [vocabulary.bos, *ids_of(first)]
    twins = [t for t in range(len(vocabulary)) if text._shared.to_draft[t] >= 0]
    for n_drafted, n_kept, following in [(0, 0, []), *steps]:
        text.follow(ids)
        told = parts(KINDS[draft], text.tokens)
        assert told == expected_parts(vocabulary, KINDS[draft], text._shared, ids)
        drafted = [twins[(number * 7 + n_kept) % len(twins)] for number in range(n_drafted)]
        for token in drafted:
            text.append(token)
        text.roll_back(len(ids) + n_kept)
        ids += drafted[:n_kept]
        ids += ids_of(following)
        text.roll_back(len(ids) - 1)


def token_choice(vocabulary: Vocabulary, likely: bool) -> Callable[[Sequence[int]], list[int]]:
    """Makes ids of numbers: any, or mostly those of a few characters that are split over tokens."""
    ids = [i for i, kind in enumerate(vocabulary.types) if kind != TokenType.UNKNOWN]
    if likely:
        few = {"a", "b", " ab", " ", "é", "😀", "ab", "\n"}
        spelled = {text.encode() for text in few} | {
            bytes([b]) for text in few for b in text.encode()
        }
        ids = [i for i in ids if not isinstance(m := vocabulary.meaning(i), bytes) or m in spelled]
    return lambda numbers: [ids[number % len(ids)] for number in numbers]


WORDS = st.sampled_from(
    ["the", "inner", "theatre", "on", "a", "he.", "ab", "abé", "cd.\n", "\n\n", ""]
)


@pytest.mark.parametrize(
    ("target", "draft"), [("bytes", "sentences"), ("sentences", "bytes"), ("few", "sentences")]
)
@settings(max_examples=25, deadline=None)
@given(words=st.lists(WORDS, max_size=12), sizes=st.lists(st.integers(1, 4), min_size=1))
def test_the_tokens_are_the_tokenizers_for_the_whole_text(
    loaded: dict[str, Model],
    retelling: Callable[[str, str], Retelling],
    target: str,
    draft: str,
    words: list[str],
    sizes: list[int],
) -> None:
    """However few tokens come at a time."""
    text, typed = retelling(target, draft), " ".join(words)
    ids = loaded[target].tokenize(typed)
    if target == "few":
        typed = b"".join(map(loaded[target].piece, ids)).decode()
    at = 1
    while at < len(ids):
        text.follow(ids[:at])
        at += sizes[at % len(sizes)]
    text.follow(ids)
    assert text.tokens == loaded[draft].tokenize(typed)


@pytest.mark.parametrize("words", ["the ab ", "abtheaé", "😀", "\n"])
def test_new_text_costs_no_more_than_the_last_word(
    loaded: dict[str, Model],
    retelling: Callable[[str, str], Retelling],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The work of a round does not grow with the text, be it in words or not."""
    text, ids = retelling("bytes", "sentences"), loaded["bytes"].tokenize(words * 60)
    spelled = list[int]()
    original = Speller.spell

    def spell(self: Speller, part: bytes, *, begins: bool) -> tuple[list[int], list[int]]:
        spelled.append(len(part))
        return original(self, part, begins=begins)

    monkeypatch.setattr(Speller, "spell", spell)
    for n in range(1, len(ids) + 1):
        text.follow(ids[:n])
    assert 1 < max(spelled) < 40
    assert text.tokens[0] == KINDS["sentences"].bos


# ---- the same text with and without a draft ------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """An engine with a draft of another vocabulary."""

    engine: Engine
    drafter: ForeignDrafter
    vocabularies: tuple[Vocabulary, Vocabulary]
    prompt: Sequence[int]


@contextmanager
def open_pair(folder: Path, target: str, draft: str, *, n_ctx: int = 512) -> Iterator[Pair]:
    """A pair of models that often agree."""
    a, b = KINDS[target], KINDS[draft]
    unlikely = [i for i in range(len(a)) if a.types[i] != TokenType.NORMAL]
    files = (
        write_llama(folder / f"{target}.gguf", a, biases=dict.fromkeys(unlikely, -6.0)),
        write_llama(folder / f"{draft}-{target}.gguf", b, width=32, layers=1, rows=b.rows_like(a)),
    )
    with ExitStack() as stack:
        p, q = (stack.enter_context(closing(Model(file))) for file in files)
        context = Context(q, n_ctx=n_ctx, threads=1)
        drafter = ForeignDrafter(context, p, SharedTokens(p, q))
        stack.callback(drafter.close)
        engine = stack.enter_context(Engine(p, drafter, n_ctx=512, threads=1))
        yield Pair(engine, drafter, (a, b), p.tokenize("ab a cab.\nab"))


@pytest.fixture(
    scope="module", params=[("few", "other"), ("few", "sentences"), ("sentences", "few")]
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    with open_pair(tmp_path_factory.mktemp("pair"), *request.param) as opened:
        yield opened


@pytest.mark.parametrize("gamma", [1, 4, 7])
def test_greedy_text_is_the_same(pair: Pair, gamma: int) -> None:
    plain = finish(pair.engine.generate(pair.prompt, GREEDY, gamma=0))
    drafted = finish(pair.engine.generate(pair.prompt, GREEDY, gamma=gamma))
    assert drafted[:2] == plain[:2]
    assert 0 < drafted[2].accepted < drafted[2].verified


@pytest.mark.parametrize("change", [{"frequency_penalty": 0.7}, {"repeat_penalty": 1.4}], ids=str)
def test_greedy_text_with_penalties_is_the_same(pair: Pair, change: dict[str, float]) -> None:
    params = with_params(GREEDY, **change)
    plain = finish(pair.engine.generate(pair.prompt, params, gamma=0))
    drafted = finish(pair.engine.generate(pair.prompt, params, gamma=4))
    assert drafted[:2] == plain[:2]
    assert drafted[2].accepted > 0


def test_coupled_text_is_the_same(pair: Pair) -> None:
    plain = finish(pair.engine.generate(pair.prompt, SAMPLED, gamma=0, rule=Rule.COUPLED))
    drafted = finish(pair.engine.generate(pair.prompt, SAMPLED, gamma=4, rule=Rule.COUPLED))
    assert drafted[:2] == plain[:2]
    assert drafted[2].accepted > 0


def test_the_cache_holds_the_text_after_rejections_and_requests(pair: Pair) -> None:
    """Each draft step is made from logits that a fresh evaluation of the text in its tokens gives."""
    finish(pair.engine.generate(pair.prompt[:3], SAMPLED, gamma=5))
    pieces = pair.engine.generate(pair.prompt, SAMPLED, gamma=4)
    ids = list(pair.prompt)
    context, rejected = pair.drafter.context, 0
    for _ in range(12):
        tokens = next(pieces).tokens
        rejected += len(tokens) < 5
        ids += [token.id for token in tokens]
        pair.drafter.catch_up(ids)
        told = pair.drafter._text.tokens
        assert len(told) == context.length
        context.truncate(len(told) - 1)
        context.evaluate(told[-1:], n_logits=1)
        found = context.logits(-1).copy()
        with closing(Context(context.model, n_ctx=512, n_batch=16, threads=1)) as fresh:
            fresh.evaluate(told, n_logits=1)
            np.testing.assert_array_equal(found, fresh.logits(-1))
    assert rejected > 0
    pieces.close()


def test_q_is_the_drafts_distribution_over_shared_tokens(pair: Pair) -> None:
    """Of a single draft step: softmax of the logits of tokens with a twin, worked out from the spelling."""
    a, b = pair.vocabularies
    twins = a.ids_of_meanings()
    ids = list(pair.prompt)
    sampler = Sampler(with_params(SAMPLED, temperature=0.7), len(a))
    proposal = pair.drafter.propose(ids, 1, sampler, round_=0)
    with closing(Context(pair.drafter.context.model, n_ctx=512, threads=1)) as fresh:
        fresh.evaluate(pair.drafter._cells, n_logits=1)
        logits = fresh.logits(-1).astype(float) / 0.7
    expected = np.zeros(len(a))
    for meaning, token in b.ids_of_meanings().items():
        if meaning in twins and b.types[token] != TokenType.UNKNOWN:
            expected[twins[meaning]] = math.exp(logits[token])
    np.testing.assert_allclose(proposal.q[0], expected / expected.sum(), rtol=1e-5)


def test_a_short_context_drafts_less_and_then_nothing(tmp_path: Path) -> None:
    with open_pair(tmp_path, "few", "sentences", n_ctx=40) as pair:
        plain = finish(pair.engine.generate(pair.prompt, GREEDY, gamma=0))
        ids, text, statistics = finish(pair.engine.generate(pair.prompt, GREEDY, gamma=4))
        assert (ids, text) == plain[:2]
        assert 0 < statistics.drafted < 40 * 4
        # The text of this prompt does not fit at all.
        long = [*pair.prompt, *pair.prompt[1:] * 8]
        assert finish(pair.engine.generate(long, GREEDY, gamma=4))[2].drafted == 0


def test_a_request_that_forbids_every_shared_token_is_not_drafted_for(tmp_path: Path) -> None:
    with open_pair(tmp_path, "sentences", "few") as pair:
        forbidden = dict.fromkeys(pair.drafter.shared.target_ids.tolist(), -math.inf)
        params = with_params(SAMPLED, logit_bias=forbidden)
        plain = finish(pair.engine.generate(pair.prompt, params, gamma=0))
        written = finish(pair.engine.generate(pair.prompt, params, gamma=4))
        assert written[:2] == plain[:2]
        assert written[2].drafted == 0


def test_an_interrupt_while_drafting_leaves_the_engine_usable(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = finish(pair.engine.generate(pair.prompt, SAMPLED, gamma=4))
    pieces = pair.engine.generate(pair.prompt, SAMPLED, gamma=4)
    next(pieces)
    original = Context._pass

    def interrupted(self: Context, tokens: Sequence[int], n_logits: int) -> None:
        original(self, tokens, n_logits)
        if self is pair.drafter.context:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Context, "_pass", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(pieces)
    assert finish(pair.engine.generate(pair.prompt, SAMPLED, gamma=4))[:2] == whole[:2]
