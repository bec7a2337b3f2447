"""Writing a model file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from .vocabulary import Vocabulary
from .weights import Array

F32 = GGMLQuantizationType.F32
Parameter = int | float | bool | str | list[int] | list[bool]


def write_file(
    path: Path,
    architecture: str,
    vocabulary: Vocabulary,
    parameters: Mapping[str, Parameter],
    tensors: Mapping[str, Array],
    *,
    weight_type: GGMLQuantizationType = F32,
) -> Path:
    """Write a model file, its matrices in ``weight_type`` and its vectors in F32.

    A parameter's name lacks the architecture in front: "block_count" becomes "llama.block_count".
    """
    writer = GGUFWriter(path, architecture)
    for name, value in parameters.items():
        key = f"{architecture}.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    _add_vocabulary(writer, vocabulary)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and weight_type != F32:
            writer.add_tensor(name, quantize(tensor, weight_type), raw_dtype=weight_type)
        else:
            writer.add_tensor(name, np.ascontiguousarray(tensor, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_token_list(list(vocabulary.texts))
    writer.add_token_types(list(vocabulary.types))
    if vocabulary.scores:
        writer.add_token_scores(list(vocabulary.scores))
    if vocabulary.model == "gpt2":
        writer.add_tokenizer_pre("llama-bpe")
        # llama.cpp refuses a byte-level file without merges, and an empty array cannot be written.
        writer.add_token_merges(list(vocabulary.merges) or ["unused merge"])
    writer.add_bos_token_id(vocabulary.bos)
    writer.add_eos_token_id(vocabulary.eos)
    if vocabulary.eot is not None:
        writer.add_eot_token_id(vocabulary.eot)
    writer.add_add_bos_token(vocabulary.add_bos)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)
