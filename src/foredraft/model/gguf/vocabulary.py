"""Turn the vocabulary of a GGUF file into a `tokenizer.json` and a `tokenizer_config.json`.

Contract: two kinds of vocabulary are read. "gpt2" is byte-level BPE; how text is cut into words before the
merges depends on a name in the file, and a name whose rule is not in `WORDS` is refused. "llama" is
SentencePiece's BPE, whose merges follow from the scores of the tokens. Tokens of type UNUSED fill ids up and
have no text. A file without a vocabulary is no error: its model runs on token ids.

Sources: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp for words, defaults and types;
https://github.com/huggingface/transformers/blob/main/src/transformers/convert_slow_tokenizer.py for merges.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from foredraft.errors import shortened

__all__ = ["UnreadableVocabularyError", "Vocabulary", "special_ids", "vocabulary_of"]

KEY = "tokenizer.ggml."
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # types of tokens; 1 is an ordinary one, 6 a byte
SPECIAL = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
}
SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unk": 0}  # where a "llama" vocabulary does not name them
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's space
MOST_SHOWN = 200  # characters of an error of the library
# words of Llama 3; Qwen 2 has single digits
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = (_WORDS % "{1,3}",)


@dataclass(frozen=True, slots=True)
class Words:
    """How a byte-level vocabulary cuts text into words.

    Attributes:
        patterns: Regular expressions, applied one after the other: each cuts what it matches out of the rest.
        normalizer: Applied before: the `type` of one of the library's, or None.
        ignores_merges: A word that is a token is that token, even where no merges lead to it.
        adds_bos: Texts begin with the bos token where the file does not say.
    """

    patterns: tuple[str, ...]
    normalizer: str | None = None
    ignores_merges: bool = False
    adds_bos: bool = False


# name in the file -> rule
WORDS: dict[str, Words] = {
    "default": Words((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": Words((_GPT2,)),
    "llama-bpe": Words(LLAMA3, ignores_merges=True, adds_bos=True),
    "qwen2": Words((_WORDS % "",), normalizer="NFC"),
}


class UnreadableVocabularyError(Exception):
    """A vocabulary cannot be turned into a tokenizer; its text says why, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer.

    Attributes:
        tokenizer: The content of `tokenizer.json`.
        config: The content of `tokenizer_config.json`: the special tokens and the chat templates.
    """

    tokenizer: str
    config: dict[str, Any] = field(default_factory=dict)


def special_ids(metadata: dict[str, Any]) -> dict[str, int]:
    """Return the ids of the special tokens by the keys of `SPECIAL`."""
    defaults = SENTENCEPIECE_IDS if metadata.get(f"{KEY}model") == "llama" else {}
    given = {name: metadata.get(KEY + key, defaults.get(name)) for name, key in SPECIAL.items()}
    return {name: id for name, id in given.items() if isinstance(id, int) and id < 2**32 - 1}  # -1: none


def vocabulary_of(metadata: dict[str, Any]) -> Vocabulary | None:
    """Return the tokenizer of a file; None if it has no vocabulary.

    Args:
        metadata: That of the file.

    Raises:
        UnreadableVocabularyError: The tokenizer cannot be reproduced exactly.
    """
    model, tokens = metadata.get(f"{KEY}model", "no_vocab"), _list(metadata, "tokens", str)
    if model in ("none", "no_vocab"):
        return None
    if not tokens:
        raise UnreadableVocabularyError(f"has a vocabulary {shortened(model)} without tokens")
    if model == "gpt2":
        content = _byte_level(metadata, tokens)
    elif model == "llama":
        content = _sentencepiece(metadata, tokens)
    else:
        raise UnreadableVocabularyError(
            f"has a vocabulary of kind {shortened(model)}, which is not supported (gpt2 and llama are)"
        )
    _check(content)
    return Vocabulary(json.dumps(content, ensure_ascii=False), _config(metadata, tokens))


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    name = metadata.get(f"{KEY}pre")
    if not isinstance(name, str) or name not in WORDS:
        raise UnreadableVocabularyError(
            f"has a vocabulary with the pre-tokenizer {shortened(name)}, which is not supported"
            f" ({', '.join(WORDS)} are)"
        )
    words, merges = WORDS[name], _list(metadata, "merges", str)
    pairs = [merge.split(" ") for merge in merges]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise UnreadableVocabularyError("has a vocabulary without merges")
    cuts = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in words.patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    added, vocabulary = _split(metadata, tokens)
    return {
        "added_tokens": added,
        "normalizer": None if words.normalizer is None else {"type": words.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, byte_level]},
        "post_processor": _template(metadata, tokens, adds_bos=words.adds_bos),
        "decoder": byte_level,
        "model": _bpe(vocabulary, pairs) | {"ignore_merges": words.ignores_merges},
    }


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    scores = _list(metadata, "scores", float)
    if len(scores) != len(tokens):
        raise UnreadableVocabularyError("has a vocabulary without a score for each token")
    for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if metadata.get(KEY + key):
            raise UnreadableVocabularyError(f"has a vocabulary with {key}, which is not supported")
    prefix = metadata.get(f"{KEY}add_space_prefix", True)
    unknown = special_ids(metadata).get("unk")
    added, vocabulary = _split(metadata, tokens)
    within = {token: id for token, id in vocabulary.items() if id not in {each["id"] for each in added}}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoders = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    return {
        "added_tokens": added,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": SPACE}] if prefix else []), spaces],
        },
        "pre_tokenizer": None,
        "post_processor": _template(metadata, tokens, adds_bos=True),
        "decoder": {"type": "Sequence", "decoders": decoders if prefix else decoders[:-1]},
        "model": _bpe(vocabulary, _merges(within, scores))
        | {
            "unk_token": None if unknown is None or unknown >= len(tokens) else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _merges(vocabulary: dict[str, int], scores: Sequence[float]) -> list[list[str]]:
    """Return the merges of a vocabulary of scored tokens: the highest score of a merged token first.

    Args:
        vocabulary: Ids by token.
        scores: The score of each id.
    """
    found = []
    for token, id in vocabulary.items():
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in cuts if pair[0] in vocabulary and pair[1] in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(scores[id], pair) for pair in known]
    found.sort(key=lambda merge: (merge[0], len(merge[1][0]), len(merge[1][1])), reverse=True)
    return [[*pair] for _, pair in found]


def _split(metadata: dict[str, Any], tokens: list[str]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the added tokens, and the ids of the vocabulary by token.

    Added tokens whose ids follow the vocabulary's are not in it, as Hugging Face has it for such models.
    """
    types = _list(metadata, "token_type", int)
    if len(types) != len(tokens):
        raise UnreadableVocabularyError("has a vocabulary without a type for each token")
    added = {
        id: {
            "id": id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    }
    used = [id for id, kind in enumerate(types) if kind != UNUSED]
    inner = [id for id in used if id not in added]
    follow = [*range(len(inner), len(used))] == [*added] and inner == [*range(len(inner))]
    vocabulary = {tokens[id]: id for id in (inner if follow else used)}
    if len(vocabulary) != len(inner if follow else used):
        raise UnreadableVocabularyError("has a vocabulary with a token twice")
    return [*added.values()], vocabulary


def _bpe(vocabulary: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }


def _template(metadata: dict[str, Any], tokens: list[str], *, adds_bos: bool) -> dict[str, Any] | None:
    """Return the post-processor, which adds the tokens that begin and end a text; None where it adds none."""
    ids, added = special_ids(metadata), []
    for name, default in (("bos", adds_bos), ("eos", False)):
        if not metadata.get(f"{KEY}add_{name}_token", default):
            continue
        if not 0 <= ids.get(name, -1) < len(tokens):
            raise UnreadableVocabularyError(f"adds a token {name} to texts, and does not say which it is")
        added.append((name, ids[name]))
    if not added:
        return None

    def text(id: str, type_id: int) -> list[dict[str, Any]]:
        parts = {
            name: {"SpecialToken": {"id": tokens[token], "type_id": type_id}} for name, token in added
        } | {"text": {"Sequence": {"id": id, "type_id": type_id}}}
        return [parts[name] for name in ("bos", "text", "eos") if name in parts]

    return {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": [*text("A", 0), *text("B", 1)],
        "special_tokens": {
            tokens[id]: {"id": tokens[id], "ids": [id], "tokens": [tokens[id]]} for _, id in added
        },
    }


def _check(content: dict[str, Any]) -> None:
    """Check that the library reads a tokenizer, and gives every added token its id."""
    try:
        read = tokenizers.Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the library raises bare Exception
        raise UnreadableVocabularyError(
            f"has a vocabulary that makes no tokenizer ({str(error)[:MOST_SHOWN]})"
        ) from error
    for token in content["added_tokens"]:
        if read.token_to_id(token["content"]) != token["id"]:
            raise UnreadableVocabularyError(
                f"has a vocabulary in which {shortened(token['content'])} has more than one id"
            )


def _config(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Return the texts of the special tokens, and the chat templates by name."""
    ids = special_ids(metadata)
    config: dict[str, Any] = {
        f"{name}_token": tokens[id]
        for name, id in ids.items()
        if name in ("bos", "eos", "unk", "pad") and 0 <= id < len(tokens)
    }
    key = "tokenizer.chat_template"
    named = {
        name.removeprefix(f"{key}."): text for name, text in metadata.items() if name.startswith(f"{key}.")
    }
    templates = {"default": metadata[key]} if key in metadata else {}
    templates |= named
    if not all(isinstance(text, str) for text in templates.values()):
        raise UnreadableVocabularyError("has a chat template that is not a text")
    if templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config


def _list(metadata: dict[str, Any], key: str, kind: type) -> list[Any]:
    """Return a list of values of one type; an empty one where the metadata have none."""
    values = metadata.get(KEY + key)
    return values if isinstance(values, list) and all(type(value) is kind for value in values) else []
