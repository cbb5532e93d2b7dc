"""The special tokens of a GGUF file: their ids, and the tokens that end a text.

Contract: metadata name few of the tokens that end a text, so tokens are also found by the texts that models
use for the end of a turn or of a document. Such a token counts only where the file marks it as an added one.
Tokens that separate files, as in `<|file_sep|>`, end nothing here, and neither does a `</s>` that the
metadata do not name, because Gemma has it for HTML. In llama.cpp both end a text.

Source: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp (`special_eog_ids`).
"""

from __future__ import annotations

from typing import Any

__all__ = ["CONTROL", "KEY", "UNKNOWN", "UNUSED", "USER_DEFINED", "end_ids", "listed", "special_ids"]

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
    """Return the ids of the special tokens by the keys of `SPECIAL`."""
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
    """Return a list of values of one type; an empty one where the metadata have none."""
    values = metadata.get(KEY + key)
    return values if isinstance(values, list) and all(type(value) is kind for value in values) else []
