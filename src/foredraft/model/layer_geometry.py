"""The geometry of layers: the heads that each one has, whose keys and values it reads; the sub-layers of a
pass.

Layers with one window have heads of one number and one size, so a window stands for its kind. Every pass has
a plan: a draft of Draft & Verify (arXiv:2309.08168) leaves some sub-layers out, and an early exit
(arXiv:2404.16710) all from one layer on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class Plan:
    attention: tuple[bool, ...]  # whether each layer's attention runs
    mlp: tuple[bool, ...]  # whether each layer's MLP runs

    @classmethod
    def full(cls, layers: int) -> Plan:
        return cls((True,) * layers, (True,) * layers)

    def without(self, attention: Iterable[int] = (), mlp: Iterable[int] = ()) -> Plan:
        return Plan(_cleared(self.attention, attention), _cleared(self.mlp, mlp))


def _cleared(runs: tuple[bool, ...], skip: Iterable[int]) -> tuple[bool, ...]:
    skipped = frozenset(skip)
    if not skipped <= frozenset(range(len(runs))):
        raise ValueError(f"cannot skip layers {sorted(skipped)}: the model has layers 0 to {len(runs) - 1}")
    return tuple(run and layer not in skipped for layer, run in enumerate(runs))


OUTSIDE = -1  # the source of keys and values that are another model's
OF_KEYS = re.compile(r"model\.layers\.(\d{1,6})\.self_attn\.(?:[kv]_proj|[kv]_norm)\.\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGeometry:
    """The fields of a `ModelSpec` that say what its layers are, and what they say."""

    layers: int
    heads: int  # query heads
    kv_heads: int  # key and value heads; of windowed layers, where `full_kv_heads` gives others
    head_dim: int  # of windowed layers, where `full_head_dim` gives another
    intermediate_size: int
    windows: tuple[int | None, ...]  # the sliding window of each layer in positions; None is full attention
    unrotated: tuple[int, ...] = ()  # the layers whose queries and keys are not rotated
    full_kv_heads: int | None = None  # key and value heads of layers with full attention; None: `kv_heads`
    full_head_dim: int | None = None  # the size of a head there; None: `head_dim`
    sources: tuple[int, ...] = ()  # whose keys each layer reads; (): its own. -1 (`OUTSIDE`): another model's
    shared_intermediate_size: int | None = None  # in layers that read keys of another; None: as elsewhere
    keys_are_values: bool = False  # layers with full attention project keys alone, which are their values too
    layer_input_size: int = 0  # of the embedding that each token has in every layer; 0: there is none
    layer_input_rows: int = 0  # tokens with such embeddings

    @property
    def groups(self) -> int:
        """G, the query heads that share one key head, where all layers have the same heads."""
        return self.heads // self.kv_heads

    def kv_heads_of(self, window: int | None) -> int:
        return self.kv_heads if window is not None else self.full_kv_heads or self.kv_heads

    def head_dim_of(self, window: int | None) -> int:
        return self.head_dim if window is not None else self.full_head_dim or self.head_dim

    def groups_of(self, window: int | None) -> int:
        return self.heads // self.kv_heads_of(window)

    def joins_values(self, window: int | None) -> bool:
        return self.keys_are_values and window is None

    def inner_of(self, layer: int) -> int:
        return (None if self.stores(layer) else self.shared_intermediate_size) or self.intermediate_size

    def source_of(self, layer: int) -> int:
        return self.sources[layer] if self.sources else layer

    def stores(self, layer: int) -> bool:
        return self.source_of(layer) == layer

    @property
    def producers(self) -> tuple[int, ...]:
        """The layers whose keys and values another layer reads, in ascending order."""
        return tuple(
            sorted({each for layer, each in enumerate(self.sources) if each not in (layer, OUTSIDE)})
        )

    @property
    def windows_by_heads(self) -> tuple[int | None, ...]:
        """One window for each shape of heads that layers have."""
        shapes = {(self.kv_heads_of(w), self.head_dim_of(w)): w for w in reversed(self.windows)}
        return tuple(reversed(shapes.values()))

    @property
    def cached_values(self) -> int:
        """The numbers that the keys and values of one position are, over all layers."""
        own = [window for layer, window in enumerate(self.windows) if self.stores(layer)]
        return 2 * sum(self.kv_heads_of(window) * self.head_dim_of(window) for window in own)

    def first(self, layers: int) -> Self:
        unrotated = tuple(layer for layer in self.unrotated if layer < layers)
        windows, sources = self.windows[:layers], self.sources[:layers]
        return replace(self, layers=layers, windows=windows, sources=sources, unrotated=unrotated)

    def plain_layer(self, window: int | None = None) -> Self:
        """Return the spec of one rotated layer with full attention, own keys, and this window's heads."""
        return replace(
            self.first(0), layers=1, windows=(None,), kv_heads=self.kv_heads_of(window),
            head_dim=self.head_dim_of(window), full_kv_heads=None, full_head_dim=None,
            keys_are_values=self.joins_values(window), layer_input_size=0, layer_input_rows=0,
        )  # fmt: skip

    def makes_unread_keys(self, name: str) -> bool:
        found = OF_KEYS.fullmatch(name)
        return found is not None and (layer := int(found[1])) < self.layers and not self.stores(layer)
