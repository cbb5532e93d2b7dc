"""The forward of a block drafter: all slots in one pass (DFlash, arXiv:2602.06036; DSpark, arXiv:2607.05147).

The target's auxiliary states of a position, joined by `fc` and normed, are its *context*, which every layer
projects to a key and a value at that position. The queries of a block, the anchor's embedding and masks,
attend to the contexts before the anchor and to the block's own keys and values. DSpark adds a bias of low
rank to a slot's logits, from the token before the slot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.drafters.heads.head_files import JOINTS, MARKOV, HeadFiles
from foredraft.drafters.heads.layers import ATTENDED, HeadBuilder, head_context, load_head
from foredraft.drafters.heads.record import BlockRecord
from foredraft.model.attention import additive_mask, at_columns, attend, inject
from foredraft.model.cache import KVCache
from foredraft.model.decoder import Decoder, Layer, finish, project
from foredraft.model.layers import Product, RMSNorm, soft_cap
from foredraft.model.memory import upload
from foredraft.model.rope import Rope
from foredraft.model.runner import Runner


@dataclass(frozen=True, slots=True)
class Projections:
    """The projections of a layer, apart: contexts need no queries."""

    queries: Product
    keys_values: Product

    @classmethod
    def of(cls, builder: HeadBuilder, names: Sequence[str]) -> Self:
        return cls(builder.linear(names[0]), builder.linear(*names[1:]))

    @property
    def bias(self) -> Tensor | None:
        parts = self.queries.bias, self.keys_values.bias
        return None if parts[0] is None or parts[1] is None else torch.cat([parts[0], parts[1]])

    @property
    def shape(self) -> tuple[int, int]:
        return self.queries.shape[0] + self.keys_values.shape[0], self.queries.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        """Return queries, keys and values side by side, [N, (H + 2 * Hk) * D]."""
        return torch.cat([self.queries(x), self.keys_values(x)], -1)

    def dense(self) -> Tensor:
        return torch.cat([self.queries.dense(), self.keys_values.dense()])


@dataclass(frozen=True, slots=True)
class Markov:
    """The bias that the token before a slot adds to the slot's logits."""

    form: str  # one of `MARKOV_FORMS`
    embedding: Tensor  # of the token before, [V, r]
    output: Product  # from r to the head's draft vocabulary
    joint: Product | None = None  # the gate, or the cell of the recurrent form; None in the plain form

    @classmethod
    def of(cls, builder: HeadBuilder, form: str | None) -> Self | None:
        if form is None:
            return None
        embedding, output = (
            builder.load([f"{MARKOV}.markov_w1.weight"]),
            builder.linear(f"{MARKOV}.markov_w2"),
        )
        return cls(form, embedding, output, builder.linear(JOINTS[form][0]) if form in JOINTS else None)

    def __call__(self, before: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the bias [B, draft_vocab] float32 of a slot behind `before`, and the next state [B, r]."""
        inner = F.embedding(before, self.embedding)
        if self.form == "gated":
            assert self.joint is not None
            inner = self.joint(torch.cat([hidden, inner], -1)).sigmoid() * inner
        elif self.form == "rnn":
            assert self.joint is not None
            state = torch.zeros_like(inner) if state is None else state
            gate, new, inner = self.joint(torch.cat([state, inner, hidden], -1)).chunk(3, -1)
            state = torch.lerp(new.tanh(), state, gate.sigmoid())
            inner = inner.tanh()
        return self.output(inner).float(), state

    def after(self, before: Tensor, hidden: Tensor) -> Tensor | None:
        """Return the state after a slot that does not draft; arguments as the call's."""
        return self(before, hidden, None)[1] if self.form == "rnn" else None


@dataclass(frozen=True, slots=True)
class BlockHead:
    """The weights of a block drafter, beside its target's."""

    record: BlockRecord  # what it is
    target: Decoder  # the target's decoder
    fc: Product  # joins the auxiliary states
    context_norm: RMSNorm  # after `fc`
    layers: tuple[Layer, ...]  # its layers, whose projections are `Projections`
    norm: RMSNorm  # before the head
    output: Product  # the head over its draft vocabulary
    draft_vocab: Tensor | None  # the ids that it can draft, [draft_vocab]; None where it can draft all
    embedding: Tensor | None  # its own embedding [V, d]; None: the target's
    markov: Markov | None = None  # the bias of the token before; None for none

    @classmethod
    def of(cls, builder: HeadBuilder) -> Self:
        record = cast(BlockRecord, builder.record)
        builder = replace(builder, projections=Projections.of)
        return cls(
            record=record, target=builder.target, fc=builder.linear("fc"),
            context_norm=builder.norm("hidden_norm"), layers=builder.layers(), norm=builder.norm("norm"),
            output=builder.output(), draft_vocab=builder.draft_vocab, embedding=builder.embedding(),
            markov=Markov.of(builder, record.markov),
        )  # fmt: skip

    def read_as(self, record: BlockRecord) -> BlockHead:
        return replace(self, record=record)

    def contexts(self, aux_states: Tensor) -> Tensor:
        """Return the contexts [N, d] of the target's joined auxiliary states [N, layers * d_target]."""
        return self.context_norm(self.fc(aux_states))

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., d] that enter the first layer, for the target's token ids."""
        own = self.embedding
        rows = self.target.embedding_rows(tokens) if own is None else F.embedding(tokens, own)
        return rows if self.record.embedding_scale == 1 else rows * self.record.embedding_scale

    def inject(
        self,
        cache: KVCache,
        tables: dict[Rope, Tensor],
        contexts: Sequence[Tensor],
        starts: Sequence[int],
        first_row: int = 0,
    ) -> None:
        """Write the keys and values of contexts to the cache; its lengths stay as they are."""
        spec, counts = self.record.spec, [len(each) for each in contexts]
        width, length = max(counts), 1  # nothing attends
        context = head_context(spec, cache, tables, width, length, starts, counts, first_row)
        x = torch.cat([each for each in contexts if len(each)])
        for index, layer in enumerate(self.layers):
            weights = layer.attention
            kv = cast(Projections, weights.qkv).keys_values(x).view(len(x), 2 * spec.kv_heads, spec.head_dim)
            if weights.k_norm is not None:
                keys, values = torch.split(kv, spec.kv_heads, 1)
                kv = torch.cat([weights.k_norm(keys), values], 1)
            inject(spec, index, kv, context)

    def run(
        self,
        cache: KVCache,
        tables: dict[Rope, Tensor],
        anchors: Tensor,
        starts: Sequence[int],
        drafts: Sequence[bool],
    ) -> Tensor:
        """Run a block after each anchor [B] -> normed states [B, block, d]."""
        record, spec, batch = self.record, self.record.spec, len(starts)
        counts = [record.block if each else 0 for each in drafts]
        end = record.block + max(start for start, each in zip(starts, drafts, strict=True) if each)
        length = min(cache.stored, math.ceil(end / ATTENDED) * ATTENDED)
        context = head_context(spec, cache, tables, record.block, length, starts, counts)
        places = upload(
            [s if each else cache.scratch for s, each in zip(starts, drafts, strict=True)], cache.device
        )
        context = replace(context, masks=self.block_masks(places, length, cache.dtype))
        ids = anchors.new_full((batch, record.block), record.mask_token)
        ids[:, 0] = anchors
        flat = ids.flatten() if context.real is None else ids.flatten()[context.real]
        x = self.embed(flat)
        for index, layer in enumerate(self.layers):
            attended = attend(spec, index, project(spec, layer.attention, x, None), context)
            x = finish(spec, layer, x, attended, True, None)
        return at_columns(self.norm(x), context.real, batch * record.block).view(batch, record.block, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [N, draft_vocab] float32 of the states of slots, [N, d], without the Markov bias."""
        logits, record = self.output(hidden).float(), self.record
        if record.logit_scale != 1:
            logits = logits * record.logit_scale
        return logits if record.logit_softcap is None else soft_cap(logits, record.logit_softcap)

    def block_masks(self, anchors: Tensor, length: int, dtype: torch.dtype) -> dict[int | None, Tensor]:
        """Return the additive masks [B, 1, T * G, L] of blocks after anchors [B], by window.

        A slot sees the contexts before its anchor and its own block. One past the attended length, of a row
        that does not draft, sees position 0, as the softmax of nothing is NaN.
        """
        record, width = self.record, self.record.block
        keys = torch.arange(length, device=anchors.device)
        anchor = anchors[:, None, None]
        slots = anchor + torch.arange(width, device=anchors.device)[:, None]  # [B, T, 1]
        before, block = keys < anchor, (keys >= anchor) & (keys < anchor + width)
        masks: dict[int | None, Tensor] = {}
        for window in dict.fromkeys(record.spec.windows):
            causal = record.causal if window is None else record.causal_windows
            own = block & (keys <= slots) if causal else block
            context = before
            if window is not None and record.window_from_anchor:
                context = before & (keys >= anchor - window)
            elif window is not None:
                context = before & (keys > slots - window)
                own = own & (keys > slots - window) & (keys < slots + window)
            visible = (context | own).expand(-1, width, -1)
            visible = visible | ((slots >= length) & (keys == 0))
            masks[window] = additive_mask(visible, record.spec.groups_of(window), dtype)
        return masks


def load_block(files: HeadFiles[BlockRecord], target: Runner) -> BlockHead:
    """Read the weights of a head, in the target's dtype."""
    return load_head(files, target, BlockHead.of)
