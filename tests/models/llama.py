"""Tiny models of the Llama architecture: a plain KV cache, and the options that most tests need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

from .file import F32, write_file
from .vocabulary import Vocabulary
from .weights import HEAD, Weights


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
    rows: Sequence[int] | None = None,
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
        rows: For each token the id of which it has the embedding and the output weights; by default its
            own. So models of different vocabularies can agree.
    """
    weights = Weights(seed, width, noise)
    for layer in range(layers):
        weights.norm(f"blk.{layer}.attn_norm")
        weights.attention(layer)
        weights.feed_forward(layer)
    weights.ends(vocabulary, biases=biases, sharpness=sharpness, rows=rows)
    output = weights.tensors["output.weight"]
    if negated:
        output *= -1
    if nan_token is not None:
        output[nan_token] = np.nan
    parameters = {
        "context_length": context,
        "embedding_length": width,
        "block_count": layers,
        "feed_forward_length": 2 * width,
        "attention.head_count": width // HEAD,
        "attention.head_count_kv": width // HEAD // 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": HEAD,
        "vocab_size": len(vocabulary),
    }
    return write_file(
        path, "llama", vocabulary, parameters, weights.tensors, weight_type=weight_type
    )
