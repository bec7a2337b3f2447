from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType, GGUFReader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyspec.errors import ModelError
from pyspec.gguf_file import check_gguf, inspect_gguf
from tests.models import CHATML, Vocabulary, all_bytes, write_llama


def test_an_intact_file_passes(tiny_target: Path) -> None:
    check_gguf(tiny_target)


def test_agrees_with_the_reader_of_the_gguf_package(tmp_path: Path, vocabulary: Vocabulary) -> None:
    path = write_llama(tmp_path / "q4.gguf", vocabulary, weight_type=GGMLQuantizationType.Q4_0)
    info, reader = inspect_gguf(path), GGUFReader(path)

    def field(key: str) -> object:
        return reader.fields[key].contents()

    assert info.architecture == field("general.architecture") == "llama"
    assert info.context_length == field("llama.context_length")
    assert info.vocabulary_size == len(field("tokenizer.ggml.tokens"))  # type: ignore[arg-type]
    assert info.tokenizer == field("tokenizer.ggml.model")
    assert info.bos_id == field("tokenizer.ggml.bos_token_id")
    assert info.eos_id == field("tokenizer.ggml.eos_token_id")
    assert info.bos_text == vocabulary.texts[vocabulary.bos]
    assert info.eos_text == vocabulary.texts[vocabulary.eos]
    assert info.parameters == sum(tensor.n_elements for tensor in reader.tensors)
    names = [tensor.tensor_type.name for tensor in reader.tensors]
    assert info.tensor_types == {name: names.count(name) for name in set(names)}
    assert "Q4_0" in info.tensor_types
    assert info.bytes == path.stat().st_size
    embedding = next(t.n_bytes for t in reader.tensors if t.name == "token_embd.weight")
    assert info.bytes_read == sum(tensor.n_bytes for tensor in reader.tensors) - int(embedding)


def test_every_beginning_of_a_file_is_refused(tiny_draft: Path, tmp_path: Path) -> None:
    content = tiny_draft.read_bytes()
    part = tmp_path / "part.gguf"
    for length in [*range(4, 3000, 7), len(content) // 2, len(content) - 32]:
        part.write_bytes(content[:length])
        with pytest.raises(ModelError, match="truncated"):
            check_gguf(part)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(position=st.integers(4, 1500), value=st.binary(min_size=1, max_size=8))
def test_a_damaged_header_gives_a_model_error_or_none(
    tiny_draft: Path, tmp_path: Path, position: int, value: bytes
) -> None:
    content = bytearray(tiny_draft.read_bytes())
    content[position : position + len(value)] = value
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content)
    with contextlib.suppress(ModelError):
        inspect_gguf(damaged)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"PK\x03\x04", r"begins with b'PK\\x03\\x04'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"GGUF\x00\x00\x00\x03", "big-endian"),
        (b"GGUF\x01\x00\x00\x00", "version 1"),
        (b"GGUF", "truncated"),
    ],
)
def test_what_is_no_gguf_file_is_called_what_it_is(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        check_gguf(path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        check_gguf(tmp_path / "missing.gguf")
    with pytest.raises(ModelError, match="is not a file"):
        check_gguf(tmp_path)


def test_the_chat_template_is_read(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "chat.gguf", all_bytes())
    assert inspect_gguf(path).chat_template == CHATML
