"""What the engine writes is distributed as what the target alone would write.

Two checks, on tiny models in real llama.cpp:

- short outputs: a chi-square test of two or three tokens against the probabilities of every output,
  enumerated from the target;
- long texts: of each token the randomised probability integral transform under its own p, with ids ranked
  by log(q / p), so that any leaning towards or away from the draft shifts it, and by id, as draws by
  inversion are. The values of a right sampler are independent and uniform.

Right values come from tests/oracle.py: llama.cpp's logits at width 1, and the transforms by numpy in double.
Seeds are fixed, so that a result changes only with the code or a platform's arithmetic. The default run has
about 75 such p-values: at a threshold of 1e-4 a right sampler fails on less than one platform in a hundred.
The same checks must give the wrong samplers of tests/mutants.py less than 1e-8.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from pyspec import bridge
from pyspec import engine as engine_module
from pyspec.costs import CostCurve
from pyspec.drafters.model import ModelDrafter
from pyspec.drafters.ngram import NgramDrafter
from pyspec.engine import AUTO, Engine, Gamma
from pyspec.grammar import Grammar
from pyspec.sampling import Probabilities, Rule, Sampler, SamplingParams, Verdict
from tests import mutants, oracle
from tests.goodness_of_fit import Uniforms, chi_square, independence, integral_transform, uniformity
from tests.models import Reference, byte_level, write_llama

THRESHOLD = 1e-4
REJECTED = 1e-8

# As in the engine. With another kind of attention logits differ by enough to move a token over a cut.
FLASH_ATTENTION = 1

TEMPERATURES = (0.6, 1.0, 1.5)
GAMMAS = (1, 2, 3, 4)
# More than the planner drafts with the costs below.
MAX_PLANNED = 8
BLOCK, TOKEN, COUPLED = Rule.BLOCK, Rule.TOKEN, Rule.COUPLED

# Of the short pair's tokens, each text of the grammar below: what follows depends on all that came before.
TEXTS = {
    "".join(pairs)
    for n in range(4)
    for pairs in itertools.product(["ac", "ad", "bd", "b ", "c"], repeat=n)
}
PIECES = {3: "a", 4: "b", 5: "c", 6: "d", 7: " "}
ENDS = (1, 2)


def in_a_text(ids: Sequence[int]) -> list[int]:
    """The ids that may follow in one of the texts."""
    text = "".join(PIECES[id_] for id_ in ids)
    following = [
        id_ for id_, piece in PIECES.items() if any(t.startswith(text + piece) for t in TEXTS)
    ]
    return [*following, *(ENDS if text in TEXTS else ())]


TRANSFORMS: dict[str, dict[str, Any]] = {
    "none": {},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.15},
    "repeat": {"repeat_penalty": 1.8, "repeat_last_n": 6},
    "frequency": {"frequency_penalty": 0.8, "repeat_last_n": -1},
    "presence": {"presence_penalty": 2.5, "repeat_last_n": 8},
    "bias": {"logit_bias": {3: 1.5, 4: -1.0, 5: -math.inf}},
    "all cuts": {"top_k": 6, "top_p": 0.95, "min_p": 0.05},
    "everything": {
        "top_k": 7,
        "top_p": 0.97,
        "min_p": 0.03,
        "repeat_penalty": 1.2,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "repeat_last_n": 7,
        "logit_bias": {3: 0.7, 6: -0.7},
    },
    "no end": {"logit_bias": {1: -math.inf, 2: -math.inf}},
    "grammar": {"grammar": Grammar.regex("(a[cd]|b[d ]|c){0,3}")},
    "grammar, cuts": {
        "grammar": Grammar.lark(
            'start: pair? pair? pair?\npair: "a" ("c" | "d") | "b" /[d ]/ | "c"'
        ),
        "top_k": 3,
        "top_p": 0.9,
        "frequency_penalty": 0.5,
    },
}
OF_EVERY_PAIR = [name for name in TRANSFORMS if name != "no end" and "grammar" not in name]


@dataclass(frozen=True)
class Case:
    """One setting of the engine."""

    transform: str
    temperature: float
    gamma: Gamma
    rule: Rule

    def __str__(self) -> str:
        return f"{self.rule.value}, {self.transform}, T={self.temperature}, gamma={self.gamma}"

    @property
    def params(self) -> SamplingParams:
        off: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return SamplingParams(**(off | TRANSFORMS[self.transform]), temperature=self.temperature)

    def requests(self, max_tokens: int) -> Iterator[SamplingParams]:
        """The case's requests, with seeds that no other case uses."""
        first = crc32(str(self).encode()) << 24
        for seed in itertools.count(first):
            yield replace(self.params, seed=seed, max_tokens=max_tokens)


