"""EAGLE: a head over the target's states drafts (Li et al., arXiv:2401.15077, 2406.16858, 2503.01840).

It reads pairs: a state of the target, and the embedding of the token after it. EAGLE-3's state is the joined
auxiliary states through `fc`, and the residual; EAGLE-1 and 2 join the target's last, normed state and the
embedding by `fc`. What leaves the last layer recurs, and gives logits. A pair lies at its token's position;
slot 0 is empty, and masked. The bits of a pair's state depend on no other pair of the pass, so a fused draft
draws what single steps draw.

The first step of a draft reads all pairs of committed tokens that the head has not read; each further step
reads the drafted token and the state that the step before gave. What drafted tokens wrote to the head's cache
is dropped at the commit: the next draft reads the accepted ones with the target's own states. Heads of
EAGLE-1 and 2, whose papers draft a tree, draft a chain, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.decode.round_draft import pad_rows
from foredraft.decode.sequence import Sequence
from foredraft.drafters.heads.configs import read_eagle, read_eagle3
from foredraft.drafters.heads.layers import HeadBuilder, HeadCache, HeadDrafter, PairNorm, load_head
from foredraft.drafters.heads.record import HeadRecord
from foredraft.drafters.heads.tensors import HeadFiles
from foredraft.drafters.states import MAX_WAITING, WaitingStates, keep, kept, states_spec
from foredraft.model.attention import ForwardContext, at_columns, attend
from foredraft.model.cache import KVCache
from foredraft.model.decoder import Decoder, Layer, finish, project
from foredraft.model.layers import PairInputs, Product, RMSNorm
from foredraft.model.memory import upload
from foredraft.model.runner import DraftInputs, DraftVocab, FusedDraft, Runner
from foredraft.model.runner.native.check import unserved_because
from foredraft.model.runner.native.native_backend import NativeBackend, PairDraft
from foredraft.model.spec import ModelSpec, Plan


@dataclass(frozen=True, slots=True)
class EagleKernels:
    backend: NativeBackend  # runs it
    plan: Plan  # all of its sub-layers
    draft_vocab: DraftVocab | None  # None where it can draft all ids of the target

    @classmethod
    def of(cls, weights: Decoder, pairs: PairInputs, draft_vocab: Tensor | None) -> Self | None:
        """Return what runs a head over the ids `draft_vocab`, or over all; None where operators have to."""
        if unserved_because(weights.spec, torch.device("cpu"), weights.dtype) is not None:
            return None
        backend = NativeBackend.of(weights, pairs)
        if backend is None:
            return None
        own = None if draft_vocab is None else DraftVocab(draft_vocab, weights.spec.vocab_size)
        return cls(backend, Plan.full(weights.spec.layers), own)

    def run(
        self, own: HeadCache, tokens: Tensor, states: Tensor, starts: Seq[int], counts: Seq[int],
        first_row: int,
    ) -> Tensor:  # fmt: skip
        """Run the layers over pairs; arguments and result as `Eagle3Head.run`. Keys lie in blocks."""
        (batch, width), rows = tokens.shape, enumerate(zip(starts, counts, strict=True), first_row)
        groups = [(row, start, count, start) for row, (start, count) in rows if count]
        columns = [row * width + column for row, count in enumerate(counts) for column in range(count)]
        real = None if len(columns) == batch * width else upload(columns, own.kv.device)
        ids, x = tokens.flatten(), states.reshape(batch * width, -1)
        ids, x = (ids.contiguous(), x.clone()) if real is None else (ids[real], x[real])
        self.backend.use_rotary_tables(own.tables)
        self.backend.forward(ids, x, own.kv, groups, (self.plan, 0, len(self.plan.attention)))
        return at_columns(x, real, batch * width).view(batch, width, -1)

    def draft(self, own: HeadCache, inputs: DraftInputs, states: Tensor) -> tuple[FusedDraft, Tensor]:
        """Take all steps of a draft in one call, from the states [N, d] of its first pairs."""
        left = states.new_zeros(len(inputs.lengths), states.shape[1])
        self.backend.use_rotary_tables(own.tables)
        pairs, inputs = PairDraft(states.contiguous(), left), replace(inputs, draft_vocab=self.draft_vocab)
        return self.backend.draft(own.kv, inputs, self.plan, None, pairs), left


@dataclass(frozen=True, slots=True)
class Eagle3Head:
    """The weights of a head, beside its target's."""

    record: HeadRecord  # what it is
    target: Decoder  # the target's decoder
    aux_norms: tuple[RMSNorm, ...]  # the norms before `fc`: none, one over all states, or one for each
    fc: Product  # joins the auxiliary states, or pairs
    layers: tuple[Layer, ...]  # its layers; the first one reads pairs
    norm: RMSNorm | None  # before the head; None where there is none
    output: Product  # the head over its draft vocabulary
    draft_vocab: Tensor | None  # the ids that it can draft, [draft_vocab]; None where it can draft all
    embedding: Tensor | None  # its own embedding [V, d]; None: the target's
    pair_norm: PairNorm | None = None  # before an `fc` that joins pairs
    kernels: EagleKernels | None = None  # run its layers; None: PyTorch's operators do

    @classmethod
    def of(cls, builder: HeadBuilder) -> Self:
        record = builder.record
        count = len(record.aux_layers or ()) if record.fc_norm else 0
        names = ["input_norm"] if record.norm_before_fc else [f"fc_norm.{at}" for at in range(count)]
        return cls(
            record=record, target=builder.target, aux_norms=tuple(map(builder.norm, names)),
            fc=builder.linear("fc"), layers=builder.layers(), norm=builder.norm_if_there("norm"),
            output=builder.output(), draft_vocab=builder.draft_vocab, embedding=builder.embedding(),
        )  # fmt: skip

    def by_kernels(self) -> Eagle3Head:
        """Return the head run by the C kernels where they run its target and have its weights."""
        first, pair_norm = self.layers[0], self.pair_norm
        if pair_norm is None:  # it stands before the first layer, if there is one
            pair_norm = cast(PairNorm | None, first.attention.norm)
            first = replace(first, attention=replace(first.attention, norm=None))
        weights = Decoder(
            spec=replace(self.record.spec, embedding_scale=None),
            embedding=self.target.embedding if self.embedding is None else self.embedding,
            layers=(first, *self.layers[1:]),
            norm=self.norm or self.target.norm,
            output=self.output,
        )
        pairs = PairInputs(
            None if pair_norm is None else pair_norm.embedding,
            None if pair_norm is None else pair_norm.state,
            join=self.fc if self.record.pair_fc else None,
            normed_residual=self.record.norm_before_residual,
            normed_output=self.record.norm_output and self.norm is not None,
            final_norm=self.norm is not None,
        )
        return replace(self, kernels=EagleKernels.of(weights, pairs, self.draft_vocab))

    def read_as(self, record: HeadRecord) -> Eagle3Head:
        """Return the head with the same weights under another record."""
        changed = replace(self, record=record, kernels=None)
        return changed if self.kernels is None else changed.by_kernels()

    def joined(self, aux_states: Tensor) -> Tensor:
        """Return the states [N, d] of the target's joined auxiliary states [N, layers * d_target]."""
        if self.record.final_norm:
            aux_states = self.target.norm(aux_states)
        if self.record.pair_fc:
            return aux_states
        if self.record.norm_before_fc:
            aux_states = self.aux_norms[0](aux_states)
        elif self.aux_norms:
            parts = aux_states.chunk(len(self.aux_norms), -1)
            aux_states = torch.cat([norm(part) for norm, part in zip(self.aux_norms, parts, strict=True)], -1)
        return self.fc(aux_states)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., d] of the target's token ids, without a factor: they are normed."""
        if self.embedding is not None:
            return F.embedding(tokens, self.embedding)
        return self.target.embedding_rows(tokens)

    def run(
        self, own: HeadCache, tokens: Tensor, states: Tensor, starts: Seq[int], counts: Seq[int],
        first_row: int = 0,
    ) -> Tensor:  # fmt: skip
        """Run the layers over pairs of tokens [B, T] and states [B, T, d] -> states [B, T, d]."""
        if self.kernels is not None:
            return self.kernels.run(own, tokens, states, starts, counts, first_row)
        spec, (batch, width) = self.record.spec, tokens.shape
        context = self._context(own, width, starts, counts, first_row)
        real = context.real
        state = states.reshape(batch * width, -1)
        state = state if real is None else state[real]
        ids = tokens.flatten() if real is None else tokens.flatten()[real]
        x = self.entering(torch.cat([self.embed(ids), state], -1))
        first = self.layers[0]
        attended = attend(spec, 0, project(spec, first.attending, x, None), context)
        x = finish(spec, first, x if self.record.pair_fc else self.residual(state), attended, True, None)
        for index, layer in enumerate(self.layers[1:], 1):
            attended = attend(spec, index, project(spec, layer.attending, x, None), context)
            x = finish(spec, layer, x, attended, True, None)
        return at_columns(x, real, batch * width).view(batch, width, -1)

    def entering(self, pairs: Tensor) -> Tensor:
        """Return what enters the first layer, of pairs [N, 2 * d]."""
        if not self.record.pair_fc:
            return pairs
        return self.fc(pairs if self.pair_norm is None else self.pair_norm(pairs))

    def residual(self, state: Tensor) -> Tensor:
        """Return what the first layer adds its attention to, for states [N, d]."""
        if not self.record.norm_before_residual:
            return state
        return cast(PairNorm, self.layers[0].attention.norm).state(state)

    def logits(self, left: Tensor) -> Tensor:
        """Return logits [N, draft_vocab] float32 of states that left the last layer, [N, d]."""
        if self.kernels is not None:
            return self.kernels.backend.head(left.contiguous())
        return self.output(left if self.norm is None else self.norm(left)).float()

    def recurring(self, left: Tensor) -> Tensor:
        """Return the states of the next pairs, from those that left the last layer."""
        if not self.record.norm_output or self.norm is None:
            return left
        return self.norm(left) if self.kernels is None else self.kernels.backend.normed(left.contiguous())

    def timed_step(self, own: HeadCache, tokens: Tensor, starts: list[int]) -> Tensor:
        states = own.kv.planes[0].new_zeros(len(starts), 1, self.record.spec.hidden_size)
        left = self.run(own, tokens, states, [max(1, start) for start in starts], [1] * len(starts))
        return self.logits(left[:, 0])

    def timed_draft(self, own: HeadCache, inputs: DraftInputs) -> FusedDraft | None:
        if self.kernels is None:
            return None
        read = sum(len(inputs.tokens[row]) for row in inputs.active)
        states = own.kv.planes[0].new_zeros(read, self.record.spec.hidden_size)
        inputs = replace(inputs, starts=[max(1, start) for start in inputs.starts])
        return self.kernels.draft(own, inputs, states)[0]

    def _context(
        self, own: HeadCache, width: int, starts: Seq[int], counts: Seq[int], first_row: int
    ) -> ForwardContext:
        end = max(start + count for start, count in zip(starts, counts, strict=True) if count)
        context = own.context(self.record.spec, width, own.attended(end), starts, counts, first_row)
        masks = {window: mask.clone() for window, mask in context.masks.items()}
        for mask in masks.values():
            mask[..., 0] = -math.inf  # no pair lies there
        return replace(context, masks=masks)


