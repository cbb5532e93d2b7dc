"""Vocabularies of GGUF files cut text as the model's own tokenizer does.

The oracle of the SentencePiece kind is its algorithm as it is published (Kudo and Richardson 2018,
arXiv:1808.06226): of all neighbours whose join is a token, those with the highest score are joined first.
"""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
import tokenizers

from foredraft.model.gguf import vocabulary
from foredraft.model.gguf.vocabulary import UnreadableVocabularyError, special_ids, vocabulary_of

KEY = "tokenizer.ggml."
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
TEXTS = ["a b", "  the  cat ", "naïve café", "tab\tnew\nline", "日本", "<s>a</s>", "it's 12345 -- ok?!", ""]


def random_texts() -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices("abcdeh t's1\n é<>", k=draw.randint(1, 30))) for _ in range(300)]


# --- SentencePiece ---------------------------------------------------------------------------------------

PIECES = [
    SPACE,
    *"abcdeht",
    f"{SPACE}t",
    "he",
    f"{SPACE}the",
    "at",
    "cat",
    "ca",
    "ab",
    f"{SPACE}a",
    "abc",
    "bc",
]


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """Return the metadata of a small vocabulary, in which some tokens can be joined in two ways."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    types = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
    scores = [0.0] * 259 + [-float((rank * 7) % 50) for rank in range(len(PIECES))]
    found = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {KEY + name: value for name, value in (found | changes).items()}


def defined(text: str, metadata: dict[str, Any]) -> list[int]:
    """Return the ids of a text without special tokens, by the definition."""
    ids = {token: id for id, token in enumerate(metadata[f"{KEY}tokens"])}
    scores = metadata[f"{KEY}scores"]
    parts = list(SPACE + text.replace(" ", SPACE)) if text else []
    while True:
        joins = [
            (-scores[ids[left + right]], at)
            for at, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in ids
        ]
        if not joins:
            break
        _, at = min(joins)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    pieces = []
    for part in parts:
        pieces += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return pieces


def tokenizer_of(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    found = vocabulary_of(metadata)
    assert found is not None
    return tokenizers.Tokenizer.from_str(found.tokenizer)


def check_sentencepiece() -> None:
    metadata = sentencepiece()
    read = tokenizer_of(metadata)
    for text in [*TEXTS, *random_texts()]:
        if "<s>" in text or "</s>" in text:
            continue
        ids = read.encode(text, add_special_tokens=False).ids
        assert ids == defined(text, metadata), text
        assert read.decode(ids) == text
    assert read.encode("a").ids[0] == 1, "a text begins with bos"
    assert read.encode("a<s>b", add_special_tokens=False).ids.count(1) == 1


def test_a_sentencepiece_vocabulary_joins_as_it_is_defined() -> None:
    check_sentencepiece()


def test_lost_scores_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = vocabulary._merges
    monkeypatch.setattr(vocabulary, "_merges", lambda ids, scores: sound(ids, [0.0] * len(scores)))
    with pytest.raises(AssertionError):
        check_sentencepiece()


def test_the_space_before_a_text_may_be_left_out() -> None:
    read = tokenizer_of(sentencepiece(add_space_prefix=False, add_bos_token=False))
    assert read.encode("cat").tokens == ["cat"]
    assert read.decode(read.encode(" cat").ids) == " cat"


# --- bytes -----------------------------------------------------------------------------------------------


def byte_level(rule_name: str, **changes: Any) -> tuple[dict[str, Any], tokenizers.Tokenizer]:
    """Return the metadata of a trained vocabulary, and the tokenizer that it comes from."""
    rule = vocabulary.WORDS[rule_name]
    split = [
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in rule.patterns
    ]
    bytes_ = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=rule.ignores_merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*split, bytes_])
    made.decoder = tokenizers.decoders.ByteLevel()
    if rule.normalizer:
        made.normalizer = tokenizers.normalizers.NFC()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([*TEXTS, *random_texts()], trainer)
    made.add_special_tokens(["<|end|>"])
    model = json.loads(made.to_str())["model"]
    tokens = [made.id_to_token(id) for id in range(made.get_vocab_size())]
    end = made.token_to_id("<|end|>")
    found = {
        "model": "gpt2",
        "pre": rule_name,
        "tokens": [*tokens, "[PAD]"],
        "token_type": [3 if id == end else 1 for id in range(len(tokens))] + [5],
        "merges": [" ".join(pair) for pair in model["merges"]],
        "eos_token_id": end,
        "add_bos_token": False,
    }
    return {KEY + name: value for name, value in (found | changes).items()}, made


@pytest.mark.parametrize("pre", vocabulary.WORDS)
def test_a_vocabulary_of_bytes_is_the_tokenizer_that_it_comes_from(pre: str) -> None:
    metadata, made = byte_level(pre)
    read = tokenizer_of(metadata)
    for text in [*TEXTS, *random_texts(), "a<|end|>b"]:
        ids = read.encode(text).ids
        assert ids == made.encode(text).ids, text
        assert read.decode(ids, skip_special_tokens=False) == made.decode(ids, skip_special_tokens=False)


WORDS = {  # of "it's 12345 +x", by hand; \u0120 stands for a space
    "default": "it|'|s|Ġ|123|45|Ġ|+|x",  # punctuation first, then GPT-2's rule, then digits
    "gpt-2": "it|'s|Ġ12345|Ġ+|x",
    "llama-bpe": "it|'s|Ġ|123|45|Ġ+|x",
    "qwen2": "it|'s|Ġ|1|2|3|4|5|Ġ+|x",
}


def test_words_are_those_of_the_rule() -> None:
    assert WORDS.keys() == vocabulary.WORDS.keys()
    for pre, words in WORDS.items():
        splitter = tokenizer_of(byte_level(pre)[0]).pre_tokenizer
        assert splitter is not None
        assert [word for word, _ in splitter.pre_tokenize_str("it's 12345 +x")] == words.split("|"), pre


# --- special tokens, templates, refusals -------------------------------------------------------------------


def test_special_tokens_and_templates_are_named() -> None:
    metadata = sentencepiece() | {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "tools",
    }
    assert special_ids(metadata) == {"bos": 1, "eos": 2, "unk": 0}
    found = vocabulary_of(metadata)
    assert found is not None
    assert found.config["bos_token"] == "<s>" and found.config["eos_token"] == "</s>"
    templates = {each["name"]: each["template"] for each in found.config["chat_template"]}
    assert templates == {"default": "plain", "tool_use": "tools"}


def test_no_vocabulary_is_no_error() -> None:
    assert vocabulary_of({}) is None
    assert vocabulary_of({f"{KEY}model": "no_vocab"}) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "t5"}, "kind 't5', which is not supported"),
        ({"tokens": []}, "without tokens"),
        ({"scores": [0.0]}, "without a score for each token"),
        ({"token_type": [1]}, "without a type for each token"),
        ({"precompiled_charsmap": [1]}, "precompiled_charsmap, which is not supported"),
        ({"bos_token_id": 2**32 - 1}, "adds a token bos to texts, and does not say which it is"),
    ],
)
def test_what_cannot_be_reproduced_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnreadableVocabularyError, match=says):
        vocabulary_of(sentencepiece(**changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pre": "other"}, "the pre-tokenizer 'other', which is not supported"),
        ({"merges": []}, "without merges"),
        ({"merges": ["a"]}, "without merges"),
    ],
)
def test_rules_that_are_not_known_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnreadableVocabularyError, match=says):
        vocabulary_of(byte_level("gpt-2", **changes)[0])


def test_a_token_twice_is_refused() -> None:
    metadata = sentencepiece()
    metadata[f"{KEY}tokens"][-1] = "a"
    with pytest.raises(UnreadableVocabularyError, match="twice|more than one id"):
        vocabulary_of(metadata)
