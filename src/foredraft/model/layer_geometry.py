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
from typing import Any, Self, cast


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


class LayerGeometry:
    """What the fields of a `ModelSpec` say of its layers' heads."""

    __slots__ = ()

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    windows: tuple[int | None, ...]
    unrotated: tuple[int, ...]
    full_kv_heads: int | None
    full_head_dim: int | None
    sources: tuple[int, ...]
    shared_intermediate_size: int | None
    keys_are_values: bool

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
        own = self.stores(layer) or self.shared_intermediate_size is None
        return self.intermediate_size if own else self.shared_intermediate_size or 0

    def source_of(self, layer: int) -> int:
        return self.sources[layer] if self.sources else layer

    def stores(self, layer: int) -> bool:
        return self.source_of(layer) == layer

    @property
    def producers(self) -> tuple[int, ...]:
        """The layers whose keys and values another layer reads, in ascending order."""
        read = {source for layer, source in enumerate(self.sources) if source not in (layer, OUTSIDE)}
        return tuple(sorted(read))

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
        made: Self = replace(
            cast("Any", self), layers=layers, windows=self.windows[:layers], sources=self.sources[:layers],
            unrotated=unrotated,
        )  # fmt: skip
        return made

    def plain_layer(self, window: int | None = None) -> Self:
        """Return the spec of one rotated layer with full attention, own keys, and this window's heads."""
        made: Self = replace(
            cast("Any", self), layers=1, windows=(None,), kv_heads=self.kv_heads_of(window),
            head_dim=self.head_dim_of(window), full_kv_heads=None, full_head_dim=None, sources=(),
            unrotated=(), keys_are_values=self.joins_values(window), layer_input_size=0, layer_input_rows=0,
        )  # fmt: skip
        return made

    def makes_unread_keys(self, name: str) -> bool:
        found = OF_KEYS.fullmatch(name)
        return found is not None and (layer := int(found[1])) < self.layers and not self.stores(layer)
