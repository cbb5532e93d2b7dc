"""The sizes of recurrent layers, in numbers, whatever their kind.

All kinds convolve channels of a position and the ones before it. A gated delta net (arXiv:2412.06464) then
takes them for queries, keys and values, as Mamba-2 (arXiv:2405.21060) does, which calls them C, B and x. A
short convolution has values alone, of one head, and no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RATES = {
    "delta": 2,
    "mamba": 1,
    "convolution": 0,
}  # kind -> numbers of a head of values that decide how its state changes, in every entry


@dataclass(frozen=True, slots=True)
class RecurrentSizes:
    kind: Literal["delta", "mamba", "convolution"]
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
    def rates(self) -> int:
        return RATES[self.kind] * self.value_heads

    @property
    def entry(self) -> int:
        """The numbers that the log keeps of a position: the channels before the convolution, and rates."""
        return self.channels + self.rates

    @property
    def state(self) -> int:
        """The numbers of a layer's state, in float32."""
        return self.value_heads * self.key_dim * self.value_dim
