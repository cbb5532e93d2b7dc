"""Turn the vocabulary of a GGUF file and its special tokens into a `tokenizer.json` and a
`tokenizer_config.json`.

"gpt2" is BPE with merges; a name in the file says how text is cut into words before them (`WORDS`). "llama"
is SentencePiece's BPE, whose merges follow from the scores of the tokens. Tokens that end a text are also
found by their texts, if the file marks them as added ones; not `<|file_sep|>`, and no `</s>` that the
metadata do not name.

Sources: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp for defaults and types;
https://github.com/huggingface/transformers/blob/main/src/transformers/convert_slow_tokenizer.py for merges;
https://github.com/ggml-org/llama.cpp/blob/master/conversion/base.py for the spelling of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import tokenizers

from foredraft.errors import did_you_mean, is_fault, shortened
from foredraft.model.gguf.words import WORDS

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
ENDS = frozenset(
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <end_of_turn> <turn|>"
    " <|endoftext|> <|end_of_text|> <end_of_utterance> <eos> <EOT> _<EOT> [EOT] [EOS] [e~["
    " <\uff5cend\u2581of\u2581sentence\uff5c>".split(" ")
)
# vocabularies with these texts have <|end|> between the parts of a turn
PARTS_OF_TURNS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})


def special_ids(metadata: dict[str, Any]) -> dict[str, int]:
    defaults = SENTENCEPIECE_IDS if metadata.get(f"{KEY}model") == "llama" else {}
    given = {name: metadata.get(KEY + key, defaults.get(name)) for name, key in SPECIAL.items()}
    return {name: id for name, id in given.items() if isinstance(id, int) and id < 2**32 - 1}  # -1: none


def end_ids(metadata: dict[str, Any]) -> list[int]:
    """Return the ids that end a text: the named ones first, then those that are found by their texts."""
    ids = special_ids(metadata)
    named = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    marked = zip(listed(metadata, "tokens", str), listed(metadata, "token_type", int), strict=False)
    found = {
        token: id
        for id, (token, kind) in enumerate(marked)
        if token in ENDS and kind in (CONTROL, USER_DEFINED)
    }
    if any(texts <= found.keys() for texts in PARTS_OF_TURNS):
        found.pop("<|end|>", None)
    return [*dict.fromkeys([*named, *found.values()])]


def listed(metadata: dict[str, Any], key: str, kind: type) -> list[Any]:
    values = metadata.get(KEY + key)
    return values if isinstance(values, list) and all(type(value) is kind for value in values) else []


SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's space
# Characters of a token whose merges are sought: their number of places grows with the square of the length.
MAX_TOKEN = 1_000
MAX_SHOWN = 200  # characters of an error of the library


class UnreadableVocabularyError(Exception):
    """A vocabulary cannot be turned into a tokenizer; its text says why, as the end of a sentence."""


def vocabulary_of(metadata: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the text of `tokenizer.json` and the content of `tokenizer_config.json`."""
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
    return text, _config(metadata, tokens)


def _with_merges(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
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
    added, vocabulary = _split(metadata, tokens, spell_spaces=not words.spells_bytes)
    model = _bpe(vocabulary, pairs)
    if not words.spells_bytes:
        return _text_level(metadata, tokens, added, model, prefix=False, adds_bos=words.adds_bos)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "added_tokens": added,
        "normalizer": None if words.normalizer is None else {"type": words.normalizer},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*_cuts(words.patterns), byte_level, *_cuts(words.byte_patterns)],
        },
        "post_processor": _template(metadata, tokens, adds_bos=words.adds_bos),
        "decoder": byte_level,
        "model": model | {"ignore_merges": words.ignores_merges},
    }


def _cuts(patterns: Sequence[str]) -> list[dict[str, Any]]:
    cut = {"type": "Split", "behavior": "Isolated", "invert": False}
    return [{**cut, "pattern": {"Regex": pattern}} for pattern in patterns]


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
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
    """Return the content of `tokenizer.json` for a vocabulary over text, with bytes for what it lacks."""
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
    """Return the merges of a vocabulary of scored tokens: the highest score of a merged token first."""
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, id in vocabulary.items():
        if (length := len(token)) > MAX_TOKEN:
            problem = f"has the token {id} of {length:,} characters; at most {MAX_TOKEN:,} are read"
            raise UnreadableVocabularyError(problem)
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
        problem = f"has a vocabulary that makes no tokenizer ({str(error)[:MAX_SHOWN]})"
        raise UnreadableVocabularyError(problem) from error
    for token in added:
        if read.token_to_id(token["content"]) != token["id"]:
            problem = f"has a vocabulary in which {shortened(token['content'])} has more than one id"
            raise UnreadableVocabularyError(problem)


def _config(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    ids = special_ids(metadata)
    config: dict[str, Any] = {
        f"{name}_token": tokens[id]
        for name, id in ids.items()
        if name in ("bos", "eos", "unk", "pad") and 0 <= id < len(tokens)
    }
    key = "tokenizer.chat_template"
    named = (name for name in metadata if name.startswith(f"{key}."))
    templates = {"default": metadata[key]} if key in metadata else {}
    templates |= {name.removeprefix(f"{key}."): metadata[name] for name in named}
    if not all(isinstance(text, str) for text in templates.values()):
        raise UnreadableVocabularyError("has a chat template that is not a text")
    if templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config
