"""Draft model: a small model with the target's tokenizer proposes (Leviathan et al. 2023; Chen et al. 2023).

It has its own cache, whose rows follow the batch's. It reads what it has not read yet, usually the
pending token, or that and the last drafted one after a draft accepted whole: no special case, since a
drafter that is behind reads `tokens[its length:]`. Its passes may use any shape: only q comes of them.
Where its vocabulary is not the target's own, a `VocabularyMap` stands between the two, both ways.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from foredraft.decode.draft_pass import DraftPass
from foredraft.decode.sequence import Sequence
from foredraft.drafters.vocabulary import VocabularyMap
from foredraft.model.cache import KVCache
from foredraft.model.runner import FusedDraft, Resume, Runner, SamplingInputs, StopThresholds, next_chunk

__all__ = ["DraftModel"]


class DraftModel:
    """A Stepper over a Runner of its own.

    rows, positions: as the target's cache has; its own has no more positions than the draft model was made
    for, which is max_length, where drafts end. vocabulary: None where ids mean the same on both sides.
    """

    name = "draft-model"
    taps: tuple[int, ...] = ()

    def __init__(
        self, runner: Runner, rows: int, positions: int, vocabulary: VocabularyMap | None = None
    ) -> None:
        self.draft_pass, self.vocabulary = DraftPass(runner), vocabulary
        longest = min(positions, runner.decoder.spec.max_positions)
        self.max_length: int | None = longest
        self.cache = runner.new_cache(rows, longest)
        self.caches: tuple[KVCache, ...] = (self.cache,)
        self._read: dict[int, int] = {}  # row -> tokens in the cache after this round's steps
        self._began: dict[int, int] = {}  # sequence's id -> where its text begins, if not at 0

    def began(self, sequence: Sequence) -> int:
        return self._began.get(sequence.id, 0)

    def begin(self, sequence: Sequence, start: int) -> None:
        self._began[sequence.id] = start
        self.cache.lengths[sequence.row] = 0

    def length(self, sequence: Sequence) -> int:
        return self.began(sequence) + self.cache.lengths[sequence.row]

    def read(self, sequence: Sequence, start: int, stop: int) -> None:
        runner, began = self.draft_pass.runner, self.began(sequence)
        start, stop = start - began, stop - began  # as its cache counts
        while start < stop:
            end = next_chunk(start, stop, runner.chunk)
            tokens = sequence.tokens[began + start : began + end]
            if self.vocabulary is not None:
                tokens = [self.vocabulary.draft_ids[token] for token in tokens]
            runner.prefill(self.cache, sequence.row, tokens, start)
            start = end
        self.cache.lengths[sequence.row] = max(self.cache.lengths[sequence.row], stop)

    def step(
        self, tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Tensor | None
    ) -> Tensor:
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            if not idle[row]:
                self._read[row] = start + count
        if self.vocabulary is not None:
            tokens = self.vocabulary.read(tokens)
        forward = self.draft_pass(self.cache, tokens, starts, idle=idle, counts=counts, at=at)
        assert forward.logits is not None
        logits = forward.logits[:, 0]
        return logits if self.vocabulary is None else self.vocabulary.columns(logits)

    def draft(
        self,
        tokens: list[list[int]],
        starts: list[int],
        most: list[int],
        sampling_inputs: SamplingInputs | None,
        stops: StopThresholds | None = None,
    ) -> FusedDraft | None:
        if self.vocabulary is not None:
            return None
        drafted = self.draft_pass.at_once(self.cache, tokens, starts, most, sampling_inputs, stops)
        if drafted is not None:
            for row, (start, own, steps) in enumerate(zip(starts, tokens, drafted.steps, strict=True)):
                if steps:
                    self._read[row] = start + len(own) + steps - 1
        return drafted

    def resume(self) -> Resume | None:
        return None

    def join(self, sequence: Sequence) -> None:
        return None  # its prompt was read with the target's, or copied from a sibling

    def observe(self, sequence: Sequence, start: int, states: Mapping[int, Tensor]) -> None:
        return None

    def rewind(self, sequence: Sequence) -> None:
        row, most = sequence.row, len(sequence.tokens) - 1 - self.began(sequence)
        read = self._read.pop(row, self.cache.lengths[row])
        if most < 0:  # a ban took back what the text began with
            del self._began[sequence.id]
        self.cache.lengths[row] = max(0, min(read, most))

    def leave(self, sequence: Sequence) -> None:
        self._read.pop(sequence.row, None)
        self._began.pop(sequence.id, None)
