import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspec._cspec import ffi, lib
from scipy import stats

from tests.cspec.binding import Round, coupled_choice, draw, probabilities

FLT_MIN = float(np.finfo(np.float32).tiny)
LAST = 1 - 2**-53  # the greatest u that exists
RULES = ["token", "block"]

u_values = st.one_of(st.sampled_from([0.0, 2**-53, 0.5, LAST]), st.floats(0, LAST))


def make_row(n_vocab, kind, seed):
    """A row as cspec_probabilities makes them: normalised, nothing below FLT_MIN."""
    rng = np.random.default_rng(seed)
    weights = {
        "uneven": lambda: np.exp(rng.normal(0, 4, n_vocab)),
        "sparse": lambda: rng.random(n_vocab) * (rng.random(n_vocab) < 0.2),
        "tiny": lambda: rng.choice([0.0, FLT_MIN, 1e-30, 1e-9, 1.0], n_vocab),
        "level": lambda: np.ones(n_vocab),
        "certain": lambda: np.zeros(n_vocab),
    }[kind]()
    weights[rng.integers(n_vocab)] += 1e-3
    row = (weights / weights.sum()).astype(np.float32)
    row[row < FLT_MIN] = 0
    return row


def distributions(n_vocab):
    kinds = st.sampled_from(["level", "certain", "uneven", "sparse", "tiny"])
    return st.builds(make_row, st.just(n_vocab), kinds, st.integers(0, 2**32 - 1))


@st.composite
def rounds(draw_):
    # 64 is the block of the C's loops.
    n_vocab = draw_(st.sampled_from([1, 2, 3, 5, 63, 64, 65, 130]))
    gamma = draw_(st.integers(0, 4))
    p = [draw_(distributions(n_vocab)) for _ in range(gamma + 1)]
    q, drafted = [], []
    for i in range(gamma):
        row = draw_(st.one_of(st.none(), st.just(p[i]), distributions(n_vocab)))
        q.append(row)
        drafted.append(draw_(st.integers(0, n_vocab - 1)))
    u_accept = draw_(st.lists(u_values, min_size=gamma, max_size=gamma))
    return p, q, drafted, u_accept, draw_(u_values)


# ---- drawing ------------------------------------------------------------------------------------


@given(st.sampled_from([1, 3, 64, 65, 300]).flatmap(distributions), u_values)
def test_draw_inverts_the_cumulative_distribution(p, u):
    id_ = draw(p, u)
    assert p[id_] > 0
    goal = u * p.sum(dtype=float)
    assert p[:id_].sum(dtype=float) <= goal + 1e-12
    assert goal - 1e-12 <= p[: id_ + 1].sum(dtype=float)


@given(
    st.sampled_from([2, 3, 64, 65, 130]).flatmap(
        lambda n: st.tuples(distributions(n), distributions(n))
    ),
    u_values,
    st.one_of(st.just(1.0), st.floats(0, 1)),
)
def test_draw_takes_from_the_residual_alone(rows, u, scale):
    p, q = rows
    weights = np.maximum(scale * p.astype(float) - q, 0)
    id_ = draw(p, u, q, scale)
    if weights.sum() > 0:
        assert weights[id_] > 0
        goal = u * weights.sum()
        tolerance = 1e-12 * weights.sum()
        assert weights[:id_].sum() <= goal + tolerance
        assert goal - tolerance <= weights[: id_ + 1].sum()
    else:
        assert id_ == draw(p, u)


def test_draw_at_the_ends_of_u_returns_the_first_and_last_possible_id():
    for n_vocab in (5, 64, 65, 1000):
        p = np.zeros(n_vocab)
        p[[1, 2, n_vocab - 2]] = [0.25, 0.5, 0.25]
        assert draw(p, 0.0) == 1
        assert draw(p, 0.25) == 2
        assert draw(p, LAST) == n_vocab - 2


def test_draw_of_a_residual_of_nothing_is_a_draw_of_p():
    p = [0.25, 0.5, 0.25]
    for u in (0.0, 0.3, LAST):
        assert draw(p, u, p) == draw(p, u)


def test_draw_finds_a_residual_of_the_smallest_numbers():
    p = np.array([0.5, FLT_MIN, 0.5], np.float32)
    q = np.array([0.5, 0.0, 0.5], np.float32)
    for u in (0.0, 0.5, LAST):
        assert draw(p, u, q) == 1


def test_draw_of_nothing_says_so():
    assert draw([0.0, 0.0], 0.5) == -1


def test_draw_over_a_real_vocabulary_fits():
    p = probabilities(np.random.default_rng(0).normal(0, 3, 151936))
    n = 2000
    sample = np.array([draw(p, lib.cspec_uniform(2, 0, i, 0)) for i in range(n)])
    # Runs of ids of about a fiftieth of the mass each.
    run = np.floor(50 * np.cumsum(p, dtype=float)).clip(0, 49).astype(int)
    mass = np.bincount(run, weights=p, minlength=50)
    counts = np.bincount(run[sample], minlength=50)
    used = mass > 0
    assert stats.chisquare(counts[used], mass[used] / mass.sum() * n).pvalue > 1e-3


