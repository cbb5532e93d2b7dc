"""API keys: compared in constant time, by their digests.

A line of the file is a key, or a name and a key; `#` begins a comment, at the beginning of a line and between
spaces. Logs, traces, limits, shares and the prefix cache know keys by their names: keys of one name are one
client. Where a file or the variable is given, there must be a key in it: otherwise a mistake would open the
server.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from contextlib import suppress
from pathlib import Path

from foredraft.errors import ConfigError
from foredraft.serve import request_records
from foredraft.serve.problems import Problem
from foredraft.serve.settings import Settings

__all__ = ["Keys"]

VARIABLE = "FOREDRAFT_API_KEY"  # of the environment; several keys are separated by commas
COMMENT = re.compile(r"(^|\s+)#(\s.*)?$")
UNNAMED = re.compile(r"key [0-9]+(?=\s+\S+$)")  # the name of a key that was given none, before a key


class Keys:
    """The keys that a server takes; without any it asks for none.

    Args:
        lines: Each a key, or a name and a key.
    """

    def __init__(self, lines: list[str]) -> None:
        self._digests: list[bytes] = []
        self._names: list[str] = []
        for place, line in enumerate(lines):
            *name, key = line.rsplit(maxsplit=1)
            for spelling in _spellings(key):
                self._digests.append(hashlib.sha256(spelling).digest())
                self._names.append(name[0].strip() if name else f"key {place}")

    def __bool__(self) -> bool:
        return bool(self._digests)

    @classmethod
    def of(cls, settings: Settings) -> Keys:
        """Return the keys of the file and of the environment.

        Raises:
            ConfigError: The file cannot be read, one of the two is given and has no key, or a name is taken.
        """
        keys: list[str] = []
        if (variable := os.environ.get(VARIABLE)) is not None:
            keys = [key.strip() for key in variable.split(",") if key.strip()]
            if not keys:
                raise ConfigError(
                    f"the environment variable {VARIABLE} is set, but has no key",
                    remedy="write keys into it, or unset it to ask for none",
                )
        if settings.api_key_file is not None:
            keys += _read(settings.api_key_file)
        for key in keys:
            if found := UNNAMED.match(key):
                raise ConfigError(
                    f"an API key is named {found[0].strip()!r}, as keys without a name are called",
                    remedy="give another name",
                )
        return cls(keys)

    def check(self, authorization: str | None, key: str | None = None) -> str:
        """Check the header `Authorization`, or a key that came in another header.

        Return a name of the key for limits, never the key itself; "" where the server asks for none.

        Raises:
            Problem: The key is missing or wrong.
        """
        if not self._digests:
            return ""
        scheme, _, bearer = (authorization or "").partition(" ")
        if key is None and scheme.lower() == "bearer":
            key = bearer
        # ASGI hands the bytes of a header over as Latin-1.
        digest = hashlib.sha256((key or "").strip(" \t").encode("latin-1", "replace")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if key is None or not any(matches):
            raise Problem(
                401, "the API key is missing or wrong; send Authorization: Bearer KEY",
                code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        request_records.current().key = name = self._names[matches.index(True)]
        return name


def _read(file: Path) -> list[str]:
    """Return the lines of a file that have keys, without comments.

    Raises:
        ConfigError: It cannot be read, has no key, or has a line that can be read in two ways.
    """

    def refused(problem: str, remedy: str) -> ConfigError:
        return ConfigError(problem, option="api_key_file", value=str(file), remedy=remedy)

    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()  # editors of Windows begin with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise refused("which cannot be read", "give a text file in UTF-8") from error
    found = []
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("#") or not (rest := COMMENT.sub("", line).strip()):
            continue
        if re.search(r"\s#", rest):
            remedy = "write a comment as ' # ...', and give keys that do not begin with #"
            raise refused(f"which has a # before a letter in line {number}", remedy)
        found.append(rest)
    if not found:
        raise refused("which has no key", "write one key a line, or leave the option out to ask for none")
    return found


def _spellings(key: str) -> list[bytes]:
    """Return the bytes that clients may write into a header for a key: two where it is not ASCII."""
    found = [key.encode()]
    with suppress(UnicodeEncodeError):
        found.append(key.encode("latin-1"))
    return found
