"""Adapters: the trained adapter that drafts over the target's first layers, given or found."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from foredraft import demo
from foredraft.drafters.adapter import Adapter, adapter_bytes, adapter_spec, load_adapter
from foredraft.drafters.adapter_files import (
    AdapterConfig,
    adapters_kept,
    find_adapter,
    read_adapter,
    target_hash,
)
from foredraft.errors import ConfigError
from foredraft.kinds.compatibility import missing_part
from foredraft.loading.checkpoints import Checkpoint
from foredraft.model.cache import KVCache
from foredraft.model.runner import Runner

__all__ = ["ChosenAdapter", "choose_adapter"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenAdapter:
    """An adapter that fits the model.

    Attributes:
        folder: Holds it.
        config: What it is.
        bytes: Memory of its weights.
        row_bytes: Given positions, the memory of a row of its cache.
    """

    folder: Path
    config: AdapterConfig
    bytes: int
    row_bytes: Callable[[int], int]

    @property
    def pays(self) -> bool:
        """Whether its validation predicted that it is faster than plain decoding."""
        return self.config.predicted > 1

    def load(self, target: Runner) -> Adapter:
        """Load its weights."""
        return load_adapter(self.folder, self.config, target)


def choose_adapter(given: str | Path | None, checkpoint: Checkpoint, *, needed: bool) -> ChosenAdapter | None:
    """Return the given adapter, or else the one that is kept for the model.

    Args:
        given: The folder of an adapter.
        checkpoint: The model.
        needed: The default drafter uses the adapter. Otherwise a kept one that cannot be used is left out
            with a warning, and the demo's is not looked for, since the demo's draft model drafts better.

    Raises:
        ConfigError: The adapter cannot be read or is for another model, or one is needed and none is found.
    """
    try:
        folder = _found(checkpoint.folder) if given is None else Path(given)
        if folder is None and needed and checkpoint.folder == demo.target_path():
            folder = demo.adapter_path()
        if folder is None:
            if needed:
                raise missing_part("kangaroo", "this drafter")
            return None
        config = read_adapter(folder)
        config.check(target_hash(checkpoint.folder), str(checkpoint.source))
    except ConfigError as error:
        if needed or given is not None:
            raise
        logger.warning("%s", error)
        return None
    spec, dtype = checkpoint.spec, checkpoint.dtype
    return ChosenAdapter(
        folder,
        config,
        adapter_bytes(config, spec, dtype),
        lambda positions: KVCache.bytes_per_row(adapter_spec(spec), positions, dtype),
    )


def _found(model: Path) -> Path | None:
    """Return the folder of the adapter that is kept for the model in a folder; None without one."""
    return find_adapter(target_hash(model)) if adapters_kept() else None
