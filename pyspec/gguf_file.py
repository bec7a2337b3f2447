"""What a GGUF file says about itself, read from its header alone.

The gguf package's reader makes an object of every one of some 300,000 vocabulary entries, which
takes seconds. Walking over them takes a tenth of one, so this can run before every load.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
    LlamaFileType,
)

from pyspec.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4  # ggml's limit

_UINT32 = struct.Struct("<I")
_UINT64 = struct.Struct("<Q")
_SCALARS = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: _UINT32,
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.BOOL: struct.Struct("<?"),
    GGUFValueType.UINT64: _UINT64,
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}


@dataclass(frozen=True)
class GgufInfo:
    """A model file's description of itself; None where the file does not say."""

    path: Path
    bytes: int
    version: int
    architecture: str | None
    name: str | None
    parameters: int
    file_type: str | None  # the quantisation's name, such as Q4_K_M
    tensor_types: dict[str, int]  # how many tensors are of each type
    bytes_read: (
        int  # by a pass over one token: all weights, the embedding only if it is the output too
    )
    context_length: int | None
    vocabulary_size: int | None
    tokenizer: str | None
    pre_tokenizer: str | None
    bos_id: int | None
    bos_text: str | None
    eos_id: int | None
    eos_text: str | None
    chat_template: str | None


def check_gguf(path: Path) -> None:
    """Tell a file that is no GGUF, or only the beginning of one, from one worth loading.

    Args:
        path: The file that llama.cpp is about to load.

    Raises:
        ModelError: The file is missing, is not a GGUF file, is of a version or byte order that
            cannot be read, or ends before its last tensor does.
    """
    with _open_header(path) as header:
        _check_length(path, header)


def inspect_gguf(path: Path) -> GgufInfo:
    """Describe a model file without loading it.

    Args:
        path: A GGUF file.

    Raises:
        ModelError: As for `check_gguf`.
    """
    with _open_header(path) as header:
        _check_length(path, header)
        architecture = header.text("general.architecture")
        bos_id = header.integer("tokenizer.ggml.bos_token_id")
        eos_id = header.integer("tokenizer.ggml.eos_token_id")
        tokens = header.metadata.get("tokenizer.ggml.tokens")
        file_type = header.integer("general.file_type")
        return GgufInfo(
            path=path,
            bytes=len(header.content),
            version=header.version,
            architecture=architecture,
            name=header.text("general.name"),
            parameters=sum(math.prod(tensor.shape) for tensor in header.tensors),
            file_type=None if file_type is None else _file_type_name(file_type),
            tensor_types=dict(
                Counter(_tensor_type_name(tensor.type) for tensor in header.tensors).most_common()
            ),
            bytes_read=header.bytes_read(),
            context_length=header.integer(f"{architecture}.context_length"),
            vocabulary_size=tokens.count if isinstance(tokens, _Array) else None,
            tokenizer=header.text("tokenizer.ggml.model"),
            pre_tokenizer=header.text("tokenizer.ggml.pre"),
            bos_id=bos_id,
            bos_text=header.token_text(bos_id),
            eos_id=eos_id,
            eos_text=header.token_text(eos_id),
            chat_template=header.text("tokenizer.chat_template"),
        )


@dataclass(frozen=True)
class _Array:
    type: GGUFValueType
    count: int
    start: int  # the first element's position in the file


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    type: int
    offset: int  # from the beginning of the tensors' data

    def bytes(self) -> int:
        """Return the size in the file; 0 for a type that is newer than the gguf package."""
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(self.type)]
        except (ValueError, KeyError):
            return 0
        return math.prod(self.shape) // block * block_bytes


class _HeaderError(Exception):
    """The header is unusable; the message continues a sentence begun with the file's name."""


