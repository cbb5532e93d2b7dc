"""The sizes of recurrent layers: gated delta nets (arXiv:2412.06464), in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    key_heads: int  # each of them serves value_heads / key_heads heads of values, one after the other
    value_heads: int
    key_dim: int  # of a head
    value_dim: int  # of a head
    taps: int  # of the causal convolution over queries, keys and values
    # two weights hold, key head by key head, queries, keys, values and z, and b and a; otherwise four do
    by_key: bool = False

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def entry(self) -> int:
        """The numbers that the log keeps of a position: the channels before the convolution, b and a."""
        return self.channels + 2 * self.value_heads

    @property
    def state(self) -> int:
        """The numbers of a layer's state, in float32."""
        return self.value_heads * self.key_dim * self.value_dim
