"""Files that are not, or no longer, models."""

from __future__ import annotations

from pathlib import Path


def truncated(path: Path, source: Path, share: float = 0.5) -> Path:
    """Copy the leading share of a model file, as an interrupted download would leave it."""
    data = source.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    return path


def empty(path: Path) -> Path:
    """Make a file of no bytes."""
    path.write_bytes(b"")
    return path


def foreign(path: Path) -> Path:
    """Make a file of another kind: what a server sends for a page that is not there."""
    path.write_text("<!DOCTYPE html><title>404 Not Found</title>\n" * 100)
    return path


def misshapen(path: Path, source: Path, tensor: str = "blk.0.ffn_down.weight") -> Path:
    """Copy a model file with the two dimensions of a matrix exchanged."""
    data = bytearray(source.read_bytes())
    # After its name, a tensor's entry has the number of dimensions in 4 bytes, then each in 8.
    first = data.index(tensor.encode()) + len(tensor) + 4
    data[first : first + 16] = data[first + 8 : first + 16] + data[first : first + 8]
    path.write_bytes(data)
    return path
