"""The asset of drafters that run a whole model of their own: the draft model that option `draft` names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from foredraft.decode.drafter import Drafter
from foredraft.drafters.asset import Asset, AssetSearch, Found, Missing, Parts
from foredraft.drafters.vocabulary_map import same_tokenizer
from foredraft.errors import ConfigError, Option
from foredraft.model.cache import KVCache
from foredraft.model.unread import Checkpoint

__all__ = ["DraftCheckpoint", "FoundModel", "same_vocabulary"]

GIVE_DRAFT = ("give ", Option("draft"))


@dataclass(frozen=True, kw_only=True)
class FoundModel(Found):
    """A draft model that fits.

    Attributes:
        target: The target.
        draft: The draft model.
        stretch: Positions of the draft model's cache for each position of the target's cache.
        build: Builds the drafter.
    """

    target: Checkpoint
    draft: Checkpoint
    stretch: int
    build: Callable[[Parts, FoundModel], Drafter]

    def row_bytes(self, positions: int) -> int:
        longest = min(self.stretch * positions, self.draft.spec.max_positions)
        return KVCache.bytes_per_row(self.draft.spec, longest, self.draft.dtype)

    def make(self, parts: Parts) -> Drafter:
        return self.build(parts, self)


class DraftCheckpoint(Asset):
    """A whole model beside the target.

    Args:
        build: Builds the drafter.
        other_tokenizer: The draft model has another tokenizer than the target; otherwise it has the target's.
        stretch: Positions of its cache for each position of the target's cache.
    """

    required = Missing("which needs a draft model", (*GIVE_DRAFT, ", its folder or hub id"))

    def __init__(
        self,
        build: Callable[[Parts, FoundModel], Drafter],
        *,
        other_tokenizer: bool = False,
        stretch: int = 1,
    ) -> None:
        self.build, self.other_tokenizer, self.stretch = build, other_tokenizer, stretch
        tokenizer = "another" if other_tokenizer else "the target's"
        self.missing = Missing(f"needs a draft model with {tokenizer} tokenizer", GIVE_DRAFT)

    def find(self, search: AssetSearch) -> Found | Missing:
        if search.draft is None:
            return self.missing
        target, draft = search.target, search.read_draft()
        other = not same_vocabulary(target, draft)
        if other != self.other_tokenizer:
            has = "another tokenizer than" if other else "the tokenizer of"
            unfit = f"the draft model {draft.source} has {has} the target {target.source}"
            return replace(self.missing, unfit=unfit)
        return FoundModel(models=(draft,), target=target, draft=draft, stretch=self.stretch, build=self.build)


def same_vocabulary(target: Checkpoint, draft: Checkpoint) -> bool:
    """Return whether the draft model's ids mean what the target's do, padding and special tokens aside.

    Without both tokenizers, vocabularies of the same size count as the same.

    Raises:
        ConfigError: The vocabularies cannot be matched.
    """
    if target.tokenizer is not None and draft.tokenizer is not None:
        return same_tokenizer(target.tokenizer, draft.tokenizer)
    sizes = target.spec.vocab_size, draft.spec.vocab_size
    if sizes[0] != sizes[1]:
        without = target if target.tokenizer is None else draft
        raise ConfigError(
            f"the draft model {draft.source} has a vocabulary of {sizes[1]} and the target {target.source}"
            f" one of {sizes[0]}",
            remedy=f"to match their tokens, give {without.source} as a folder with its tokenizer.json",
        )
    return True
