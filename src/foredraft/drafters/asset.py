"""Asset: what a drafter needs beside the target, such as a draft model, a plan, an adapter, or nothing.

Contract: a drafter's file holds its asset as `ASSET`, and its line in `kinds.tables` names the file. Loading,
`info` and the memory plan ask the assets of all kinds, and know no kind. A search reads no weights:

    asset.find(search) -> Missing          what the drafter lacks, and the remedy
                       -> Found           its sizes in memory, the draft length that it was made for
    found.make(parts)  -> Drafter          the weights are read, and the drafter is built

Importing this module does not import PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.errors import ConfigError, Option, Text, join_text

if TYPE_CHECKING:
    import torch

    from foredraft.decode.drafter import Drafter
    from foredraft.model.cache import KVCache
    from foredraft.model.runner import Runner
    from foredraft.model.tokenizer import Tokenizer
    from foredraft.model.unread import Checkpoint

__all__ = ["Asset", "AssetSearch", "Found", "Missing", "Nothing", "Parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssetSearch:
    """Where an asset is looked for, before any weights are read.

    Attributes:
        target: The target.
        device: The device that will run it.
        options: The options of `load` that give assets, by name; None where the user does not give one.
        needed: The drafter is the default one, so that it has to be at hand.
        choosing: The default drafter stands for all drafters at hand, among which the policy chooses.
        kernels: Foredraft's kernels may run the models.
        weights_here: The target's weights are on this machine. What is kept for a model is known by them.
        draft: The folder or GGUF file that option `draft` names; None where another kind knows it
            (`Asset.knows`).
        read_draft: Reads `draft` as a whole model, once for all kinds.
        shipped: Folders that come with the target.
        free_memory: Counts the free bytes of the device.
        found: What was found for the kinds that stand before this one in the table.
    """

    target: Checkpoint
    device: torch.device
    options: Mapping[str, Any]
    needed: bool = False
    choosing: bool = False
    kernels: bool = True
    weights_here: bool = True
    draft: Path | None = None
    read_draft: Callable[[], Checkpoint]
    shipped: Sequence[Path] = ()
    free_memory: Callable[[], int]
    found: Sequence[Found] = ()


@dataclass(frozen=True, slots=True)
class Missing:
    """Why a drafter is not at hand.

    Attributes:
        problem: What it lacks, in the words that follow its name.
        remedy: What the user can do.
        unfit: Why what the user gave is not the asset, in words that follow "but"; None where that is not so.
        why: Says in full why the asset is missing, for `info`, where finding that out costs something; it
            returns None where problem and remedy say it.
    """

    problem: str
    remedy: Text = ""
    unfit: str | None = None
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
    """The loaded parts that a drafter is built from.

    Attributes:
        target: Runner of the target.
        cache: The target's KV cache.
        rows: Rows of the target's cache.
        positions: Positions of each row of the target's cache.
        tokenizer: The target's.
        models: Runners of the asset's own models, in the order of `Found.models`.
    """

    target: Runner
    cache: KVCache
    rows: int
    positions: int
    tokenizer: Tokenizer | None = None
    models: tuple[Runner, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Found:
    """An asset that was found and fits the target. Subclasses say how a drafter is made with it.

    Attributes:
        models: Whole models that the drafter runs beside the target. The loader reads their weights.
        bytes: Memory of all other weights that the drafter adds.
        planned: Draft length that it was made for, in tokens; None where it was made for none.
        longest_draft: As `Drafter.longest_draft`.
        about: What it is, for `info`; None where the drafter's name says it.
    """

    models: tuple[Checkpoint, ...] = ()
    bytes: int = 0
    planned: int | None = None
    longest_draft: int = 0
    about: str | None = None

    def row_bytes(self, positions: int) -> int:
        """Return the memory of the drafter's caches for a row of so many positions of the target's cache."""
        return 0

    def announce(self) -> None:
        """Log what the user should know of it before it is loaded."""

    def make(self, parts: Parts) -> Drafter:
        """Read the weights and build the drafter."""
        raise NotImplementedError


class Asset:
    """What one kind of drafter needs beside the target.

    Attributes:
        missing: What a drafter lacks that is not at hand.
        required: What a user who names the drafter has to give, where it cannot be found otherwise: the error
            without the option that gives it. None where it may be found.
    """

    missing: Missing
    required: Missing | None = None

    def knows(self, place: Path) -> bool:
        """Return whether a folder or a GGUF file is this asset, as its small files say.

        So a value of option `draft` that is no whole model finds its drafter.
        """
        return False

    def find(self, search: AssetSearch) -> Found | Missing:
        """Look for the asset: what the user gives, or else what is kept for the target.

        Raises:
            ForedraftError: What the user gives cannot be used; or, if the asset is needed, what was found
                cannot. What is not needed is left out with a warning.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class _FoundNothing(Found):
    build: Callable[[], Drafter]

    def make(self, parts: Parts) -> Drafter:
        return self.build()


class Nothing(Asset):
    """The asset of a drafter that needs nothing.

    Args:
        build: Builds the drafter.
    """

    def __init__(self, build: Callable[[], Drafter]) -> None:
        self.build = build

    def find(self, search: AssetSearch) -> Found:
        return _FoundNothing(build=self.build)
