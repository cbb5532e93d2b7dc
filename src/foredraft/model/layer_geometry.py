"""The geometry of layers: the heads that each one has, and whose keys and values it reads.

Contract: layers with one window have heads of one number and one size, so that a window stands for its kind.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Self, cast

__all__ = ["OUTSIDE", "LayerGeometry"]

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
        """Return Hk of layers with the given window."""
        return self.kv_heads if window is not None else self.full_kv_heads or self.kv_heads

    def head_dim_of(self, window: int | None) -> int:
        """Return D of layers with the given window."""
        return self.head_dim if window is not None else self.full_head_dim or self.head_dim

    def groups_of(self, window: int | None) -> int:
        """Return G, the query heads that share one key head, of layers with the given window."""
        return self.heads // self.kv_heads_of(window)

    def joins_values(self, window: int | None) -> bool:
        """Return whether layers with the given window take their keys, as projected, for values."""
        return self.keys_are_values and window is None

    def inner_of(self, layer: int) -> int:
        """Return the size within the MLP of a layer."""
        own = self.stores(layer) or self.shared_intermediate_size is None
        return self.intermediate_size if own else self.shared_intermediate_size or 0

    def source_of(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads."""
        return self.sources[layer] if self.sources else layer

    def stores(self, layer: int) -> bool:
        """Return whether a layer has keys and values of its own."""
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
        """Return the spec of the first layers alone."""
        unrotated = tuple(layer for layer in self.unrotated if layer < layers)
        made: Self = replace(
            cast("Any", self), layers=layers, windows=self.windows[:layers], sources=self.sources[:layers],
            unrotated=unrotated,
        )  # fmt: skip
        return made

    def plain_layer(self, window: int | None = None) -> Self:
        """Return the spec of one layer with full attention, in the form of those with the given window.

        It has keys and values of its own, is rotated, and has no part that belongs to its place in a model.
        """
        made: Self = replace(
            cast("Any", self), layers=1, windows=(None,), kv_heads=self.kv_heads_of(window),
            head_dim=self.head_dim_of(window), full_kv_heads=None, full_head_dim=None, sources=(),
            unrotated=(), keys_are_values=self.joins_values(window), layer_input_size=0, layer_input_rows=0,
        )  # fmt: skip
        return made

    def makes_unread_keys(self, name: str) -> bool:
        """Return whether a tensor would make keys or values in a layer that reads those of another."""
        found = OF_KEYS.fullmatch(name)
        return found is not None and (layer := int(found[1])) < self.layers and not self.stores(layer)
