"""The text of ids by its definition: the library decodes all of them at once."""

from __future__ import annotations

import codecs
import contextlib

from foredraft.model.tokenizer import REPLACEMENT, Tokenizer


def decoded(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> str:
    """Return the text of ids without a character at its end whose last bytes are missing."""
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
