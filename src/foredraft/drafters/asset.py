"""Asset: what a drafter needs beside the target, such as a draft model, a plan, an adapter, or nothing.

A drafter's file holds its asset as `ASSET`, and its line in `kinds.tables` names the file; loading, `info`
and the memory plan know no kind. A search reads no weights, and this module does not import PyTorch:

    asset.find(search) -> Missing          what the drafter lacks, and the remedy
                       -> Found           its sizes in memory, the draft length that it was made for
    found.make(parts)  -> Drafter          the weights are read, and the drafter is built
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.errors import ConfigError, Option, Text, join_text
from foredraft.user_cache import cache_folder

if TYPE_CHECKING:
    import torch

    from foredraft.decode.drafter import Drafter
    from foredraft.model.cache import KVCache
    from foredraft.model.checkpoint import Checkpoint
    from foredraft.model.runner import Runner
    from foredraft.model.source import ModelSource
    from foredraft.model.spec import ModelSpec
    from foredraft.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AssetSearch:
    """Where an asset is looked for, before any weights are read."""

    target: Checkpoint  # the target
    device: torch.device  # the device that will run it
    options: Mapping[str, Any]  # of `load` that give assets, by name; None where the user gives none
    needed: bool = False  # the drafter is the default one, so that it has to be at hand
    choosing: bool = False  # the default drafter stands for all at hand, among which the policy chooses
    kernels: bool = True  # Foredraft's kernels may run the models
    weights_here: bool = True  # the target's are on this machine; what is kept for it is known by them
    draft: Path | None = None  # that option `draft` names; None where another kind knows it (`Asset.knows`)
    read_draft: Callable[[], Checkpoint]  # reads `draft` as a whole model, once for all kinds
    shipped: Sequence[Path] = ()  # folders that come with the target
    free_memory: Callable[[], int]  # counts the free bytes of the device
    found: Sequence[Found] = ()  # what was found for the kinds that stand before this one in the table


@dataclass(frozen=True, slots=True)
class Missing:
    """Why a drafter is not at hand."""

    problem: str  # what it lacks, in the words that follow its name
    remedy: Text = ""  # what the user can do
    unfit: str | None = None  # why what the user gave is not the asset, in words that follow "but"
    # says in full why it is missing, for `info`, where that costs something; None: problem and remedy say it
    why: Callable[[], Text | None] | None = field(default=None, compare=False)

    def error(self, drafter: str) -> ConfigError:
        """Return the error of a drafter that is needed; `drafter` is what the message calls it."""
        return ConfigError(f"{drafter} {self.problem}", remedy=self.remedy)

    def note(self, drafter: str, spelling: Callable[[Option], str]) -> str:
        """Return one line for `info`, with every option spelled by `spelling`."""
        reason = None if self.why is None else self.why()
        return self.error(drafter).describe(spelling) if reason is None else join_text(reason, spelling)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The loaded parts that a drafter is built from."""

    target: Runner  # runner of the target
    cache: KVCache  # the target's KV cache
    rows: int  # rows of the target's cache
    positions: int  # positions of each row of the target's cache
    tokenizer: Tokenizer | None = None  # the target's
    models: tuple[Runner, ...] = ()  # runners of the asset's own models, in the order of `Found.models`


@dataclass(frozen=True, kw_only=True)
class Found:
    """An asset that was found and fits the target."""

    models: tuple[Checkpoint, ...] = ()  # whole models beside the target. The loader reads their weights
    bytes: int = 0  # memory of all other weights that the drafter adds
    planned: int | None = None  # draft length that it was made for, in tokens
    longest_draft: int = 0  # as `Drafter.longest_draft`
    about: str | None = None  # what it is, for `info`; None where the drafter's name says it
    specs: tuple[ModelSpec, ...] = ()  # of the drafter's caches
    dtype: torch.dtype | None = None  # of these
    # positions of such a cache for each one of the target's, up to those that the drafter's own model has;
    # None: as many as the target has
    stretch: int | None = None
    build: Callable[[Parts], Drafter] | None = None  # reads the weights and builds the drafter
    announce: Callable[[], object] = lambda: None  # logs what the user should know of it before it is loaded

    def row_bytes(self, positions: int) -> int:
        """Return the memory of the drafter's caches for a row of so many positions of the target's cache."""
        from foredraft.model.cache import KVCache

        dtype, wanted = self.dtype, (self.stretch or 1) * positions
        own = [(spec, min(wanted, spec.max_positions) if self.stretch else wanted) for spec in self.specs]
        return sum(KVCache.bytes_per_row(spec, longest, dtype) for spec, longest in own if dtype is not None)

    def make(self, parts: Parts) -> Drafter:
        """Read the weights and build the drafter."""
        assert self.build is not None
        return self.build(parts)


class Asset:
    """What one kind of drafter needs beside the target."""

    missing: Missing  # what a drafter lacks that is not at hand
    required: Missing | None = None  # what the user has to give, where it cannot be found otherwise

    def knows(self, place: Path) -> bool:
        """Return whether a folder or GGUF file that option `draft` names is this asset; reads small files."""
        return False

    def find(self, search: AssetSearch) -> Found | Missing:
        """Look for the asset: what the user gives, or else what is kept for the target."""
        raise NotImplementedError


class Nothing(Asset):
    def __init__(self, build: Callable[[], Drafter]) -> None:
        self.build = build  # builds the drafter

    def find(self, search: AssetSearch) -> Found:
        return Found(build=lambda parts: self.build())


ATTENTION, WITH_MLP = "attention", "attention+mlp"
ADAPTER_KINDS = {
    ATTENTION: "one attention with its norm, as in the paper",
    WITH_MLP: "a whole layer of the model's family",
}


def any_kept(kind: str) -> bool:
    """Return whether the cache folder holds anything of a kind for any model."""
    folder = cache_folder(kind)
    try:
        return folder is not None and any(folder.glob("[!.]*"))
    except OSError:  # no folder, or one that cannot be read
        return False


def hash_of_base(source: ModelSource, hash_of: Callable[[ModelSource], str]) -> str | None:
    """Return the hash of a model without its LoRAs; None where it has none."""
    return hash_of(source.base) if source.loras else None


def say_made_for_base(what: str) -> None:
    """Log that a plan or an adapter is of the model without LoRAs."""
    logger.warning(
        "%s was made for the model without its LoRA: the output stays exact, but drafts may be accepted less"
        " often", what,
    )  # fmt: skip


DEFAULT_COPY = "int4"  # of the target's weights
