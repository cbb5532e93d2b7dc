"""Make small tokenizers of every type a draft model may have: byte-level, SentencePiece, WordPiece.

Further functions change a given tokenizer, for pairs of related vocabularies.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from foredraft.model.tokenizer import FILE, Tokenizer
from tests.support.checkpoints import TEXT, tiny_tokenizer

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def byte_level(size: int = 384) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer."""
    return tiny_tokenizer(size)


def sentencepiece(size: int = 420, *, metaspace: bool = False) -> tokenizers.Tokenizer:
    """Return a tokenizer like Llama 2's: a space before every text, and byte tokens.

    Args:
        size: The size of the vocabulary.
        metaspace: Use a pre-tokenizer, as newer files do, instead of a normalizer.
    """
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(SPACE)
    trainer = trainers.BpeTrainer(
        vocab_size=size - 256, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    trained.train_from_iterator([TEXT.replace("🙂", "").replace("ß", "")], trainer)
    model = json.loads(trained.to_str())["model"]
    vocabulary = dict(model["vocab"])
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    merges = [(left, right) for left, right in model["merges"]]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    """Return a WordPiece tokenizer, which lowercases text and has no token for a line break."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["[UNK]", "[CLS]"], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def changed(inner: tokenizers.Tokenizer, change: Callable[[dict[str, Any]], Any]) -> tokenizers.Tokenizer:
    """Return a copy of a tokenizer whose tokenizer.json was changed."""
    content = json.loads(inner.to_str())
    change(content)
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def permuted(inner: tokenizers.Tokenizer, seed: int = 0) -> tuple[tokenizers.Tokenizer, list[int]]:
    """Return the tokenizer with permuted ids, and the new id of each old one."""
    import random

    size = inner.get_vocab_size()
    new = list(range(size))
    random.Random(seed).shuffle(new)

    def change(content: dict[str, Any]) -> None:
        content["model"]["vocab"] = {piece: new[id] for piece, id in content["model"]["vocab"].items()}
        for token in content["added_tokens"]:
            token["id"] = new[token["id"]]
        content["added_tokens"].sort(key=lambda token: token["id"])
        for special in (content["post_processor"] or {}).get("special_tokens", {}).values():
            special["ids"] = [new[id] for id in special["ids"]]

    return changed(inner, change), new


def save(inner: tokenizers.Tokenizer, folder: Path) -> None:
    """Save a tokenizer as the tokenizer.json of a checkpoint folder."""
    inner.save(str(folder / FILE))


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": byte_level,
    "coarse byte-level": lambda: byte_level(600),
    "sentencepiece": sentencepiece,
    "metaspace": lambda: sentencepiece(480, metaspace=True),
}


def make(name: str) -> Tokenizer:
    """Return one of `KINDS`."""
    return Tokenizer(KINDS[name]())
