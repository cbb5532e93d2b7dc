"""Packed documents: several texts as one run of columns, and passes over it that can be trained through.

Contract: the arithmetic is that of `model.decoder`, whose layers run here as they do in decoding. Only
attention differs: there is no cache, and a column sees its own document alone. All other work is one product
over all columns, without padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.model.decoder import Layer, finish, project
from foredraft.model.forward_context import rope_tables
from foredraft.model.layers import soft_cap
from foredraft.model.rope import Rope
from foredraft.model.spec import ModelSpec

__all__ = ["Document", "Packed", "PackedPass", "rotated"]


@dataclass(frozen=True, slots=True)
class Document:
    """One text to learn from.

    Attributes:
        ids: Token ids.
        counts: Whether the prediction of each token counts, as long as `ids`; that of the first never does.
    """

    ids: tuple[int, ...]
    counts: tuple[bool, ...]

    @property
    def counted(self) -> int:
        """The tokens whose prediction counts."""
        return sum(self.counts[1:])


@dataclass(frozen=True, slots=True)
class Packed:
    """Documents as one run of N columns.

    Attributes:
        tokens: [N] int64.
        lengths: Tokens of each document, in order.
        predicting: The columns whose next token counts, [M] int64, ascending.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    predicting: Tensor

    @classmethod
    def of(cls, documents: Sequence[Document], device: torch.device) -> Packed:
        """Return the documents, one after the other."""
        tokens = [id for document in documents for id in document.ids]
        # A column predicts the next token of its document; the last one predicts nothing.
        counts = [n for document in documents for n in (*document.counts[1:], False)]
        return cls(
            torch.tensor(tokens, device=device),
            tuple(len(document.ids) for document in documents),
            torch.tensor(counts, device=device).nonzero()[:, 0],
        )

    @property
    def positions(self) -> Tensor:
        """The position of every column in its document, [N]."""
        return torch.cat([torch.arange(length) for length in self.lengths]).to(self.tokens.device)

    def groups(self) -> Iterator[tuple[int, int, slice]]:
        """Yield documents of one length that attend in one call: how many, their length, their columns."""
        start = 0
        for length, group in groupby(self.lengths):
            count = len(list(group))
            yield count, length, slice(start, start := start + count * length)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads [N, H, D] with their first channels rotated; cos and sin [N, 1, R]."""
    channels = cos.shape[-1]
    first, rest = x[..., :channels], x[..., channels:]
    first = first * cos + first.roll(channels // 2, -1) * sin
    return first if not rest.shape[-1] else torch.cat([first, rest], -1)


class PackedPass:
    """What all layers of a pass over packed documents share.

    Args:
        spec: The model.
        packed: The documents.
        dtype: Of the rotary tables.
        inputs: What layers take of the tokens themselves, [N, layers, I]; None in models without.
        shift: Added to the position of every column.
    """

    def __init__(
        self,
        spec: ModelSpec,
        packed: Packed,
        dtype: torch.dtype,
        inputs: Tensor | None = None,
        *,
        shift: int = 0,
    ) -> None:
        self.spec, self.packed, self.inputs = spec, packed, inputs
        self._held: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values of layers that others read
        device, longest = packed.tokens.device, max(packed.lengths) + shift
        tables: Mapping[Rope, Tensor] = rope_tables(spec, longest, device, dtype)
        positions = packed.positions + shift
        self._rotations = {rope: table[positions].chunk(2, 1) for rope, table in tables.items()}

    def run(self, layers: Sequence[Layer], x: Tensor, first: int = 0) -> Tensor:
        """Run layers `first` and on.

        Args:
            layers: The layers.
            x: The states that enter the first of them, [N, hidden].
            first: Its index in the model.

        Returns:
            The states that leave the last of them, [N, hidden].
        """
        for index, layer in enumerate(layers, first):
            qkv = project(self.spec, layer.attention, x, None)
            given = () if layer.input is None or self.inputs is None else (self.inputs[:, index],)
            x = finish(self.spec, layer, x, self._attend(index, qkv), True, None, *given)
        return x

    def _attend(self, index: int, qkv: Tensor) -> Tensor:
        """Return the output of all heads, [N, H * D], of what `project` returned."""
        spec, window = self.spec, self.spec.windows[index]
        heads, kv_heads, dim = spec.heads, spec.kv_heads_of(window), spec.head_dim_of(window)
        rope, rotates = spec.rope_of(window), index not in spec.unrotated
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        q = self.rotated(q, spec.query_rope or rope) if rotates else q
        if spec.stores(index):
            k = self.rotated(k, rope) if rotates else k
        else:
            k, v = self._held[spec.source_of(index)]
        if index in spec.producers:
            self._held[index] = k, v
        parts = q, k, v
        outputs = []
        for count, length, columns in self.packed.groups():
            q, k, v = (part[columns].view(count, length, -1, dim).transpose(1, 2) for part in parts)
            out = self._attention(q, k, v, window)  # [documents, H, T, D]
            outputs.append(out.transpose(1, 2).reshape(count * length, heads * dim))
        return torch.cat(outputs)

    def rotated(self, x: Tensor, rope: Rope) -> Tensor:
        """Return heads [N, H, D] with their first channels rotated."""
        return rotated(x, *self._rotations[rope])

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        spec, length = self.spec, q.shape[2]
        groups = q.shape[1] // k.shape[1]
        grouped = groups > 1
        reach = None if window is None or window >= length else window
        if reach is None and spec.attention_softcap is None:
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=spec.attention_scale, enable_gqa=grouped
            )
        keys = torch.arange(length, device=q.device)
        seen = keys <= keys[:, None]
        if reach is not None:
            seen &= keys > keys[:, None] - reach
        if spec.attention_softcap is None:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, scale=spec.attention_scale, enable_gqa=grouped
            )
        k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
        scores = soft_cap(q @ k.transpose(2, 3), spec.attention_softcap, spec.attention_scale)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1, dtype=torch.float32)
        return weights.to(v.dtype) @ v
