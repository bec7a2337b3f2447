"""Every outcome of every rule on tiny vocabularies, and wrong rules that the same check must catch."""

from collections import defaultdict
from fractions import Fraction

import pytest
from pyspec._cspec import lib
from scipy import stats

from tests.cspec.binding import Round, draw, probabilities
from tests.cspec.enumeration import (
    Model,
    block_outcomes,
    block_thresholds,
    departure,
    measured_outcomes,
    random_model,
    token_outcomes,
)

# What the measurement resolves, over the few edges that bound an outcome, and what a wrong rule exceeds.
RESOLVED = 1e-9
WRONG = 1e-4

SHAPES = [
    *[(seed, n_vocab, gamma) for n_vocab in (1, 2, 3) for gamma in (1, 2, 3) for seed in range(6)],
    *[(seed, n_vocab, 1) for n_vocab in (4, 5) for seed in range(4)],
    *[(seed, n_vocab, 2) for n_vocab in (4, 5) for seed in range(4)],
    *[(seed, n_vocab, 3) for n_vocab in (4, 5) for seed in range(4)],
    # Copied tokens: no row of the draft is there at all.
    *[(seed, n_vocab, 3, ("no q",)) for n_vocab in (2, 3) for seed in range(6)],
]
REFERENCES = {"token": token_outcomes, "block": block_outcomes}


@pytest.mark.parametrize("shape", [*SHAPES, *[(seed, 3, 3) for seed in range(6, 24)]])
@pytest.mark.parametrize("rule", REFERENCES)
def test_each_rule_in_rational_arithmetic_is_lossless(rule, shape):
    model = random_model(*shape)
    assert departure(model, shape[2], lambda drafted: REFERENCES[rule](model, drafted)) == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", REFERENCES)
def test_each_rule_in_c_is_the_rational_one(rule, shape):
    gamma = shape[2]
    model = random_model(*shape)
    outcomes = {
        drafted: measured_outcomes(getattr(model.round(drafted), rule), gamma)
        for drafted, _ in model.drafts(gamma)
    }
    for drafted, ours in outcomes.items():
        right = REFERENCES[rule](model, drafted)
        for outcome in {*ours, *right}:
            # The draw's weights are exact up to rounding, so an outcome that cannot be does not happen.
            assert abs(ours.get(outcome, 0) - right.get(outcome, 0)) < RESOLVED, (drafted, outcome)
            assert right.get(outcome, 0) > 0 or ours.get(outcome, 0) < 2**-38
    assert departure(model, gamma, outcomes.__getitem__) < RESOLVED


