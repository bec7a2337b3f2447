"""Tiny random models of the Llama architecture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

from .file import F32, WIDEST, Array, gaussian, write_file
from .vocabulary import Vocabulary

HEAD = 16  # width of an attention head

# Gains that give next-token distributions with a top probability of 0.2 to 0.7, which depend on the
# whole context, and a draft (the leading part of its target) with an acceptance of 0.5 to 0.6.
QUERY_KEY = 2.0
ATTENTION = 1.5
FEED_FORWARD = 1.0
LATER_LAYERS = 0.3  # the first layer, which a draft has too, counts most
OUTPUT = 1.8
FALL = 12  # channels to half magnitude: the leading ones, which a draft has, count most


def write_llama(
    path: Path,
    vocabulary: Vocabulary,
    *,
    seed: int = 1,
    width: int = 64,
    layers: int = 2,
    noise: float = 0.0,
    biases: Mapping[int, float] | None = None,
    negated: bool = False,
    nan_token: int | None = None,
    sharpness: float = 1.0,
    context: int = 8192,
    weight_type: GGMLQuantizationType = F32,
) -> Path:
    """Write a model with a head for each 16 channels, and a key and value head for every two.

    Args:
        path: The file to write.
        vocabulary: Its tokens; their number is the number of logits.
        seed: Chooses the weights. With one seed, a model of less width or fewer layers is the
            leading part of a larger one, so that the two often agree: a target and its draft.
        width: A multiple of 32, at most 256.
        layers: The number of layers.
        noise: The share, 0 to 1, of the weights' variance that is not the seed's common one.
        biases: What to add, roughly, to the logits of tokens. By default -6 on control tokens, so
            that text goes on; with 0 the end of generation is as frequent as any other token.
        negated: Give every logit the opposite sign, exactly.
        nan_token: A token whose logit is NaN.
        sharpness: A factor on all logits.
        context: The context length it claims to be trained for.
        weight_type: The type of the matrices.
    """
    if width % 32 or not 32 <= width <= WIDEST:
        raise ValueError(f"width must be a multiple of 32 up to {WIDEST}")
    ffn = 2 * width

    def matrix(name: str, rows: int, columns: int, gain: float) -> Array:
        weights = gaussian(seed, name, rows, columns, noise=noise)
        return weights * np.float32(gain / np.sqrt(columns))

    def into_residual(name: str, columns: int, gain: float) -> Array:
        """A matrix whose product is added to the residual stream."""
        weights = _fall(width)[:, None] * matrix(name, width, columns, gain) * _fall(columns)
        weights[0] = 0.0  # the first channel stays what the embedding says
        return weights / np.sqrt(np.mean(_fall(columns) ** 2))

    tensors: dict[str, Array] = {}
    for layer in range(layers):
        block = f"blk.{layer}"
        weight = 1.0 if layer == 0 else LATER_LAYERS
        for name, rows, gain in (
            ("attn_q", width, QUERY_KEY),
            ("attn_k", width // 2, QUERY_KEY),
            ("attn_v", width // 2, 1.0),
            ("ffn_gate", ffn, 1.0),
            ("ffn_up", ffn, 1.0),
        ):
            full = f"{block}.{name}.weight"
            tensors[full] = matrix(full, rows, width, gain)
        for name, columns, gain in (
            ("attn_output", width, ATTENTION),
            ("ffn_down", ffn, FEED_FORWARD),
        ):
            full = f"{block}.{name}.weight"
            tensors[full] = into_residual(full, columns, gain * weight)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"{block}.{name}.weight"] = np.ones(width, np.float32)

    embedding = gaussian(seed, "token_embd.weight", len(vocabulary), width, noise=noise)
    embedding *= _fall(width)
    embedding[:, 0] = 0.5
    tensors["token_embd.weight"] = embedding
    tensors["output_norm.weight"] = np.ones(width, np.float32)

    output = matrix("output.weight", len(vocabulary), width, OUTPUT * sharpness)
    if biases is None:
        biases = dict.fromkeys(vocabulary.controls, -6.0)
    # The first channel is about as large in every context: its weights act as biases.
    output[:, 0] = [biases.get(token, 0.0) for token in range(len(vocabulary))]
    if negated:
        output = -output
    if nan_token is not None:
        output[nan_token] = np.nan
    tensors["output.weight"] = output

    parameters = {
        "context_length": context,
        "embedding_length": width,
        "block_count": layers,
        "feed_forward_length": ffn,
        "attention.head_count": width // HEAD,
        "attention.head_count_kv": width // HEAD // 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": HEAD,
        "vocab_size": len(vocabulary),
    }
    return write_file(path, "llama", vocabulary, parameters, tensors, weight_type=weight_type)


def _fall(channels: int) -> Array:
    """The relative magnitude of each channel; a narrower model's is the leading part."""
    return (1 / (1 + np.arange(channels) / FALL)).astype(np.float32)
