"""The student that becomes an EAGLE-3 head, by training-time test (Li et al. 2025, arXiv:2503.01840).

An *anchor* is a column after whose token a draft begins; all drafts of all texts run at once. Step 0 reads
each column's token with the target's state before it. Step k reads the token k columns later with the state
that the head itself gave at the same anchor. Its query stands k positions later, and sees the keys of step 0
up to the anchor, and those of steps 1 to k at its own anchor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from foredraft.drafters.heads.eagle3_files import D2T, HEAD, T2D, head_shapes
from foredraft.drafters.heads.eagle3_head import Eagle3Head, HeadBuilder
from foredraft.drafters.heads.record import HeadRecord
from foredraft.drafters.heads.writing import maps_of
from foredraft.model.decoder import Decoder, finish, project
from foredraft.model.layers import Linear, RMSNorm
from foredraft.train.losses import CHUNK, Compare, by_chunks
from foredraft.train.students import Accept, Parameters, Student
from foredraft.train.target import Packed, PackedPass


class DraftStep(NamedTuple):
    """One step of all drafts."""

    left: Tensor  # the states that leave the layer, [A, d]
    anchors: Tensor  # the prediction that each draft begins with, [A], among the M that count
    reached: Tensor  # the prediction that this step makes, [A], among the same


class KeysValues(NamedTuple):
    """Keys and values of all columns, [N, Hk, D] each."""

    keys: Tensor
    values: Tensor


class HeadStudent(Student):
    """Base class of a head over the target's states; its embedding is the target's."""

    own: Parameters

    def __init__(self, record: HeadRecord, target: Decoder, steps: int, decay: float) -> None:
        super().__init__()
        assert record.aux_layers is not None
        self.record, self.target, self.aux_layers = record, target, record.aux_layers
        self.steps, self.decay = steps, decay

    def begin(self, seed: int) -> None:
        """Draw the first weights, but for the last norm, which is the target's."""
        self.own.draw(torch.Generator().manual_seed(seed), norm=1.0)
        if isinstance(self.target.norm, RMSNorm):
            with torch.no_grad():
                self.own.by_name["norm.weight"].copy_(self.target.norm.weight)

    def tensors(self) -> dict[str, Tensor]:
        own = self.own.by_name
        return own if self.vocabulary is None else {**own, **maps_of(self.vocabulary, self.record)}

    def shards(self) -> list[torch.nn.Module]:
        return []