def load_eagle3(files: HeadFiles[HeadRecord], target: Runner) -> Eagle3Head:
    """Read the weights of a head, in the target's dtype."""
    head = load_head(files, target, Eagle3Head.of)
    return head.by_kernels() if target.by_kernels else head


@dataclass(frozen=True, slots=True)
class MaskedPairs:
    """Pairs behind the pending token's (P-EAGLE)."""

    count: int
    token: int  # the target's id of each
    state: Tensor  # of each, [1, d]


class Eagle3(HeadDrafter):
    """An autoregressive drafter over an EAGLE-3 head and the target's states."""

    name = "eagle3"
    head: Eagle3Head
    read_folder: Any = staticmethod(read_eagle3)
    load: Any = staticmethod(load_eagle3)

    def __init__(self, target: Runner, cache: KVCache, head: Eagle3Head, planned: int | None = None) -> None:
        super().__init__(target, cache, head, planned, blocked=head.kernels is not None)
        self.states = self.own[1]
        self._joined: dict[int, Sequence] = {}  # by sequence id
        self._stepped: dict[int, int] = {}  # sequence id -> positions in its row after the first step
        self._recurring: Tensor | None = None  # the states of the next pairs, [B, d]; None before a draft

    @classmethod
    def specs(cls, record: HeadRecord) -> tuple[ModelSpec, ...]:
        return record.spec, states_spec(record.spec, record.spec.hidden_size)

    def join(self, sequence: Sequence) -> None:
        self._joined[sequence.id] = sequence

    @torch.inference_mode()
    def step(
        self, tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Tensor | None
    ) -> Tensor:
        if self._recurring is None:
            first, drafts = self.first_step(starts, idle)
            left = first[:, 0]
        else:
            # a text that began with one token has no state before it: its draft goes on from zeros
            drafts = [not is_idle and start > 0 for start, is_idle in zip(starts, idle, strict=True)]
            left = self._run(tokens, self._recurring[:, None], starts, [int(draws) for draws in drafts])[:, 0]
        self._recurring = self.head.recurring(left)
        return self.over_target(self.head.logits(left), drafts)

    @torch.inference_mode()
    def fused_draft(self, inputs: DraftInputs) -> FusedDraft | None:
        kernels, active = self.head.kernels, inputs.active
        if kernels is None or not all(inputs.starts[row] for row in active):
            return None  # a text of one token has no pair
        if self._recurring is None:
            tokens, first = self._unread(list(inputs.starts), [not length for length in inputs.lengths])
            states = [kept(self.states, row, slice(first[row] - 1, inputs.starts[row])) for row in active]
            inputs = replace(inputs, tokens=tokens, starts=first)
            pairs = torch.cat(states)
        else:
            pairs = self._recurring[active]
        draft, self._recurring = kernels.draft(self._own, inputs, pairs)
        return draft

    def first_step(
        self, starts: list[int], idle: list[bool], masked: MaskedPairs | None = None
    ) -> tuple[Tensor, list[bool]]:
        """Read all pairs up to the pending tokens, and masked ones behind them.

        Returns what the last pair and the masked ones left, [B, 1 + masked, d], and which rows draft.
        """
        unread, first = self._unread(starts, idle)
        counts, more = [len(tokens) for tokens in unread], 0 if masked is None else masked.count
        width = max(1, *counts) + more
        hidden = self.head.record.spec.hidden_size
        states = torch.zeros(len(starts), width, hidden, dtype=self.cache.dtype, device=self.cache.device)
        for row, count in enumerate(counts):
            if count:
                states[row, :count] = kept(self.states, row, slice(first[row] - 1, first[row] + count - 1))
            if count and masked is not None:
                states[row, count : count + more] = masked.state
                unread[row] = [*unread[row], *[masked.token] * more]
        tokens = F.pad(upload(pad_rows(unread), self.cache.device, torch.int64), (0, width))[:, :width]
        drafts = [count > 0 for count in counts]
        left = self._run(tokens, states, first, [count and count + more for count in counts])
        columns = [[max(0, count - 1) + slot for slot in range(1 + more)] for count in counts]
        rows = torch.arange(len(counts), device=left.device)[:, None]
        return left[rows, upload(columns, left.device)], drafts

    def _unread(self, starts: list[int], idle: list[bool]) -> tuple[list[list[int]], list[int]]:
        """Return each row's tokens up to the pending one whose pairs are unread, and the first's position."""
        rows = {s.row: s for s in self._joined.values() if 0 <= s.row < len(idle) and not idle[s.row]}
        self.read_waiting(lambda sequence: sequence.row in rows)
        tokens, first = [list[int]() for _ in starts], [1] * len(starts)
        for row, sequence in rows.items():
            if starts[row] - self.cache.lengths[row] >= MAX_WAITING:
                self._read(sequence, starts[row])
            first[row] = max(1, self.cache.lengths[row])
            tokens[row] = sequence.tokens[first[row] : starts[row] + 1]
            if tokens[row]:
                self._stepped[sequence.id] = starts[row] + 1
        return tokens, first

    def _run(self, tokens: Tensor, states: Tensor, starts: list[int], counts: list[int]) -> Tensor:
        if not any(counts):
            return torch.zeros_like(states)
        return self.head.run(self._own, tokens, states, starts, counts)

    def end_draft(self) -> None:
        self._recurring = None

    @torch.inference_mode()
    def observe(self, sequence: Sequence, start: int, states: Mapping[int, Tensor]) -> None:
        lengths, row = self.cache.lengths, sequence.row
        lengths[row] = max(lengths[row], self._stepped.pop(sequence.id, 0))
        super().observe(sequence, start, states)
        if sequence.id not in self._waiting:
            self._read(sequence, self.states.lengths[row])

    def rewind(self, sequence: Sequence) -> None:
        super().rewind(sequence)
        self._stepped.pop(sequence.id, None)

    def leave(self, sequence: Sequence) -> None:
        super().leave(sequence)
        self._joined.pop(sequence.id, None)
        self._stepped.pop(sequence.id, None)

    def read_states(self, waiting: list[WaitingStates]) -> None:
        """Join waiting states, those of all rows in one product, and write the states to their rows."""
        joined = self.head.joined(torch.cat([each.states for each in waiting]))
        counts = [len(each.states) for each in waiting]
        for each, states in zip(waiting, torch.split(joined, counts), strict=True):
            keep(self.states, each.sequence.row, each.start, states)

    def _read(self, sequence: Sequence, stop: int) -> None:
        """Read the pairs of tokens before `stop` that are not read yet, for their keys and values."""
        row, start = sequence.row, max(1, self.cache.lengths[sequence.row])
        while start < stop:
            end = min(stop, start + MAX_WAITING)
            tokens = upload([sequence.tokens[start:end]], self.cache.device)
            states = kept(self.states, row, slice(start - 1, end - 1))[None]
            self.head.run(self._own, tokens, states, [start], [end - start], first_row=row)
            start = end
        self.cache.lengths[row] = max(self.cache.lengths[row], stop)


class Eagle(Eagle3):
    """An autoregressive drafter over an EAGLE-1 or EAGLE-2 head and the target's last states."""

    name = "eagle"
    read_folder = staticmethod(read_eagle)
