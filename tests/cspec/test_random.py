import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspec._cspec import ffi, lib

# Lines "philox4x32 10" of tests/kat_vectors in Random123 (github.com/DEShawResearch/random123):
# counter, key, output. The third input is digits of pi.
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]

words64 = st.integers(0, 2**64 - 1)
words32 = st.integers(0, 2**32 - 1)


def philox(counter: list[int], key: list[int]) -> list[int]:
    out = ffi.new("uint32_t[4]")
    lib.cspec_philox(counter, key, out)
    return list(out)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    counter, key, expected = (
        [int(word, 16) for word in words.split()] for words in (counter, key, expected)
    )
    assert philox(counter, key) == expected


@given(seed=words64, stream=words32, round_=words64, index=words32)
def test_uniform_is_the_top_53_bits_of_the_block_of_its_arguments(seed, stream, round_, index):
    block = philox(
        [round_ & 0xFFFFFFFF, round_ >> 32, index, stream], [seed & 0xFFFFFFFF, seed >> 32]
    )
    bits = (block[0] << 32 | block[1]) >> 11
    assert lib.cspec_uniform(seed, stream, round_, index) == bits / 2**53 < 1


@given(seed=words64, stream=words32, round_=words64, index=words32, bit=st.integers(0, 191))
def test_uniform_depends_on_every_bit_of_its_arguments(seed, stream, round_, index, bit):
    packed = seed << 128 | stream << 96 | round_ << 32 | index

    def uniform(packed):
        return lib.cspec_uniform(
            packed >> 128,
            packed >> 96 & 0xFFFFFFFF,
            packed >> 32 & (2**64 - 1),
            packed & 0xFFFFFFFF,
        )

    assert uniform(packed) != uniform(packed ^ 1 << bit)


def test_uniform_is_uniform():
    n = 20000
    sample = [lib.cspec_uniform(3, 1, i, 0) for i in range(n)]
    # The deviations of mean and variance have standard errors 1/sqrt(12 n) and 1/sqrt(180 n).
    assert abs(sum(sample) / n - 1 / 2) < 5 / math.sqrt(12 * n)
    assert abs(sum((u - 1 / 2) ** 2 for u in sample) / n - 1 / 12) < 5 / math.sqrt(180 * n)
