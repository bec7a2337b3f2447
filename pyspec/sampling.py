"""What is sampled and how: a request's settings, and the C library's distributions and rules over them."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from pyspec._cspec import ffi, lib
from pyspec.errors import LogitsError, NoTokenError, UsageError
from pyspec.grammar import Constraint, Grammar

Probabilities = npt.NDArray[np.float32]

_STATUS_TEXTS = {
    lib.CSPEC_NAN: "NaN",
    lib.CSPEC_INF: "infinite",
    lib.CSPEC_EMPTY: "all -inf",
}


# Beyond any use, and well inside of what the C library's single precision can add up.
_EXTREME = 1e6


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of one request. The defaults and the meanings are those of llama.cpp's sampler chain.

    Attributes:
        temperature: 0 is greedy. Applied last, after the cuts below.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        top_p: Keep the likeliest tokens whose probabilities reach p together; 1 keeps all.
        min_p: Keep tokens at least this fraction as likely as the likeliest; 0 keeps all.
        repeat_penalty: Divides positive and multiplies negative logits of tokens in the window; 1 is off.
        frequency_penalty: Subtracted from a logit for each occurrence in the window.
        presence_penalty: Subtracted once from the logit of each token in the window.
        repeat_last_n: Length of the penalties' window over prompt and output; -1 is all of it.
        logit_bias: Added to the logits of these token ids; -inf bans a token.
        seed: The same seed writes the same text; None draws one, which the statistics report.
        max_tokens: Most tokens to write; None writes until the model ends or the context is full.
        stop: Texts before which the output is cut.
        grammar: What the output may be; tokens that do not keep to it are left out before all of the above.
        logprobs: Report the log probability of each token and of this many likeliest ones in its place;
            None reports none.

    Raises:
        UsageError: A setting is outside its range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = 64
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int | None = None
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    grammar: Grammar | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            f"temperature must be 0 or more, not {self.temperature}",
        )
        _require(
            0 <= self.top_k < 2**31, f"top-k must be 0 (off) or more, below 2**31, not {self.top_k}"
        )
        _require(0 < self.top_p <= 1, f"top-p must be over 0 and at most 1, not {self.top_p}")
        _require(0 <= self.min_p <= 1, f"min-p must be from 0 to 1, not {self.min_p}")
        _require(
            1 / _EXTREME <= self.repeat_penalty <= _EXTREME,
            f"repeat penalty must be over 0, from {1 / _EXTREME:g} to {_EXTREME:g}, "
            f"not {self.repeat_penalty}",
        )
        for name in ("frequency", "presence"):
            value = getattr(self, f"{name}_penalty")
            _require(
                -_EXTREME <= value <= _EXTREME,
                f"{name} penalty must be from {-_EXTREME:g} to {_EXTREME:g}, not {value}",
            )
        _require(
            self.repeat_last_n >= -1, f"repeat-last-n must be -1 or more, not {self.repeat_last_n}"
        )
        _require(
            all(
                bias == -math.inf or -_EXTREME <= bias <= _EXTREME
                for bias in self.logit_bias.values()
            ),
            f"a logit bias must be from {-_EXTREME:g} to {_EXTREME:g}, or -inf",
        )
        _require(
            self.max_tokens is None or self.max_tokens >= 1,
            f"max-tokens must be 1 or more, not {self.max_tokens}",
        )
        _require(
            self.seed is None or 0 <= self.seed < 2**64,
            f"seed must be from 0 to 2**64 - 1, not {self.seed}",
        )
        _require(
            self.logprobs is None or self.logprobs >= 0,
            f"logprobs must be 0 or more, not {self.logprobs}",
        )
        _require(all(self.stop), "a stop string must not be empty")

    def _check_types(self) -> None:
        for name in ("top_k", "repeat_last_n", "seed", "max_tokens", "logprobs"):
            value = getattr(self, name)
            optional = name in ("seed", "max_tokens", "logprobs")
            _require(
                isinstance(value, int) or (optional and value is None),
                f"{name} must be a whole number, not {value!r}",
            )
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repeat_penalty",
            "frequency_penalty",
            "presence_penalty",
        ):
            value = getattr(self, name)
            _require(isinstance(value, (int, float)), f"{name} must be a number, not {value!r}")
        _require(
            isinstance(self.stop, Sequence)
            and not isinstance(self.stop, str)
            and all(isinstance(text, str) for text in self.stop),
            f"stop must be a list of texts, not {self.stop!r}",
        )
        _require(
            self.grammar is None or isinstance(self.grammar, Grammar),
            f"grammar must be a Grammar, not {self.grammar!r}",
        )
        _require(
            isinstance(self.logit_bias, Mapping)
            and all(
                isinstance(token, int) and isinstance(bias, (int, float))
                for token, bias in self.logit_bias.items()
            ),
            "logit_bias must map token ids to numbers",
        )

    @property
    def penalised(self) -> bool:
        """Whether the distribution depends on which tokens came before, beyond the logits."""
        return self.repeat_last_n != 0 and (
            self.repeat_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        )


class Rule(str, Enum):
    """How drafted tokens are verified; each leaves the target's distribution as it is.

    BLOCK: Block Verification (Sun et al., 2024): accepts the most on average.
    TOKEN: Leviathan, Kalman, Matias (ICML 2023): one token after the other.
    COUPLED: draft and target choose with the same noise, so that a seed's text is the same with any draft
        or none; accepts less than the others.
    """

    BLOCK = "block"
    TOKEN = "token"
    COUPLED = "coupled"


@dataclass(frozen=True)
class Verdict:
    """What a rule decided: how many drafted tokens are accepted, and the token that follows them."""

    accepted: int
    token: int


class Sampler:
    """Distributions and random decisions of one request.

    Every random number is a function of the seed, the purpose, the round and the index in the round, so
    a text does not depend on timing, and no two decisions share a number.

    Args:
        params: The request's settings.
        n_vocab: Size of the target's vocabulary.
        rule: How drafted tokens are verified.
        constraint: Of the request's grammar, if it has one.
    """

    def __init__(
        self,
        params: SamplingParams,
        n_vocab: int,
        rule: Rule = Rule.BLOCK,
        constraint: Constraint | None = None,
    ) -> None:
        self.params = params
        self._constraint = constraint
        self.rule = rule
        self.n_vocab = n_vocab
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self._settings = ffi.new(
            "cspec_sampling *",
            {
                "temperature": params.temperature,
                "top_k": params.top_k,
                "top_p": params.top_p,
                "min_p": params.min_p,
                "repeat_penalty": params.repeat_penalty,
                "frequency_penalty": params.frequency_penalty,
                "presence_penalty": params.presence_penalty,
            },
        )
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.int32, len(params.logit_bias))
        self._bias = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))

    def distribution(
        self, logits: Probabilities, history: Sequence[int], out: Probabilities, *, source: str
    ) -> None:
        """Turn a row of logits into the probabilities of the next token.

        Where a grammar and the bias leave no token between them, the text ends.

        Args:
            logits: [n] float32, n at most n_vocab.
            history: The tokens before this position, oldest first.
            out: [n] float32, may be `logits` itself.
            source: Whose logits these are, for the message.

        Raises:
            LogitsError: No distribution follows from the logits; NoTokenError if none is above -inf.
        """
        seen, counts = self._penalty_window(history)
        mask = None if self._constraint is None else self._constraint.mask(history)
        status = lib.cspec_probabilities(
            ffi.from_buffer("float[]", logits),
            ffi.from_buffer("float[]", out),
            len(logits),
            self._settings,
            ffi.from_buffer("int32_t[]", seen),
            ffi.from_buffer("int32_t[]", counts),
            len(seen),
            ffi.from_buffer("int32_t[]", self._bias_ids),
            ffi.from_buffer("float[]", self._bias),
            len(self._bias_ids),
            ffi.NULL if mask is None else ffi.from_buffer("uint32_t[]", mask),
        )
        if status == lib.CSPEC_BARRED and self._constraint is not None:
            out[:] = 0
            # A draft may lack the end; any other token is as good, as none of it will be accepted.
            out[min(self._constraint.end, len(out) - 1)] = 1
        elif status != lib.CSPEC_OK:
            raise (NoTokenError if status == lib.CSPEC_EMPTY else LogitsError)(
                f"the {source}'s logits for position {len(history)} are {_STATUS_TEXTS[status]}: "
                "the model file is damaged, or it does not work in this configuration"
            )

    def _penalty_window(
        self, history: Sequence[int]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        if not self.params.penalised:
            return _NO_IDS, _NO_IDS
        last_n = self.params.repeat_last_n
        window = np.asarray(history if last_n < 0 else history[-last_n:], np.int32)
        ids, counts = np.unique(window, return_counts=True)
        return ids, counts.astype(np.int32)

    def draw_draft(self, q: Probabilities, *, round_: int, index: int, position: int) -> int:
        """Draw a drafted token from q.

        Args:
            q: [n_vocab].
            round_: Number of the round in the request.
            index: Number of the token among the round's drafted ones.
            position: The token's absolute position.
        """
        if self.params.temperature == 0:
            return int(q.argmax())
        row = ffi.from_buffer("float[]", q)
        if self.rule is Rule.COUPLED:
            return int(lib.cspec_coupled_choice(row, len(q), self.seed, position))
        return int(lib.cspec_draw(row, ffi.NULL, 1.0, len(q), self._uniform(_DRAFT, round_, index)))

    def verify(
        self,
        p: Sequence[Probabilities],
        q: Sequence[Probabilities | None],
        drafted: Sequence[int],
        *,
        round_: int,
        position: int,
    ) -> Verdict:
        """Decide how many drafted tokens stand, and draw the token after them.

        Args:
            p: [gamma + 1] rows [n_vocab] of the target.
            q: [gamma] rows [n_vocab], what each drafted token was drawn from; None is one-hot at it.
            drafted: [gamma] ids.
            round_: Number of the round in the request.
            position: Absolute position of the first drafted token.
        """
        gamma, token = len(drafted), ffi.new("int32_t *")
        ids = ffi.new("int32_t[]", list(drafted))
        if self.rule is Rule.COUPLED:
            accepted = lib.cspec_verify_coupled(
                _rows(p), ids, gamma, self.n_vocab, self.seed, position, token
            )
        else:
            verify = _VERIFY[self.rule]
            u_accept = [self._uniform(_ACCEPT, round_, index) for index in range(gamma)]
            u_draw = self._uniform(_TARGET, round_, 0)
            accepted = verify(
                _rows(p),
                _rows(q),
                ids,
                gamma,
                self.n_vocab,
                ffi.new("double[]", u_accept),
                u_draw,
                token,
            )
        return Verdict(int(accepted), int(token[0]))

    def _uniform(self, stream: int, round_: int, index: int) -> float:
        return float(lib.cspec_uniform(self.seed, stream, round_, index))


_DRAFT, _ACCEPT = lib.CSPEC_STREAM_DRAFT, lib.CSPEC_STREAM_ACCEPT
_TARGET = lib.CSPEC_STREAM_TARGET
_VERIFY = {Rule.TOKEN: lib.cspec_verify_token, Rule.BLOCK: lib.cspec_verify_block}
_NO_IDS = np.empty(0, np.int32)


def softmax_of(logits: Probabilities, token: int) -> float:
    """The probability of a token at temperature 1, with no other transform. logits: [n] float32."""
    row = ffi.from_buffer("float[]", logits)
    return float(lib.cspec_softmax_of(row, len(logits), token))


def _rows(rows: Sequence[Probabilities | None]) -> object:
    """A C array of pointers to rows that outlive the call; null for None."""
    return ffi.new(
        "float *[]", [ffi.NULL if row is None else ffi.from_buffer("float[]", row) for row in rows]
    )
