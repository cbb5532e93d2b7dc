"""Text <-> ids, over the `tokenizers` library, and text as it grows.

Contract: BOS and EOS are added as the `tokenizer.json`'s own post-processor says, never by rules of ours; to
a conversation none is added, since its template writes them. An id that has no token (a model's vocabulary is
often padded beyond its tokenizer's) has no text. A
`Detokenizer` shows text as soon as later ids can no longer change it, and never waits for more than a bounded
number of them. `Tokenizer.decode` pushes its ids through one, so pieces join to the decoded text however the
ids were pushed; and that text is the library's own, save where a run of more than `LONGEST_RUN` byte tokens
turns out to be invalid.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from foredraft.errors import CheckpointError, RequestError
from foredraft.model.chat import CONFIG, ChatTemplate, Message
from foredraft.model.config import read_json, shortened

FILE = "tokenizer.json"
UNDECODED = "\N{REPLACEMENT CHARACTER}"
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# An incomplete character spans 3 ids at most; one more is left context (decoders treat a text's first token
# differently).
CONTEXT = 4
LONGEST_RUN = 32


class Tokenizer:
    """The tokenizer of a checkpoint folder.

    chat: its template for conversations, where it has one. vocabulary: ids of the model that it is for; added
    tokens may have ids beyond them, which that model neither reads nor says.
    """

    def __init__(
        self, inner: tokenizers.Tokenizer, chat: ChatTemplate | None = None, vocabulary: int | None = None
    ) -> None:
        inner.no_truncation()
        inner.no_padding()
        content = json.loads(inner.to_str())
        self._inner = inner
        self.chat = chat
        self.vocabulary = sys.maxsize if vocabulary is None else vocabulary
        self._special = {id for id, token in inner.get_added_tokens_decoder().items() if token.special}
        self._byte_fallback = _has("ByteFallback", content.get("decoder"))
        self._byte_level = _has("ByteLevel", content.get("decoder"))
        self.fingerprint = _fingerprint(content)

    @classmethod
    def from_folder(cls, path: Path, vocabulary: int | None = None) -> Tokenizer | None:
        """The folder's tokenizer, or None where it has no `tokenizer.json`. Raises CheckpointError."""
        file = Path(path) / FILE
        if not file.is_file():
            return None
        try:
            inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(
                f"{file} is not a readable tokenizer ({error}); download it again"
            ) from error
        _check_added(inner, file)
        return cls(inner, ChatTemplate.from_folder(Path(path)), vocabulary)

    @property
    def size(self) -> int:
        """One more than the largest id of a piece, added tokens aside; ids below it may have none."""
        added = self._inner.get_added_tokens_decoder()
        ids = self._inner.get_vocab(with_added_tokens=False).values()
        return max((id for id in ids if id not in added), default=-1) + 1

    def has(self, id: int) -> bool:
        """Whether the id has a token."""
        return self._inner.id_to_token(id) is not None

    @property
    def inner(self) -> tokenizers.Tokenizer:
        """The library's own object, to read its tables from; nobody changes it."""
        return self._inner

    @property
    def special(self) -> frozenset[int]:
        """Ids that stand for no text."""
        return frozenset(self._special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """The ids of a conversation, as `ChatTemplate.render` spells it; variables: what it takes.

        Raises RequestError: there is no template, or what `render` raises.
        """
        if self.chat is None:
            raise RequestError(
                "the model's folder has no chat template; give a plain prompt, use a model that was trained"
                " to chat, or put its chat_template.jinja into the folder"
            )
        return self.encode(self.chat.render(messages, **variables), add_special_tokens=False)

    def decode(self, ids: Iterable[int], after: Sequence[int] = (), *, skip_special: bool = True) -> str:
        """The text that `ids` add to that of `after`, the ids before them."""
        stream = self.detokenizer(after, skip_special=skip_special)
        return stream.push(ids) + stream.flush()

    def detokenizer(self, after: Sequence[int] = (), *, skip_special: bool = True) -> Detokenizer:
        """A stream of the text that ids add to that of `after`."""
        return Detokenizer(self, after, skip_special)

    def special_id(self, text: str) -> int | None:
        """The id of the special token that reads so."""
        id = self._inner.token_to_id(text)
        return id if id in self._special else None

    def shows(self, id: int, skip_special: bool) -> bool:
        """Whether the decoder gets to see the id."""
        return not (skip_special and id in self._special) and self.has(id)

    def byte(self, id: int) -> bytes | None:
        """The byte that an id stands for in a vocabulary that spells unknown characters as bytes."""
        if not self._byte_fallback:
            return None
        spelled = BYTE.fullmatch(self._inner.id_to_token(id) or "")
        return bytes.fromhex(spelled[1]) if spelled else None

    def cuts(self, ids: Iterable[int]) -> bool:
        """Whether the bytes of ids that show end within a character, which later ids may complete."""
        if not self._byte_level:
            return False
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for id in ids:
            decoder.decode(_bytes(self._inner.id_to_token(id) or ""))
        return bool(decoder.getstate()[0])

    def text(self, ids: list[int], skip_special: bool) -> str:
        """The library's decoding of some ids as a whole text."""
        text: str = self._inner.decode(ids, skip_special_tokens=skip_special)
        return text


class Detokenizer:
    """Text of a growing sequence of ids.

    Only a window of the latest ids is decoded at each push; characters of its text up to `_shown` are out.
    Two kinds of text may still change. A character cut off at the end reads U+FFFD until its last byte comes;
    one that is invalid, or is U+FFFD, reads so for good.
    And the library decodes a run of byte tokens as a whole: one bad byte turns every byte of the run into
    U+FFFD. So a run is held back until it ends or breaks, or is long and at a character's end; then what
    follows counts as a run of its own.
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._window: list[int] = []
        self._shown = 0
        self._head = 0  # where in the window the run of bytes begins
        self._cut = 0  # how many ids of the run are out
        self._run: codecs.IncrementalDecoder | None = None  # None outside of runs
        self._broken = False
        self._given = ""  # what `after` itself shows of a character that it leaves incomplete
        self.push(self._suffix(after))
        if self._held() and not self._incomplete():
            self._cut_run()
        self._given = self._rest()

    def push(self, ids: Iterable[int]) -> str:
        """Add ids; the text that is certain now and was not before."""
        return "".join([self._added(self._push(id)) for id in ids])

    def flush(self) -> str:
        """The rest, an incomplete character as U+FFFD; nothing may be pushed after it."""
        return self._added(self._rest())

    def pending(self) -> str:
        """The whole characters that are held back: the rest of the text if it ended now, but for a character
        cut off at its end."""
        if self._held() == 0:
            return ""
        assert self._run is not None
        partial = len(self._run.getstate()[0])
        text = self._text(self._window[: len(self._window) - partial])[self._shown :]
        return text.removeprefix(self._given)

    def _suffix(self, after: Sequence[int]) -> list[int]:
        """The end of `after` that decides what follows: a few ids that show, no run of bytes cut in two."""
        suffix: list[int] = []
        for id in reversed(after):
            if len(suffix) >= CONTEXT and self._tokenizer.byte(suffix[-1]) is None:
                break
            if self._tokenizer.shows(id, self._skip_special):
                suffix.append(id)
        return suffix[::-1]

    def _added(self, piece: str) -> str:
        """A piece less what `after` shows of it."""
        if piece and self._given:
            piece, self._given = piece.removeprefix(self._given), ""
        return piece

    def _push(self, id: int) -> str:
        if not self._tokenizer.shows(id, self._skip_special):
            return ""
        byte = self._tokenizer.byte(id)
        if byte is None:
            self._end_run()
        elif self._run is None:
            self._run = codecs.getincrementaldecoder("utf-8")()
            self._head = len(self._window)
        elif self._broken:
            return UNDECODED  # as the library shows each further byte of the run
        self._window.append(id)
        if byte is not None and not self._breaks(byte):
            if self._held() < LONGEST_RUN or self._incomplete():
                return ""
            return self._cut_run()
        text = self._text(self._window)
        certain = len(text) - (text.endswith(UNDECODED) and self._tokenizer.cuts(self._window))
        piece, self._shown = text[self._shown : certain], certain
        if byte is None and len(self._window) > 2 * CONTEXT:
            self._window = self._window[-CONTEXT:]
            # a decoder finds back into step within a character, so both texts end alike
            self._shown += len(self._text(self._window)) - len(text)
        return piece

    def _rest(self) -> str:
        shown = self._spoiled() if self._incomplete() else self._shown
        return self._text(self._window)[shown:]

    def _held(self) -> int:
        """How many ids of a valid run are held back."""
        return 0 if self._run is None or self._broken else len(self._window) - self._head - self._cut

    def _incomplete(self) -> bool:
        """Whether the run of bytes ends within a character."""
        return self._run is not None and not self._broken and bool(self._run.getstate()[0])

    def _breaks(self, byte: bytes) -> bool:
        """Take the run's next byte; whether it makes the run invalid."""
        assert self._run is not None
        try:
            self._run.decode(byte)
        except UnicodeDecodeError:
            self._break()
        return self._broken

    def _break(self) -> None:
        self._broken, self._shown = True, self._spoiled()

    def _spoiled(self) -> int:
        """`_shown` in an invalid run: the library decodes each byte as U+FFFD, also those that are out."""
        return len(self._text(self._window[: self._head])) + self._cut if self._cut else self._shown

    def _end_run(self) -> None:
        if self._incomplete():
            self._break()
        self._run, self._cut, self._broken = None, 0, False

    def _cut_run(self) -> str:
        """Show the run so far; as context for what follows, only its last stretch stays."""
        text = self._text(self._window)
        piece = text[self._shown :]
        stretch = self._window[self._head + self._cut :]
        self._window[self._head :] = stretch
        self._cut = len(stretch)
        self._shown = len(self._text(self._window))
        return piece

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.text(ids, self._skip_special)


def _check_added(inner: tokenizers.Tokenizer, file: Path) -> None:
    """Refuse a file that lacks added tokens of its config: transformers would add them, and ids differ."""
    config = file.with_name(CONFIG)
    listed = (read_json(config) if config.is_file() else {}).get("added_tokens_decoder") or {}
    added = {str(id): token.content for id, token in inner.get_added_tokens_decoder().items()}
    for id, token in listed.items() if isinstance(listed, dict) else [("", listed)]:
        content = token.get("content") if isinstance(token, dict) else None
        if not isinstance(content, str):
            raise CheckpointError(
                f"{config}: added_tokens_decoder holds {shortened(token)}, which is no token; download it"
                " again"
            )
        if added.get(id) != content:
            raise CheckpointError(
                f"{file} has no added token {shortened(content)} with the id {id}, but {config} lists it"
                " (added_tokens_decoder); take both files from one tokenizer"
            )


def _has(kind: str, decoder: dict[str, Any] | None) -> bool:
    """Whether a decoder is of a kind, or has a part that is."""
    if decoder is None:
        return False
    return decoder["type"] == kind or any(_has(kind, part) for part in decoder.get("decoders", ()))


def _byte_level_table() -> dict[str, int]:
    """The character that stands for each byte: itself where it shows, else the next from U+0100 on (GPT-2,
    https://github.com/openai/gpt-2/blob/master/src/encoder.py)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(rest)}


BYTE_LEVEL = _byte_level_table()


def _bytes(token: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary; one that was added may not be spelled in the table."""
    spelled = [BYTE_LEVEL.get(character) for character in token]
    return token.encode() if None in spelled else bytes(byte for byte in spelled if byte is not None)


def _fingerprint(content: dict[str, Any]) -> str:
    """A hash of what makes ids mean the same: vocabulary, merges and added tokens."""
    model = content["model"]
    added = sorted((token["id"], token["content"]) for token in content.get("added_tokens") or [])
    parts = [model.get("type"), model.get("vocab"), model.get("merges"), added]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