@pytest.mark.parametrize("shape", SHAPES)
def test_block_thresholds_are_the_rational_ones(shape):
    gamma = shape[2]
    model = random_model(*shape)
    for drafted, _ in model.drafts(gamma):
        a, b = model.round(drafted).block_thresholds()
        right_a, right_b = block_thresholds(model, drafted)
        assert a == pytest.approx([float(x) for x in right_a], abs=1e-14)
        assert b == pytest.approx([float(x) for x in right_b], abs=1e-14)
        # What is certain or impossible is so exactly.
        for ours, right in zip(a + b, right_a + right_b, strict=True):
            assert (ours == 0) == (right == 0)
            assert (ours == 1) == (right == 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_block_accepts_at_least_i_tokens_with_probability_a_i(shape):
    # Given x_1 to x_i, and averaged over the tokens drafted after them.
    gamma = shape[2]
    model = random_model(*shape)
    reached, accepted, a = defaultdict(float), defaultdict(float), {}
    for drafted, probability in model.drafts(gamma):
        thresholds, _ = model.round(drafted).block_thresholds()
        outcomes = measured_outcomes(model.round(drafted).block, gamma)
        for i in range(gamma + 1):
            at_least_i = sum(share for (t, _), share in outcomes.items() if t >= i)
            reached[drafted[:i]] += float(probability)
            accepted[drafted[:i]] += float(probability) * at_least_i
            a[drafted[:i]] = thresholds[i]
    for prefix, probability in reached.items():
        assert accepted[prefix] / probability == pytest.approx(a[prefix], abs=RESOLVED)


@pytest.mark.parametrize("shape", SHAPES)
def test_block_accepts_no_fewer_than_token(shape):
    model = random_model(*shape)

    def expected_length(rule):
        return sum(
            probability * t * share
            for drafted, probability in model.drafts(shape[2])
            for (t, _), share in REFERENCES[rule](model, drafted).items()
        )

    assert expected_length("block") >= expected_length("token")


# ---- wrong rules --------------------------------------------------------------------------------

GAMMA = 3
MODELS = [random_model(seed, 3, GAMMA, kinds=["any"]) for seed in range(3)]


def residual_from_p(model, drafted):
    p = model.p_rows(drafted)
    round_ = model.round(drafted)

    def verify(u_accept, u_draw):
        t, _ = round_.token(u_accept, u_draw)
        return t, draw(p[t], u_draw)

    return measured_outcomes(verify, GAMMA)


def block_stopped_at_its_first_failure(model, drafted):
    p, q = model.p_rows(drafted), model.q_rows(drafted)
    a, b = model.round(drafted).block_thresholds()

    def verify(u_accept, u_draw):
        t = 0
        while t < GAMMA and u_accept[t] < b[t + 1]:
            t += 1
        return t, draw(p[t], u_draw) if t == GAMMA else draw(p[t], u_draw, q[t], a[t])

    return measured_outcomes(verify, GAMMA)


def block_with_the_token_rules_residual(model, drafted):
    p, q = model.p_rows(drafted), model.q_rows(drafted)
    round_ = model.round(drafted)

    def verify(u_accept, u_draw):
        t, _ = round_.block(u_accept, u_draw)
        return t, draw(p[t], u_draw) if t == GAMMA else draw(p[t], u_draw, q[t])

    return measured_outcomes(verify, GAMMA)


def q_before_its_truncation(model, drafted):
    # The draft is drawn from the model's rows; C is told flatter ones.
    q = [[(q_x + Fraction(1, 3)) / 2 for q_x in row] for row in model.q_rows(drafted)]
    return measured_outcomes(Round(model.p_rows(drafted), q, drafted).block, GAMMA)


def unlikely_token_discarded(model, drafted):
    q = model.q_rows(drafted)
    kept = 0
    while kept < GAMMA and q[kept][drafted[kept]] >= Fraction(1, 3):
        kept += 1
    return measured_outcomes(model.round(drafted[:kept]).block, kept)


@pytest.mark.parametrize(
    "wrong",
    [
        residual_from_p,
        block_stopped_at_its_first_failure,
        block_with_the_token_rules_residual,
        q_before_its_truncation,
        unlikely_token_discarded,
    ],
)
def test_the_check_catches(wrong):
    for model in MODELS:
        assert departure(model, GAMMA, lambda drafted, model=model: wrong(model, drafted)) > WRONG


def test_stopping_before_a_token_is_drawn_is_allowed():
    # The lawful neighbour of discarding one: whether to draw depends on the prefix, not on the token.
    def shorter_after_zero(model, drafted):
        kept = 1 if drafted[0] == 0 else GAMMA
        return measured_outcomes(model.round(drafted[:kept]).block, kept)

    for model in MODELS:
        decide = {drafted: shorter_after_zero(model, drafted) for drafted, _ in model.drafts(GAMMA)}
        assert departure(model, GAMMA, decide.__getitem__) < RESOLVED


# ---- random numbers that must not be shared -----------------------------------------------------


def sampled_fit(rounds, draw_stream):
    """The chi-square p value of rounds of one drafted token, whose residual is drawn from a stream."""
    logits = [0.25 * (x - 7.5) for x in range(16)]
    p = probabilities(logits)
    q = probabilities([-logit for logit in logits])
    counts = [0] * 16
    by_token = [Round([p, p], [q], [x]) for x in range(16)]
    for i in range(rounds):
        drafted = draw(q, lib.cspec_uniform(1, lib.CSPEC_STREAM_DRAFT, i, 0))
        u_accept = lib.cspec_uniform(1, lib.CSPEC_STREAM_ACCEPT, i, 0)
        u_draw = lib.cspec_uniform(1, draw_stream, i, 0)
        t, y = by_token[drafted].block([u_accept], u_draw)
        counts[drafted if t else y] += 1
    return stats.chisquare(counts, p.astype(float) / p.sum(dtype=float) * rounds).pvalue


def test_residual_from_its_own_stream_fits():
    assert sampled_fit(20000, lib.CSPEC_STREAM_TARGET) > 1e-3


def test_residual_from_the_drafts_stream_does_not_fit():
    assert sampled_fit(20000, lib.CSPEC_STREAM_DRAFT) < 1e-6


def test_the_exact_check_sees_a_small_error():
    # Its own control: a target that differs by 1/64 in one row of one prefix.
    model = random_model(1, 2, 2)
    decide = {drafted: block_outcomes(model, drafted) for drafted, _ in model.drafts(2)}
    nudged = Model(2, dict(model.p), model.q)
    p0, p1 = model.p[()]
    nudged.p[()] = [p0 - Fraction(1, 64), p1 + Fraction(1, 64)]
    assert departure(model, 2, decide.__getitem__) == 0
    assert departure(nudged, 2, decide.__getitem__) > WRONG
