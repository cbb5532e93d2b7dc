"""Make small tokenizers of every type a draft model may have, and change them for pairs of related vocabularies."""

from __future__ import annotations

import codecs
import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from foredraft.model.tokenizer import FILE, REPLACEMENT, Tokenizer
from tests.support.checkpoints import TEXT, tiny_tokenizer

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def byte_level(size: int = 384) -> tokenizers.Tokenizer:
    return tiny_tokenizer(size)


def sentencepiece(size: int = 420, *, metaspace: bool = False) -> tokenizers.Tokenizer:
    """Return a tokenizer like Llama 2's, whose spaces a normalizer puts, or, as in newer files, `metaspace`."""
    special, trained = ["<unk>", "<s>", "</s>"], tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(SPACE)
    trainer = trainers.BpeTrainer(vocab_size=size - 256, special_tokens=special, show_progress=False)
    trained.train_from_iterator([TEXT.replace("🙂", "").replace("ß", "")], trainer)
    model = json.loads(trained.to_str())["model"]
    size = len(model["vocab"])
    vocabulary = {**model["vocab"], **{f"<0x{byte:02X}>": size + byte for byte in range(256)}}
    merges, options = [*map(tuple, model["merges"])], {"byte_fallback": True, "fuse_unk": True}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", **options)
    )
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    else:
        steps = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        tokenizer.normalizer = normalizers.Sequence(steps)
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(back)
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    special = ["[UNK]", "[CLS]"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def changed(inner: tokenizers.Tokenizer, change: Callable[[dict[str, Any]], Any]) -> tokenizers.Tokenizer:
    content = json.loads(inner.to_str())
    change(content)
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def permuted(inner: tokenizers.Tokenizer, seed: int = 0) -> tuple[tokenizers.Tokenizer, list[int]]:
    new = list(range(inner.get_vocab_size()))
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
    inner.save(str(folder / FILE))


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": byte_level,
    "coarse byte-level": lambda: byte_level(600),
    "sentencepiece": sentencepiece,
    "metaspace": lambda: sentencepiece(480, metaspace=True),
}


def make(name: str) -> Tokenizer:
    return Tokenizer(KINDS[name]())


def decoded(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> str:
    """Return the text of ids by its definition, without a character at its end whose last bytes are missing.

    The library decodes all of them at once.
    """
    shown = [id for id in ids if tokenizer.is_visible(id, skip_special)]
    if tokenizer.ends_mid_character(shown):
        return tokenizer.text(shown, skip_special).removesuffix(REPLACEMENT)
    at = len(shown)
    while at and tokenizer.byte(shown[at - 1]) is not None:
        at -= 1
    decoder = codecs.getincrementaldecoder("utf-8")()
    with contextlib.suppress(UnicodeDecodeError):
        decoder.decode(b"".join(tokenizer.byte(id) or b"" for id in shown[at:]))
        shown = shown[: len(shown) - len(decoder.getstate()[0])]
    return tokenizer.text(shown, skip_special)
