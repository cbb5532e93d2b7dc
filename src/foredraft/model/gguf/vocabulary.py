"""Turn the vocabulary of a GGUF file into a `tokenizer.json` and a `tokenizer_config.json`.

Contract: two kinds of vocabulary are read. "gpt2" is BPE with merges; how text is cut into words before them
depends on a name in the file, and a name whose rule is not in `WORDS` is refused. "llama" is SentencePiece's
BPE, whose merges follow from the scores of the tokens. Tokens of type UNUSED fill ids up and have no text. A
file without a vocabulary is no error: its model runs on token ids.

The tokenizer is that of the model's own `tokenizer.json`. Gemma's has tokens for runs of spaces, in
SentencePiece's spelling, and merges such runs before anything else; its files spell these tokens with spaces.
llama.cpp cuts runs of spaces out first, so it reads a text otherwise that spells SentencePiece's space
itself.

Sources: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp for defaults and types;
https://github.com/huggingface/transformers/blob/main/src/transformers/convert_slow_tokenizer.py for merges;
https://github.com/ggml-org/llama.cpp/blob/master/conversion/base.py for the spelling of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import tokenizers

from foredraft.errors import did_you_mean, is_fault, shortened
from foredraft.model.gguf.special import CONTROL, KEY, UNKNOWN, UNUSED, USER_DEFINED, listed, special_ids
from foredraft.model.gguf.words import WORDS, Words

__all__ = ["UnreadableVocabularyError", "Vocabulary", "vocabulary_of"]

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's space
# Characters of a token whose merges are sought: their number of places grows with the square of the length.
MAX_TOKEN = 1_000
MAX_SHOWN = 200  # characters of an error of the library


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


def vocabulary_of(metadata: dict[str, Any]) -> Vocabulary | None:
    """Return the tokenizer of a file; None if it has no vocabulary.

    Args:
        metadata: That of the file.

    Raises:
        UnreadableVocabularyError: The tokenizer cannot be reproduced exactly.
    """
    model, tokens = metadata.get(f"{KEY}model", "no_vocab"), listed(metadata, "tokens", str)
    if model in ("none", "no_vocab"):
        return None
    if not tokens:
        raise UnreadableVocabularyError(f"has a vocabulary {shortened(model)} without tokens")
    if model == "llama":
        content = _sentencepiece(metadata, tokens)
    elif model in ("gpt2", "gemma4"):
        content = _with_merges(metadata, tokens)
    else:
        raise UnreadableVocabularyError(
            f"has a vocabulary of kind {shortened(model)}, which is not supported"
            " (gpt2, llama and gemma4 are)"
        )
    text = json.dumps(content, ensure_ascii=False)
    _check(text, content["added_tokens"])
    return Vocabulary(text, _config(metadata, tokens))


def _with_merges(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Return the content of `tokenizer.json` for a vocabulary whose file lists the merges."""
    name = "gemma4" if metadata[f"{KEY}model"] == "gemma4" else metadata.get(f"{KEY}pre")
    if not isinstance(name, str) or name not in WORDS:
        raise UnreadableVocabularyError(
            f"has a vocabulary with the pre-tokenizer {shortened(name)}, which is not supported"
            f"{did_you_mean(name, WORDS)}"
        )
    words, merges = WORDS[name], listed(metadata, "merges", str)
    pairs = [merge.split(" ") for merge in merges]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise UnreadableVocabularyError("has a vocabulary without merges")
    if words.spells_bytes:
        return _byte_level(metadata, tokens, words, pairs)
    added, vocabulary = _split(metadata, tokens, spell_spaces=True)
    return _text_level(
        metadata, tokens, added, _bpe(vocabulary, pairs), prefix=False, adds_bos=words.adds_bos
    )


