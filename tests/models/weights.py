"""Random weights whose scales give lively next-token distributions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np

from .vocabulary import Vocabulary

Array = np.ndarray[Any, np.dtype[Any]]

WIDEST = 256
HEAD = 16  # width of an attention head

# Gains that give next-token distributions with a top probability of 0.2 to 0.7, which depend on the
# whole context, and a draft (the leading part of its target) with an acceptance of 0.5 to 0.6.
QUERY_KEY = 2.0
MIXER = 1.5
FEED_FORWARD = 1.0
LATER_LAYERS = 0.3  # the first layer, which a draft has too, counts most
OUTPUT = 1.8
CONSTANT = 0.5  # the value of the first channel, which no layer changes
FALL = 12  # channels to half magnitude: the leading ones, which a draft has, count most


def fall(channels: int) -> Array:
    """The relative magnitude of each channel; a narrower model's is the leading part."""
    magnitudes: Array = 1 / (1 + np.arange(channels, dtype=np.float32) / np.float32(FALL))
    return magnitudes


def gaussian(seed: int, name: str, rows: int, columns: int, *, noise: float = 0.0) -> Array:
    """A matrix of independent normal numbers that depends on the seed and the name alone.

    A smaller matrix is the leading block of a larger one. ``noise`` is the share of the variance
    that comes from other, independent numbers.
    """

    def draw(stream: int) -> Array:
        generator = np.random.default_rng([seed, crc32(name.encode()), stream])
        return generator.standard_normal((rows, 2 * WIDEST), dtype=np.float32)[:, :columns]

    weights: Array = draw(0)
    if noise:
        weights = np.sqrt(np.float32(1 - noise)) * weights + np.sqrt(np.float32(noise)) * draw(1)
    return weights


class Weights:
    """The tensors of one model, by name. A matrix is (rows, columns) and maps columns to rows."""

    def __init__(self, seed: int, width: int, noise: float = 0.0) -> None:
        if width % 32 or not 32 <= width <= WIDEST:
            raise ValueError(f"width must be a multiple of 32 up to {WIDEST}")
        self.seed = seed
        self.width = width
        self.noise = noise
        self.tensors: dict[str, Array] = {}

    def matrix(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        """Add a matrix that makes vectors of unit scale from such, times ``gain``."""
        weights = gaussian(self.seed, name, rows, columns, noise=self.noise)
        self.tensors[f"{name}.weight"] = weights * np.float32(gain / np.sqrt(columns))

    def into_residual(self, name: str, layer: int, columns: int, gain: float) -> None:
        """Add a matrix whose product is added to the residual stream."""
        self.matrix(name, self.width, columns, gain * (1.0 if layer == 0 else LATER_LAYERS))
        weights = self.tensors[f"{name}.weight"]
        weights *= fall(self.width)[:, None]
        weights *= fall(columns) / np.sqrt(np.mean(fall(columns) ** 2))
        weights[0] = 0.0

    def norm(self, name: str, size: int | None = None, gain: float | Array = 1.0) -> None:
        """Add the weights of a normalisation, by default of the residual stream."""
        scale = np.ones(size or self.width, np.float32)
        self.tensors[f"{name}.weight"] = scale * np.float32(gain)

    def attention(self, layer: int, *, normed: bool = False) -> None:
        """Add a head for each 16 channels, a key and value head for every two of them."""
        block = f"blk.{layer}"
        for name, rows in (("attn_q", self.width), ("attn_k", self.width // 2)):
            self.matrix(f"{block}.{name}", rows, self.width, QUERY_KEY)
            if normed:
                self.norm(f"{block}.{name}_norm", HEAD, QUERY_KEY)
        self.matrix(f"{block}.attn_v", self.width // 2, self.width)
        self.into_residual(f"{block}.attn_output", layer, self.width, MIXER)

    def feed_forward(self, layer: int) -> None:
        """Add a gated feed-forward network of twice the width, and the norm before it."""
        block = f"blk.{layer}"
        self.norm(f"{block}.ffn_norm")
        self.matrix(f"{block}.ffn_gate", 2 * self.width, self.width)
        self.matrix(f"{block}.ffn_up", 2 * self.width, self.width)
        self.into_residual(f"{block}.ffn_down", layer, 2 * self.width, FEED_FORWARD)

    def ends(
        self,
        vocabulary: Vocabulary,
        *,
        biases: Mapping[int, float] | None = None,
        sharpness: float = 1.0,
        rows: Sequence[int] | None = None,
    ) -> None:
        """Add the embedding and the output matrix.

        ``biases`` are, roughly, added to the logits of tokens: by default -6 to control tokens. ``rows``
        says which of the seed's rows each token has, by default that of its id.
        """
        rows = range(len(vocabulary)) if rows is None else rows
        embedding = gaussian(self.seed, "token_embd", max(rows) + 1, self.width, noise=self.noise)
        embedding = embedding[list(rows)] * fall(self.width)
        embedding[:, 0] = CONSTANT
        self.tensors["token_embd.weight"] = embedding
        self.norm("output_norm")
        self.matrix("output", max(rows) + 1, self.width, OUTPUT * sharpness)
        output = self.tensors["output.weight"][list(rows)]
        if biases is None:
            biases = dict.fromkeys(vocabulary.controls, -6.0)
        # After the last norm the first channel is about 1 in every context.
        output[:, 0] = [biases.get(token, 0.0) for token in range(len(vocabulary))]
        self.tensors["output.weight"] = output
