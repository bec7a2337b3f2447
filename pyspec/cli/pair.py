"""From what the user named to the files of a target and its draft."""

from __future__ import annotations

from pathlib import Path

import click

from pyspec.catalogue import format_size, load_catalogue, models_folder, resolve
from pyspec.cli.progress import transfer_progress
from pyspec.download import is_offline
from pyspec.squeeze import preferred_draft


def resolve_pair(
    model: str | None, draft: str | None, *, no_draft: bool
) -> tuple[Path, Path | None]:
    """Find both files, fetching what the cache lacks after saying what that is.

    Without a model it is the catalogue's default target. Without a draft it is the one that the catalogue
    pairs with the target; a target that is not in the catalogue has none. A squeezed copy of the draft goes
    before the draft itself.
    """
    catalogue = load_catalogue()
    known = {entry.name: entry for entry in catalogue.models}
    target = model if model is not None else catalogue.default_target.name
    if draft is None and not no_draft and target.casefold() in known:
        draft = known[target.casefold()].draft
    specs = [target] if draft is None else [target, draft]
    lacking = [
        entry
        for spec in specs
        if (entry := known.get(spec.casefold())) and not entry.is_downloaded()
    ]
    if lacking and not is_offline():
        named = " and ".join(f"{entry.name} ({format_size(entry.bytes)})" for entry in lacking)
        click.echo(f"fetching {named} into {models_folder()}", err=True)
    with transfer_progress() as progress:
        files = [resolve(spec, progress=progress) for spec in specs]
    return files[0], preferred_draft(*files) if draft is not None else None
