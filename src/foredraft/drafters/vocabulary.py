"""Vocabulary: which ids of a draft model mean which ids of the target.

Relatives share a tokenizer but not always a vocabulary: embeddings are padded to other sizes (Qwen2.5 has
151,936 rows or 152,064), and special tokens lie at other ids. Tokens are matched by their text. An id that
the draft lacks is never drafted and is read as a stand-in; an id that only the draft has loses its logit
before any transform, so that q is the law over the target's ids that was drawn from. (Token-level
intersection in Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms
for Heterogeneous Vocabularies", of two vocabularies that are nearly one.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.byte_codec import ByteCodec
from foredraft.model.device import upload
from foredraft.model.tokenizer import Tokenizer

__all__ = ["VocabularyMap", "same_tokenizer"]

SHARED = 0.99  # of both ordinary vocabularies: less is another tokenizer
SAMPLE = 256  # shared pieces whose meaning is compared


class VocabularyMap:
    """Between the target's ids and the draft's.

    pairs: (target id, draft id) of every shared token. sizes: of the two vocabularies, the target's first.
    stand_in: the draft's id for what it lacks.
    """

    def __init__(
        self, pairs: Iterable[tuple[int, int]], sizes: tuple[int, int], stand_in: int, device: torch.device
    ) -> None:
        self.draft_ids = [stand_in] * sizes[0]  # by the target's id
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
        """Of two vocabularies of the same tokenizer; None where they are one."""
        if sizes[0] == sizes[1] and target.fingerprint == draft.fingerprint:
            return None
        theirs = draft.inner.get_vocab()
        pairs = ((id, theirs[token]) for token, id in target.inner.get_vocab().items() if token in theirs)
        return cls(pairs, sizes, _stand_in(draft, sizes[1]), device)

    def read(self, tokens: Tensor) -> Tensor:
        """The target's ids, any shape -> the draft's."""
        return self._draft_ids[tokens]

    def columns(self, logits: Tensor) -> Tensor:
        """The draft's logits [B, V_draft] -> of the target's ids [B, V]."""
        chosen = logits[:, self._draft_ids]
        return chosen if self._lacking is None else chosen.masked_fill_(self._lacking, -math.inf)


def same_tokenizer(target: Tokenizer, draft: Tokenizer) -> bool:
    """Whether both cut a text alike, up to special tokens and padding, so that one can read the other's ids.

    They do if vocabulary, merges and special tokens are equal. Else, if their models are of one type, their
    normalizers and pre-tokenizers equal where both have one, 99 % of either one's ordinary pieces are the
    other's too, as many merges are shared and come in one order, and the same piece means the same text. Ids
    may differ.
    """
    if target.fingerprint == draft.fingerprint:
        return True
    mine, theirs = (json.loads(tokenizer.inner.to_str()) for tokenizer in (target, draft))
    if mine["model"]["type"] != theirs["model"]["type"]:
        return False
    for step in ("normalizer", "pre_tokenizer"):
        parts = _parts(mine[step]), _parts(theirs[step])
        if all(parts) and parts[0] != parts[1]:
            return False
    pieces = [_ordinary(tokenizer, content) for tokenizer, content in ((target, mine), (draft, theirs))]
    shared = pieces[0].keys() & pieces[1].keys()
    most = max(map(len, pieces))
    if len(shared) < SHARED * most or not _merge_alike(mine["model"], theirs["model"], (1 - SHARED) * most):
        return False
    return _mean_alike(target, draft, pieces, shared)


def _parts(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """What a normalizer or a pre-tokenizer does, one after another, without what changes no id."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [
            part for inner in step.get("normalizers", step.get("pretokenizers", [])) for part in _parts(inner)
        ]
    return [{key: value for key, value in step.items() if key != "trim_offsets"}]


def _ordinary(tokenizer: Tokenizer, content: dict[str, Any]) -> dict[str, int]:
    """Pieces that the tokenizer's model knows of itself, with their ids."""
    added = {token["content"] for token in content["added_tokens"]}
    return {piece: id for piece, id in tokenizer.inner.get_vocab().items() if piece not in added}


def _merge_alike(mine: dict[str, Any], theirs: dict[str, Any], spare: float) -> bool:
    """Whether all but a few merges are shared, in one order."""
    ranked = [[tuple(merge) for merge in model.get("merges") or []] for model in (mine, theirs)]
    shared = set(ranked[0]) & set(ranked[1])
    if max(map(len, ranked)) - len(shared) > spare:
        return False
    first, second = ([merge for merge in merges if merge in shared] for merges in ranked)
    return first == second


def _mean_alike(target: Tokenizer, draft: Tokenizer, pieces: list[dict[str, int]], shared: set[str]) -> bool:
    """Of pieces spread over the vocabulary."""
    spellings = ByteCodec(target), ByteCodec(draft)
    spread = sorted(shared)[:: math.ceil(len(shared) / SAMPLE)] if shared else []
    return all(spellings[0].of(pieces[0][piece]) == spellings[1].of(pieces[1][piece]) for piece in spread)


def _stand_in(draft: Tokenizer, size: int) -> int:
    """What a draft model of `size` ids best makes nothing of: its unknown token, else its first special
    one."""
    unknown = json.loads(draft.inner.to_str())["model"].get("unk_token")
    id = draft.inner.token_to_id(unknown) if isinstance(unknown, str) else None
    if id is not None and id < size:
        return int(id)
    return min((id for id in draft.special if id < size), default=0)