# ---- pairs of models -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """An engine, and its two models for the oracle."""

    engine: Engine
    target: Reference
    draft: Reference


def open_pair(target: Path, draft: Path) -> Iterator[Pair]:
    # Without it a token may lie on the other side of a cut than in the target's own pass.
    bridge.attach()
    with (
        Engine(target, draft, n_ctx=512, threads=1) as engine,
        Reference(target, n_ctx=512, flash_attn_type=FLASH_ATTENTION) as p,
        Reference(draft, n_ctx=512, flash_attn_type=FLASH_ATTENTION) as q,
    ):
        yield Pair(engine, p, q)


@pytest.fixture(scope="module")
def short_pair(models: Path) -> Iterator[Pair]:
    """8 tokens, few enough that outputs of three have countable frequencies; many end early."""
    vocabulary, biases = byte_level(8), {0: -1.0}
    target = write_llama(models / "short.gguf", vocabulary, biases=biases)
    draft = write_llama(
        models / "short-draft.gguf", vocabulary, biases=biases, width=32, layers=1, noise=0.3
    )
    yield from open_pair(target, draft)


@pytest.fixture(scope="module")
def long_pair(models: Path) -> Iterator[Pair]:
    """24 tokens, and texts that do not end."""
    vocabulary = byte_level()
    biases = dict.fromkeys(vocabulary.controls, -40.0)
    target = write_llama(models / "long.gguf", vocabulary, biases=biases)
    draft = write_llama(
        models / "long-draft.gguf", vocabulary, biases=biases, width=32, layers=1, noise=0.3
    )
    yield from open_pair(target, draft)


@pytest.fixture(scope="module")
def opposite_pair(models: Path) -> Iterator[Pair]:
    """16 tokens, and a draft that likes what the target does not."""
    vocabulary = byte_level(16)
    target = write_llama(models / "opposite.gguf", vocabulary, biases={})
    draft = write_llama(models / "opposite-draft.gguf", vocabulary, biases={}, negated=True)
    yield from open_pair(target, draft)


@pytest.fixture(scope="module")
def copying_pair(models: Path, short_pair: Pair) -> Iterator[Pair]:
    """The short pair's target with tokens copied from its own text, after single ones too."""
    with Engine(models / "short.gguf", NgramDrafter(min_match=1), n_ctx=512, threads=1) as engine:
        yield replace(short_pair, engine=engine)


def use(monkeypatch: pytest.MonkeyPatch, pair: Pair, what: type[Sampler | ModelDrafter]) -> None:
    """Have the engine use another sampler or drafter."""
    if issubclass(what, Sampler):
        monkeypatch.setattr(engine_module, "Sampler", what)
    else:
        own = pair.engine._slots[0].drafters[0]
        assert isinstance(own, ModelDrafter)
        monkeypatch.setattr(
            pair.engine._slots[0], "drafters", [what(own.context, pair.engine.target.n_vocab)]
        )


# ---- the two checks ------------------------------------------------------------------------------------

SHORT_PROMPT = (0, 3)
LONG_PROMPT = (0, 3, 5, 7, 4)
# The target takes up the 4 that can be copied about every other time, and then the 5 every third.
REPEATING_PROMPT = (0, 5, 3, 4, 5, 3)