def _byte_level(
    metadata: dict[str, Any], tokens: list[str], words: Words, merges: list[list[str]]
) -> dict[str, Any]:
    """Return the content of `tokenizer.json` for a vocabulary over bytes."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    added, vocabulary = _split(metadata, tokens)
    return {
        "added_tokens": added,
        "normalizer": None if words.normalizer is None else {"type": words.normalizer},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*_cuts(words.patterns), byte_level, *_cuts(words.byte_patterns)],
        },
        "post_processor": _template(metadata, tokens, adds_bos=words.adds_bos),
        "decoder": byte_level,
        "model": _bpe(vocabulary, merges) | {"ignore_merges": words.ignores_merges},
    }


def _cuts(patterns: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Return the content of `tokenizer.json` for a vocabulary whose scores imply the merges."""
    scores = listed(metadata, "scores", float)
    if len(scores) != len(tokens):
        raise UnreadableVocabularyError("has a vocabulary without a score for each token")
    for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if metadata.get(KEY + key):
            raise UnreadableVocabularyError(f"has a vocabulary with {key}, which is not supported")
    prefix = bool(metadata.get(f"{KEY}add_space_prefix", True))
    added, vocabulary = _split(metadata, tokens, spell_spaces=not prefix)
    # an added token's score is 0 in SentencePiece's own model, and -1000 in files
    scores = scores.copy()
    for token in added:
        scores[token["id"]] = 0.0
    special = {token["content"] for token in added if token["special"]}
    merges = _merges({token: id for token, id in vocabulary.items() if token not in special}, scores)
    return _text_level(metadata, tokens, added, _bpe(vocabulary, merges), prefix=prefix, adds_bos=True)


def _text_level(
    metadata: dict[str, Any],
    tokens: list[str],
    added: list[dict[str, Any]],
    model: dict[str, Any],
    *,
    prefix: bool,
    adds_bos: bool,
) -> dict[str, Any]:
    """Return the content of `tokenizer.json` for a vocabulary over text, with bytes for what it lacks.

    Args:
        metadata: Those of the file.
        tokens: The texts of all tokens.
        added: The added tokens.
        model: The vocabulary and its merges.
        prefix: Texts begin with a space, as after each special token.
        adds_bos: Texts begin with the bos token where the file does not say.
    """
    unknown = special_ids(metadata).get("unk")
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
        "post_processor": _template(metadata, tokens, adds_bos=adds_bos),
        "decoder": {"type": "Sequence", "decoders": decoders if prefix else decoders[:-1]},
        "model": model
        | {
            "unk_token": None if unknown is None or unknown >= len(tokens) else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _merges(vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges of a vocabulary of scored tokens: the highest score of a merged token first.

    Args:
        vocabulary: Ids by token.
        scores: The score of each id.
    """
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, id in vocabulary.items():
        if (length := len(token)) > MAX_TOKEN:
            raise UnreadableVocabularyError(
                f"has the token {id} of {length:,} characters; at most {MAX_TOKEN:,} are read"
            )
        known = [
            (left, right)
            for at in range(1, length)
            if (left := token[:at]) in vocabulary and (right := token[at:]) in vocabulary
        ]
        if len(known) > 1:
            known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        score = scores[id]
        found += [(score, len(pair[0]), len(pair[1]), pair) for pair in known]
    found.sort(key=itemgetter(0, 1, 2), reverse=True)
    return [pair for _, _, _, pair in found]


def _split(
    metadata: dict[str, Any], tokens: list[str], *, spell_spaces: bool = False
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the added tokens, and the ids of the vocabulary by token.

    Added tokens whose ids follow the vocabulary's are not in it, as Hugging Face has it for such models.

    Args:
        metadata: Those of the file.
        tokens: The texts of all tokens.
        spell_spaces: Use SentencePiece's spelling for tokens that are user-defined runs of spaces.
    """
    types = listed(metadata, "token_type", int)
    if len(types) != len(tokens):
        raise UnreadableVocabularyError("has a vocabulary without a type for each token")
    if spell_spaces:
        runs = {SPACE * len(token) for token in tokens if not token.strip(" ")} - {*tokens}
        tokens = [
            spelt if kind == USER_DEFINED and (spelt := token.replace(" ", SPACE)) in runs else token
            for token, kind in zip(tokens, types, strict=True)
        ]
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


def _bpe(vocabulary: dict[str, int], merges: Sequence[Sequence[str]]) -> dict[str, Any]:
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


def _check(text: str, added: list[dict[str, Any]]) -> None:
    """Check that the library reads the text of a tokenizer, and gives every added token its id."""
    try:
        read = tokenizers.Tokenizer.from_str(text)
    except BaseException as error:  # the library raises bare Exception, and panics
        if not is_fault(error):
            raise
        raise UnreadableVocabularyError(
            f"has a vocabulary that makes no tokenizer ({str(error)[:MAX_SHOWN]})"
        ) from error
    for token in added:
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