class Eagle3Student(HeadStudent):
    """An EAGLE-3 head of one layer; a new one is random but for its last norm and its head, the target's."""

    def __init__(
        self,
        record: HeadRecord,  # the head
        target: Decoder,  # the target
        head: Tensor,  # the weight of the target's head, [V, hidden]
        *,
        vocabulary: Sequence[int] | None = None,  # the token ids of a reduced head; None keeps all
        steps: int,  # tokens of a draft that are learned
        decay: float,  # weight of each of them against the one before
        seed: int = 0,  # of the first weights
        start: Mapping[str, Tensor] | None = None,  # the first weights, by name; None draws them
    ) -> None:
        super().__init__(record, target, steps, decay)
        assert record.spec.layers == 1 and record.own_head
        if vocabulary is not None:
            self.vocabulary = torch.tensor(vocabulary, device=head.device)
            head = head[self.vocabulary]
        needed, allowed = head_shapes(record, len(self.aux_layers))
        self.shapes = {name: shape for name, shape in needed.items() if name not in (D2T, T2D)}
        self.shapes[HEAD] = allowed[HEAD]
        self.own = Parameters(self.shapes, head.device)
        if start is not None:
            self.own.fill(start)
            return
        self.begin(seed)
        with torch.no_grad():
            self.own.by_name[HEAD].copy_(head)

    def head(self) -> Eagle3Head:
        """Return the head over the parameters as they are now."""
        return HeadBuilder(self.record, self.shapes, self.own, self.target, Linear).head(self.vocabulary)

    def forward(
        self,
        packed: Packed,
        states: Tensor | None,
        compare: Compare | None = None,
        accept: Accept | None = None,
    ) -> Tensor:
        """Return what `Student.forward` does; logits and the figure of `compare` are those of step 0.

        The loss of step k counts `decay`^k. A column without a column before it has logits of 0, and is never
        accepted.
        """
        assert states is not None
        head, device, count = self.head(), packed.tokens.device, len(packed.predicting)
        if compare is None and accept is None:
            step = next(self._drafted(head, packed, states))
            logits = head.logits(step.left)
            everywhere = torch.zeros(count, logits.shape[1], device=device)
            return everywhere.index_put((step.anchors,), logits)
        sums = torch.zeros(2, device=device)
        accepted = torch.zeros(count, self.steps, 2, dtype=torch.float64, device=device)
        parameters = [self.own.by_name[name] for name in ("norm.weight", HEAD)]
        for k, (left, anchors, reached) in enumerate(self._drafted(head, packed, states)):
            if compare is not None:

                def compared(part: Tensor, rows: slice, reached: Tensor = reached) -> Tensor:
                    return compare(head.logits(part), reached[rows])

                weights = torch.tensor([self.decay**k, float(k == 0)], device=device)
                sums = sums + by_chunks(compared, left, parameters) * weights
            elif accept is not None and len(left):
                parts = zip(torch.split(left, CHUNK), torch.split(reached, CHUNK), strict=True)
                accepted[anchors, k] = torch.cat([accept(head.logits(part), rows) for part, rows in parts])
        return sums if compare is not None else accepted

    def _drafted(self, head: Eagle3Head, packed: Packed, aux_states: Tensor) -> Iterator[DraftStep]:
        """Yield each step of all drafts."""
        spec, layer = self.record.spec, head.layers[0]
        state = head.joined(aux_states).roll(1, 0)  # of the column before
        context: KeysValues | None = None
        own: list[KeysValues] = []
        for k in range(self.steps):
            pass_ = PackedPass(spec, packed, state.dtype, shift=k)
            x = torch.cat([head.embed(packed.tokens.roll(-k, 0)).to(state.dtype), state], -1)
            qkv = project(spec, layer.attention, x, None)  # [N, H + 2 * Hk, D]
            q, keys, values = torch.split(qkv, [spec.heads, spec.kv_heads, spec.kv_heads], 1)
            rope = spec.rope_of(None)
            q, read = pass_.rotated(q, rope), KeysValues(pass_.rotated(keys, rope), values)
            if context is None:
                context = read
            else:
                own.append(read)
            given = q, context, [each.keys for each in own], [each.values for each in own]
            attended = checkpoint(self._attended, packed, *given, use_reentrant=False)
            left = finish(spec, layer, head.residual(state), attended, True, None)
            columns, anchors, reached = reaching(packed, k)
            yield DraftStep(left[columns], anchors, reached)
            state = head.recurring(left)

    def _attended(
        self, packed: Packed, q: Tensor, context: KeysValues, own_keys: list[Tensor], own_values: list[Tensor]
    ) -> Tensor:
        """Return the output of all heads, [N, H * D], for `q` [N, H, D] and keys and values [N, Hk, D]."""
        spec, outputs = self.record.spec, []
        scale = spec.attention_scale
        for count, length, columns in packed.groups():

            def by_head(x: Tensor, columns: slice = columns, count: int = count) -> Tensor:
                """Return [N, heads, D] as [documents, Hk, heads / Hk, T, D]."""
                heads = x.shape[1] // spec.kv_heads
                return x[columns].view(count, -1, spec.kv_heads, heads, spec.head_dim).permute(0, 2, 3, 1, 4)

            queries, keys, values = map(by_head, (q, *context))
            places = torch.arange(length, device=q.device)
            # column 0 has no state before it; where it is all that there is, what it gives is not used
            seen = (places <= places[:, None]) & ((places > 0) | (places[:, None] == 0))
            scores = [(queries @ keys.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)]
            scores += [(queries * by_head(each)).sum(-1, keepdim=True) * scale for each in own_keys]
            weights = torch.cat(scores, -1).softmax(-1, dtype=torch.float32).to(values.dtype)
            out = weights[..., :length] @ values
            for place, each in enumerate(own_values, length):
                out = out + weights[..., place, None] * by_head(each)
            outputs.append(out.permute(0, 3, 1, 2, 4).reshape(count * length, -1))
        return torch.cat(outputs)


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
