import ctypes
import itertools
import math

import llama_cpp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyspec._cspec import lib

from tests.cspec.binding import OFF, probabilities, raw_probabilities, softmax_of

FLT_MIN = float(np.finfo(np.float32).tiny)
INF = math.inf


# ---- right values in double -------------------------------------------------------------------


def transformed(logits, settings, seen, bias):
    row = np.array(logits, np.float32)
    for id_, value in bias.items():
        if 0 <= id_ < len(row):
            row[id_] += np.float32(value)
    repeat, frequency, presence = (
        np.float32(settings[f"{kind}_penalty"]) for kind in ("repeat", "frequency", "presence")
    )
    for id_, count in seen.items():
        if 0 <= id_ < len(row):
            row[id_] = row[id_] * repeat if row[id_] <= 0 else row[id_] / repeat
            row[id_] -= np.float32(count) * frequency + presence
    return row


def softmax(row, temperature=1.0):
    weights = np.exp((row.astype(float) - row.max()) / temperature)
    return weights / weights.sum()


def reference(logits, seen=None, bias=None, **settings):
    """The distribution by sorting, and how clear its cuts are.

    The second value is the least distance of a cumulative probability from top-p's threshold, and of a
    logit from min-p's: a cut nearer than rounding errors may fall on either side.
    """
    settings = OFF | settings
    row = transformed(logits, settings, seen or {}, bias or {})
    order = np.argsort(-row, kind="stable")  # ties by rising id
    margin = INF
    if settings["top_k"] > 0:
        order = order[: settings["top_k"]]
    if settings["top_p"] < 1:
        cumulative = np.cumsum(softmax(row[order]))
        margin = min(margin, np.abs(cumulative - settings["top_p"]).min())
        order = order[: int((cumulative < settings["top_p"]).sum()) + 1]
    if settings["min_p"] > 0:
        threshold = row[order[0]] + np.float32(math.log(settings["min_p"]))
        margin = min(margin, np.abs(row[order].astype(float) - threshold).min())
        order = order[row[order] >= threshold]
    if settings["temperature"] == 0:
        order = order[:1]
    out = np.zeros(len(row))
    out[order] = softmax(row[order], settings["temperature"] or 1.0)
    out[out < FLT_MIN] = 0
    return out, margin


# ---- against llama.cpp ------------------------------------------------------------------------


def llama_probabilities(logits, seen=None, bias=None, **settings):
    """What llama.cpp's own samplers make of the logits, in the order of its default chain."""
    settings = OFF | settings
    n_vocab = len(logits)
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    if bias:
        biases = (llama_cpp.llama_logit_bias * len(bias))(*bias.items())
        llama_cpp.llama_sampler_chain_add(
            chain, llama_cpp.llama_sampler_init_logit_bias(n_vocab, len(bias), biases)
        )
    for sampler in (
        llama_cpp.llama_sampler_init_penalties(
            n_vocab,
            sum((seen or {}).values()),
            settings["repeat_penalty"],
            settings["frequency_penalty"],
            settings["presence_penalty"],
        ),
        llama_cpp.llama_sampler_init_top_k(settings["top_k"]),
        llama_cpp.llama_sampler_init_top_p(settings["top_p"], 1),
        llama_cpp.llama_sampler_init_min_p(settings["min_p"], 1),
        llama_cpp.llama_sampler_init_temp(settings["temperature"]),
        llama_cpp.llama_sampler_init_dist(1),
    ):
        llama_cpp.llama_sampler_chain_add(chain, sampler)
    for id_, count in (seen or {}).items():
        for _ in range(count):
            llama_cpp.llama_sampler_accept(chain, id_)
    tokens = np.zeros(n_vocab, [("id", np.int32), ("logit", np.float32), ("p", np.float32)])
    tokens["id"] = np.arange(n_vocab)
    tokens["logit"] = logits
    data = tokens.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
    candidates = llama_cpp.llama_token_data_array(data, n_vocab, -1, False)
    llama_cpp.llama_sampler_apply(chain, ctypes.byref(candidates))
    llama_cpp.llama_sampler_free(chain)
    kept = tokens[: candidates.size]
    out = np.zeros(n_vocab)
    out[kept["id"]] = kept["p"]
    return out