# ---- token and block ----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@given(case=rounds())
def test_what_is_emitted_is_possible(rule, case):
    p, q, drafted, u_accept, u_draw = case
    t, y = getattr(Round(p, q, drafted), rule)(u_accept, u_draw)
    assert 0 <= t <= len(drafted)
    for i in range(t):
        assert p[i][drafted[i]] > 0
    assert p[t][y] > 0


@given(case=rounds())
def test_thresholds_decide_the_block_rule(case):
    p, q, drafted, u_accept, u_draw = case
    round_ = Round(p, q, drafted)
    a, b = round_.block_thresholds()
    assert a[0] == b[0] == 1
    assert all(0 <= x <= 1 for x in a + b)
    t = max([0, *(i for i, u in enumerate(u_accept, 1) if u < b[i])])
    assert round_.block(u_accept, u_draw)[0] == t


@given(case=rounds())
def test_token_accepts_while_u_is_below_the_ratio(case):
    p, q, drafted, u_accept, u_draw = case
    t = 0
    while t < len(drafted):
        x = drafted[t]
        if u_accept[t] * (1.0 if q[t] is None else float(q[t][x])) >= float(p[t][x]):
            break
        t += 1
    assert Round(p, q, drafted).token(u_accept, u_draw)[0] == t


@given(case=rounds())
def test_block_is_token_for_one_drafted_token_and_for_drafts_without_probabilities(case):
    p, q, drafted, u_accept, u_draw = case
    one = Round(p[:2], q[:1], drafted[:1])
    assert one.token(u_accept[:1], u_draw) == one.block(u_accept[:1], u_draw)
    # With one-hot q the two agree in distribution: a_i is the product of the token rule's ratios.
    a, _ = Round(p, [None] * len(drafted), drafted).block_thresholds()
    ratios = [float(row[x]) for row, x in zip(p, drafted, strict=False)]
    assert a == pytest.approx(list(np.cumprod([1.0, *ratios])), rel=1e-12)


@pytest.mark.parametrize("rule", RULES)
@given(case=rounds())
def test_a_null_row_is_one_hot_at_the_drafted_token(rule, case):
    p, _, drafted, u_accept, u_draw = case
    hot = [np.eye(len(p[0]), dtype=np.float32)[x] for x in drafted]
    given_null, given_row = (
        getattr(Round(p, q, drafted), rule) for q in ([None] * len(drafted), hot)
    )
    assert given_null(u_accept, u_draw) == given_row(u_accept, u_draw)


@pytest.mark.parametrize("rule", RULES)
def test_equal_rows_accept_everything(rule):
    p = probabilities(np.random.default_rng(0).normal(0, 3, 1000))
    round_ = Round([p, p, p], [p, p], [3, 999])
    for u in (0.0, 0.5, LAST):
        assert getattr(round_, rule)([u, u], u) == (2, draw(p, u))


@pytest.mark.parametrize("rule", RULES)
def test_disjoint_rows_accept_nothing(rule):
    p, q = [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]
    round_ = Round([p, p, p], [q, q], [2, 3])
    for u in (0.0, 0.75, LAST):
        assert getattr(round_, rule)([u, u], u) == (0, draw(p, u))


@pytest.mark.parametrize("rule", RULES)
def test_a_token_that_q_excludes_is_judged_by_p(rule):
    # It cannot have been drawn from q; p decides, and nothing divides by zero.
    q = [1.0, 0.0, 0.0]
    accepted = Round([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], [q], [1])
    rejected = Round([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], [q], [2])
    for u in (0.0, LAST):
        assert getattr(accepted, rule)([u], 0.5) == (1, 0)
        assert getattr(rejected, rule)([u], 0.5) == (0, 1)


@pytest.mark.parametrize("rule", RULES)
def test_a_tiny_ratio_is_not_an_acceptance(rule):
    round_ = Round([[1e-9, 1 - 1e-9], [0.5, 0.5]], [[0.5, 0.5]], [0])
    assert getattr(round_, rule)([1e-8], 0.5) == (0, 1)
    assert getattr(round_, rule)([1e-9], 0.0) == (1, 0)
    underflowing = Round([[FLT_MIN, 1]] * 9, [[1, 0]] * 8, [0] * 8)
    assert getattr(underflowing, rule)([2**-53] * 8, 0.5) == (0, 1)


@pytest.mark.parametrize("rule", RULES)
def test_one_token_vocabulary(rule):
    round_ = Round([[1.0]] * 3, [[1.0], None], [0, 0])
    assert getattr(round_, rule)([LAST, LAST], LAST) == (2, 0)


@pytest.mark.parametrize("rule", RULES)
def test_nothing_drafted_is_a_draw_from_p(rule):
    assert getattr(Round([[0.25, 0.75]], [], []), rule)([], 0.5) == (0, 1)


