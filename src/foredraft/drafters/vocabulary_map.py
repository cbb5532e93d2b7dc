"""Vocabulary: the map between the target's ids and those of a draft model with the same tokenizer.

Models of one family share a tokenizer but not always a vocabulary: embeddings are padded to different sizes
(Qwen2.5 has 151,936 or 152,064 rows), and special tokens have different ids. Tokens are matched by their
text. An id that the draft model lacks is never drafted, and the draft model reads a stand-in for it. An id
that only the draft model has loses its logit before all sampling transforms, so q is the distribution over
the target's ids from which the draft is drawn. (Token-level intersection in Timor et al. 2025, "Accelerating
LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies".)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from foredraft.model.byte_codec import ByteCodec
from foredraft.model.tokenizer import Tokenizer
from foredraft.model.transfers import upload

__all__ = ["VocabularyMap", "same_tokenizer"]

# Share of the ordinary tokens, in either vocabulary, that two versions of one tokenizer have in common.
# Versions differ by a few tokens; different tokenizers share far less.
SHARED = 0.99
# Shared tokens whose bytes are compared, spread over the vocabulary. More would take longer at every loading.
SAMPLE = 256


class VocabularyMap:
    """Maps the target's ids to the draft model's, and the draft model's logits to the target's ids.

    Args:
        pairs: (target id, draft id) of every shared token.
        sizes: Sizes of the target's and of the draft model's vocabulary.
        stand_in: The draft id that replaces ids without a counterpart.
        device: The device of the logits.

    Attributes:
        draft_ids: Draft id of every target id.
    """

    def __init__(
        self, pairs: Iterable[tuple[int, int]], sizes: tuple[int, int], stand_in: int, device: torch.device
    ) -> None:
        self.draft_ids = [stand_in] * sizes[0]
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
        draft_vocab = draft.inner.get_vocab()
        pairs = (
            (id, draft_vocab[token]) for token, id in target.inner.get_vocab().items() if token in draft_vocab
        )
        return cls(pairs, sizes, _stand_in(draft, sizes[1]), device)

    @classmethod
    def of_words(cls, words: Iterable[int], vocabulary: int, device: torch.device) -> VocabularyMap:
        """Return the map of a head over some of the target's ids: those of its words, in their order."""
        pairs = [(id, word) for word, id in enumerate(words)]
        return cls(pairs, (vocabulary, len(pairs)), 0, device)

    def read(self, tokens: Tensor) -> Tensor:
        """Return the draft ids of target ids, in any shape."""
        return self._draft_ids[tokens]

    def columns(self, logits: Tensor) -> Tensor:
        """Return logits over the target's ids [B, V] from the draft model's logits [B, V_draft]."""
        chosen = logits[:, self._draft_ids]
        return chosen if self._lacking is None else chosen.masked_fill_(self._lacking, -math.inf)


def same_tokenizer(target: Tokenizer, draft: Tokenizer) -> bool:
    """Return whether two tokenizers split text in the same way, special tokens and padding aside.

    They do if vocabulary, merges and special tokens are equal. They also count as the same if all of this
    holds: their models have one type; normalizers and pre-tokenizers are equal where both have one; 99 % of
    the ordinary tokens of either one are shared; as many merges are shared, in the same order; and shared
    tokens have the same bytes. Ids may differ.
    """
    if not _may_share(target, draft):
        return False
    if target.has_ids_of(draft):
        return True
    contents = [json.loads(tokenizer.inner.to_str()) for tokenizer in (target, draft)]
    models = [content["model"] for content in contents]
    if models[0]["type"] != models[1]["type"]:
        return False
    for step in ("normalizer", "pre_tokenizer"):
        steps = [_steps(content[step]) for content in contents]
        if all(steps) and steps[0] != steps[1]:
            return False
    tokens = [
        _ordinary(tokenizer, content) for tokenizer, content in zip((target, draft), contents, strict=True)
    ]
    shared = tokens[0].keys() & tokens[1].keys()
    most = max(map(len, tokens))
    if len(shared) < SHARED * most or not _same_merges(models, (1 - SHARED) * most):
        return False
    return _same_bytes((target, draft), tokens, shared)


def _may_share(target: Tokenizer, draft: Tokenizer) -> bool:
    """Return whether two vocabularies can share enough tokens, by their sizes alone.

    The comparison of all tokens takes seconds where vocabularies are large.
    """
    sizes = [tokenizer.inner.get_vocab_size() for tokenizer in (target, draft)]
    added = [len(tokenizer.inner.get_added_tokens_decoder()) for tokenizer in (target, draft)]
    most_ordinary = max(size - count for size, count in zip(sizes, added, strict=True))
    return min(sizes) >= SHARED * most_ordinary


def _steps(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or a pre-tokenizer, flat and without options that change no id."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [
            each for inner in step.get("normalizers", step.get("pretokenizers", [])) for each in _steps(inner)
        ]
    return [{key: value for key, value in step.items() if key != "trim_offsets"}]


def _ordinary(tokenizer: Tokenizer, content: dict[str, Any]) -> dict[str, int]:
    """Return the tokens that were not added to the tokenizer's model, with their ids."""
    added = {token["content"] for token in content["added_tokens"]}
    return {token: id for token, id in tokenizer.inner.get_vocab().items() if token not in added}


def _same_merges(models: list[dict[str, Any]], spare: float) -> bool:
    """Return whether all but `spare` merges are shared and come in the same order."""
    ranked = [[tuple(merge) for merge in model.get("merges") or []] for model in models]
    shared = set(ranked[0]) & set(ranked[1])
    if max(map(len, ranked)) - len(shared) > spare:
        return False
    first, second = ([merge for merge in merges if merge in shared] for merges in ranked)
    return first == second


def _same_bytes(
    tokenizers: tuple[Tokenizer, Tokenizer], tokens: list[dict[str, int]], shared: set[str]
) -> bool:
    """Return whether shared tokens stand for the same bytes, by a sample of them."""
    target, draft = (ByteCodec(tokenizer) for tokenizer in tokenizers)
    sample = sorted(shared)[:: math.ceil(len(shared) / SAMPLE)] if shared else []
    return all(target.of(tokens[0][token]) == draft.of(tokens[1][token]) for token in sample)


def _stand_in(draft: Tokenizer, size: int) -> int:
    """Return the id of the draft model's unknown token, or else of its first special one, below `size`."""
    unknown = getattr(draft.inner.model, "unk_token", None)
    id = draft.inner.token_to_id(unknown) if isinstance(unknown, str) else None
    if id is not None and id < size:
        return int(id)
    return min((id for id in draft.special if id < size), default=0)