PENALTIES = [
    {},
    {"repeat_penalty": 1.3},
    {"frequency_penalty": 0.4, "presence_penalty": 0.7},
    {"repeat_penalty": 0.8, "frequency_penalty": -0.3, "presence_penalty": 0.2},
]
CUTS = [
    {"top_k": k, "top_p": p, "min_p": m}
    for k, p, m in itertools.product([0, 1, 40, 900], [1.0, 0.95, 0.4, 1e-6], [0.0, 0.05, 0.6])
]
BIAS = {3: 4.0, 17: -INF, 18: -1.5, 64: 0.25}
SEEN = {5: 1, 17: 2, 40: 7, 63: 1, 199: 3}


# 1500 and 200: llama.cpp sorts partially above 1024 candidates, wholly below.
@pytest.mark.parametrize("n_vocab", [200, 1500])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.7])
@pytest.mark.parametrize("penalties", PENALTIES)
@pytest.mark.parametrize("bias", [{}, BIAS])
def test_equals_llama_cpps_chain_and_the_reference(n_vocab, temperature, penalties, bias):
    rng = np.random.default_rng(n_vocab)
    compared = 0
    for cuts in CUTS:
        logits = rng.normal(0, 3, n_vocab).astype(np.float32)
        settings = {"temperature": temperature, "bias": bias, "seen": SEEN} | penalties | cuts
        right, margin = reference(logits, **settings)
        if margin < 1e-5:
            continue
        compared += 1
        ours = probabilities(logits, **settings)
        np.testing.assert_allclose(ours, right, atol=1e-6)
        np.testing.assert_allclose(ours, llama_probabilities(logits, **settings), atol=1e-5)
    assert compared > len(CUTS) * 0.8


@pytest.mark.parametrize(
    "cuts", [{}, {"top_p": 0.95}, {"top_p": 0.95, "min_p": 0.05}, {"top_k": 40}]
)
@pytest.mark.parametrize("spread", [0.0, 1e-4, 2.5, 40.0])
def test_a_real_vocabulary(cuts, spread):
    logits = np.random.default_rng(1).normal(0, 1, 151936).astype(np.float32) * np.float32(spread)
    right, _ = reference(logits, temperature=0.8, **cuts)
    ours = probabilities(logits, temperature=0.8, **cuts)
    assert abs(np.count_nonzero(ours) - np.count_nonzero(right)) <= 1  # a cut within rounding
    assert np.abs(ours - right).max() < 1e-6
    assert abs(ours.sum(dtype=float) - 1) < 1e-6


# ---- properties over all inputs ---------------------------------------------------------------

any_float = st.floats(width=32)
finite = st.floats(-(2.0**100), 2.0**100, width=32)
logit = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-40, -INF]), st.floats(-30, 30, width=32), finite
)
# 64 is the number of partial results in the C; shapes around its multiples have a rest.
rows = st.one_of(
    st.lists(logit, min_size=1, max_size=12),
    st.builds(
        lambda row, n: (row * n)[:n],
        st.lists(logit, min_size=1, max_size=70),
        st.sampled_from([1, 63, 64, 65, 128, 200]),
    ),
)
settings_ = st.fixed_dictionaries(
    {
        "temperature": st.one_of(st.sampled_from([0.0, 1.0, 1e-45, 1e-300]), st.floats(0.05, 10)),
        "top_k": st.one_of(st.just(0), st.integers(-1, 250)),
        "top_p": st.one_of(st.just(1.0), st.floats(1e-12, 1)),
        "min_p": st.one_of(st.just(0.0), st.floats(0, 1)),
    }
)


@given(row=rows, settings=settings_)
def test_what_is_kept_is_what_the_settings_mean(row, settings):
    row = np.array(row, np.float32)
    out = np.full_like(row, np.nan)
    status = raw_probabilities(row, out, **settings)
    if row.max() == -INF:
        assert status == lib.CSPEC_EMPTY
        return
    assert status == lib.CSPEC_OK
    order = np.argsort(-row, kind="stable")  # ties by rising id
    if settings["temperature"] == 0:
        assert out[order[0]] == 1
        assert np.count_nonzero(out) == 1
        return

    # What has probability is a prefix of the sorted tokens, but for underflow.
    kept = np.count_nonzero(out)
    assert kept >= 1
    assert np.all(out[order[kept:]] == 0)
    assert np.all(np.diff(out[order]) <= 0)
    assert np.all(out[out > 0] >= FLT_MIN)
    assert abs(out.sum(dtype=float) - 1) < 1e-6

    # Its ratios are those of the tempered logits, and each cut is neither early nor late.
    temperature = max(settings["temperature"], FLT_MIN)
    log_ratio = (row[order[:kept]].astype(float) - row[order[0]]) / temperature
    np.testing.assert_allclose(
        out[order[:kept]], np.exp(log_ratio) * out[order[0]], rtol=2e-5, atol=FLT_MIN
    )
    limit = settings["top_k"] if settings["top_k"] > 0 else len(row)
    assert kept <= limit
    weights = softmax(row[order[:limit]])
    if settings["top_p"] < 1:
        assert weights[: kept - 1].sum() < settings["top_p"] + 1e-6
    threshold = (
        row[order[0]] + np.float32(math.log(settings["min_p"])) if settings["min_p"] > 0 else -INF
    )
    assert np.all(row[order[:kept]] >= threshold)
    if kept < min(len(row), limit):
        following = row[order[kept]]
        underflows = (float(following) - float(row[order[0]])) / temperature < -80
        enough = settings["top_p"] < 1 and weights[:kept].sum() > settings["top_p"] - 1e-6
        assert underflows or enough or following < threshold


