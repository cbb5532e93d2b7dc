"""The file of recent texts: written whole, believed only if nothing in it is damaged.

The first line has the format and the SHA-256 of all that follows: a JSON object in a line, with the
vocabulary of the token ids and the scope and the length of each text, the oldest first, and then the token
ids, as int32 in little-endian order. Texts are private, so other users may not read the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foredraft.drafters.recent_texts import Text
from foredraft.errors import ConfigError
from foredraft.files import check_place, is_no_file, write_whole
from foredraft.model.unread import Checkpoint

__all__ = ["TextsFile"]

FORMAT = b"foredraft texts 1 "  # with which the first line begins
OPTION = "texts_file"  # whose value the file is
IDS = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class TextsFile:
    """Where texts are kept between runs.

    Attributes:
        path: The file; None for none.
        tokenizer: Digest of the tokenizer; None without one.
        size: Ids of the vocabulary.
    """

    path: Path | None
    tokenizer: str | None
    size: int

    @classmethod
    def of(cls, target: Checkpoint, path: Path | None) -> TextsFile:
        """Return the file of a target's texts."""
        tokenizer = None if target.tokenizer is None else target.tokenizer.digest
        return cls(path, tokenizer, target.spec.vocab_size)

    def read(self) -> list[Text]:
        """Return the texts of the file, the oldest first; none where there is no file yet.

        Raises:
            ConfigError: It is damaged, of another tokenizer, or cannot be read or written.
        """
        if self.path is None:
            return []
        check_place(self.path, OPTION)
        if not self.path.exists():
            return []
        if is_no_file(self.path):
            raise self._refused("which is no file", "give another one")
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise self._refused(f"which cannot be read ({error.strerror})", "give another one") from error
        return self._unpacked(content)

    def write(self, texts: Seq[Text], path: Path | None = None) -> None:
        """Write texts to the file, or to another one, in place of what it has.

        Raises:
            ConfigError: It cannot be written, or there is none.
        """
        file = path or self.path
        if file is None:
            raise ConfigError("the texts have no file", remedy=f"give one here, or to load as {OPTION}")
        write_whole(file, self._packed(texts), OPTION, private=True)

    def _packed(self, texts: Seq[Text]) -> bytes:
        body = b"".join(np.array(text.tokens, dtype=IDS).tobytes() for text in texts)
        about = {
            "tokenizer": self.tokenizer,
            "vocabulary": self.size,
            "texts": [[text.scope.hex(), len(text.tokens)] for text in texts],
        }
        rest = json.dumps(about).encode() + b"\n" + body
        return FORMAT + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest

    def _unpacked(self, content: bytes) -> list[Text]:
        head, _, rest = content.partition(b"\n")
        if not head.startswith(FORMAT):
            raise self._refused("which is no file of texts", "give another one, or remove it")
        if head != FORMAT + hashlib.sha256(rest).hexdigest().encode():
            raise self._refused("which is damaged", "remove it, or give another one")
        line, _, body = rest.partition(b"\n")
        about = json.loads(line)
        if (about["tokenizer"], about["vocabulary"]) != (self.tokenizer, self.size):
            raise self._refused("whose texts are of another tokenizer", "give another one, or remove it")
        counts = [count for _, count in about["texts"]]
        parts = np.split(np.frombuffer(body, IDS), np.cumsum(counts, dtype=np.int64))
        scopes = [bytes.fromhex(scope) for scope, _ in about["texts"]]
        return [Text(scope, part.tolist()) for scope, part in zip(scopes, parts, strict=False)]

    def _refused(self, problem: str, remedy: str) -> ConfigError:
        return ConfigError(problem, option=OPTION, value=str(self.path), remedy=remedy)
