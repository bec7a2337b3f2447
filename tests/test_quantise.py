"""Copies of a model in another quantisation."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyspec.errors import ModelError, UsageError
from pyspec.gguf_file import inspect_gguf
from pyspec.llama import Context, Model
from pyspec.quantise import quantisations, requantised
from tests.models import Vocabulary, foreign, write_llama

TOKENS = [3, 5, 8, 13, 21, 4, 7]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYSPEC_HOME", str(tmp_path))
    return tmp_path


def logits(path: Path) -> list[float]:
    model = Model(path)
    context = Context(model, n_ctx=64, n_logits=1)
    context.evaluate(TOKENS, n_logits=1)
    result = [float(value) for value in context.logits(0)]
    context.close()
    model.close()
    return result


def test_the_copy_is_of_the_asked_type_and_says_nearly_the_same(
    tiny_target: Path, home: Path
) -> None:
    said: list[str] = []
    path = requantised(tiny_target, "Q8_0", lambda what, *_: said.append(what))
    assert path.parent == home / "models" / "requantised"
    assert path.name.startswith("target-")
    assert path.name.endswith("-q8_0.gguf")
    assert said == ["quantising target.gguf to q8_0"]
    before, after = inspect_gguf(tiny_target), inspect_gguf(path)
    assert after.file_type == "Q8_0"
    # Two layers of seven matrices, the embedding and the output.
    assert after.tensor_types["Q8_0"] == 16
    assert after.parameters == before.parameters
    expected = logits(tiny_target)
    assert logits(path) == pytest.approx(expected, abs=0.1 * max(map(abs, expected)))


def test_it_is_made_once(tiny_target: Path) -> None:
    said: list[str] = []
    paths = {requantised(tiny_target, "q4_0", lambda what, *_: said.append(what)) for _ in range(2)}
    assert (len(paths), len(said)) == (1, 1)


def test_a_changed_source_is_quantised_anew(tmp_path: Path, vocabulary: Vocabulary) -> None:
    source = write_llama(tmp_path / "a.gguf", vocabulary)
    first = requantised(source, "q8_0")
    write_llama(source, vocabulary, width=32)
    assert requantised(source, "q8_0") != first


def test_what_is_quantised_is_quantised_again(tiny_target: Path) -> None:
    path = requantised(requantised(tiny_target, "q8_0"), "q4_1")
    assert inspect_gguf(path).file_type == "Q4_1"


def test_an_unknown_quantisation_is_named_with_the_known_ones(tiny_target: Path) -> None:
    with pytest.raises(UsageError, match=r"no quantisation is called q9; known: .*q4_k_m"):
        requantised(tiny_target, "q9")


def test_names_are_llama_cpps_numbers() -> None:
    # include/llama.h, enum llama_ftype.
    assert {name: quantisations()[name] for name in ("f16", "q4_0", "q8_0", "q4_k_m", "q6_k")} == {
        "f16": 1,
        "q4_0": 2,
        "q8_0": 7,
        "q4_k_m": 15,
        "q6_k": 18,
    }


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a GGUF file"):
        requantised(foreign(tmp_path / "page.gguf"), "q8_0")


def test_a_failing_quantiser_leaves_one_line_and_no_file(
    home: Path, vocabulary: Vocabulary
) -> None:
    # This mixture needs an importance matrix where rows are of 256 weights.
    source = write_llama(home / "wide.gguf", vocabulary, width=256)
    with pytest.raises(ModelError) as raised:
        requantised(source, "iq1_s")
    assert str(raised.value).startswith(f"{source}: llama.cpp cannot quantise this model: ")
    assert str(raised.value).endswith("this quantization requires an imatrix!")
    assert list((home / "models" / "requantised").iterdir()) == []
