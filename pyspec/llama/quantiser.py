"""llama.cpp's quantiser, as a program: `python -m pyspec.llama.quantiser SOURCE TARGET FILE_TYPE OUTPUT`.

A process of its own because llama.cpp ends it over some files, cannot be interrupted in it, and leaves memory
behind that nobody needs. On failure the last line on stderr says why.
"""

from __future__ import annotations

import os
import sys

import llama_cpp

from pyspec.llama.library import complaints, default_threads


def main(source: str, target: str, file_type: str, output_type: str) -> int:
    """Write a copy of a model.

    Args:
        source: The model.
        target: Where to write the copy.
        file_type: The copy's quantisation, one of llama.cpp's numbers.
        output_type: The type of its embedding and output matrix, one of ggml's numbers; empty for the usual.
    """
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = int(file_type)
    params.allow_requantize = True
    if output_type:
        params.output_tensor_type = params.token_embedding_type = int(output_type)
    params.nthread = default_threads()
    if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), params) != 0:
        why = complaints[-1] if complaints else "llama.cpp gave no reason"
        print(f"{source}: llama.cpp cannot quantise this model: {why}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
