"""The demo tokenizer: byte-level BPE over Python source, 4,096 entries, exact on every byte string.

Contract: `build` trains on an iterator of texts and returns a `tokenizers.Tokenizer` in which
`<|endoftext|>` has id 0 and stands between files; `encode` puts nothing in front and takes nothing away,
so that decode(encode(text)) == text. A line break and the indentation after it form one piece.

    python -m foredraft.demo.recipe.bpe --corpus DIR
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .corpus import read_sources

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 4096
START = 0  # the id of END_OF_TEXT
# Line breaks with the indentation that follows; words with one leading mark or blank (".append",
# " return"); up to three digits; runs of marks with one leading blank; any other blanks.
PIECES = r"\n[\n ]*|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[^\S\n]+|\s+"


def build(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Train the tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_files(tokenizer: Tokenizer, texts: Iterable[str]) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """One stream: every file preceded by the end-of-text mark, which so doubles as a start mark."""
    start = START
    stream: list[int] = []
    for text in texts:
        stream.append(start)
        stream.extend(tokenizer.encode(text, add_special_tokens=False).ids)
    stream.append(start)
    return np.array(stream, dtype=np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tokenizer and encode both splits.")
    parser.add_argument("--corpus", type=Path, required=True)
    corpus: Path = parser.parse_args().corpus
    training = [source.text for source in read_sources(corpus / "train.jsonl")]
    tokenizer = build(training[::4])
    tokenizer.save(str(corpus / "tokenizer.json"))
    for name, texts in (
        ("train", training),
        ("heldout", [source.text for source in read_sources(corpus / "heldout.jsonl")]),
    ):
        stream = encode_files(tokenizer, texts)
        np.save(corpus / f"{name}.npy", stream)
        size = sum(len(text.encode()) for text in texts)
        print(f"{name}: {len(stream)} tokens, {size / len(stream):.3f} bytes per token")


if __name__ == "__main__":
    main()
