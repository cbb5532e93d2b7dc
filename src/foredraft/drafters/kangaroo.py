"""Kangaroo: the target's first layers and a trained adapter draft (Liu et al. 2024, arXiv:2404.18911).

A draft step runs the target's layers below `depth` on the target's own cache, then the adapter's layer on a
cache of its own, then norm and head. The states that enter layer `depth` are those of the verifying pass, to
the bit, so it resumes from them. The adapter reads committed positions from the target's own states: the
first layers never run on them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from foredraft.decode.drafter import DraftPass
from foredraft.decode.sequence import Sequence
from foredraft.drafters.adapter import Adapter, AdapterConfig, adapter_bytes, adapter_spec, load_adapter
from foredraft.drafters.asset import Found
from foredraft.drafters.draft_model import VocabularyMap
from foredraft.drafters.states import FoundReader, KnownStates, WaitingReader, WaitingStates
from foredraft.model.cache import KVCache
from foredraft.model.checkpoint import Checkpoint
from foredraft.model.runner import DraftInputs, DraftVocab, FusedDraft, Resume, Runner


class Kangaroo(WaitingReader):
    name = "kangaroo"

    def __init__(self, target: Runner, cache: KVCache, adapter: Adapter) -> None:
        depth = adapter.depth
        super().__init__((depth,))
        self.adapter, self.planned = adapter, adapter.planned
        runner = adapter.over(target)
        runner.reserve_positions(cache.stored)
        self.cache = cache.aligned(adapter_spec(target.decoder.spec), blocked=cache.blocked)
        self.caches, self.own = (cache, self.cache), (self.cache,)
        self.draft_pass = DraftPass(runner, exit=depth)
        self.vocabulary: VocabularyMap | None = None
        self.draft_vocab: DraftVocab | None = None
        if adapter.vocabulary is not None:
            size, device = target.decoder.spec.vocab_size, runner.decoder.device
            self.vocabulary = VocabularyMap.of_draft_vocab(adapter.vocabulary, size, device)
            self.draft_vocab = DraftVocab(torch.tensor(adapter.vocabulary, device=device), size)
        self._layers = cache.joined(depth, self.cache)
        self._known = KnownStates(depth)
        self._stepped: dict[int, int] = {}  # row -> positions in the adapter's cache after this round's steps

    def step(
        self, tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Tensor | None
    ) -> Tensor:
        self.read_states(self._waiting.where(lambda sequence: not idle[sequence.row]))
        forward = self.draft_pass(self._layers, tokens, starts, idle=idle)
        self._known.add(forward.aux_states[self.adapter.depth], idle)
        self._stepped |= {row: start + 1 for row, start in enumerate(starts) if not idle[row]}
        assert forward.logits is not None
        logits = forward.logits[:, 0]
        return logits if self.vocabulary is None else self.vocabulary.columns(logits)

    def fused_draft(self, inputs: DraftInputs) -> FusedDraft | None:
        lengths, inputs = inputs.lengths, replace(inputs, draft_vocab=self.draft_vocab)
        self.read_states(self._waiting.where(lambda sequence: bool(lengths[sequence.row])))
        draft = self.draft_pass.fused(self._layers, inputs)
        if draft is not None:
            self._known.add_fused(draft, lengths)
            steps = enumerate(zip(inputs.starts, lengths, strict=True))
            self._stepped |= {row: start + length for row, (start, length) in steps if length}
        return draft

    def resume(self) -> Resume | None:
        return self._known.take()

    def observe(self, sequence: Sequence, start: int, states: Mapping[int, Tensor]) -> None:
        """Note what the adapter lacks of the committed positions: its steps have read some of them."""
        new = states[self.adapter.depth]
        stop = start + len(new)
        read = min(self._stepped.pop(sequence.row, start), stop)
        if read > start:
            self.cache.lengths[sequence.row] = read
        if read < stop:
            super().observe(sequence, read, {self.adapter.depth: new[read - start :]})

    def end_draft(self) -> None:
        self._known.forget()

    def rewind(self, sequence: Sequence) -> None:
        super().rewind(sequence)
        self._stepped.pop(sequence.row, None)

    def leave(self, sequence: Sequence) -> None:
        super().leave(sequence)
        self._stepped.pop(sequence.row, None)

    def read_states(self, waiting: list[WaitingStates]) -> None:
        """Run the adapter's layer on waiting states, for its keys and values: one pass for all rows."""
        by_row = {each.sequence.row: each for each in waiting}
        if not by_row:
            return
        rows = range(min(by_row), max(by_row) + 1)
        width, like = max(len(each.states) for each in waiting), waiting[0].states
        hidden = like.new_zeros(len(rows), width, like.shape[1])
        starts, counts = [0] * len(rows), [0] * len(rows)
        for row, each in by_row.items():
            at = row - rows.start
            starts[at], counts[at] = each.start, len(each.states)
            hidden[at, : counts[at]] = each.states
        self.draft_pass.runner.forward(
            self._layers,
            torch.zeros(len(counts), width, dtype=torch.int64, device=like.device),
            starts,
            first_row=rows.start,
            idle=[not count for count in counts],
            counts=counts,
            resume=Resume(self.adapter.depth, hidden, counts),
            want_logits=False,
            invariant=False,
        )
        for row, each in by_row.items():
            self.cache.lengths[row] = each.stop
            self._waiting.drop(each.sequence)


def found(folder: Path, config: AdapterConfig, target: Checkpoint, about: str) -> Found:
    """Return an adapter that was found for a target."""
    return FoundReader(
        bytes=adapter_bytes(config, target.spec, target.dtype), planned=config.max_draft, about=about,
        specs=(adapter_spec(target.spec),), dtype=target.dtype,
        build=lambda parts: Kangaroo(
            parts.target, parts.cache, load_adapter(folder, config, parts.target)
        ),
    )  # fmt: skip