@given(row=st.lists(any_float, min_size=1, max_size=130), settings=settings_)
@example(row=[INF, math.nan], settings={"temperature": 1.0})
def test_what_is_no_logit_has_a_status(row, settings):
    row = np.array(row, np.float32)
    status = raw_probabilities(row, np.empty_like(row), **settings)
    if np.isnan(row).any():
        assert status == lib.CSPEC_NAN
    elif row.max() == INF:
        assert status == lib.CSPEC_INF
    elif row.max() == -INF:
        assert status == lib.CSPEC_EMPTY
    else:
        assert status == lib.CSPEC_OK


@given(row=rows, settings=settings_)
def test_in_place_is_the_same(row, settings):
    row = np.array(row, np.float32)
    out = np.empty_like(row)
    status = raw_probabilities(row, out, **settings)
    assert raw_probabilities(row, row, **settings) == status
    if status == lib.CSPEC_OK:
        assert row.tobytes() == out.tobytes()


@given(row=rows, settings=settings_, data=st.data())
def test_what_is_not_allowed_is_as_if_its_logit_were_minus_infinity(row, settings, data):
    row = np.array(row, np.float32)
    allowed = data.draw(st.sets(st.integers(0, len(row) - 1)))
    others = [i for i in range(len(row)) if i not in allowed]
    barred, masked, out = row.copy(), row.copy(), np.empty_like(row)
    barred[others] = -INF
    status = raw_probabilities(barred, barred, **settings)
    if status == lib.CSPEC_EMPTY and row.max() > -INF:
        status = lib.CSPEC_BARRED
    assert raw_probabilities(row, out, allowed=allowed, **settings) == status
    masked[others] = np.resize([math.nan, INF, 1.0], len(others))
    again = raw_probabilities(masked, masked, allowed=allowed, **settings)
    if status == lib.CSPEC_OK:
        assert again == status
        assert out.tobytes() == masked.tobytes() == barred.tobytes()


# ---- single cases -----------------------------------------------------------------------------


def test_ties_are_cut_by_id():
    row = np.zeros(200)
    row[[7, 100]] = 1
    assert list(np.flatnonzero(probabilities(row, top_k=1))) == [7]
    assert list(np.flatnonzero(probabilities(row, top_k=5))) == [0, 1, 2, 7, 100]
    assert list(np.flatnonzero(probabilities(np.zeros(200), top_p=0.02))) == [0, 1, 2, 3]
    assert list(np.flatnonzero(probabilities(row, temperature=0))) == [7]


def test_zeros_of_either_sign_tie():
    assert list(np.flatnonzero(probabilities([-0.0, 0.0, -1], top_k=1))) == [0]
    assert list(np.flatnonzero(probabilities([-1, 0.0, -0.0, 0.0], top_k=2))) == [1, 2]


def test_top_p_keeps_the_token_that_reaches_it():
    row = np.log([0.5, 0.25, 0.25])
    assert np.count_nonzero(probabilities(row, top_p=0.49)) == 1
    assert np.count_nonzero(probabilities(row, top_p=0.51)) == 2


def test_top_p_is_a_share_of_what_top_k_left():
    row = np.log([0.4, 0.3, 0.2, 0.1])
    # Of the first two, the first has 4/7.
    np.testing.assert_allclose(probabilities(row, top_k=2, top_p=0.55), [1, 0, 0, 0])
    np.testing.assert_allclose(probabilities(row, top_p=0.55), [4 / 7, 3 / 7, 0, 0], rtol=1e-6)


