"""Batches: which documents are learned from together, and in which order, as a function of a seed alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foredraft.train.packed_documents import Document

__all__ = ["Batches", "hold_out"]


class Batches:
    """Groups of documents of at most `tokens` tokens each, in another order in every epoch.

    The groups are the same in every epoch, so that what was computed for one of them can be kept.

    Args:
        documents: The documents.
        tokens: Tokens of a group at most; a longer document is a group of its own.
        seed: Of the order.
    """

    def __init__(self, documents: Sequence[Document], tokens: int, seed: int) -> None:
        self.documents, self.tokens, self._seed = documents, tokens, seed
        self.groups: list[list[int]] = []
        self._epoch, self._order = -1, np.empty(0, np.int64)
        room = 0
        for index in np.random.default_rng(seed).permutation(len(documents)).tolist():
            length = len(documents[index].ids)
            if length > room or not self.groups:
                self.groups.append([])
                room = tokens
            self.groups[-1].append(index)
            room -= length
        # Documents of one length attend in one call (`packed`).
        for group in self.groups:
            group.sort(key=lambda index: len(documents[index].ids))

    def __len__(self) -> int:
        return len(self.groups)

    def group_at(self, place: int) -> int:
        """Return which group comes at a place, counted over all epochs."""
        epoch, within = divmod(place, len(self.groups))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self.groups))
        return int(self._order[within])

    def documents_of(self, group: int) -> list[Document]:
        """Return the documents of a group."""
        return [self.documents[index] for index in self.groups[group]]


def hold_out(
    documents: Sequence[Document], share: float, most: int, seed: int
) -> tuple[list[Document], list[Document]]:
    """Split documents into those to learn from and a share that is held out, from 1 to `most`."""
    order = np.random.default_rng([seed, len(documents)]).permutation(len(documents)).tolist()
    count = min(most, max(1, round(share * len(documents))), len(documents) - 1)
    return [documents[index] for index in sorted(order[count:])], [
        documents[index] for index in order[:count]
    ]
