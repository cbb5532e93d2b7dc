"""Pairing: what a target's and a draft's folders have to do with each other, and which drafters that fits."""

from __future__ import annotations

from pathlib import Path

import torch

from foredraft.drafters.vocabulary import VocabularyMap, same_tokenizer
from foredraft.errors import CheckpointError, ConfigError
from foredraft.kinds import DRAFTERS, DrafterKind
from foredraft.model.runner import Runner
from foredraft.model.spec import ModelSpec
from foredraft.model.tokenizer import Tokenizer

__all__ = ["check_kind", "fitting_kinds", "same_vocabulary", "tokenizer_of", "vocabulary_map"]


def tokenizer_of(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer, where it can be its model's.

    A model's vocabulary is often padded beyond its tokenizer's. The other way round, only tokens that were
    added may lie beyond the model's: Gemma 3's text models share a tokenizer with those that see. And the
    tokens that the model begins and ends with have to be there.
    """
    spec = ModelSpec.from_folder(folder)
    tokenizer = Tokenizer.from_folder(folder, spec.vocab_size)
    if tokenizer is None:
        return None
    found = ""
    if tokenizer.size > spec.vocab_size:
        found = f"ids up to {tokenizer.size - 1}, but the model's vocabulary is {spec.vocab_size}"
    bos = () if spec.bos_token_id is None else (spec.bos_token_id,)
    for name, ids in (("bos_token_id", bos), ("eos_token_id", spec.eos_token_ids)):
        for id in ids:
            if not found and not tokenizer.has(id):
                found = f"no token {id}, which is the model's {name}"
    if found:
        raise CheckpointError(
            f"{folder / 'tokenizer.json'} is not the tokenizer of {folder / 'config.json'}: it has {found};"
            " put the model's own tokenizer there"
        )
    return tokenizer


def same_vocabulary(folders: list[Path], tokenizers: tuple[Tokenizer | None, ...]) -> bool:
    """Whether the draft's ids mean what the target's do, padding and special tokens aside."""
    if tokenizers[0] is not None and tokenizers[1] is not None:
        return same_tokenizer(tokenizers[0], tokenizers[1])
    sizes = [ModelSpec.from_folder(folder).vocab_size for folder in folders]
    if sizes[0] != sizes[1]:
        without = folders[0] if tokenizers[0] is None else folders[1]
        raise ConfigError(
            f"the draft model {folders[1]} has a vocabulary of {sizes[1]} and the target {folders[0]} one of"
            f" {sizes[0]}; to match their tokens, put the tokenizer.json that is missing into {without}"
        )
    return True  # sizes are all there is to go by


def fitting_kinds(
    draft_given: bool, other_tokenizer: bool, plan_given: bool = False
) -> dict[str, DrafterKind]:
    """Those there is all for that they need: whoever drafts by default, a request may name any of them."""
    return {
        name: kind
        for name, kind in DRAFTERS.items()
        if (not kind.needs_draft or (draft_given and kind.retokenizes == other_tokenizer))
        and (not kind.needs_plan or plan_given)
    }


def check_kind(drafter: str, draft_sampling: str, kinds: dict[str, DrafterKind], folders: list[Path]) -> None:
    """A draft model is for the drafters that its tokenizer fits, and greedy drafts are for a model's."""
    fitting = " or ".join(repr(name) for name, kind in kinds.items() if kind.needs_draft)
    if drafter not in kinds:
        has = "the tokenizer of" if DRAFTERS[drafter].retokenizes else "another tokenizer than"
        raise ConfigError(
            f"drafter is {drafter!r}, but the draft model {folders[1]} has {has} the target {folders[0]};"
            f" give drafter={fitting}, or leave it out"
        )
    if draft_sampling == "sampled" or any(kind.stepper for kind in kinds.values()):
        return
    if len(folders) == 1:
        raise ConfigError("draft_sampling is 'greedy', but no model drafts; give draft=, or leave it out")
    raise ConfigError(
        f"draft_sampling is 'greedy', but the draft model {folders[1]} has another tokenizer than the"
        f" target {folders[0]}, and is never sampled from; leave it out"
    )


def vocabulary_map(
    runners: list[Runner], tokenizers: tuple[Tokenizer | None, ...], device: torch.device
) -> VocabularyMap | None:
    if len(runners) < 2 or tokenizers[0] is None or tokenizers[1] is None:
        return None
    target, draft = (runner.decoder.spec.vocab_size for runner in runners)
    return VocabularyMap.between(tokenizers[0], tokenizers[1], (target, draft), device)
