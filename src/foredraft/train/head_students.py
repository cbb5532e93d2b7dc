"""The students that become heads over the target's states; all drafts of all texts run at once.

An *anchor* is a column with which a draft begins.

EAGLE-3, by training-time test (Li et al. 2025, arXiv:2503.01840): step 0 reads each column's token with the
target's state before it. Step k reads the token k columns later with the state that the head itself gave at
the same anchor. Its query stands k positions later, and sees the keys of step 0 up to the anchor, and those
of steps 1 to k at its own anchor.

DFlash (Chen et al. 2026, arXiv:2602.06036): a block is the anchor's token, which is the pending one of a
draft, and masked slots; slot k predicts the token k columns later, from the contexts of the columns before
the anchor and the block itself. A step of training takes every n-th column as an anchor, where n is the
length of a draft; which ones depends on the texts of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from foredraft.drafters.block_drafter import BlockHead, Projections
from foredraft.drafters.eagle3 import Eagle3Head
from foredraft.drafters.heads.layers import HeadBuilder
from foredraft.drafters.heads.record import BlockRecord, HeadRecord
from foredraft.drafters.heads.tensors import D2T, HEAD, head_shapes
from foredraft.drafters.heads.writing import maps_of
from foredraft.drafters.mtp import MTPRecord, head_of
from foredraft.model.attention import rope_tables
from foredraft.model.decoder import Decoder, Layer, finish, project
from foredraft.model.layers import Linear, RMSNorm
from foredraft.model.spec import ModelSpec
from foredraft.model.tensor_names import LAST_NORM
from foredraft.model.weights import build_further, further_shapes
from foredraft.train.students import Drafts, DraftStep, Parameters, Student
from foredraft.train.target import Packed, PackedPass, rotated


class HeadStudent(Student):
    """Base class of a head over the target's states; its embedding is the target's."""

    head: Callable[[], Any]  # returns the head over the parameters as they are now
    drafted: Callable[..., Iterator[DraftStep]]  # yields each step of all drafts, or of a sample of them
    reread: tuple[str, ...] = ()  # the parameters that give logits of the states that a step leaves

    def __init__(
        self,
        record: HeadRecord,  # the head
        target: Decoder,  # the target
        head: Tensor,  # the weight of the target's head, [V, hidden]
        *,
        vocabulary: Sequence[int] | None = None,  # the token ids of a reduced head, ascending; None keeps all
        steps: int,  # tokens of a draft that are learned
        decay: float,  # weight of each of them against the one before
        seed: int = 0,  # of the first weights, but for the last norm and the head, which are the target's
        start: Mapping[str, Tensor] | None = None,  # the first weights, by name; None draws them
    ) -> None:
        super().__init__()
        assert record.aux_layers is not None
        self.record, self.target, self.aux_layers = record, target, record.aux_layers
        self.steps, self.decay = steps, decay
        if vocabulary is not None:
            self.vocabulary = torch.tensor(vocabulary, device=target.device)
            head = head[self.vocabulary]
        self.output: Any = None if record.own_head else Linear(head)
        self.shapes = self.shapes_of(record)
        self.own = Parameters(self.shapes, target.device)
        if start is None:
            self.own.draw(torch.Generator().manual_seed(seed), norm=1.0)
            norm = {} if not isinstance(target.norm, RMSNorm) else {"norm.weight": target.norm.weight}
            start = {**self.own.by_name, **norm, **({HEAD: head} if record.own_head else {})}
        self.own.fill(start)

    @staticmethod
    def shapes_of(record: HeadRecord) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters, by name."""
        needed, optional = head_shapes(record)
        shapes = {name: shape for name, shape in needed.items() if name != D2T}
        return shapes | ({HEAD: optional[HEAD]} if record.own_head else {})

    @property
    def builder(self) -> HeadBuilder:
        """Builds the head over the parameters as they are now."""
        return HeadBuilder(self.record, self.shapes, self.own.load, self.target, Linear, self.vocabulary)

    def drafts(self, packed: Packed, states: Tensor | None, steps: int, *, sampled: bool) -> Drafts:
        assert states is not None
        head = self.head()
        drafted = self.drafted(head, packed, states, steps, sampled=sampled)
        return Drafts(head.logits, [self.own.by_name[name] for name in self.reread], drafted)

    def tensors(self) -> dict[str, Tensor]:
        own = self.own.by_name
        return own if self.vocabulary is None else {**own, **maps_of(self.vocabulary, self.record)}


