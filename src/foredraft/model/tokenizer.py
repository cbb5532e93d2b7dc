"""Encode text to ids and decode ids to text, at once or as a stream, with the `tokenizers` library.

Only the post-processor of `tokenizer.json` adds special tokens to a prompt; a conversation's template writes
them. An id without a token has no text. A `Detokenizer` returns text as soon as no later id can change it.
The text is that of the library, but for an incomplete character at its end, which is left out, and for
invalid runs of more than `MAX_HELD_BYTES` byte tokens, of which only a part becomes U+FFFD.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from foredraft.errors import CheckpointError, Option, RequestError, invalid_at, is_fault, shortened
from foredraft.model.chat import CONFIG, ChatTemplate, Message
from foredraft.model.config import broken, read_json

T = TypeVar("T")

FILE = "tokenizer.json"
# of a model whose folder has none: the problem, and the beginning of a remedy
NO_TOKENIZER = f"this model's folder has no {FILE}"
GIVE_TOKENIZER = "give the folder of the model's tokenizer as ", Option("tokenizer")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
HEX = "0123456789abcdefABCDEF"
BYTE_TOKENS = {f"<0x{high}{low}>": bytes.fromhex(high + low) for high in HEX for low in HEX}
# in a `tokenizer.json`: the tokens within words have a prefix
PREFIXED = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')
CONTEXT = 4  # ids on the left: an incomplete character spans at most 3, and the first token of a text differs
MAX_SHOWN = 200  # characters of an error of the library, which may quote a whole value
PROBE = "The 1st text, \N{LATIN SMALL LETTER E WITH ACUTE}.\n"  # what a tokenizer is tried on at loading
LONG = 16 << 10  # characters from which on a text is read as a batch, beside which other threads run
MAX_HELD_BYTES = 32  # byte tokens that a stream holds back at most: bounds its delay


class Tokenizer:
    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        chat: ChatTemplate | None = None,
        model_vocab_size: int | None = None,
        *,
        digest: str | None = None,
    ) -> None:
        """Wrap a tokenizer of the library, whose truncation and padding are switched off."""
        inner.no_truncation()
        inner.no_padding()
        self._digest = digest
        self.inner = inner  # that of the library, for reading its tables; it must not be changed
        self.chat = chat  # the chat templates; None if the checkpoint has none
        self.model_vocab_size = sys.maxsize if model_vocab_size is None else model_vocab_size
        self.special = frozenset(
            id for id, token in inner.get_added_tokens_decoder().items() if token.special
        )
        self._decoder = inner.decoder
        decoder = None if self._decoder is None else json.loads(self._decoder.__getstate__())
        self.byte_level = has_decoder("ByteLevel", decoder)  # in `BYTE_LEVEL`
        self._byte_fallback = has_decoder("ByteFallback", decoder)

    @classmethod
    def from_folder(
        cls, path: Path, model_vocab_size: int | None = None, *, like: Tokenizer | None = None
    ) -> Tokenizer | None:
        file = Path(path) / FILE
        if not file.is_file():
            return None
        found = cls.from_content(file, file, None, model_vocab_size, like=like)
        _check_added(found.inner, file)
        found.chat = ChatTemplate.from_folder(Path(path))
        return found

    @classmethod
    def from_content(
        cls,
        content: bytes | Path,
        where: Path,
        chat: ChatTemplate | None,
        model_vocab_size: int | None = None,
        *,
        like: Tokenizer | None = None,
    ) -> Tokenizer:
        """Return the tokenizer of the content of a `tokenizer.json`; `where` names it in errors."""
        try:
            content = content if isinstance(content, bytes) else content.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            if like is not None and like.digest == digest:
                inner = like.inner
            else:
                if PREFIXED.search(content):
                    _check_merges(json.loads(content))
                inner = tokenizers.Tokenizer.from_buffer(content)
                inner.decode(inner.encode(PROBE).ids)  # refuses one that always fails
        except BaseException as error:  # the library raises bare Exception, and panics
            if not is_fault(error):
                raise
            raise broken(f"{where} is not a readable tokenizer ({str(error)[:MAX_SHOWN]})") from error
        return cls(inner, chat, model_vocab_size, digest=digest)

    @cached_property
    def digest(self) -> str:
        """A hash of everything about the tokenizer: of its file, or else of its content."""
        return self._digest or hashlib.sha256(self.inner.to_str().encode()).hexdigest()

    @cached_property
    def fingerprint(self) -> str:
        """A hash that two tokenizers share if their ids mean the same; a large one takes seconds."""
        content = json.loads(self.inner.to_str())
        model = content["model"]
        added = sorted((token["id"], token["content"]) for token in content.get("added_tokens") or [])
        parts = [model.get("type"), model.get("vocab"), model.get("merges"), added]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def has_ids_of(self, other: Tokenizer) -> bool:
        return self.digest == other.digest or self.fingerprint == other.fingerprint

    @property
    def size(self) -> int:
        """One more than the largest id of the vocabulary without added tokens; ids below may be unused."""
        added = self.inner.get_added_tokens_decoder()
        ids = self.inner.get_vocab(with_added_tokens=False).values()
        return max((id for id in ids if id not in added), default=-1) + 1

    def has(self, id: int) -> bool:
        return self.inner.id_to_token(id) is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with the special tokens that the post-processor adds unless disabled."""
        ids: list[int] = self.encoding(text, add_special_tokens, places=False).ids
        return ids

    def encoding(
        self, text: str, add_special_tokens: bool = True, *, places: bool = True
    ) -> tokenizers.Encoding:
        """Return the encoding of a text, in which the places of the tokens are right only with `places`."""
        check_unicode(text, "the text")
        options = {"add_special_tokens": add_special_tokens}
        if len(text) < LONG:
            return _called("encode the text", self.inner.encode, text, **options)
        encode = self.inner.encode_batch if places else self.inner.encode_batch_fast
        return _called("encode the text", encode, [text], **options)[0]

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        return self.encode(self.chat_text(messages, **variables), add_special_tokens=False)

    def chat_text(self, messages: Sequence[Message], **variables: Any) -> str:
        if self.chat is None:
            problem = "the model's folder has no chat template"
            remedy = "give a plain prompt, use a chat model, or put a chat_template.jinja into the folder"
            raise RequestError(problem, remedy=remedy)
        return self.chat.render(messages, **variables)

    def decode(self, ids: Iterable[int], after: Sequence[int] = (), *, skip_special: bool = True) -> str:
        """Return the text that `ids` add to that of the ids `after`, without an incomplete character."""
        stream = self.detokenizer(after, skip_special=skip_special)
        return stream.push(ids) + stream.pending()

    def detokenizer(self, after: Sequence[int] = (), *, skip_special: bool = True) -> Detokenizer:
        """Return a stream of the text that further ids add to that of `after`; arguments as in `decode`."""
        return Detokenizer(self, after, skip_special)

    def special_ids(self, texts: Iterable[str]) -> dict[int, str]:
        """Return those of the texts that are special tokens, by their ids."""
        found = {self.inner.token_to_id(text): text for text in texts if invalid_at(text) is None}
        return {id: text for id, text in found.items() if id in self.special}

    def special_within(self, texts: Iterable[str]) -> dict[int, str]:
        """Return the special tokens that one of the texts contains, by their ids."""
        tokens = {id: self.inner.id_to_token(id) or "" for id in self.special}
        return {id: token for id, token in tokens.items() if token and any(token in text for text in texts)}

    def is_visible(self, id: int, skip_special: bool) -> bool:
        """Return whether the id reaches the decoder: it has a token, and is not skipped as special."""
        return not (skip_special and id in self.special) and self.has(id)

    def byte(self, id: int) -> bytes | None:
        return self.byte_of(self.inner.id_to_token(id) or "") if self._byte_fallback else None

    def byte_of(self, token: str) -> bytes | None:
        """Return the byte of a byte token, given by its name; None for any other token."""
        return BYTE_TOKENS.get(token) if self._byte_fallback else None

    def ends_mid_character(self, ids: Iterable[int]) -> bool:
        """Return whether the bytes of visible ids end within a character, which later ids may complete."""
        data = b"".join(token_bytes(self.inner.id_to_token(id) or "") for id in ids)
        return self.byte_level and codecs.utf_8_decode(data, "replace")[1] < len(data)

    def text(self, ids: list[int], skip_special: bool) -> str:
        text: str = _called("decode token ids", self.inner.decode, ids, skip_special_tokens=skip_special)
        return text

    def text_of(self, tokens: list[str]) -> str:
        decode = " ".join if self._decoder is None else self._decoder.decode
        text: str = _called("decode tokens", decode, tokens)
        return text


