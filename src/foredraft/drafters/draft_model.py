"""Draft model: a small model with the target's tokenizer proposes (Leviathan et al. 2023; Chen et al. 2023).

Its passes may use any shape, because only q comes of them. Models of one family have embeddings of different
sizes, and other ids of special tokens, so a map matches tokens by their text: an id that the draft model
lacks has the logit -inf before all transforms, so q is over the target's ids. (Token-level intersection in
Timor et al. 2025.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foredraft.decode.drafter import AutoregressiveDrafter, Drafter, DraftPass
from foredraft.decode.sequence import Sequence
from foredraft.drafters.asset import Asset, AssetSearch, Found, Missing, Parts
from foredraft.errors import ConfigError, Option
from foredraft.model.byte_codec import ByteCodec
from foredraft.model.checkpoint import Checkpoint
from foredraft.model.memory import upload
from foredraft.model.runner import DraftInputs, FusedDraft, Runner, next_chunk
from foredraft.model.tokenizer import Tokenizer

SHARED = 0.99  # of the ordinary tokens, by two versions of one tokenizer; others share far less
SAMPLE = 256  # shared tokens whose bytes are compared, spread over the vocabulary, at every loading


class VocabularyMap:
    """Maps the target's ids to the draft model's, and the draft model's logits to the target's ids."""

    def __init__(
        self, pairs: Iterable[tuple[int, int]], sizes: tuple[int, int], stand_in: int, device: torch.device
    ) -> None:
        self.draft_ids = [stand_in] * sizes[0]  # draft id of every target id
        lacking = [True] * sizes[0]
        for target, draft in pairs:
            if target < sizes[0] and draft < sizes[1]:
                self.draft_ids[target] = draft
                lacking[target] = False
        self._draft_ids = upload(self.draft_ids, device, torch.int64)  # [V]
        self._lacking = upload(lacking, device) if any(lacking) else None  # [V]

    @classmethod
    def between(
        cls, target: Tokenizer, draft: Tokenizer, sizes: tuple[int, int], device: torch.device
    ) -> VocabularyMap | None:
        """Return the map between two vocabularies of one tokenizer; None where they are equal."""
        if sizes[0] == sizes[1] and target.has_ids_of(draft):
            return None
        own = draft.inner.get_vocab()
        pairs = ((id, own[token]) for token, id in target.inner.get_vocab().items() if token in own)
        # the draft model's unknown token, or else its first special one, stands for what it lacks
        unknown = getattr(draft.inner.model, "unk_token", None)
        stand_in = draft.inner.token_to_id(unknown) if isinstance(unknown, str) else None
        if stand_in is None or stand_in >= sizes[1]:
            stand_in = min((id for id in draft.special if id < sizes[1]), default=0)
        return cls(pairs, sizes, int(stand_in), device)

    def read(self, tokens: Tensor) -> Tensor:
        return self._draft_ids[tokens]

    def columns(self, logits: Tensor) -> Tensor:
        """Return logits over the target's ids [B, V] from the draft model's logits [B, V_draft]."""
        chosen = logits[:, self._draft_ids]
        return chosen if self._lacking is None else chosen.masked_fill_(self._lacking, -math.inf)


def same_tokenizer(target: Tokenizer, draft: Tokenizer) -> bool:
    """Return whether two tokenizers split text alike, special tokens, padding and ids aside.

    99 % of the tokens and merges must be shared, merges in one order; shared tokens must have the same bytes.
    """
    both = target, draft
    sizes = [each.inner.get_vocab_size() for each in both]
    added = [len(each.inner.get_added_tokens_decoder()) for each in both]
    if min(sizes) < SHARED * max(size - count for size, count in zip(sizes, added, strict=True)):
        return False  # their sizes tell that they cannot share enough: comparing all tokens takes seconds
    if target.has_ids_of(draft):
        return True
    contents = [json.loads(tokenizer.inner.to_str()) for tokenizer in both]
    models = [content["model"] for content in contents]
    if models[0]["type"] != models[1]["type"]:
        return False
    for step in ("normalizer", "pre_tokenizer"):
        steps = [_steps(content[step]) for content in contents]
        if all(steps) and steps[0] != steps[1]:
            return False
    tokens: list[dict[str, int]] = []  # those that were not added to the tokenizer's model, with their ids
    for tokenizer, content in zip(both, contents, strict=True):
        extra = {token["content"] for token in content["added_tokens"]}
        vocab = tokenizer.inner.get_vocab()
        tokens.append({token: id for token, id in vocab.items() if token not in extra})
    shared, most = tokens[0].keys() & tokens[1].keys(), max(map(len, tokens))
    if len(shared) < SHARED * most or not _same_merges(models, (1 - SHARED) * most):
        return False
    sample = sorted(shared)[:: math.ceil(len(shared) / SAMPLE)] if shared else []
    codecs = [ByteCodec(tokenizer) for tokenizer in both]
    return all(codecs[0].of(tokens[0][token]) == codecs[1].of(tokens[1][token]) for token in sample)


def _steps(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or a pre-tokenizer, flat and without options that change no id."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        parts = step.get("normalizers", step.get("pretokenizers", []))
        return [each for inner in parts for each in _steps(inner)]
    return [{key: value for key, value in step.items() if key != "trim_offsets"}]


def _same_merges(models: list[dict[str, Any]], spare: float) -> bool:
    """Return whether all but `spare` merges are shared and come in the same order."""
    ranked = [[tuple(merge) for merge in model.get("merges") or []] for model in models]
    shared = set(ranked[0]) & set(ranked[1])
    if max(map(len, ranked)) - len(shared) > spare:
        return False
    first, second = ([merge for merge in merges if merge in shared] for merges in ranked)
    return first == second


STRETCH = 2  # tokens of another tokenizer for each of the target's: few split text more finely
GIVE_DRAFT = ("give ", Option("draft"))


class DraftCheckpoint(Asset):
    """A whole model beside the target."""

    required = Missing("which needs a draft model", (*GIVE_DRAFT, ", its folder or hub id"))

    def __init__(self, *, other_tokenizer: bool = False) -> None:
        self.other_tokenizer = other_tokenizer  # the draft model has another one than the target
        tokenizer = "another" if other_tokenizer else "the target's"
        self.missing = Missing(f"needs a draft model with {tokenizer} tokenizer", GIVE_DRAFT)

    def find(self, search: AssetSearch) -> Found | Missing:
        if search.draft is None:
            return self.missing
        target, draft = search.target, search.read_draft()
        other = not same_vocabulary(target, draft)
        if other != self.other_tokenizer:
            has = "another tokenizer than" if other else "the tokenizer of"
            unfit = f"the draft model {draft.source} has {has} the target {target.source}"
            return replace(self.missing, unfit=unfit)
        return Found(
            models=(draft,), specs=(draft.spec,), dtype=draft.dtype,
            stretch=STRETCH if other else 1,
            build=lambda parts: _build(parts, target, draft, other_tokenizer=other),
        )  # fmt: skip


def same_vocabulary(target: Checkpoint, draft: Checkpoint) -> bool:
    """Return whether the draft model's ids mean what the target's do, padding and special tokens aside.

    Without both tokenizers, vocabularies of the same size count as the same.
    """
    if target.tokenizer is not None and draft.tokenizer is not None:
        return same_tokenizer(target.tokenizer, draft.tokenizer)
    sizes = target.spec.vocab_size, draft.spec.vocab_size
    if sizes[0] != sizes[1]:
        without = target if target.tokenizer is None else draft
        raise ConfigError(
            f"the draft model {draft.source} has a vocabulary of {sizes[1]} and the target {target.source}"
            f" one of {sizes[0]}",
            remedy=f"to match their tokens, give {without.source} as a folder with its tokenizer.json",
        )
    return True


class DraftModel(AutoregressiveDrafter):
    """An autoregressive drafter over a runner of its own."""

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
        if self.cache.recurrent is not None:  # whose log reaches so far
            self.max_draft = runner.max_queries - 1
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
            try:
                runner.prefill(self.cache, sequence.row, tokens, start)
            except BaseException:
                self.cache.lengths[sequence.row] = 0  # some layers may have read on
                raise
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


def _build(parts: Parts, target: Checkpoint, draft: Checkpoint, *, other_tokenizer: bool) -> Drafter:
    [runner] = parts.models
    vocabulary: VocabularyMap | None = None
    if parts.tokenizer is not None and draft.tokenizer is not None:
        if other_tokenizer:
            from foredraft.drafters.retokenize import Retokenize

            positions = STRETCH * parts.positions
            return Retokenize(runner, parts.rows, positions, parts.tokenizer, draft.tokenizer)
        sizes = target.spec.vocab_size, draft.spec.vocab_size
        vocabulary = VocabularyMap.between(parts.tokenizer, draft.tokenizer, sizes, runner.decoder.device)
    return DraftModel(runner, parts.rows, parts.positions, vocabulary)


ASSET, OTHER_TOKENIZER_ASSET = DraftCheckpoint(), DraftCheckpoint(other_tokenizer=True)
