"""DFlash (arXiv:2602.06036), DFlash 2, DSpark (arXiv:2607.05147): one pass over a block, then a slot a step.

The target's auxiliary states of a position, joined by `fc` and normed, are its *context*, which every layer
projects to a key and a value at that position. The queries of a block, the anchor's embedding and masks,
attend to the contexts before the anchor and to the block's own keys and values. DSpark adds a bias of low
rank to a slot's logits, from the token before the slot. DFlash 2 convolves what enters and what leaves each
sub-layer along the block, and chooses among the likeliest tokens of a slot by the token before it
(https://github.com/z-lab/dflash).

The first step of a draft runs the block, which gives the states of all slots; each step gives the logits of
the next slot. Those of DFlash depend on the text before the draft alone; those of DSpark also on the tokens
drawn before the slot. Either way q is known before the token is drawn, so ordinary rejection is exact. What
the block wrote to the cache lies behind the committed positions, and the next block overwrites it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.drafters.head_kinds import MUSE, config_of
from foredraft.drafters.heads.block_configs import read_block, read_muse
from foredraft.drafters.heads.layers import HeadBuilder, HeadCache, HeadDrafter, load_head
from foredraft.drafters.heads.record import BlockRecord
from foredraft.drafters.heads.tensors import HeadFiles
from foredraft.drafters.heads.transitions import (
    Convolution,
    Markov,
    Selector,
    convolutions_of,
    transition_of,
)
from foredraft.drafters.states import WaitingStates, by_row
from foredraft.model.attention import ForwardContext, additive_mask, at_columns, attend, inject
from foredraft.model.cache import KVCache
from foredraft.model.checkpoint import Checkpoint, named_tensors
from foredraft.model.decoder import MLP, Decoder, Layer, finish, project
from foredraft.model.layers import Product, RMSNorm, gate, soft_cap
from foredraft.model.memory import upload
from foredraft.model.runner import DraftInputs, FusedDraft, Runner
from foredraft.model.tensor_names import EMBEDDING, Naming


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
    row_scales: Tensor | None = None  # of the target's rows before they enter, [V]; None: no change
    # changes a slot's logits by the token before it; None: nothing does
    transition: Markov | Selector | None = None
    convolutions: tuple[tuple[Convolution, Convolution], ...] = ()  # of each layer's two sub-layers, or none

    @classmethod
    def of(cls, builder: HeadBuilder) -> Self:
        record = cast(BlockRecord, builder.record)
        builder = replace(builder, projections=Projections.of)
        return cls(
            record=record, target=builder.target, fc=builder.linear("fc"),
            context_norm=builder.norm("hidden_norm"), layers=builder.layers(), norm=builder.norm("norm"),
            output=builder.output(), draft_vocab=builder.draft_vocab, embedding=builder.embedding(),
            transition=transition_of(builder, record), convolutions=convolutions_of(builder, record),
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
        if self.row_scales is not None:
            rows = rows * self.row_scales[tokens][..., None]
        return rows if self.record.embedding_scale == 1 else rows * self.record.embedding_scale

    def inject(
        self, own: HeadCache, contexts: Sequence[Tensor], starts: Sequence[int], first_row: int = 0
    ) -> None:
        """Write the keys and values of contexts to the cache; its lengths stay as they are."""
        spec, counts = self.record.spec, [len(each) for each in contexts]
        width, length = max(counts), 1  # nothing attends
        context = own.context(spec, width, length, starts, counts, first_row)
        x = torch.cat([each for each in contexts if len(each)])
        for index, layer in enumerate(self.layers):
            weights = layer.attending
            kv = cast(Projections, weights.qkv).keys_values(x).view(len(x), 2 * spec.kv_heads, spec.head_dim)
            if weights.k_norm is not None:
                keys, values = torch.split(kv, spec.kv_heads, 1)
                kv = torch.cat([weights.k_norm(keys), values], 1)
            inject(spec, index, kv, context)

    def run(self, own: HeadCache, anchors: Tensor, starts: Sequence[int], drafts: Sequence[bool]) -> Tensor:
        """Run a block after each anchor [B] -> normed states [B, block, d]."""
        record, spec, batch = self.record, self.record.spec, len(starts)
        counts = [record.block if each else 0 for each in drafts]
        end = record.block + max(start for start, each in zip(starts, drafts, strict=True) if each)
        length = own.attended(end)
        context = own.context(spec, record.block, length, starts, counts)
        places = [s if each else own.kv.scratch for s, each in zip(starts, drafts, strict=True)]
        masks = self.block_masks(upload(places, own.kv.device), length, own.kv.dtype)
        context = replace(context, masks=masks)
        ids = anchors.new_full((batch, record.block), record.mask_token)
        ids[:, 0] = anchors
        flat = ids.flatten() if context.real is None else ids.flatten()[context.real]
        x = self.embed(flat)
        for index, layer in enumerate(self.layers):
            if self.convolutions:
                x = self._convolved(index, x, context)
                continue
            attended = attend(spec, index, project(spec, layer.attending, x, None), context)
            x = finish(spec, layer, x, attended, True, None)
        return at_columns(self.norm(x), context.real, batch * record.block).view(batch, record.block, -1)

    def _convolved(self, index: int, x: Tensor, context: ForwardContext) -> Tensor:
        """Run a layer over whole blocks [N, d], with convolutions around its sub-layers."""
        spec, layer, (around_attention, around_mlp) = (
            self.record.spec, self.layers[index], self.convolutions[index],
        )  # fmt: skip
        entering, leave = around_attention(cast(RMSNorm, layer.attention.norm)(x), self.record.block)
        projected = project(spec, replace(layer.attending, norm=None), entering, None)
        x = x + leave(layer.attention.output(attend(spec, index, projected, context)))
        mlp = cast(MLP, layer.mlp)
        entering, leave = around_mlp(cast(RMSNorm, mlp.norm)(x), self.record.block)
        return x + leave(mlp.down(gate(spec.activation, mlp.gate_up(entering))))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [N, draft_vocab] float32 of the states of slots, [N, d], whatever is before them."""
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

    def timed_step(self, own: HeadCache, tokens: Tensor, starts: list[int]) -> Tensor:
        raise NotImplementedError  # all slots of a block come of one pass

    def timed_draft(self, own: HeadCache, inputs: DraftInputs) -> FusedDraft:
        batch = len(inputs.starts)
        before = torch.tensor([tokens[-1] for tokens in inputs.tokens], device=own.kv.device)
        hidden = self.run(own, before, inputs.starts, [True] * batch)
        count = min(self.record.drafts, max(inputs.lengths))
        chain, tokens = Chain(self, hidden, count, before), list[Tensor]()
        for _ in range(count):
            before = chain.next(before).argmax(-1)
            tokens.append(before)
        drafted = torch.stack(tokens, 1)
        return FusedDraft(drafted, torch.ones_like(drafted, dtype=torch.bool), None)