def fit_of_short_outputs(
    pair: Pair,
    case: Case,
    *,
    prompt: Sequence[int] = SHORT_PROMPT,
    length: int = 3,
    n: int = 400,
) -> float:
    """The p-value of the first tokens of n outputs."""
    # Room for a whole round, so that the first one is not clamped to fewer than gamma.
    gamma = case.gamma if isinstance(case.gamma, int) else MAX_PLANNED
    requests = case.requests(max_tokens=max(length, gamma + 1))
    draws = []
    for request in itertools.islice(requests, n):
        ids: list[int] = []
        for piece in pair.engine.generate(prompt, request, rule=case.rule, gamma=case.gamma):
            ids += [token.id for token in piece.tokens]
            if len(ids) >= length:
                break
        draws.append(tuple(ids[:length]))
    allowed = in_a_text if case.params.grammar is not None else None
    outputs = oracle.Enumeration(pair.target, prompt, ENDS, allowed)
    return chi_square(draws, outputs.of_length(length, case.params))


def transformed(pair: Pair, case: Case, n: int) -> Uniforms:
    """[2, n] the integral transforms of a text, with ids ranked by the draft's leaning and by id."""
    request = next(case.requests(max_tokens=n))
    ids = list(LONG_PROMPT)
    for piece in pair.engine.generate(LONG_PROMPT, request, rule=case.rule, gamma=case.gamma):
        ids += [token.id for token in piece.tokens]
    written = ids[len(LONG_PROMPT) :]
    assert len(written) == n
    p, q = (
        np.stack(list(oracle.along(model, ids, len(LONG_PROMPT), case.params)))
        for model in (pair.target, pair.draft)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        leaning = np.nan_to_num(np.log(q) - np.log(p))
    v = np.random.default_rng(request.seed).random(n)
    rankings = leaning, np.broadcast_to(np.arange(p.shape[1]), p.shape)
    return np.array(
        [
            [integral_transform(*token) for token in zip(p, ranking, written, v, strict=True)]
            for ranking in rankings
        ]
    )


def fit_of_long_texts(pair: Pair, cases: Sequence[Case], *, n: int = 30) -> float:
    """The p-value of a text of n tokens a case, for uniformity and independence under either ranking."""
    u = np.concatenate([transformed(pair, case, n) for case in cases], axis=1)
    p_values = [test(ranked) for test in (uniformity, independence) for ranked in u]
    return min(1.0, len(p_values) * min(p_values))


# ---- the engine passes ---------------------------------------------------------------------------------

# Each transform, temperature, gamma and rule, and most pairs of them.
SHORT_CASES = [
    Case("none", 0.6, 2, BLOCK),
    Case("none", 1.0, 4, BLOCK),
    Case("none", 1.5, 3, BLOCK),
    Case("top-k", 0.6, 4, BLOCK),
    Case("top-p", 1.0, 3, BLOCK),
    Case("min-p", 1.5, 4, BLOCK),
    Case("repeat", 0.6, 1, BLOCK),
    Case("frequency", 1.0, 2, BLOCK),
    Case("presence", 0.6, 1, BLOCK),
    Case("bias", 1.5, 2, BLOCK),
    Case("all cuts", 1.0, 1, BLOCK),
    Case("everything", 0.6, 3, BLOCK),
    Case("none", 1.0, 2, TOKEN),
    Case("top-p", 0.6, 4, TOKEN),
    Case("presence", 1.0, 3, TOKEN),
    Case("everything", 1.5, 2, TOKEN),
    Case("none", 1.0, 1, COUPLED),
    Case("repeat", 0.6, 2, COUPLED),
    Case("all cuts", 1.5, 4, COUPLED),
    Case("grammar", 1.0, 3, BLOCK),
    Case("grammar", 1.5, 1, BLOCK),
    Case("grammar", 0.6, 4, TOKEN),
    Case("grammar", 1.0, 2, COUPLED),
    Case("grammar, cuts", 1.0, 2, BLOCK),
]
OPPOSITE = Case("no end", 1.0, 1, TOKEN)


def long_cases(transform: str, rule: Rule) -> list[Case]:
    return [Case(transform, t, gamma, rule) for t in TEMPERATURES for gamma in GAMMAS]


@pytest.mark.parametrize("case", SHORT_CASES, ids=str)
def test_short_outputs_have_the_targets_frequencies(short_pair: Pair, case: Case) -> None:
    assert fit_of_short_outputs(short_pair, case) > THRESHOLD


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("transform", OF_EVERY_PAIR)
def test_long_texts_are_independent_draws_from_the_target(
    long_pair: Pair, transform: str, rule: Rule
) -> None:
    assert fit_of_long_texts(long_pair, long_cases(transform, rule)) > THRESHOLD


def test_short_outputs_with_an_opposite_draft_have_the_targets_frequencies(
    opposite_pair: Pair,
) -> None:
    assert fit_of_short_outputs(opposite_pair, OPPOSITE, length=2, n=1000) > THRESHOLD


@pytest.mark.parametrize("rule", [BLOCK, TOKEN])
def test_long_texts_with_an_opposite_draft_are_independent_draws_from_the_target(
    opposite_pair: Pair, rule: Rule
) -> None:
    assert fit_of_long_texts(opposite_pair, long_cases("no end", rule)) > THRESHOLD


@pytest.mark.parametrize("rule", [BLOCK, TOKEN])
def test_a_draft_may_stop_after_a_token_that_it_was_unsure_of(
    short_pair: Pair, long_pair: Pair, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, short_pair, mutants.StoppingDrafter)
    assert fit_of_short_outputs(short_pair, Case("none", 1.0, 4, rule)) > THRESHOLD
    use(monkeypatch, long_pair, mutants.StoppingDrafter)
    assert fit_of_long_texts(long_pair, long_cases("top-p", rule)) > THRESHOLD


@pytest.mark.parametrize("rule", [BLOCK, TOKEN])
def test_a_greedy_draft_is_right_with_a_one_hot_q(
    short_pair: Pair, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, short_pair, mutants.OneHotGreedyDraft)
    assert fit_of_short_outputs(short_pair, Case("none", 1.0, 4, rule)) > THRESHOLD


PLANNED_CASES = [
    Case("none", 1.0, AUTO, TOKEN),
    Case("everything", 1.0, AUTO, TOKEN),
    Case("none", 1.5, AUTO, BLOCK),
    Case("top-p", 0.6, AUTO, BLOCK),
    Case("none", 1.0, AUTO, COUPLED),
]


@pytest.fixture(params=[False, True], ids=["beside copies", "guided by copies"])
def planned(
    short_pair: Pair, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Pair:
    """The pair with an n-gram drafter, and costs at which each of several lengths pays now and then."""
    engine, ngram = short_pair.engine, NgramDrafter(min_match=1)
    drafter = engine._slots[0].drafters[0]
    monkeypatch.setattr(drafter, "guide", ngram if request.param else None)
    monkeypatch.setattr(engine, "_costs", CostCurve((1, 2, 9), (1.0, 1.02, 1.9)))
    monkeypatch.setattr(drafter, "costs", CostCurve((1, 2), (0.12, 0.13)))
    monkeypatch.setattr(engine._slots[0], "drafters", [drafter, ngram])
    return short_pair


@pytest.mark.parametrize("case", PLANNED_CASES, ids=str)
def test_short_outputs_with_a_planned_draft_have_the_targets_frequencies(
    planned: Pair, case: Case
) -> None:
    assert fit_of_short_outputs(planned, case, prompt=REPEATING_PROMPT) > THRESHOLD


def test_the_planner_of_these_costs_drafts_now_more_and_now_less(planned: Pair) -> None:
    params = replace(
        PLANNED_CASES[0].params, max_tokens=200, logit_bias={1: -math.inf, 2: -math.inf}
    )
    *_, last = planned.engine.generate(REPEATING_PROMPT, replace(params, seed=5), gamma=AUTO)
    assert last.statistics is not None
    guided = planned.engine._slots[0].drafters[0].guided
    assert set(last.statistics.sources) == {"short-draft.gguf", *([] if guided else ["ngram"])}
    assert len([n for n in last.statistics.accepted_histogram if n]) > 2


COPYING_CASES = [
    Case("none", 1.0, 1, TOKEN),
    Case("top-p", 1.5, 3, TOKEN),
    Case("none", 1.0, 4, BLOCK),
    Case("frequency", 0.6, 2, BLOCK),
    Case("all cuts", 1.0, 3, COUPLED),
    Case("grammar", 1.0, 3, BLOCK),
]


@pytest.mark.parametrize("case", COPYING_CASES, ids=str)
def test_short_outputs_with_copied_tokens_have_the_targets_frequencies(
    copying_pair: Pair, case: Case
) -> None:
    assert fit_of_short_outputs(copying_pair, case, prompt=REPEATING_PROMPT) > THRESHOLD


# ---- and would fail if it were wrong -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "case"),
    [
        (mutants.ResidualFromTarget, Case("none", 0.6, 2, BLOCK)),
        (mutants.ResidualFromTarget, Case("top-p", 0.6, 4, TOKEN)),
        (mutants.StopsAtFirstFailure, Case("none", 1.0, 4, BLOCK)),
        (mutants.UntransformedDraft, Case("top-k", 0.6, 4, BLOCK)),
        (mutants.TargetAtTemperatureOne, Case("none", 0.6, 2, BLOCK)),
        (mutants.GreedyDraft, Case("none", 1.0, 4, BLOCK)),
        (mutants.GreedyDraft, Case("none", 1.0, 2, TOKEN)),
        (mutants.PenalisesRejected, Case("presence", 0.6, 1, BLOCK)),
        (mutants.PenalisesLastOfRound, Case("presence", 0.6, 1, BLOCK)),
        (mutants.NoiseByPlaceInRound, Case("none", 1.0, 1, COUPLED)),
        (mutants.DiscardingDrafter, Case("none", 1.0, 4, BLOCK)),
        (mutants.MaskOfRound, Case("grammar", 1.0, 3, BLOCK)),
        (mutants.MaskOfRound, Case("grammar", 0.6, 4, TOKEN)),
        (mutants.MaskAfterRejected, Case("grammar", 1.0, 3, BLOCK)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_the_check_of_short_outputs_rejects(
    short_pair: Pair,
    wrong: type[Sampler | ModelDrafter],
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert case in SHORT_CASES, "the right sampler passes the very same check"
    use(monkeypatch, short_pair, wrong)
    assert fit_of_short_outputs(short_pair, case) < REJECTED


@pytest.mark.parametrize(
    "case", [case for case in COPYING_CASES if case.rule is not COUPLED], ids=str
)
def test_the_check_of_copied_tokens_rejects(
    copying_pair: Pair, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, copying_pair, mutants.ResidualFromTarget)
    assert fit_of_short_outputs(copying_pair, case, prompt=REPEATING_PROMPT) < REJECTED


def test_the_check_of_short_outputs_rejects_one_stream_for_draft_and_residual(
    opposite_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, opposite_pair, mutants.OneStream)
    assert fit_of_short_outputs(opposite_pair, OPPOSITE, length=2, n=1000) < REJECTED


@pytest.mark.parametrize(
    ("wrong", "case"),
    [
        (mutants.TargetAtTemperatureOne, Case("none", 0.4, 2, BLOCK)),
        (mutants.GreedyDraft, Case("none", 1.5, 4, BLOCK)),
        (mutants.SameNumbersEveryRound, Case("none", 1.0, 1, BLOCK)),
        (mutants.PenalisesLastOfRound, Case("frequency", 0.6, 4, BLOCK)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_the_check_of_long_texts_rejects(
    long_pair: Pair, wrong: type[Sampler], case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fit_of_long_texts(long_pair, [case], n=480) > THRESHOLD
    use(monkeypatch, long_pair, wrong)
    assert fit_of_long_texts(long_pair, [case], n=480) < REJECTED


# ---- what the rule is given ----------------------------------------------------------------------------


@pytest.mark.parametrize("transform", OF_EVERY_PAIR)
def test_p_and_q_are_the_oracles_at_every_row_of_a_round(
    long_pair: Pair, transform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rejected tokens too: row i has the transforms of the history h + x[:i], whatever comes of it."""
    ids = list(LONG_PROMPT)
    case = Case(transform, 0.6, 4, BLOCK)
    checked = 0

    class Compared(Sampler):
        def verify(
            self,
            p: Sequence[Probabilities],
            q: Sequence[Probabilities],
            drafted: Sequence[int],
            *,
            round_: int,
            position: int,
        ) -> Verdict:
            nonlocal checked
            text = [*ids, *drafted]
            for model, rows in ((long_pair.target, p), (long_pair.draft, q)):
                logits = model.evaluate(text)[len(ids) - 1 :]
                for i, row in enumerate(rows):
                    expected = oracle.distribution(logits[i], case.params, text[: len(ids) + i])
                    # A float has 24 bits.
                    np.testing.assert_allclose(row, expected, rtol=2e-6, atol=1e-9)
                    checked += 1
            verdict = super().verify(p, q, drafted, round_=round_, position=position)
            ids.extend([*drafted[: verdict.accepted], verdict.token])
            return verdict

    use(monkeypatch, long_pair, Compared)
    request = next(case.requests(max_tokens=30))
    for _ in long_pair.engine.generate(LONG_PROMPT, request, gamma=case.gamma):
        pass
    assert checked > 60


@pytest.mark.parametrize("rule", [BLOCK, TOKEN])
def test_no_random_number_serves_two_decisions(
    long_pair: Pair, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[tuple[int, int, int]] = []

    class Recorded(Sampler):
        def _uniform(self, stream: int, round_: int, index: int) -> float:
            used.append((stream, round_, index))
            return super()._uniform(stream, round_, index)

    use(monkeypatch, long_pair, Recorded)
    request = next(Case("none", 1.0, 4, rule).requests(max_tokens=100))
    for _ in long_pair.engine.generate(LONG_PROMPT, request, rule=rule, gamma=4):
        pass
    assert len(used) > 200
    assert len(set(used)) == len(used)


@pytest.mark.parametrize("rule", Rule)
def test_a_target_that_is_its_own_draft_accepts_everything(
    models: Path, long_pair: Pair, rule: Rule
) -> None:
    """p == q leaves a residual of no mass, which is never drawn from."""
    with Engine(models / "long.gguf", models / "long.gguf", n_ctx=512, threads=1) as engine:
        case = Case("top-p", 1.0, 4, rule)
        request = next(case.requests(max_tokens=100))
        *_, last = engine.generate(LONG_PROMPT, request, rule=rule, gamma=case.gamma)
        assert last.statistics is not None
        assert last.statistics.accepted == last.statistics.drafted == 80
        assert fit_of_long_texts(replace(long_pair, engine=engine), [case], n=300) > THRESHOLD


# ---- distributions written by hand ---------------------------------------------------------------------


def row(*probabilities: float) -> Probabilities:
    return np.array(probabilities, np.float32)


def rounds(
    rule: Rule, p: Probabilities, q: Probabilities, *, greedy: bool = False, n: int = 10_000
) -> list[Verdict]:
    """Verdicts of n rounds with one drafted token; where it is rejected, the token is its substitute."""
    sampler = Sampler(SamplingParams(seed=5), len(p), rule)
    verdicts = []
    for round_ in range(n):
        drafted = sampler.draw_draft(q, round_=round_, index=0, position=0)
        drafted = int(np.argmax(q)) if greedy else drafted
        verdict = sampler.verify([p, p], [q], [drafted], round_=round_, position=0)
        verdicts.append(replace(verdict, token=drafted) if verdict.accepted else verdict)
    return verdicts


@pytest.mark.parametrize("rule", [BLOCK, TOKEN])
def test_a_greedy_draft_with_its_softmax_for_q_is_known_to_go_wrong(rule: Rule) -> None:
    """By hand: with q = [.8, .2] the likeliest token is kept with .6 / .8; with a one-hot q with .6."""
    p = row(0.6, 0.4)
    right = [v.token for v in rounds(rule, p, row(1.0, 0.0), greedy=True)]
    wrong = [v.token for v in rounds(rule, p, row(0.8, 0.2), greedy=True)]
    drawn = [v.token for v in rounds(rule, p, row(0.8, 0.2))]
    assert chi_square(right, {0: 0.6, 1: 0.4}) > THRESHOLD
    assert chi_square(wrong, {0: 0.75, 1: 0.25}) > THRESHOLD
    assert chi_square(drawn, {0: 0.6, 1: 0.4}) > THRESHOLD


@pytest.mark.parametrize("rule", [BLOCK, TOKEN])
@pytest.mark.parametrize("tiny", [1e-9, 1e-30, 1e-44, 0.0])
def test_a_token_of_tiny_probability_is_hardly_ever_accepted(rule: Rule, tiny: float) -> None:
    """10000 rounds in which the draft is as likely as not to draw it, and p / q is 2e-9 or less."""
    verdicts = rounds(rule, row(tiny, 1.0), row(0.5, 0.5))
    assert {v.token for v in verdicts} == {1}
    assert 0.45 < np.mean([v.accepted for v in verdicts]) < 0.55


@pytest.mark.parametrize("rule", [BLOCK, TOKEN])
def test_disjoint_supports_reject_everything(rule: Rule) -> None:
    verdicts = rounds(rule, row(0.0, 0.0, 0.3, 0.7), row(0.5, 0.5, 0.0, 0.0))
    assert not any(v.accepted for v in verdicts)
    assert chi_square([v.token for v in verdicts], {2: 0.3, 3: 0.7}) > THRESHOLD


@pytest.mark.parametrize("rule", [BLOCK, TOKEN])
def test_equal_distributions_accept_everything(rule: Rule) -> None:
    p = row(0.1, 0.2, 0.3, 0.4)
    verdicts = rounds(rule, p, p.copy())
    assert all(v.accepted for v in verdicts)
    assert chi_square([v.token for v in verdicts], {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}) > THRESHOLD


@pytest.mark.parametrize("rule", Rule)
def test_a_missing_row_is_one_hot_at_the_drafted_token(rule: Rule) -> None:
    """Verdict for verdict, with drafted tokens of every kind and rows of both kinds in one round."""
    rng = np.random.default_rng(0)
    sampler = Sampler(SamplingParams(seed=5), 5, rule)
    accepted = set()
    for round_ in range(300):
        p = list(rng.dirichlet(np.full(5, 0.3), 4).astype(np.float32))
        drafted = [int(rng.choice(5, p=row / row.sum())) for row in p[:3]]
        one_hot = list(np.eye(5, dtype=np.float32)[drafted])
        missing = [None if rng.random() < 0.7 else row for row in one_hot]
        verdicts = {
            sampler.verify(p, q, drafted, round_=round_, position=7 * round_)
            for q in (one_hot, missing, [None] * 3)
        }
        assert len(verdicts) == 1
        accepted.add(verdicts.pop().accepted)
    assert accepted == {0, 1, 2, 3}


# ---- longer ----------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("transform", OF_EVERY_PAIR)
def test_many_short_outputs_have_the_targets_frequencies(
    short_pair: Pair, transform: str, rule: Rule
) -> None:
    """30 tests of 3 p-values each."""
    for temperature, gamma in zip(TEMPERATURES, (2, 3, 4), strict=True):
        case = Case(transform, temperature, gamma, rule)
        assert fit_of_short_outputs(short_pair, case, n=2000) > THRESHOLD, case


@pytest.mark.thorough
@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("stopping", [False, True], ids=["", "stopping"])
def test_many_long_texts_are_independent_draws_from_the_target(
    long_pair: Pair, rule: Rule, stopping: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """36000 tokens at once: a leaning of a hundredth would show."""
    if stopping:
        use(monkeypatch, long_pair, mutants.StoppingDrafter)
    cases = [case for transform in OF_EVERY_PAIR for case in long_cases(transform, rule)]
    assert fit_of_long_texts(long_pair, cases, n=300) > THRESHOLD
