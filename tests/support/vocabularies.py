"""Metadata of GGUF files with small vocabularies, on which a rule that cuts or joins wrongly shows."""

from __future__ import annotations

import functools
import json
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from foredraft.model.gguf.vocabulary import vocabulary_of
from tests.support.strings import strings

KEY = "tokenizer.ggml."
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
PIECES = [SPACE, *"abcdeht", *f"{SPACE}t he {SPACE}the at cat ca ab {SPACE}a abc bc".split()]


def sentencepiece(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    scores = [0.0] * 259 + [-float((rank * 7) % 50) for rank in range(len(PIECES))]
    found = {"model": "llama", "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    found |= {"tokens": tokens, "token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES)], "scores": scores}
    return {KEY + name: value for name, value in (found | changes).items()}


def byte_level(pre: Any, **changes: Any) -> dict[str, Any]:
    """Return the metadata of a vocabulary over bytes, whose merges cross every border that a rule may draw."""
    tokens, merges = _spanning()
    found = {"model": "gpt2", "pre": pre, "eos_token_id": len(tokens), "add_bos_token": False}
    found |= {"tokens": [*tokens, "<|end|>", "[PAD]"], "token_type": [*[1] * len(tokens), 3, 5]}
    found["merges"] = [*merges]
    return {KEY + name: value for name, value in (found | changes).items()}


def tokenizer_of(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    found = vocabulary_of(metadata)
    assert found is not None
    return tokenizers.Tokenizer.from_str(found[0])


@functools.cache
def _spanning() -> tuple[tuple[str, ...], tuple[str, ...]]:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([text for text in strings(2000, seed=1) if "<" not in text], trainer)
    model = json.loads(made.to_str())["model"]
    tokens = tuple(sorted(model["vocab"], key=model["vocab"].__getitem__))
    return tokens, tuple(" ".join(pair) for pair in model["merges"])
