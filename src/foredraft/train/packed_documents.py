"""Packed documents: several texts as one run of columns, and passes over it that can be trained through.

Contract: the arithmetic is that of `model.decoder`, whose layers run here as they do in decoding. Only
attention differs: there is no cache, and a column sees its own document alone. All other work is one product
over all columns, without padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

__all__ = ["Document", "Packed", "PackedPass"]


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


class PackedPass:
    """What all layers of a pass over packed documents share.

    Args:
        spec: The model.
        packed: The documents.
        dtype: Of the rotary tables.
    """

    def __init__(self, spec: ModelSpec, packed: Packed, dtype: torch.dtype) -> None:
        self.spec, self.packed = spec, packed
        device, longest = packed.tokens.device, max(packed.lengths)
        tables: Mapping[Rope, Tensor] = rope_tables(spec, longest, device, dtype)
        positions = packed.positions
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
            x = finish(self.spec, layer, x, self._attend(index, qkv), True, None)
        return x

    def _attend(self, index: int, qkv: Tensor) -> Tensor:
        """Return the output of all heads, [N, H * D], of queries, keys and values [N, H + 2 * Hk, D]."""
        spec = self.spec
        heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
        window = spec.windows[index]
        cos, sin = self._rotations[spec.rope_of(window)]
        qk = qkv[:, : heads + kv_heads]
        qk = qk * cos + qk.roll(dim // 2, -1) * sin
        parts = qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :]
        outputs, start = [], 0
        for length, group in groupby(self.packed.lengths):  # documents of one length in one call
            count = len(list(group))
            columns = slice(start, start := start + count * length)
            q, k, v = (part[columns].view(count, length, -1, dim).transpose(1, 2) for part in parts)
            out = self._attention(q, k, v, window)  # [documents, H, T, D]
            outputs.append(out.transpose(1, 2).reshape(count * length, heads * dim))
        return torch.cat(outputs)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        spec, length = self.spec, q.shape[2]
        grouped = spec.groups > 1
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
        k, v = (part.repeat_interleave(spec.groups, 1) for part in (k, v))
        scores = soft_cap(q @ k.transpose(2, 3), spec.attention_softcap, spec.attention_scale)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1, dtype=torch.float32)
        return weights.to(v.dtype) @ v