class Detokenizer:
    """The text of a growing sequence of ids, piece by piece, of a window of the latest ids.

    An incomplete character decodes to U+FFFD until its last bytes come. The library decodes a run of byte
    tokens as a whole: one invalid byte turns all into U+FFFD. So a run is held back until it ends, becomes
    invalid, or is `MAX_HELD_BYTES` long and at the end of a character; what follows counts as a run of its
    own.
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int], skip_special: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._window: list[int] = []
        self._emitted = 0  # characters of the window's text
        self._run: bytes | None = b""  # of the byte tokens that end the window; None when they are invalid
        self._run_emitted = 0  # bytes of the run whose text has been returned
        self._prompt_tails: tuple[str, ...] = ()  # of `after`: the end of its text that is not certain yet
        self.push(self._context(after))
        if self._held_back() and not self._incomplete():
            self._emit_run()
        # as it reads if what follows breaks the character at its end, and if it completes it
        self._prompt_tails = self._rest(), self.pending()

    def push(self, ids: Iterable[int]) -> str:
        """Add ids, and return the further text that no later id can change."""
        pieces = []
        for id in ids:
            piece = self._push(id)
            if piece and self._prompt_tails:
                piece, self._prompt_tails = self._without_prompt(piece), ()
            pieces.append(piece)
        return "".join(pieces)

    def pending(self) -> str:
        """Return the rest of the text if it ends here: the complete characters that are held back."""
        if self._held_back() == 0:
            return ""
        text = self._text(self._window[: len(self._window) - self._incomplete()])[self._emitted :]
        return self._without_prompt(text)

    def _context(self, after: Sequence[int]) -> list[int]:
        """Return the last ids of `after` that affect what follows: a few visible ids, and whole runs."""
        context: list[int] = []
        for id in reversed(after):
            if len(context) >= CONTEXT and self._tokenizer.byte(context[-1]) is None:
                break
            if self._tokenizer.is_visible(id, self._skip_special):
                context.append(id)
        return context[::-1]

    def _without_prompt(self, text: str) -> str:
        return text[len(next(filter(text.startswith, self._prompt_tails), "")) :]

    def _push(self, id: int) -> str:
        if not self._tokenizer.is_visible(id, self._skip_special):
            return ""
        byte = self._tokenizer.byte(id)
        if byte is None:
            if self._incomplete():
                self._emitted = self._emitted_of_invalid_run()
            self._run, self._run_emitted = b"", 0
        elif self._run is None:
            return REPLACEMENT  # the library decodes each further byte of an invalid run to U+FFFD
        self._window.append(id)
        if byte is not None:
            self._run += byte
            try:
                incomplete = self._incomplete()
            except UnicodeDecodeError:
                self._emitted, self._run = self._emitted_of_invalid_run(), None
            else:
                return "" if incomplete or self._held_back() < MAX_HELD_BYTES else self._emit_run()
        text = self._text(self._window)
        unfinished = text.endswith(REPLACEMENT) and self._tokenizer.ends_mid_character(self._window)
        certain = len(text) - unfinished
        piece, self._emitted = text[self._emitted : certain], certain
        if byte is None and len(self._window) > 2 * CONTEXT:
            self._window = self._window[-CONTEXT:]
            # a decoder resynchronises within one character, so both texts have the same end
            self._emitted += len(self._text(self._window)) - len(text)
        return piece

    def _rest(self) -> str:
        emitted = self._emitted_of_invalid_run() if self._incomplete() else self._emitted
        return self._text(self._window)[emitted:]

    def _held_back(self) -> int:
        return 0 if self._run is None else len(self._run) - self._run_emitted

    def _incomplete(self) -> int:
        """Return the bytes of an incomplete character at the end of the run, which are as many ids."""
        return 0 if self._run is None else len(self._run) - codecs.utf_8_decode(self._run)[1]

    def _emitted_of_invalid_run(self) -> int:
        """Return `_emitted` for an invalid run, whose bytes all decode to U+FFFD, emitted ones too."""
        if not self._run_emitted:
            return self._emitted
        return len(self._text(self._window[: -len(self._run or b"")])) + self._run_emitted

    def _emit_run(self) -> str:
        """Return the text of the run so far, and keep only its last part as context for what follows."""
        piece, run = self._text(self._window)[self._emitted :], self._run or b""
        start = len(self._window) - len(run)
        del self._window[start : start + self._run_emitted]
        self._run = run[self._run_emitted :]
        self._run_emitted, self._emitted = len(self._run), len(self._text(self._window))
        return piece

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.text(ids, self._skip_special)


def check_unicode(text: str, name: str) -> None:
    at = invalid_at(text)
    if at is not None:
        raise RequestError(f"{name} is not valid Unicode at character {at}", remedy="give it as UTF-8")


def _called(task: str, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Return a result of the library, whose faults are errors of the request; Ctrl-C stays what it is."""
    try:
        return function(*arguments, **options)
    except BaseException as error:  # the library raises bare Exception, and panics
        if not is_fault(error):
            raise
        problem = f"the model's tokenizer cannot {task} ({str(error)[:MAX_SHOWN]})"
        remedy = "its tokenizer.json is broken: download it again"
        raise RequestError(problem, remedy=remedy) from error


