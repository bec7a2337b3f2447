"""From what the user named to the files of a target and its draft."""

from __future__ import annotations

from pathlib import Path

from pyspec.catalogue import load_catalogue, resolve
from pyspec.cli.progress import transfer_progress


def resolve_pair(
    model: str | None, draft: str | None, *, no_draft: bool
) -> tuple[Path, Path | None]:
    """Find both files, fetching what the cache lacks.

    Without a model it is the catalogue's default target. Without a draft it is the one that the catalogue
    pairs with the target; a target that is not in the catalogue has none.
    """
    catalogue = load_catalogue()
    target = model if model is not None else catalogue.default_target.name
    if draft is None and not no_draft:
        draft = next((m.draft for m in catalogue.models if m.name == target.casefold()), None)
    with transfer_progress() as progress:
        return (
            resolve(target, progress=progress),
            None if draft is None else resolve(draft, progress=progress),
        )
