"""Real models are as good with the kernels as in stock llama.cpp.

The texts were written for this test, so that no model has seen them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pyspec import bridge
from pyspec.catalogue import models_folder
from pyspec.quantise import requantised
from tests.test_bit_exact import GEMMA, QWEN, QWEN_SMALL, SMOLLM

WHOLE = 1 << 20  # tokens of a text
TEXTS = sorted((Path(__file__).parent / "texts").glob("*.txt"))

pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(
        not bridge.attach_kernels().instructions, reason=bridge.attach_kernels().reason
    ),
]

# In a process of its own: the negative log-likelihood of each token, in passes of so many, and what was used.
LIKELIHOOD = """
import json, sys
from pathlib import Path
import numpy as np
from pyspec import bridge
from pyspec.llama import Context, Model

file, width, most, *texts = sys.argv[1:]
width, most = int(width), int(most)
model = Model(file)
losses = []
for text in texts:
    tokens = model.tokenize(Path(text).read_text())[:most]
    context = Context(model, n_ctx=len(tokens), n_batch=width, n_logits=width)
    for start in range(0, len(tokens) - 1, width):
        part = tokens[start : min(start + width, len(tokens) - 1)]
        context.evaluate(part, n_logits=len(part))
        for row in range(len(part)):
            logits = context.logits(row).astype(np.float64)
            top = logits.max()
            total = top + np.log(np.exp(logits - top).sum())
            losses.append(total - logits[tokens[start + row + 1]])
    context.close()
print(json.dumps([bridge.attach_kernels().instructions, losses]))
"""


Losses = npt.NDArray[np.float64]


@cache
def losses(path: Path, width: int, most: int = WHOLE, **environment: str) -> Losses:
    result = subprocess.run(
        [sys.executable, "-c", LIKELIHOOD, path, str(width), str(most), *map(str, TEXTS)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    instructions, values = json.loads(result.stdout)
    assert bool(instructions) == ("PYSPEC_BRIDGE" not in environment)
    return np.array(values)


def stock_losses(path: Path, most: int = WHOLE) -> Losses:
    return losses(path, 128, most, PYSPEC_BRIDGE="off")


def is_as_good(ours: Losses, stock: Losses) -> bool:
    """Whether the perplexities are within 0.3 % of each other, as far as so many tokens can tell.

    Both round activations, each in its way, so single tokens differ by as much as from a model that does not;
    what a mean over n tokens leaves of that is the standard error.
    """
    difference = ours - stock
    error = difference.std() / np.sqrt(len(difference))
    return bool(abs(np.expm1(difference.mean())) < max(0.003, 2 * error))


def model_file(name: str) -> Path:
    path = models_folder() / name
    if not path.exists():
        pytest.skip(f"{name} is not in {models_folder()}")
    return path


@pytest.mark.parametrize(
    ("name", "most"), [(SMOLLM, WHOLE), (GEMMA, WHOLE), (QWEN_SMALL, 600), (QWEN, 600)]
)
def test_perplexity_is_that_of_stock(name: str, most: int) -> None:
    path = model_file(name)
    ours, stock = losses(path, 128, most), stock_losses(path, most)
    assert len(ours) > 1000
    assert 2 < np.exp(stock.mean()) < 60
    assert is_as_good(ours, stock)


def test_single_tokens_are_as_near_to_a_model_that_rounds_nothing() -> None:
    path = model_file(SMOLLM)
    exact = stock_losses(requantised(path, "f16"))
    ours, stock = (float(np.std(x - exact)) for x in (losses(path, 128), stock_losses(path)))
    assert ours < 1.05 * stock


@pytest.mark.thorough
@pytest.mark.parametrize("name", [SMOLLM, GEMMA, QWEN_SMALL, QWEN])
def test_in_narrow_passes_too(name: str) -> None:
    path = model_file(name)
    assert is_as_good(losses(path, 5), stock_losses(path))


@pytest.mark.thorough
def test_a_coarser_quantisation_is_noticed() -> None:
    path = model_file(SMOLLM)
    assert not is_as_good(losses(requantised(path, "q4_0"), 128), stock_losses(path))
