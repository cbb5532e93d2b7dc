"""Train the demo tokenizer: byte-level BPE over Python source, 4,096 entries.

The tokenizer is exact on every byte string: `encode` adds and removes nothing, so decode(encode(text)) ==
text. A line break and the indentation after it form one piece before BPE merges apply.

    python -m recipes.demo.bpe --corpus DIR
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .corpus import read_sources

END_OF_TEXT = "<|endoftext|>"  # start, end and padding token
END_OF_TEXT_ID = 0
VOCAB_SIZE = 4096
SAMPLE_STEP = 4  # BPE merges are learnt from every fourth training file, which is enough for 4,096 entries
# In order: line breaks with the indentation that follows; a word with one leading symbol or space (".append",
# " return"); up to three digits; a run of symbols with one leading space; any other white space.
SPLIT_PATTERN = r"\n[\n ]*|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[^\S\n]+|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train a byte-level BPE tokenizer in which `<|endoftext|>` has id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_files(tokenizer: Tokenizer, texts: Iterable[str]) -> NDArray[np.uint16]:
    """Encode texts as one token stream, with `<|endoftext|>` before each text and at the end."""
    stream: list[int] = []
    for text in texts:
        stream.append(END_OF_TEXT_ID)
        stream.extend(tokenizer.encode(text, add_special_tokens=False).ids)
    stream.append(END_OF_TEXT_ID)
    return np.array(stream, dtype=np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tokenizer and encode both splits.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder that recipes.demo.corpus wrote")
    corpus: Path = parser.parse_args().corpus
    training = [source.text for source in read_sources(corpus / "train.jsonl")]
    heldout = [source.text for source in read_sources(corpus / "heldout.jsonl")]
    tokenizer = train_tokenizer(training[::SAMPLE_STEP])
    tokenizer.save(str(corpus / "tokenizer.json"))
    for name, texts in (("train", training), ("heldout", heldout)):
        stream = encode_files(tokenizer, texts)
        np.save(corpus / f"{name}.npy", stream)
        size = sum(len(text.encode()) for text in texts)
        print(f"{name}: {len(stream)} tokens, {size / len(stream):.3f} bytes per token")


if __name__ == "__main__":
    main()
