"""Copies of a model in another quantisation, made by llama.cpp's quantiser and kept in the cache."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

from gguf.constants import LlamaFileType

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

    Weights that are quantised in the source are quantised a second time, so it is a little worse than
    one made of the original.

    Args:
        source: A GGUF file.
        quantisation: The name of a mixture of llama.cpp's quantiser: q8_0, q4_0, q6_k, q4_k_m and so on.
        progress: Told when there is something to be made.

    Returns:
        Where the copy lies: in the folder `requantised` of the models' folder, under a name that changes if
        the source does.

    Raises:
        UsageError: There is no such quantisation.
        ModelError: The source is no usable model, or the quantiser failed, such as for want of room.
    """
    known = quantisations()
    name = quantisation.lower()
    if name not in known:
        raise UsageError(f"no quantisation is called {quantisation}; known: {', '.join(known)}")
    check_gguf(source)
    path = models_folder() / "requantised" / f"{source.stem}-{_identity(source)}-{name}.gguf"
    if path.exists():
        return path
    if progress:
        progress(f"quantising {source.name} to {name}", 0, None)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent, prefix=".") as folder:
            growing = Path(folder) / path.name
            _quantise_apart(source, growing, known[name])
            growing.replace(path)
    except OSError as error:
        raise ModelError(f"{path.parent} cannot be written: {error.strerror}") from error
    return path


def _identity(source: Path) -> str:
    """A few digits that differ for another file, or another version of it."""
    status = source.stat()
    text = f"{source.resolve()} {status.st_size} {status.st_mtime_ns}"
    return f"{zlib.crc32(text.encode()):08x}"


def _quantise_apart(source: Path, target: Path, file_type: int) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pyspec.llama.quantiser", str(source), str(target), str(file_type)],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines()
        raise ModelError(lines[-1] if lines else f"{source}: llama.cpp's quantiser failed")
