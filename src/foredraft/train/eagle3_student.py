"""The student that becomes an EAGLE-3 head, by training-time test (Li et al. 2025, arXiv:2503.01840).

Contract: products, norms and what recurs are those of `drafters.heads.eagle3_head`. Only attention differs,
as all drafts of all texts run at once.

An *anchor* is a column after whose token a draft begins. Step 0 reads each column's token with the target's
state before it. Step k reads the token k columns later with the state that the head itself gave at the same
anchor the step before, as a draft does that was accepted so far. Its query stands k positions later, and sees
the keys of step 0 up to the anchor, and those of steps 1 to k at its own anchor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from foredraft.drafters.heads.eagle3_files import D2T, HEAD, T2D, head_shapes
from foredraft.drafters.heads.eagle3_head import Eagle3Head, HeadBuilder
from foredraft.drafters.heads.eagle3_writing import maps_of
from foredraft.drafters.heads.record import HeadRecord
from foredraft.model.decoder import Decoder, finish, project
from foredraft.model.layers import Linear, RMSNorm
from foredraft.train.chunks import CHUNK, Compare, by_chunks
from foredraft.train.packed_documents import Packed, PackedPass
from foredraft.train.parameters import Parameters
from foredraft.train.students import Accept, Student

__all__ = ["Eagle3Student"]


class Step(NamedTuple):
    """One step of all drafts.

    Attributes:
        left: The states that leave the layer, [A, d].
        anchors: The prediction that each draft begins with, [A], among the M that count.
        reached: The prediction that this step makes, [A], among the same.
    """

    left: Tensor
    anchors: Tensor
    reached: Tensor


class KeysValues(NamedTuple):
    """Keys and values of all columns, [N, Hk, D] each."""

    keys: Tensor
    values: Tensor


class Eagle3Student(Student):
    """An EAGLE-3 head of one layer.

    It starts as another head, or at random but for its last norm and its head, which are the target's.

    Args:
        record: The head.
        target: The target.
        head: The weight of the target's head, [V, hidden].
        vocabulary: The token ids of a reduced head; None keeps all.
        steps: Tokens of a draft that are learned.
        decay: Weight of each of them against the one before.
        seed: Of the first weights.
        start: The tensors of the head to start from, by their names; None draws them.
    """

    def __init__(
        self,
        record: HeadRecord,
        target: Decoder,
        head: Tensor,
        *,
        vocabulary: Sequence[int] | None = None,
        steps: int,
        decay: float,
        seed: int = 0,
        start: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        assert record.taps is not None and record.spec.layers == 1 and record.own_head
        self.record, self.target, self.taps = record, target, record.taps
        self.steps, self.decay = steps, decay
        if vocabulary is not None:
            self.vocabulary = torch.tensor(vocabulary, device=head.device)
            head = head[self.vocabulary]
        needed, allowed = head_shapes(record, len(self.taps))
        self.shapes = {name: shape for name, shape in needed.items() if name not in (D2T, T2D)}
        self.shapes[HEAD] = allowed[HEAD]
        self.own = Parameters(self.shapes, head.device)
        if start is not None:
            self.own.fill(start)
            return
        self.own.draw(torch.Generator().manual_seed(seed), norm=1.0)
        with torch.no_grad():
            self.own.by_name[HEAD].copy_(head)
            if isinstance(target.norm, RMSNorm):
                self.own.by_name["norm.weight"].copy_(target.norm.weight)

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

        The loss of step k counts `decay`^k. A column without a column before it has no anchor: its logits are
        0, and it is never accepted.
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

    def tensors(self) -> dict[str, Tensor]:
        own = self.own.by_name
        return own if self.vocabulary is None else {**own, **maps_of(self.vocabulary, self.record)}

    def shards(self) -> list[torch.nn.Module]:
        return []

    def _drafted(self, head: Eagle3Head, packed: Packed, tapped: Tensor) -> Iterator[Step]:
        """Yield each step of all drafts."""
        spec, layer = self.record.spec, head.layers[0]
        state = head.joined(tapped).roll(1, 0)  # of the column before
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
            yield Step(left[columns], anchors, reached)
            state = head.recurring(left)

    def _attended(
        self, packed: Packed, q: Tensor, context: KeysValues, own_keys: list[Tensor], own_values: list[Tensor]
    ) -> Tensor:
        """Return the output of all heads, [N, H * D].

        Args:
            packed: The documents.
            q: Queries, [N, H, D].
            context: Of step 0.
            own_keys, own_values: Of the further steps at the same anchor, [N, Hk, D] each.
        """
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
    """Return the columns that a step of a draft counts for: anchors of which the token `step` later counts.

    Returns:
        The columns [A], and where these and the columns `step` later stand in `packed.predicting`, [A] each.
    """
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
