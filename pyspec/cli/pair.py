"""From what the user named to the files of a target and its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from pyspec.catalogue import format_size, load_catalogue, models_folder, resolve
from pyspec.cli.progress import transfer_progress
from pyspec.download import is_offline
from pyspec.engine import NGRAM, Engine, Gamma
from pyspec.errors import UsageError
from pyspec.squeeze import preferred_draft


@dataclass(frozen=True)
class ModelChoice:
    """Which models the user named and how they are to be used: the values of `options.model_options`.

    Raises:
        UsageError: Drafts are both named and not wanted.
    """

    model: str | None
    draft: tuple[str, ...]
    no_draft: bool
    gamma: Gamma
    rule: str
    ctx: int | None
    threads: int | None
    draft_threads: int | None

    def __post_init__(self) -> None:
        if self.draft and self.no_draft:
            raise UsageError("--draft and --no-draft exclude each other")

    def resolve(self) -> tuple[Path, list[Path | str]]:
        """Find the target's file, and what to draft with, as `resolve_models` does."""
        return resolve_models(self.model, self.draft, no_draft=self.no_draft)

    def engine(self, target: Path, drafts: Sequence[Path | str], *, parallel: int = 1) -> Engine:
        """Load what was found."""
        return Engine(
            target,
            drafts,
            gamma=self.gamma,
            n_ctx=self.ctx,
            threads=self.threads,
            draft_threads=self.draft_threads,
            parallel=parallel,
        )


def resolve_models(
    model: str | None, drafts: Sequence[str], *, no_draft: bool
) -> tuple[Path, list[Path | str]]:
    """Find all files, fetching what the cache lacks after saying what that is.

    Without a model it is the catalogue's default target. Without a draft it is the one that the catalogue
    pairs with the target; with a target that is not in the catalogue it is the text itself.

    Returns:
        The target, and what to draft with, as Engine takes it: files and "ngram".
    """
    catalogue = load_catalogue()
    known = {entry.name: entry for entry in catalogue.models}
    target = model if model is not None else catalogue.default_target.name
    if not drafts and not no_draft:
        entry = known.get(target.casefold())
        drafts = [entry.draft if entry and entry.draft else NGRAM]
    specs = [target, *(draft for draft in drafts if draft != NGRAM)]
    lacking = [
        entry
        for spec in specs
        if (entry := known.get(spec.casefold())) and not entry.is_downloaded()
    ]
    if lacking and not is_offline():
        named = " and ".join(f"{entry.name} ({format_size(entry.bytes)})" for entry in lacking)
        click.echo(f"fetching {named} into {models_folder()}", err=True)
    with transfer_progress() as progress:
        files = {spec: resolve(spec, progress=progress) for spec in specs}
    found = files[target]
    return found, [
        draft if draft == NGRAM else preferred_draft(found, files[draft]) for draft in drafts
    ]


def resolve_pair(
    model: str | None, draft: str | None, *, no_draft: bool
) -> tuple[Path, Path | None]:
    """Find the files of a target and its draft model, if it has one, as `resolve_models` does."""
    target, drafts = resolve_models(model, [draft] if draft else [], no_draft=no_draft)
    return target, next((Path(path) for path in drafts if path != NGRAM), None)
