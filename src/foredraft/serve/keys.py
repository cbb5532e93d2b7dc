"""API keys: compared in constant time, by their digests.

A line of the file is a key, or a name and a key. Logs, traces and limits know keys by their names.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from contextlib import suppress

from foredraft.errors import ConfigError
from foredraft.serve import records
from foredraft.serve.problems import Problem
from foredraft.serve.settings import Settings

__all__ = ["Keys"]

VARIABLE = "FOREDRAFT_API_KEY"  # of the environment; several keys are separated by commas


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
                self._names.append(name[0] if name else f"key {place}")

    def __bool__(self) -> bool:
        return bool(self._digests)

    @classmethod
    def of(cls, settings: Settings) -> Keys:
        """Return the keys of the file and of the environment.

        Raises:
            ConfigError: The file cannot be read, or has no key.
        """
        keys = [key.strip() for key in os.environ.get(VARIABLE, "").split(",") if key.strip()]
        if (file := settings.api_key_file) is not None:
            try:
                lines = file.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    "which cannot be read", option="api_key_file", value=str(file), remedy="give a text file"
                ) from error
            found = [line.strip() for line in lines if line.strip()]
            if not found:
                raise ConfigError(
                    "which has no key", option="api_key_file", value=str(file), remedy="write one key a line"
                )
            keys += found
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
        records.current().key = name = self._names[matches.index(True)]
        return name


def _spellings(key: str) -> list[bytes]:
    """Return the bytes that clients may write into a header for a key: two where it is not ASCII."""
    found = [key.encode()]
    with suppress(UnicodeEncodeError):
        found.append(key.encode("latin-1"))
    return found
