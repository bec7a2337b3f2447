"""Tiny models whose memory is not a plain KV cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .file import Parameter, write_file
from .vocabulary import Vocabulary
from .weights import HEAD, LATER_LAYERS, MIXER, Array, Weights, fall, gaussian

WIDTH = 64
STATE = 8  # numbers a Mamba channel remembers
STEP_RANK = 4
KERNEL = 4  # positions a convolution sees


def write_mamba(path: Path, vocabulary: Vocabulary, *, seed: int = 1) -> Path:
    """Write a recurrent model: llama.cpp keeps one state, after the last token."""
    weights = Weights(seed, WIDTH)
    for layer in range(2):
        weights.norm(f"blk.{layer}.attn_norm")
        _add_mamba(weights, layer)
    weights.ends(vocabulary)
    parameters = {**_common(vocabulary, heads=0, feed_forward=0), **_mamba_sizes()}
    return write_file(path, "mamba", vocabulary, parameters, weights.tensors)


def write_jamba(path: Path, vocabulary: Vocabulary, *, seed: int = 1) -> Path:
    """Write a hybrid of a Mamba layer and an attention layer."""
    weights = Weights(seed, WIDTH)
    for layer in range(2):
        weights.norm(f"blk.{layer}.attn_norm")
        weights.feed_forward(layer)
    _add_mamba(weights, 0)
    for name, size in (("dt", STEP_RANK), ("b", STATE), ("c", STATE)):
        weights.norm(f"blk.0.ssm_{name}_norm", size)
    weights.attention(1)
    weights.ends(vocabulary)
    parameters = {**_common(vocabulary), **_mamba_sizes(), "attention.head_count_kv": [0, 2]}
    return write_file(path, "jamba", vocabulary, parameters, weights.tensors)


def write_lfm2(path: Path, vocabulary: Vocabulary, *, seed: int = 1) -> Path:
    """Write a hybrid of a short convolution and an attention layer, which offers snapshots."""
    weights = Weights(seed, WIDTH)
    for layer in range(2):
        weights.norm(f"blk.{layer}.attn_norm")
        weights.feed_forward(layer)
    weights.matrix("blk.0.shortconv.in_proj", 3 * WIDTH, WIDTH)
    weights.matrix("blk.0.shortconv.conv", WIDTH, KERNEL, gain=2.0)
    weights.into_residual("blk.0.shortconv.out_proj", 0, WIDTH, MIXER)
    weights.attention(1, normed=True)
    weights.ends(vocabulary)
    weights.tensors["token_embd_norm.weight"] = weights.tensors.pop("output_norm.weight")
    parameters = {
        **_common(vocabulary),
        "attention.head_count_kv": [0, 2],
        "rope.dimension_count": HEAD,
        "shortconv.l_cache": KERNEL,
    }
    return write_file(path, "lfm2", vocabulary, parameters, weights.tensors)


def write_qwen35(path: Path, vocabulary: Vocabulary, *, seed: int = 1) -> Path:
    """Write a hybrid of a gated delta net and a gated attention layer, which offers snapshots."""
    weights = Weights(seed, WIDTH)
    key_heads, value_heads = 2, 4
    keys, values = HEAD * key_heads, HEAD * value_heads
    for layer in range(2):
        weights.norm(f"blk.{layer}.attn_norm")
        weights.feed_forward(layer)
        norm = weights.tensors.pop(f"blk.{layer}.ffn_norm.weight")
        weights.tensors[f"blk.{layer}.post_attention_norm.weight"] = norm
    weights.matrix("blk.0.attn_qkv", 2 * keys + values, WIDTH, gain=2.0)
    weights.matrix("blk.0.attn_gate", values, WIDTH)
    weights.matrix("blk.0.ssm_conv1d", 2 * keys + values, KERNEL, gain=2.0)
    weights.matrix("blk.0.ssm_beta", value_heads, WIDTH)
    weights.matrix("blk.0.ssm_alpha", value_heads, WIDTH)
    weights.norm("blk.0.ssm_norm", HEAD)
    weights.tensors["blk.0.ssm_dt.bias"] = np.zeros(value_heads)
    weights.tensors["blk.0.ssm_a"] = -np.arange(1.0, value_heads + 1) / value_heads / 4
    weights.into_residual("blk.0.ssm_out", 0, values, MIXER)
    weights.attention(1, normed=True)
    weights.matrix("blk.1.attn_q", 2 * WIDTH, WIDTH, gain=2.0)  # of each head, the query and a gate
    weights.ends(vocabulary)
    parameters = {
        **_common(vocabulary),
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "full_attention_interval": 2,
        "rope.dimension_count": HEAD,
        "rope.dimension_sections": [HEAD // 2, 0, 0, 0],
        "ssm.conv_kernel": KERNEL,
        "ssm.inner_size": values,
        "ssm.state_size": HEAD,
        "ssm.time_step_rank": value_heads,
        "ssm.group_count": key_heads,
    }
    return write_file(path, "qwen35", vocabulary, parameters, weights.tensors)


def write_gemma3(path: Path, vocabulary: Vocabulary, *, seed: int = 1, window: int = 16) -> Path:
    """Write a model whose first layer sees a window of positions, and the second all of them."""
    weights = Weights(seed, WIDTH)
    for layer in range(2):
        block = f"blk.{layer}"
        weights.norm(f"{block}.attn_norm")
        weights.attention(layer, normed=True)
        weights.feed_forward(layer)
        gain = fall(WIDTH) * np.float32(1.0 if layer == 0 else LATER_LAYERS)
        gain[0] = 0.0
        weights.norm(f"{block}.post_attention_norm", gain=gain)
        weights.norm(f"{block}.post_ffw_norm", gain=gain)
    weights.ends(vocabulary)
    weights.tensors["token_embd.weight"] /= np.sqrt(np.float32(WIDTH))  # the graph multiplies it
    parameters = {
        **_common(vocabulary),
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.sliding_window": window,
        "attention.sliding_window_pattern": [True, False],
    }
    return write_file(path, "gemma3", vocabulary, parameters, weights.tensors)


def _common(
    vocabulary: Vocabulary, *, heads: int = WIDTH // HEAD, feed_forward: int = 2 * WIDTH
) -> dict[str, Parameter]:
    return {
        "context_length": 8192,
        "embedding_length": WIDTH,
        "block_count": 2,
        "feed_forward_length": feed_forward,
        "attention.head_count": heads,
        "attention.head_count_kv": heads // 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": len(vocabulary),
    }


def _mamba_sizes() -> dict[str, Parameter]:
    return {
        "ssm.conv_kernel": KERNEL,
        "ssm.inner_size": 2 * WIDTH,
        "ssm.state_size": STATE,
        "ssm.time_step_rank": STEP_RANK,
    }


def _add_mamba(weights: Weights, layer: int) -> None:
    """Add a selective state space layer of twice the width."""
    block, inner = f"blk.{layer}", 2 * WIDTH
    weights.matrix(f"{block}.ssm_in", 2 * inner, WIDTH)
    weights.matrix(f"{block}.ssm_conv1d", inner, KERNEL, gain=2.0)
    weights.matrix(f"{block}.ssm_x", STEP_RANK + 2 * STATE, inner, gain=2.0)
    weights.matrix(f"{block}.ssm_dt", inner, STEP_RANK)
    vectors: dict[str, Array] = {
        "ssm_conv1d.bias": np.zeros(inner),
        "ssm_dt.bias": gaussian(weights.seed, f"{block}.ssm_dt.bias", 1, inner)[0] - 1,
        # Rates of forgetting, one for each number remembered.
        "ssm_a": np.tile(-np.arange(1.0, STATE + 1) / STATE, (inner, 1)),
        "ssm_d": np.ones(inner),
    }
    weights.tensors |= {f"{block}.{name}": values for name, values in vectors.items()}
    weights.into_residual(f"{block}.ssm_out", layer, inner, MIXER)
