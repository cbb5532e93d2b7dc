"""Text <-> ids, over the `tokenizers` library, and text as it grows.

Contract: BOS and EOS are added as the `tokenizer.json`'s own post-processor says, never by rules of ours. A
`Detokenizer` shows text as soon as later ids can no longer change it: an incomplete UTF-8 tail is held back.
Its pieces join to the decoding of all ids at once, however the ids were pushed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from foredraft.errors import CheckpointError

FILE = "tokenizer.json"
UNDECODED = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """The tokenizer of a checkpoint folder."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.vocab_size: int = inner.get_vocab_size()
        self.fingerprint = _fingerprint(json.loads(inner.to_str()))

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer | None:
        """The folder's tokenizer, or None where it has none."""
        file = Path(path) / FILE
        if not file.is_file():
            return None
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(
                f"{file} is not a readable tokenizer ({error}); download it again"
            ) from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def token_text(self, id: int) -> str | None:
        """The vocabulary's own spelling of a token, or None where it has no such id."""
        token: str | None = self._inner.id_to_token(id)
        return token

    def token_id(self, text: str) -> int | None:
        """The id of a token in the vocabulary's own spelling."""
        token: int | None = self._inner.token_to_id(text)
        return token

    def detokenizer(self, skip_special: bool = True) -> Detokenizer:
        return Detokenizer(self, skip_special)


class Detokenizer:
    """Text of a growing sequence of ids.

    Only a window of ids is decoded at each push: from `_anchor`, whose text up to `_shown` ids was given out
    already and stands in as left context (decoders treat the first token of a text differently).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []  # from the anchor on
        self._shown = 0  # how many of them are out
        self._context = ""  # their text

    def push(self, ids: Iterable[int]) -> str:
        """Add ids; the text that is certain now and was not before."""
        return "".join([self._push(id) for id in ids])

    def flush(self) -> str:
        """The rest, an incomplete character as U+FFFD; nothing may be pushed after it."""
        text = self._decode(self._ids)
        rest = text[len(self._context) :]
        self._ids, self._shown, self._context = [], 0, ""
        return rest

    def _push(self, id: int) -> str:
        self._ids.append(id)
        text = self._decode(self._ids)
        if text.endswith(UNDECODED) or not text.startswith(self._context) or len(text) == len(self._context):
            return ""
        new = text[len(self._context) :]
        # the ids just shown become the next window's left context, if they have a text of their own
        context = self._decode(self._ids[self._shown :])
        if context and not context.startswith(UNDECODED):
            self._ids = self._ids[self._shown :]
            text = context
        self._shown, self._context = len(self._ids), text
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)


def _fingerprint(content: dict[str, Any]) -> str:
    """A hash of what makes ids mean the same: vocabulary, merges and added tokens."""
    model = content["model"]
    added = sorted((token["id"], token["content"]) for token in content.get("added_tokens") or [])
    parts = [model.get("type"), model.get("vocab"), model.get("merges"), added]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
