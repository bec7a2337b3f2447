"""The wheel and the sdist, as a user's pip would meet them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist of what git tracks, and a wheel built from that sdist."""
    source = tmp_path_factory.mktemp("checkout") / "pyspec"
    tracked = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    run(sys.executable, "-m", "build", "--no-isolation", cwd=source)
    return source / "dist"


def test_the_wheel_holds_the_package_and_nothing_else(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert "-cp310-abi3-linux" in wheel.name, "one build serves every Python from 3.10 on"
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"pyspec", next(t for t in tops if t.endswith(".dist-info"))}
    for needed in ("_cspec.abi3.so", "py.typed", "models/catalogue.toml", "cli/generate.py"):
        assert f"pyspec/{needed}" in names
    assert not [name for name in names if name.endswith((".c", ".h", ".gguf"))]


def test_the_sdist_holds_what_a_build_needs(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("LICENSE", "README.md", "cspec/cspec.h", "cspec/build.py", "cspec/verify.c"):
        assert needed in names


def test_the_wheel_works_in_an_environment_of_its_own(
    dist: Path, chat_target: Path, chat_draft: Path, tmp_path: Path
) -> None:
    (wheel,) = dist.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    site_packages = Path(
        run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).strip()
    )
    # The dependencies are borrowed from this environment: compiling llama.cpp again takes minutes.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("platlib") + "\n")
    where = run(python, "-c", "import pyspec; print(pyspec.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(site_packages)
    pyspec = python.with_name("pyspec")
    assert "qwen2.5-coder-1.5b" in run(pyspec, "models", "list", cwd=tmp_path)
    text = run(
        pyspec,
        "generate",
        "-m",
        chat_target,
        "-d",
        chat_draft,
        "-n",
        "8",
        "--seed",
        "1",
        "hi",
        cwd=tmp_path,
    )
    assert text
