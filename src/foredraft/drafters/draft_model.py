"""Draft model: a small model with the target's tokenizer proposes (Leviathan et al. 2023; Chen et al. 2023).

It has its own KV cache, whose rows follow the batch's. It reads `tokens[its length:]`, usually the pending
token, or that and the last drafted one after a draft accepted whole: no special case. Its passes may use any
shape, because only q comes of them. Where its vocabulary differs from the target's, a `VocabularyMap`
translates ids both ways.
"""

from __future__ import annotations

from torch import Tensor

from foredraft.decode.drafter import DraftPass, Stepper
from foredraft.decode.sequence import Sequence
from foredraft.drafters.asset import Parts
from foredraft.drafters.draft_checkpoint import DraftCheckpoint, FoundModel
from foredraft.drafters.vocabulary_map import VocabularyMap
from foredraft.model.runner import DraftInputs, FusedDraft, Runner, next_chunk

__all__ = ["ASSET", "DraftModel"]


class DraftModel(Stepper):
    """A stepper over a runner of its own.

    Args:
        runner: Of the draft model.
        rows: As many as the target's cache has.
        positions: As many as the target's cache has; the draft's cache has no more than its model was made
            for, and drafts end there.
        vocabulary: Maps ids; None where ids mean the same on both sides.
    """

    name = "draft-model"
    whole_model = True
    starts_late = True
    draft_pass: DraftPass

    def __init__(
        self, runner: Runner, rows: int, positions: int, vocabulary: VocabularyMap | None = None
    ) -> None:
        self.draft_pass, self.vocabulary = DraftPass(runner), vocabulary
        longest = min(positions, runner.decoder.spec.max_positions)
        self.max_length = longest
        self.cache = runner.new_cache(rows, longest)
        self.caches = (self.cache,)
        self._stepped: dict[int, int] = {}  # row -> positions in the cache after this round's steps
        self._starts: dict[int, int] = {}  # sequence id -> where its text begins, if not at 0

    def context_start(self, sequence: Sequence) -> int:
        return self._starts.get(sequence.id, 0)

    def start_context(self, sequence: Sequence, start: int) -> None:
        self._starts[sequence.id] = start
        self.cache.lengths[sequence.row] = 0

    def length(self, sequence: Sequence) -> int:
        return self.context_start(sequence) + self.cache.lengths[sequence.row]

    def read(self, sequence: Sequence, start: int, stop: int) -> None:
        runner, first = self.draft_pass.runner, self.context_start(sequence)
        start, stop = start - first, stop - first  # positions in the draft's cache
        while start < stop:
            end = next_chunk(start, stop, runner.chunk)
            tokens = sequence.tokens[first + start : first + end]
            if self.vocabulary is not None:
                tokens = [self.vocabulary.draft_ids[token] for token in tokens]
            runner.prefill(self.cache, sequence.row, tokens, start)
            start = end
        self.cache.lengths[sequence.row] = max(self.cache.lengths[sequence.row], stop)

    def step(
        self, tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Tensor | None
    ) -> Tensor:
        if self.vocabulary is not None:
            tokens = self.vocabulary.read(tokens)
        forward = self.draft_pass(self.cache, tokens, starts, idle=idle, counts=counts, at=at)
        assert forward.logits is not None
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            if not idle[row]:
                self._stepped[row] = start + count
        logits = forward.logits[:, 0]
        return logits if self.vocabulary is None else self.vocabulary.columns(logits)

    def fused_draft(self, inputs: DraftInputs) -> FusedDraft | None:
        if self.vocabulary is not None:
            return None
        draft = self.draft_pass.fused(self.cache, inputs)
        if draft is not None:
            rows = zip(inputs.starts, inputs.tokens, inputs.lengths, strict=True)
            for row, (start, own, length) in enumerate(rows):
                if length:
                    self._stepped[row] = start + len(own) + length - 1
        return draft

    def rewind(self, sequence: Sequence) -> None:
        row, most = sequence.row, len(sequence.tokens) - 1 - self.context_start(sequence)
        stepped = self._stepped.pop(row, self.cache.lengths[row])
        if most < 0:  # a ban took back the text with which the context began
            del self._starts[sequence.id]
        self.cache.lengths[row] = max(0, min(stepped, most))

    def leave(self, sequence: Sequence) -> None:
        self._stepped.pop(sequence.row, None)
        self._starts.pop(sequence.id, None)


def _build(parts: Parts, found: FoundModel) -> DraftModel:
    [runner] = parts.models
    target, draft = parts.tokenizer, found.draft.tokenizer
    vocabulary: VocabularyMap | None = None
    if target is not None and draft is not None:
        sizes = found.target.spec.vocab_size, found.draft.spec.vocab_size
        vocabulary = VocabularyMap.between(target, draft, sizes, runner.decoder.device)
    return DraftModel(runner, parts.rows, parts.positions, vocabulary)


ASSET = DraftCheckpoint(_build)
