"""The student that becomes a DFlash head (Chen et al. 2026, arXiv:2602.06036).

An *anchor* is a column whose token is the pending one of a draft; the blocks of all texts run at once. A
block is that token and masked slots; slot k predicts the token k columns later, from the contexts of the
columns before the anchor and the block itself. A step of training takes every n-th column as an anchor, where
n is the length of a draft; which ones depends on the texts of the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from foredraft.drafters.heads.block_files import shapes_of
from foredraft.drafters.heads.block_head import BlockBuilder, BlockHead, Projections
from foredraft.drafters.heads.eagle3_files import D2T, T2D
from foredraft.drafters.heads.record import BlockRecord
from foredraft.model.attention import rope_tables
from foredraft.model.decoder import Decoder, Layer, finish, project
from foredraft.model.layers import Linear
from foredraft.train.eagle3_student import HeadStudent, reaching
from foredraft.train.losses import CHUNK, Compare, by_chunks
from foredraft.train.students import Accept, Parameters
from foredraft.train.target import Packed, rotated


class AnchorBlocks(NamedTuple):
    """The blocks of some anchors."""

    anchors: Tensor  # the columns of the anchors, [A], ascending
    hidden: Tensor  # the normed states of their slots, [A, block, d]


class BlockStudent(HeadStudent):
    """A DFlash head, random but for its last norm; embedding and head are the target's."""

    record: BlockRecord

    def __init__(
        self,
        record: BlockRecord,  # the head
        target: Decoder,  # the target
        head: Tensor,  # the weight of the target's head, [V, hidden]
        *,
        vocabulary: Sequence[int] | None = None,  # the token ids of a reduced head, ascending; None keeps all
        decay: float,  # weight of each token of a draft against the one before
        seed: int = 0,  # of the first weights
    ) -> None:
        super().__init__(record, target, record.drafts, decay)
        assert not any(record.spec.windows) and record.markov is None
        assert not (record.from_anchor or record.causal or record.own_head or record.own_embedding)
        if vocabulary is not None:
            self.vocabulary = torch.tensor(vocabulary, device=target.device)
            head = head[self.vocabulary]
        self.output = Linear(head)
        needed, _ = shapes_of(record, {})
        self.shapes = {name: shape for name, shape in needed.items() if name not in (D2T, T2D)}
        self.own = Parameters(self.shapes, target.device)
        self.begin(seed)

    def head(self) -> BlockHead:
        """Return the head over the parameters as they are now."""
        builder = BlockBuilder(self.record, self.shapes, self.own, self.target, Linear)
        head = builder.block_head(self.record, self.vocabulary)
        return replace(head, output=self.output)  # the target's may be packed, without gradients

    def forward(
        self,
        packed: Packed,
        states: Tensor | None,
        compare: Compare | None = None,
        accept: Accept | None = None,
    ) -> Tensor:
        """Return what `Student.forward` does; logits and the figure of `compare` are of first slots.

        The loss of token k counts `decay`^(k - 1). With `compare` some columns are anchors, which stand for
        all. A column without a column before it has logits of 0, and is never accepted.
        """
        assert states is not None
        head, device, count = self.head(), packed.tokens.device, len(packed.predicting)
        contexts = head.contexts(states)
        if compare is not None:
            return self._compared(head, packed, contexts, compare)
        accepted = torch.zeros(count, self.steps, 2, dtype=torch.float64, device=device)
        everywhere: Tensor | None = None
        for offset in range(self.steps):
            blocks = self._blocks(head, packed, contexts, offset)
            for k in range(self.steps if accept is not None else 1):
                left, columns, reached = self._drafted(packed, blocks, k)
                parts = zip(torch.split(left, CHUNK), torch.split(reached, CHUNK), strict=True)
                if accept is not None and len(left):
                    found = torch.cat([accept(head.logits(part), rows) for part, rows in parts])
                    accepted[columns, k] = found
                elif accept is None:
                    logits = head.logits(left)
                    if everywhere is None:
                        everywhere = torch.zeros(count, logits.shape[1], device=device)
                    everywhere = everywhere.index_put((columns,), logits)
        return accepted if everywhere is None else everywhere

    def _compared(self, head: BlockHead, packed: Packed, contexts: Tensor, compare: Compare) -> Tensor:
        """Return the sums of `compare`, times the columns that an anchor stands for."""
        blocks = self._blocks(head, packed, contexts, int(packed.tokens.sum()) % self.steps)
        sums = torch.zeros(2, device=packed.tokens.device)
        for k in range(self.steps):
            left, _, reached = self._drafted(packed, blocks, k)

            def compared(part: Tensor, rows: slice, reached: Tensor = reached) -> Tensor:
                return compare(head.logits(part), reached[rows])

            weights = torch.tensor([self.decay**k, float(k == 0)], device=sums.device) * self.steps
            sums = sums + by_chunks(compared, left, []) * weights
        return sums

    def _drafted(self, packed: Packed, blocks: AnchorBlocks, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return what a step of all drafts left, [A, d], and the anchors and what they reach, [A] each."""
        columns, anchors, reached = reaching(packed, step)
        place = torch.full_like(packed.tokens, -1)
        place[blocks.anchors] = torch.arange(len(blocks.anchors), device=place.device)
        own = place[columns]
        return blocks.hidden[own[own >= 0], step + 1], anchors[own >= 0], reached[own >= 0]

    def _blocks(self, head: BlockHead, packed: Packed, contexts: Tensor, offset: int) -> AnchorBlocks:
        """Run the blocks of every n-th column of each document, from column `offset` on."""
        record, spec, device = self.record, self.record.spec, packed.tokens.device
        positions = packed.positions
        anchors = (positions % self.steps == offset).nonzero()[:, 0]
        slots = torch.arange(record.block, device=device)
        ids = torch.full((len(anchors), record.block), record.mask_token, device=device)
        ids[:, 0] = packed.tokens[anchors]
        x = head.embed(ids.flatten()).to(contexts.dtype)
        rope, longest = spec.rope_of(None), max(packed.lengths) + record.block
        table = rope_tables(spec, longest, device, contexts.dtype)[rope]
        of_contexts = table[positions].chunk(2, 1)
        of_slots = table[(positions[anchors, None] + slots).flatten()].chunk(2, 1)
        for layer in head.layers:
            given = layer, packed, offset, x, contexts, of_slots, of_contexts
            x = checkpoint(self._layer, *given, use_reentrant=False)
        return AnchorBlocks(anchors, head.norm(x).view(len(anchors), record.block, -1))

    def _layer(
        self,
        layer: Layer,
        packed: Packed,
        offset: int,
        x: Tensor,
        contexts: Tensor,
        of_slots: tuple[Tensor, Tensor],
        of_contexts: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Return the states of all slots that leave a layer, [S, d], from those that enter it."""
        spec, weights = self.record.spec, layer.attention
        q, keys, values = torch.split(
            project(spec, weights, x, None), [spec.heads, spec.kv_heads, spec.kv_heads], 1
        )
        given = cast(Projections, weights.qkv).keys_values(contexts).view(len(contexts), -1, spec.head_dim)
        given_keys, given_values = torch.split(given, spec.kv_heads, 1)
        if weights.k_norm is not None:
            given_keys = weights.k_norm(given_keys)
        own = rotated(q, *of_slots), rotated(keys, *of_slots), values
        attended = self._attended(packed, offset, own, (rotated(given_keys, *of_contexts), given_values))
        return finish(spec, layer, x, attended, True, None)

    def _attended(
        self, packed: Packed, offset: int, own: tuple[Tensor, ...], given: tuple[Tensor, ...]
    ) -> Tensor:
        """Return the output of all heads, [S, H * D], for `own` [S, heads, D] and `given` [N, Hk, D]."""
        spec, width, outputs, first = self.record.spec, self.record.block, list[Tensor](), 0
        for count, length, columns in packed.groups():
            places = torch.arange(offset, length, self.steps, device=own[0].device)
            blocks = slice(first, first := first + count * len(places) * width)

            def by_head(x: Tensor, count: int = count) -> Tensor:
                """Return [n, heads, D] as [documents, Hk, heads / Hk, n / documents, D]."""
                heads = x.shape[1] // spec.kv_heads
                return x.view(count, -1, spec.kv_heads, heads, spec.head_dim).permute(0, 2, 3, 1, 4)

            def by_block(x: Tensor, blocks: int = len(places)) -> Tensor:
                """Return [..., T, D] as [..., blocks, T / blocks, D]."""
                return x.view(*x.shape[:-2], blocks, width, x.shape[-1])

            q, keys, values = (by_head(each[blocks]) for each in own)
            given_keys, given_values = (by_head(each[columns]) for each in given)
            before = torch.arange(length, device=q.device) < places.repeat_interleave(width)[:, None]
            scores = (q @ given_keys.transpose(-1, -2)).masked_fill(~before, -torch.inf)
            among = by_block(q) @ by_block(keys).transpose(-1, -2)  # [.., blocks, block, block]
            scores = torch.cat([scores, among.flatten(-3, -2)], -1) * spec.attention_scale
            shares = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
            out = shares[..., :length] @ given_values
            out = out + (by_block(shares[..., length:]) @ by_block(values)).flatten(-3, -2)
            outputs.append(out.permute(0, 3, 1, 2, 4).reshape(count * len(places) * width, -1))
        return torch.cat(outputs)