def _check_merges(content: Any) -> None:
    """Check the merges of BPE with a prefix: the library cuts it off each right part, present or not.

    So a merge gives another token than the file says; cut within a character, the library ends the process.
    """
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        return
    prefix = model.get("continuing_subword_prefix") or ""
    for merge in model.get("merges") or ():
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if len(parts) != 2 or not str(parts[1]).startswith(prefix):
            raise ValueError(f"has the merge {merge!r}, whose second part lacks the prefix {prefix!r}")


def _check_added(inner: tokenizers.Tokenizer, file: Path) -> None:
    """Check that tokenizer.json has its config's added tokens; transformers would add them to other ids."""
    config = file.with_name(CONFIG)
    listed = (read_json(config) if config.is_file() else {}).get("added_tokens_decoder") or {}
    added = {str(id): token.content for id, token in inner.get_added_tokens_decoder().items()}
    for id, token in listed.items() if isinstance(listed, dict) else [("", listed)]:
        content = token.get("content") if isinstance(token, dict) else None
        if not isinstance(content, str):
            raise broken(f"{config}: added_tokens_decoder holds {shortened(token)}, which is not a token")
        if added.get(id) != content:
            raise CheckpointError(
                f"{file} has no added token {shortened(content)} with the id {id}, but {config} lists it"
                " (added_tokens_decoder)",
                remedy="take both files from one tokenizer",
            )


def has_decoder(kind: str, decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    return decoder["type"] == kind or any(has_decoder(kind, part) for part in decoder.get("decoders", ()))


# the byte of each character of a byte-level vocabulary, as GPT-2 has it: some characters from U+0100 on
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_LEVEL = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(OTHERS)}


def token_bytes(token: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary; an added token may be plain text instead."""
    try:
        return bytes(map(BYTE_LEVEL.__getitem__, token))
    except KeyError:
        return token.encode()
