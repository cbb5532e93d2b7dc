"""Frequent words: the token ids of a reduced head, by how often the data has them to learn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from foredraft.model.spec import ModelSpec
from foredraft.train.packed_documents import Document

__all__ = ["frequent_words"]


def frequent_words(documents: Sequence[Document], size: int | None, spec: ModelSpec) -> Sequence[int] | None:
    """Return the tokens that are learned most often, those that end a text among them, in ascending order.

    Args:
        documents: The data.
        size: How many; None is all.
        spec: The target.

    Returns:
        The ids; None for all.
    """
    if size is None or size >= spec.vocab_size:
        return None
    counts: Counter[int] = Counter()
    for document in documents:
        pairs = zip(document.ids[1:], document.counts[1:], strict=True)
        counts.update(id for id, is_counted in pairs if is_counted)
    ends = list(spec.eos_token_ids)
    words = dict.fromkeys([*ends, *(id for id, _ in counts.most_common()), *range(spec.vocab_size)])
    return sorted(list(words)[:size])