@dataclass
class _Header:
    """Walks over a header, remembering where the long arrays are instead of reading them."""

    content: mmap.mmap
    position: int = len(MAGIC)
    version: int = 0
    data_start: int = 0
    metadata: dict[str, int | float | bool | str | _Array] = field(default_factory=dict)
    tensors: list[_Tensor] = field(default_factory=list)

    def read(self) -> None:
        self.version = self._number(_UINT32)
        if self.version not in VERSIONS:
            if self.version & 0xFFFF == 0:
                raise _HeaderError("is a big-endian GGUF file; get the little-endian one")
            raise _HeaderError(f"is of GGUF version {self.version}; versions 2 and 3 can be read")
        tensor_count = self._number(_UINT64)
        pair_count = self._number(_UINT64)
        for _ in range(pair_count):
            key = self._string()
            self.metadata[key] = self._value(self._number(_UINT32))
        for _ in range(tensor_count):
            self.tensors.append(self._tensor())
        alignment = self.integer("general.alignment") or GGUF_DEFAULT_ALIGNMENT
        self.data_start = math.ceil(self.position / alignment) * alignment

    def data_end(self) -> int:
        return max(
            (self.data_start + tensor.offset + tensor.bytes() for tensor in self.tensors),
            default=0,
        )

    def bytes_read(self) -> int:
        has_output = any(tensor.name == "output.weight" for tensor in self.tensors)
        return sum(
            tensor.bytes()
            for tensor in self.tensors
            if not (has_output and tensor.name == "token_embd.weight")
        )

    def integer(self, key: str) -> int | None:
        value = self.metadata.get(key)
        return value if type(value) is int else None

    def text(self, key: str) -> str | None:
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def token_text(self, token: int | None) -> str | None:
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if (
            token is None
            or not isinstance(tokens, _Array)
            or tokens.type != GGUFValueType.STRING
            or not 0 <= token < tokens.count
        ):
            return None
        self.position = tokens.start
        self._skip_strings(token)
        return self._string()

    def _number(self, layout: struct.Struct) -> int:
        (value,) = layout.unpack_from(self.content, self.position)
        self.position += layout.size
        assert isinstance(value, int)
        return value

    def _string(self) -> str:
        length = self._number(_UINT64)
        start = self.position
        self._skip(length)
        return self.content[start : self.position].decode(errors="replace")

    def _skip(self, count: int) -> None:
        if count > len(self.content) - self.position:
            raise struct.error
        self.position += count

    def _skip_strings(self, count: int) -> None:
        # Half a million turns of this loop are nearly all the time that a header takes.
        content, length_at, position = self.content, _UINT64.unpack_from, self.position
        for _ in range(count):
            position += 8 + length_at(content, position)[0]
        self.position = position

    def _value(self, raw_type: int) -> int | float | bool | str | _Array:
        value_type = _value_type(raw_type)
        if value_type == GGUFValueType.STRING:
            return self._string()
        if value_type != GGUFValueType.ARRAY:
            layout = _SCALARS[value_type]
            (scalar,) = layout.unpack_from(self.content, self.position)
            self.position += layout.size
            assert isinstance(scalar, (int, float))
            return scalar
        item_type = _value_type(self._number(_UINT32))
        if item_type == GGUFValueType.ARRAY:
            raise _HeaderError("is not a usable GGUF file: it has an array of arrays")
        array = _Array(item_type, self._number(_UINT64), self.position)
        if item_type == GGUFValueType.STRING:
            self._skip_strings(array.count)
        else:
            self._skip(array.count * _SCALARS[item_type].size)
        return array

    def _tensor(self) -> _Tensor:
        name = self._string()
        dimensions = self._number(_UINT32)
        if dimensions > MAX_DIMENSIONS:
            raise _HeaderError(f"is damaged: a tensor has {dimensions} dimensions")
        shape = tuple(self._number(_UINT64) for _ in range(dimensions))
        return _Tensor(name, shape, type=self._number(_UINT32), offset=self._number(_UINT64))


@contextmanager
def _open_header(path: Path) -> Iterator[_Header]:
    with _open(path) as file:
        beginning = file.read(64)
        if not beginning.startswith(MAGIC):
            raise ModelError(f"{path} is not a GGUF file: {_what_else(beginning)}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            header = _Header(content)
            try:
                header.read()
            except (struct.error, OverflowError):
                raise ModelError(
                    f"{path} is truncated: its {len(content)} bytes end within the header; "
                    "download it again"
                ) from None
            except _HeaderError as error:
                raise ModelError(f"{path} {error}") from None
            yield header


def _open(path: Path) -> BinaryIO:
    if not path.exists():
        raise ModelError(f"{path}: no such file")
    if not path.is_file():
        raise ModelError(f"{path} is not a file")
    try:
        return path.open("rb")
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None


def _what_else(beginning: bytes) -> str:
    if not beginning:
        return "it is empty"
    if beginning.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer to the file; fetch it with git lfs pull"
    if beginning.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "it is a web page; check the address that it was downloaded from"
    return f"it begins with {beginning[:4]!r}"


def _check_length(path: Path, header: _Header) -> None:
    present, needed = len(header.content), header.data_end()
    if present < needed:
        raise ModelError(
            f"{path} is truncated: it has {present} bytes and needs {needed}; download it again"
        )


def _value_type(raw: int) -> GGUFValueType:
    try:
        return GGUFValueType(raw)
    except ValueError:
        raise _HeaderError(f"is damaged: its header has a value of unknown type {raw}") from None


def _tensor_type_name(raw: int) -> str:
    try:
        return GGMLQuantizationType(raw).name
    except ValueError:
        return f"type {raw}"


def _file_type_name(raw: int) -> str:
    try:
        return LlamaFileType(raw).name.removeprefix("MOSTLY_")
    except ValueError:
        return f"file type {raw}"