def by_head(heads: int, count: int) -> Callable[[Tensor], Tensor]:
    """Return what reads [n, heads, D] as [documents, Hk, heads / Hk, n / documents, D]."""
    return lambda x: x.view(count, -1, heads, x.shape[1] // heads, x.shape[2]).permute(0, 2, 3, 1, 4)


def reaching(packed: Packed, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the columns that a step of a draft counts for: anchors whose token `step` later counts."""
    device, columns = packed.tokens.device, packed.predicting
    count = len(packed.tokens)
    lengths = torch.tensor(packed.lengths, device=device)
    document = torch.arange(len(packed.lengths), device=device).repeat_interleave(lengths)
    place = torch.full((count,), -1, device=device)
    place[columns] = torch.arange(len(columns), device=device)
    later = (columns + step).clamp(max=count - 1)
    fits = (columns + step < count) & (document[later] == document[columns]) & (place[later] >= 0)
    fits &= packed.positions[columns] > 0
    return columns[fits], place[columns[fits]], place[later[fits]]


class Eagle3Student(HeadStudent):
    """An EAGLE-3 head of one layer; a new one is random but for its last norm and its head, the target's."""

    reread: tuple[str, ...] = ("norm.weight", HEAD)

    def head(self) -> Eagle3Head:
        return Eagle3Head.of(self.builder)

    def drafted(
        self, head: Eagle3Head, packed: Packed, states: Tensor, steps: int, *, sampled: bool
    ) -> Iterator[DraftStep]:
        spec, layer = self.record.spec, head.layers[0]
        state = head.joined(states).roll(1, 0)  # of the column before
        read_keys, read_values = list[Tensor](), list[Tensor]()  # of all columns, [N, Hk, D] each, by step
        for k in range(steps):
            pass_ = PackedPass(spec, packed, state.dtype, shift=k)
            pairs = torch.cat([head.embed(packed.tokens.roll(-k, 0)).to(state.dtype), state], -1)
            x = head.entering(pairs)
            qkv = project(spec, layer.attending, x, None)  # [N, H + 2 * Hk, D], and gates
            q, keys, values, gates = torch.tensor_split(qkv, _parts(spec), 1)
            rope = spec.rope_of(None)
            read_keys, read_values = [*read_keys, pass_.rotated(keys, rope)], [*read_values, values]
            given = pass_.rotated(q, rope), read_keys, read_values
            attended = checkpoint(self._attended, packed, *given, use_reentrant=False)
            attended = _gated(attended, gates) if spec.gated_attention else attended
            residual = x if self.record.pair_fc else head.residual(state)
            left = finish(spec, layer, residual, attended, True, None)
            columns, anchors, reached = reaching(packed, k)
            yield DraftStep(k, left[columns], anchors, reached)
            state = head.recurring(left)

    def _attended(
        self, packed: Packed, q: Tensor, read_keys: list[Tensor], read_values: list[Tensor]
    ) -> Tensor:
        """Return the output of all heads, [N, H * D], for `q` [N, H, D] and keys and values [N, Hk, D]."""
        spec, outputs = self.record.spec, []
        scale = spec.attention_scale
        for count, length, columns in packed.groups():
            split = by_head(spec.kv_heads, count)
            queries, keys, values = (split(x[columns]) for x in (q, read_keys[0], read_values[0]))
            places = torch.arange(length, device=q.device)
            # column 0 has no state before it; where it is all that there is, what it gives is not used
            seen = (places <= places[:, None]) & ((places > 0) | (places[:, None] == 0))
            scores = [(queries @ keys.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)]
            scores += [(queries * split(x[columns])).sum(-1, keepdim=True) * scale for x in read_keys[1:]]
            weights = torch.cat(scores, -1).softmax(-1, dtype=torch.float32).to(values.dtype)
            out = weights[..., :length] @ values
            for place, each in enumerate(read_values[1:], length):
                out = out + weights[..., place, None] * split(each[columns])
            outputs.append(out.permute(0, 3, 1, 2, 4).reshape(count * length, -1))
        return torch.cat(outputs)


def _gated(attended: Tensor, gates: Tensor) -> Tensor:
    """Return the output of all heads, [N, H * D], times what opens them, of gates [N, H, D]."""
    return attended * torch.sigmoid(gates.flatten(1))


def _parts(spec: ModelSpec) -> tuple[int, int, int]:
    """Return where keys, values and gates begin among the heads of a projection."""
    return spec.heads, spec.heads + spec.kv_heads, spec.heads + 2 * spec.kv_heads


class MTPStudent(Eagle3Student):
    """The layer with which the target predicts further tokens, trained on."""

    record: MTPRecord
    reread = (f"{LAST_NORM}.weight",)

    @staticmethod
    def shapes_of(record: HeadRecord) -> dict[str, tuple[int, ...]]:
        return further_shapes(record.spec)

    def head(self) -> Eagle3Head:
        return head_of(
            self.record, self.target, build_further(self.record.spec, self.own, pack=False), self.output
        )


class BlockStudent(HeadStudent):
    """A DFlash head, random but for its last norm; embedding and head are the target's."""

    record: BlockRecord

    def __init__(self, record: BlockRecord, target: Decoder, head: Tensor, **how: Any) -> None:
        assert not any(record.spec.windows) and record.markov is None
        assert not (record.from_anchor or record.causal or record.own_head or record.own_embedding)
        super().__init__(record, target, head, steps=record.drafts, **how)
        self.stride = self.steps

    def head(self) -> BlockHead:
        head = BlockHead.of(self.builder)
        return replace(head, output=self.output)  # the target's may be packed, without gradients

    def drafted(
        self, head: BlockHead, packed: Packed, states: Tensor, steps: int, *, sampled: bool
    ) -> Iterator[DraftStep]:
        contexts, place = head.contexts(states), torch.empty_like(packed.tokens)
        for offset in [int(packed.tokens.sum()) % self.steps] if sampled else range(self.steps):
            blocks, hidden = self._blocks(head, packed, contexts, offset)
            place.fill_(-1)
            place[blocks] = torch.arange(len(blocks), device=place.device)
            for k in range(steps):
                columns, anchors, reached = reaching(packed, k)
                own = place[columns]
                yield DraftStep(k, hidden[own[own >= 0], k + 1], anchors[own >= 0], reached[own >= 0])

    def _blocks(
        self, head: BlockHead, packed: Packed, contexts: Tensor, offset: int
    ) -> tuple[Tensor, Tensor]:
        """Run the blocks of every n-th column of each document, from column `offset` on.

        Return the columns of their anchors, [A], ascending, and the normed states of their slots.
        """
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
        return anchors, head.norm(x).view(len(anchors), record.block, -1)

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
        spec, weights = self.record.spec, layer.attending
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
            split = by_head(spec.kv_heads, count)

            def by_block(x: Tensor, blocks: int = len(places)) -> Tensor:
                """Return [..., T, D] as [..., blocks, T / blocks, D]."""
                return x.view(*x.shape[:-2], blocks, width, x.shape[-1])

            q, keys, values = (split(each[blocks]) for each in own)
            given_keys, given_values = (split(each[columns]) for each in given)
            before = torch.arange(length, device=q.device) < places.repeat_interleave(width)[:, None]
            scores = (q @ given_keys.transpose(-1, -2)).masked_fill(~before, -torch.inf)
            among = by_block(q) @ by_block(keys).transpose(-1, -2)  # [.., blocks, block, block]
            scores = torch.cat([scores, among.flatten(-3, -2)], -1) * spec.attention_scale
            shares = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
            out = shares[..., :length] @ given_values
            out = out + (by_block(shares[..., length:]) @ by_block(values)).flatten(-3, -2)
            outputs.append(out.permute(0, 3, 1, 2, 4).reshape(count * len(places) * width, -1))
        return torch.cat(outputs)
