"""`Family`: what the reader of a config knows of one architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from foredraft.model.config import ConfigReader


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    Attributes:
        model_type: The `model_type` of its config.
        fields: Reads the config keys of the architecture into fields of `ModelSpec`.
        eos: The end-of-text id of a checkpoint that names none.
        bos: The beginning-of-text id of a checkpoint that names none.
        positions: `max_position_embeddings` of a checkpoint that names none.
        keys: The config keys that the reference reads, where `transformers` has no class of the architecture.
        spelled: Keys of a config that the architecture has other names for, too -> these.
        inner_key: The key of the size of an MLP.
    """

    model_type: str
    fields: Callable[[ConfigReader], dict[str, Any]]
    eos: int | list[int] | None
    bos: int | None
    positions: int
    keys: frozenset[str] | None = None
    spelled: Mapping[str, str] = field(default_factory=dict)
    inner_key: str = "intermediate_size"

    def size_key(self, key: str, config: Mapping[str, Any]) -> str:
        """Return how a config of the architecture spells the key of a size."""
        if key == "intermediate_size":
            return self.inner_key
        own = self.spelled.get(key, key)
        return own if own in config else key