@pytest.mark.parametrize("rule", RULES)
def test_greedy_rows_accept_while_drafted_is_the_argmax(rule):
    eye = np.eye(5)
    p = [eye[1], eye[4], eye[2]]
    for q in ([eye[1], eye[4]], [None, None]):
        assert getattr(Round(p, q, [1, 4]), rule)([LAST, LAST], LAST) == (2, 2)
    for q in ([eye[1], eye[0]], [None, None]):
        assert getattr(Round(p, q, [1, 0]), rule)([LAST, 0.0], LAST) == (1, 4)
    for q in ([eye[3], eye[4]], [None, None]):
        assert getattr(Round(p, q, [3, 4]), rule)([0.0, LAST], LAST) == (0, 1)


def test_block_does_not_stop_at_its_first_failure():
    # The rows of the second token make up for the first one's ratio of 1/2.
    p = [[0.5, 0.5], [1.0, 0.0], [0.5, 0.5]]
    q = [[1.0, 0.0], [0.5, 0.5]]
    round_ = Round(p, q, [0, 0])
    a, _ = round_.block_thresholds()
    assert a == [1, 0.5, 1.0]
    assert round_.block([LAST, LAST], 0.0) == (2, 0)
    assert round_.token([LAST, LAST], 0.0) == (0, 1)


# ---- coupled ------------------------------------------------------------------------------------

SKEWED = probabilities(np.linspace(2, -2, 70))


def chi_square(counts, p):
    return stats.chisquare(counts, p.astype(float) / p.sum(dtype=float) * sum(counts)).pvalue


def test_coupled_choices_are_distributed_as_p_over_positions():
    choices = [coupled_choice(SKEWED, seed=5, position=i) for i in range(20000)]
    assert chi_square(np.bincount(choices, minlength=70), SKEWED) > 1e-3


def test_coupled_choices_are_distributed_as_p_over_seeds():
    choices = [coupled_choice(SKEWED, seed=2**33 * i, position=3) for i in range(20000)]
    assert chi_square(np.bincount(choices, minlength=70), SKEWED) > 1e-3


def test_wrong_noise_is_not_distributed_as_p():
    # Argmax of p times uniform noise, a plausible mistake.
    rng = np.random.default_rng(0)
    choices = (SKEWED * rng.random((20000, 70))).argmax(axis=1)
    assert chi_square(np.bincount(choices, minlength=70), SKEWED) < 1e-6


def test_coupled_choices_at_neighbouring_positions_are_independent():
    p = np.array([0.5, 0.3, 0.2], np.float32)
    choices = [coupled_choice(p, seed=8, position=i) for i in range(20001)]
    pairs = np.zeros((3, 3))
    np.add.at(pairs, (choices[:-1], choices[1:]), 1)
    assert stats.chi2_contingency(pairs).pvalue > 1e-3


def gumbel(seed, position, id_):
    out = ffi.new("uint32_t[4]")
    counter = [position & 0xFFFFFFFF, position >> 32, id_ // 2, lib.CSPEC_STREAM_GUMBEL]
    lib.cspec_philox(counter, [seed & 0xFFFFFFFF, seed >> 32], out)
    high, low = out[2 * (id_ % 2)], out[2 * (id_ % 2) + 1]
    noise = ((high << 32 | low) // 2**12 + 0.5) / 2**52
    return -math.log(-math.log1p(-noise))


@given(
    st.sampled_from([1, 2, 63, 64, 65, 200]).flatmap(distributions),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
)
def test_coupled_choice_is_the_argmax_of_log_p_plus_the_documented_noise(p, seed, position):
    scores = [
        math.log(p_x) + gumbel(seed, position, x) if p_x > 0 else -math.inf
        for x, p_x in enumerate(p)
    ]
    assert coupled_choice(p, seed, position) == np.argmax(scores)


def test_coupled_choice_of_nothing_says_so():
    assert coupled_choice(np.zeros(70, np.float32), 1, 2) == -1


@given(case=rounds(), seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**40))
def test_coupled_emits_the_targets_own_choices(case, seed, position):
    p, q, drafted, _, _ = case
    own = [coupled_choice(row, seed, position + i) for i, row in enumerate(p)]
    t, y = Round(p, q, drafted).coupled(seed, position)
    assert [*drafted[:t], y] == own[: t + 1]
    assert t == len(drafted) or y != drafted[t]
    assert Round(p, q, own[:-1]).coupled(seed, position) == (len(own) - 1, own[-1])


def test_similar_rows_mostly_choose_alike():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, 500)
    p = probabilities(logits)
    q = probabilities(logits + rng.normal(0, 0.1, 500))
    n = 2000
    agreed = sum(coupled_choice(p, 1, i) == coupled_choice(q, 1, i) for i in range(n)) / n
    overlap = np.minimum(p, q).sum()
    # Daliri et al., "Coupling without Communication and Drafter-Invariant Speculative Decoding": at least
    # overlap / (2 - overlap).
    assert agreed > overlap / (2 - overlap) - 4 * math.sqrt(0.25 / n)
