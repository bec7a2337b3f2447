"""Copies of a model in another quantisation, made by llama.cpp's quantiser and kept in the cache."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

from gguf.constants import GGMLQuantizationType, LlamaFileType

from pyspec.catalogue import Progress, models_folder
from pyspec.errors import ModelError, UsageError
from pyspec.gguf_file import check_gguf

_PREFIX = "MOSTLY_"


def quantisations() -> dict[str, int]:
    """The names of all quantisations, such as q4_k_m, and the numbers of their file types."""
    return {
        kind.name.removeprefix(_PREFIX).lower(): kind.value
        for kind in LlamaFileType
        if kind.name.startswith(_PREFIX)
    }


def requantised(source: Path, quantisation: str, progress: Progress | None = None) -> Path:
    """A model in another quantisation, made unless it is in the cache already.

    Args:
        source: A GGUF file.
        quantisation: As for quantise.
        progress: Told when there is something to be made.

    Returns:
        Where the copy lies: in the folder `requantised` of the models' folder, under a name that changes if
        the source does.

    Raises:
        UsageError: There is no such quantisation.
        ModelError: As for quantise.
    """
    name = _known(quantisation)
    check_gguf(source)
    path = models_folder() / "requantised" / f"{source.stem}-{identity(source)}-{name}.gguf"
    if not path.exists():
        if progress:
            progress(f"quantising {source.name} to {name}", 0, None)
        quantise(source, path, name)
    return path


def quantise(source: Path, path: Path, quantisation: str, output: str | None = None) -> None:
    """Make a copy of a model in another quantisation; nothing is left behind if that fails.

    Weights that are quantised in the source are quantised a second time, so it is a little worse than
    one made of the original.

    Args:
        source: A GGUF file.
        path: Where to write the copy.
        quantisation: The name of a mixture of llama.cpp's quantiser: q8_0, q4_0, q6_k, q4_k_m and so on.
        output: The type of the embedding and the output matrix, such as q4_0, if the mixture's is not wanted.

    Raises:
        UsageError: There is no such quantisation.
        ModelError: The source is no usable model, or the quantiser failed, such as for want of room.
    """
    file_type = quantisations()[_known(quantisation)]
    output_type = "" if output is None else str(GGMLQuantizationType[output.upper()].value)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent, prefix=".") as folder:
            growing = Path(folder) / path.name
            _quantise_apart(source, growing, str(file_type), output_type)
            growing.replace(path)
    except OSError as error:
        raise ModelError(f"{path.parent} cannot be written: {error.strerror}") from error


def _known(quantisation: str) -> str:
    known, name = quantisations(), quantisation.lower()
    if name not in known:
        raise UsageError(f"no quantisation is called {quantisation}; known: {', '.join(known)}")
    return name


def identity(source: Path) -> str:
    """A few digits that differ for another file, or another version of it."""
    status = source.stat()
    text = f"{source.resolve()} {status.st_size} {status.st_mtime_ns}"
    return f"{zlib.crc32(text.encode()):08x}"


def _quantise_apart(source: Path, target: Path, *types: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pyspec.llama.quantiser", str(source), str(target), *types],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines()
        raise ModelError(lines[-1] if lines else f"{source}: llama.cpp's quantiser failed")
