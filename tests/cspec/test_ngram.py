"""The suffix index against a search of the whole text."""

from collections import Counter
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyspec._cspec import ffi, lib

SEPARATOR = -1


class Index:
    """The C functions, with nothing added."""

    def __init__(self, text=(), max_match=32):
        self.index = ffi.gc(lib.cspec_ngram_new(max_match), lib.cspec_ngram_free)
        self.push(text)

    def push(self, tokens):
        assert lib.cspec_ngram_push(self.index, list(tokens), len(tokens)) == lib.CSPEC_OK

    def truncate(self, length):
        lib.cspec_ngram_truncate(self.index, length)

    def __len__(self):
        return lib.cspec_ngram_length(self.index)

    @property
    def bytes(self):
        return lib.cspec_ngram_bytes(self.index)

    def continuation(self, tail, n, min_match=1):
        """[(token, match, followed, total)]."""
        out = [ffi.new("int32_t[]", n) for _ in range(4)]
        found = lib.cspec_ngram_continue(self.index, list(tail), len(tail), n, min_match, *out)
        return list(zip(*(list(column)[:found] for column in out), strict=True))


def naive_continuation(text, tail, n, min_match=1, max_match=32):
    """By definition: at each step every place of the text where an end of the tail occurs is looked at."""
    tail, found = list(tail), []
    for _ in range(n):
        for match in range(min(max_match, len(tail)), min_match - 1, -1):
            end = tail[len(tail) - match :]
            followers = [
                text[at + match]
                for at in range(len(text) - match)
                if text[at : at + match] == end and text[at + match] >= 0
            ]
            if min(end) >= 0 and followers:
                break
        else:
            break
        token = followers[-1]
        found.append((token, match, Counter(followers)[token], len(followers)))
        tail.append(token)
    return found


def texts(max_size=60):
    """Few ids, so that much repeats: of them some separators, and runs of one id."""
    runs = st.lists(st.tuples(st.integers(SEPARATOR, 3), st.integers(1, 6)), max_size=max_size // 3)
    return runs.map(lambda runs: [id_ for id_, n in runs for _ in range(n)][:max_size])


@settings(max_examples=300)
@given(texts(), texts(12), st.integers(0, 8), st.integers(1, 3), st.sampled_from([3, 5, 32]))
@example([0] * 40, [0] * 40, 8, 2, 5)
@example([0, 1, SEPARATOR, 0, 1], [0, 1], 4, 1, 32)
@example([0, 1, 2, 0, 1, SEPARATOR, 0, 1, 3], [0, 1], 4, 1, 32)
def test_proposals_are_those_of_a_search_of_the_whole_text(text, tail, n, min_match, max_match):
    index = Index(text, max_match)
    for query in (tail, text):
        expected = naive_continuation(text, query, n, min_match, max_match)
        assert index.continuation(query, n, min_match) == expected


@given(texts(), texts(20), st.integers(0, 60))
def test_a_text_cut_back_is_as_if_the_rest_had_never_been_there(text, more, length):
    index = Index([*text, *more])
    index.truncate(length)
    index.push(more)
    whole = [*text, *more][:length] + more
    fresh = Index(whole)
    assert len(index) == len(fresh) == len(whole)
    assert index.continuation(whole, 8) == fresh.continuation(whole, 8)
    assert index.continuation(more, 8) == fresh.continuation(more, 8)


@given(texts())
def test_pushing_one_by_one_is_pushing_at_once(text):
    index = Index()
    for length, token in enumerate(text):
        assert index.continuation(text[:length], 3) == naive_continuation(
            text[:length], text[:length], 3
        )
        index.push([token])
    assert index.continuation(text, 3) == Index(text).continuation(text, 3)


def test_the_most_recent_of_the_longest_matches_is_copied():
    """Of fault reports: a match of one token, or the earliest place, is a poor guess."""
    text = [1, 2, 3, 10, 7, 2, 3, 20, 1, 2, 3, 30, 9, 2, 3, 40, 1, 2, 3]
    assert Index(text).continuation(text, 1) == [(30, 3, 1, 2)]
    assert Index(text[1:]).continuation([2, 3], 1) == [(40, 2, 1, 4)]


def test_a_copy_goes_on_past_the_end_of_the_text():
    text = [0, 1, 2, 0, 1, 2]
    assert [token for token, *_ in Index(text).continuation(text, 7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("match", [1, 2, 5])
def test_a_match_shorter_than_wanted_is_none(match):
    text = [*range(10, 10 + match), 7, 8, *range(10, 10 + match)]
    assert Index(text).continuation(text, 1, match) == [(7, match, 1, 1)]
    assert Index(text).continuation(text, 1, match + 1) == []


TEXTS = {
    "one id": lambda n: [0] * n,
    "a period of 7": lambda n: [i % 7 for i in range(n)],
    "no repeats": lambda n: list(range(n)),
    "random": lambda n: Random(0).choices(range(20), k=n),
}


@pytest.mark.parametrize("text", TEXTS)
def test_memory_is_linear(text):
    # Past a doubling of every table, where most of each is yet unused.
    n = 2**14 + 100
    once, twice = (Index(TEXTS[text](size)).bytes for size in (n, 2 * n))
    assert once < twice <= 2 * once
    # A token's 4 bytes, two nodes of 24 and their slots of 2 * 4, each table up to twice too large.
    assert once <= 2 * n * (4 + 2 * (24 + 2 * 4))