def test_cuts_ignore_temperature():
    row = np.log([0.9, 0.06, 0.04])
    np.testing.assert_allclose(probabilities(row, top_p=0.8, temperature=100), [1, 0, 0])
    np.testing.assert_allclose(probabilities(row, min_p=0.5, temperature=100), [1, 0, 0])


def test_penalties_divide_positive_and_multiply_negative_logits():
    row = np.array([2.0, -2.0, 0.0, 1.0])
    ours = probabilities(
        row, seen={0: 1, 1: 3, 2: 1}, repeat_penalty=2, frequency_penalty=0.25, presence_penalty=0.5
    )
    np.testing.assert_allclose(ours, softmax(np.array([0.25, -5.25, -0.75, 1.0])), rtol=1e-6)


def test_ids_outside_the_row_are_passed_over():
    row = [1.0, 2.0]
    outside = {-1: 1, 2: 3, 2**31 - 1: 1, -(2**31): 1}
    ours = probabilities(row, seen=outside, bias=outside, repeat_penalty=3)
    assert ours.tobytes() == probabilities(row).tobytes()


def test_bias_may_forbid_and_force():
    np.testing.assert_array_equal(probabilities([5, 1, 2], bias={0: -INF, 2: -INF}), [0, 1, 0])
    np.testing.assert_allclose(probabilities([0.0, 0.0], bias={0: 100.0}), [1, 0], atol=1e-30)
    row = np.zeros(2, np.float32)
    assert raw_probabilities(row, row.copy(), bias={0: -INF, 1: -INF}) == lib.CSPEC_EMPTY
    assert raw_probabilities(row, row.copy(), bias={0: INF}) == lib.CSPEC_INF


def test_bias_and_penalties_bring_nothing_back_that_is_not_allowed():
    ours = probabilities(
        [1.0, 1.0, 1.0], allowed=[0, 2], bias={1: 1e6}, seen={1: 3}, frequency_penalty=-1e6
    )
    np.testing.assert_array_equal(ours, [0.5, 0, 0.5])


def test_a_row_of_which_nothing_is_allowed_is_told_from_one_that_is_empty():
    row = np.array([1.0, -INF, math.nan], np.float32)
    for allowed, bias, status in (
        ([], {}, lib.CSPEC_BARRED),
        ([1], {}, lib.CSPEC_BARRED),
        ([0], {0: -INF}, lib.CSPEC_EMPTY),
        ([0, 2], {}, lib.CSPEC_NAN),
    ):
        assert raw_probabilities(row, row.copy(), allowed=allowed, bias=bias) == status
    nothing = np.full(3, -INF, np.float32)
    assert raw_probabilities(nothing, nothing.copy(), allowed=[0]) == lib.CSPEC_EMPTY


def test_large_logits_do_not_lose_the_cut():
    # One unit in the last place of 1e6 is 0.0625.
    row = np.float32(1e6) + np.array([0, -0.0625, -0.125, -5], np.float32)
    right, _ = reference(row, top_p=0.9)
    np.testing.assert_allclose(probabilities(row, top_p=0.9), right, atol=1e-6)


def test_a_cut_within_rounding_of_the_threshold_is_off_by_no_more_than_that():
    # The C sums in parts, and parts may add up to less than the whole did. The first 500 tokens reach
    # top-p; 24 bits each over 23 nats do not add up exactly in 53, and no step between parts is large.
    for seed in range(10):
        rng = np.random.default_rng(seed)
        row = np.full(3500, 1087.9, np.float32)
        row[:500] = rng.uniform(1088, 1111, 500)
        share = softmax(row)[:500].sum()
        for ulps in range(-40, 41):
            kept = np.count_nonzero(probabilities(row, top_p=share * (1 + ulps * 2**-52)))
            assert 480 < kept < 520


# ---- one id's probability -------------------------------------------------------------------------------


@pytest.mark.parametrize("n_vocab", [1, 63, 64, 1000])
def test_the_probability_of_one_id_is_the_softmaxs(n_vocab):
    logits = np.random.default_rng(n_vocab).normal(0, 6, n_vocab).astype(np.float32)
    logits[n_vocab // 2] = -INF if n_vocab > 1 else 0
    for token in {0, n_vocab // 2, n_vocab - 1, int(logits.argmax())}:
        # Each term is a float.
        assert softmax_of(logits, token) == pytest.approx(softmax(logits)[token], rel=1e-6)


@pytest.mark.parametrize("logit", [INF, -INF, math.nan])
def test_no_id_is_probable_where_no_distribution_follows(logit):
    assert softmax_of(np.array([logit, -INF], np.float32), 0) == 0
