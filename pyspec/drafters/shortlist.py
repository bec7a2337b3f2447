"""Which tokens a draft proposes from: most of a large vocabulary is read for nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pyspec.bridge import PANEL_ROWS
from pyspec.llama import Model


class Shortlist:
    """The frequent tokens, the special ones, and those of the text, in panels of the output matrix.

    A token's number says how frequent it is: byte-pair merges are numbered as training found them, the most
    frequent first. The list is a function of the text alone, so that a seed writes one text.

    Args:
        model: The draft.
        n_frequent: Tokens below this id are on the list.
    """

    def __init__(self, model: Model, n_frequent: int) -> None:
        self._n_vocab = model.n_vocab
        self._permanent = np.zeros(-(-model.n_vocab // PANEL_ROWS), np.bool_)
        self._permanent[: -(-n_frequent // PANEL_ROWS)] = True
        self._permanent[_panels_of(model.special_ids)] = True
        self._listed = self._permanent.copy()
        self._n_seen = 0

    def panels(self, ids: Sequence[int]) -> npt.NDArray[np.int32]:
        """Numbers of the panels on the list after ids, of which it has seen a beginning; ascending."""
        new = [token for token in ids[self._n_seen :] if token < self._n_vocab]
        self._n_seen = len(ids)
        self._listed[_panels_of(new)] = True
        return np.flatnonzero(self._listed).astype(np.int32)

    def roll_back(self, length: int) -> None:
        """Forget the tokens from `length` on, of which there may be none."""
        if length < self._n_seen:
            self._listed = self._permanent.copy()
            self._n_seen = 0


def _panels_of(ids: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.asarray(ids, np.int64) // PANEL_ROWS