def load_block(files: HeadFiles[BlockRecord], target: Runner) -> BlockHead:
    """Read the weights of a head, in the target's dtype."""
    head = load_head(files, target, BlockHead.of)
    if files.row_scales is None:
        return head
    return replace(head, row_scales=files.row_scales().to(target.decoder.device, target.decoder.dtype))


class Chain:
    """The logits of one slot after the other, given the tokens before them."""

    def __init__(
        self,
        head: BlockHead,
        hidden: Tensor,  # the normed states of all slots of a block, [B, block, d]
        count: int,  # the first slots that draft; their logits come in one product
        anchors: Tensor,  # [B]
    ) -> None:
        self.head, self.hidden, self.first = head, hidden, head.record.first_slot
        slots = hidden[:, self.first : self.first + count]
        self.logits = head.logits(slots.flatten(0, 1)).view(*slots.shape[:2], -1)  # [B, n, draft V] float32
        self.taken = 0
        self.state: Tensor | None = None
        if isinstance(head.transition, Markov) and self.first:
            self.state = head.transition.after(anchors, hidden[:, 0])

    def next(self, before: Tensor) -> Tensor:
        """Return the logits [B, draft_vocab] of the next slot, after the tokens before it, [B]."""
        logits, transition = self.logits[:, self.taken], self.head.transition
        if transition is not None:
            hidden = self.hidden[:, self.first + self.taken]
            logits, self.state = transition(logits, before, hidden, self.state)
        self.taken += 1
        return logits


class BlockDrafter(HeadDrafter):
    """An autoregressive drafter over a block drafter's head and the target's states."""

    head: BlockHead
    read_folder, load = staticmethod(read_block), staticmethod(load_block)

    def __init__(self, target: Runner, cache: KVCache, head: BlockHead, planned: int | None = None) -> None:
        super().__init__(target, cache, head, planned)
        self.max_draft = self.longest_draft = head.record.drafts
        self._chain: Chain | None = None  # of the draft that is being made
        self._expected = head.record.drafts  # tokens of the longest draft of the round

    def expect(self, budgets: list[int]) -> None:
        self._expected = min(max(budgets), self.head.record.drafts)

    @torch.inference_mode()
    def step(
        self, tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Tensor | None
    ) -> Tensor:
        before = tokens[:, 0]
        if self._chain is None:
            self.read_waiting(lambda sequence: not idle[sequence.row])
            drafts = [not is_idle for is_idle in idle]
            hidden = self.head.run(self._own, before, starts, drafts)
            self._chain = Chain(self.head, hidden, self._expected, before)
        return self.over_target(self._chain.next(before))

    def end_draft(self) -> None:
        self._chain = None

    def read_states(self, waiting: list[WaitingStates]) -> None:
        """Write the keys and values of waiting states to their rows, those of all rows in one pass."""
        first, rows = by_row(waiting)
        joined = self.head.contexts(torch.cat([each.states for each in rows if each is not None]))
        counts = [0 if each is None else len(each.states) for each in rows]
        starts = [0 if each is None else each.start for each in rows]
        self.head.inject(self._own, torch.split(joined, counts), starts, first)
        for each in waiting:
            self.cache.lengths[each.sequence.row] = each.stop


class DFlash(BlockDrafter):
    """An autoregressive drafter whose slots are independent."""

    name = "dflash"

    @classmethod
    def files_for(cls, place: Path, target: Checkpoint) -> HeadFiles[BlockRecord]:
        if config_of(place).get("model_type") != MUSE:
            return super().files_for(place, target)
        files, spec = read_muse(place, target.spec.vocab_size), target.spec
        # on the scale of the target's own logits
        record = replace(files.record, logit_scale=spec.logit_scale or 1.0, logit_softcap=spec.logit_softcap)
        return replace(files, record=record, row_scales=partial(sizes_of_rows, target))


def sizes_of_rows(target: Checkpoint) -> Tensor:
    """Return what the target's normed rows of its embedding were divided by, [V]."""
    spec, naming = target.spec, Naming(nested=target.spec.naming.nested)
    with ExitStack() as stack:
        stored = named_tensors(target.source, stack, naming)[f"{EMBEDDING}.weight"]
        pieces = (stored[first : first + 4096].float() for first in range(0, spec.vocab_size, 4096))
        return torch.cat([(piece.square().mean(-1) + spec.norm_eps).sqrt() for piece in pieces])


class DSpark(BlockDrafter):
    """An autoregressive drafter whose slots follow each other."""

    name = "dspark"
