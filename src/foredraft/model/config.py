"""Read a JSON object of a checkpoint strictly: no key is overlooked.

Contract: `ConfigReader` records the keys that its caller reads, and gives the others. `reject_unknown_keys`
refuses them by name and value; for a `config.json`, `reference.py` decides. Only `spec.py`, `families/`,
`rope_config.py` and the files of `quantisation` know what a key means.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError, shortened
from foredraft.files import NO_FILE, is_no_file

DOWNLOAD_AGAIN = "download it again"  # the remedy for a broken or incomplete file
MAX_FLOAT = sys.float_info.max
MAX_DEPTH = 50  # objects and lists within each other in a JSON file; no file of a checkpoint has ten
MAX_FILE_NAME = 255  # bytes, on all common file systems
NO_DEFAULT = object()  # of a key that must be there


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint.

    Raises:
        CheckpointError: The file cannot be read, or does not hold a JSON object.
    """
    try:
        if is_no_file(path):
            raise OSError(NO_FILE)
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error})", remedy=DOWNLOAD_AGAIN) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object", remedy=DOWNLOAD_AGAIN)
    return content


# Sizes beyond those of any model that a machine can hold: refused before anything is made of that size.
MOST = {
    "hidden_size": 2**18,
    "intermediate_size": 2**20,
    "vocab_size": 2**24,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
}
MAX_WIDTH = 2**19  # of all query heads together
MAX_KEY_WIDTH = 2**15  # of all key heads together


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: The text is not JSON, or nests lists and objects more than MAX_DEPTH deep. Deeper values
            could be parsed, but not printed, compared or copied.
    """
    too_deep = ValueError(f"lists and objects are nested more than {MAX_DEPTH} deep")
    try:
        value = json.loads(text)
    except RecursionError:
        raise too_deep from None
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        nested = [each for each in level if isinstance(each, list | dict)]
        level = [item for each in nested for item in (each.values() if isinstance(each, dict) else each)]
        if not nested:
            return value
    raise too_deep


def is_file_name(text: str) -> bool:
    """Return whether a text can be the name of a file within a folder."""
    return Path(text).name == text and len(text.encode("utf-8", "replace")) <= MAX_FILE_NAME


def _as_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


class ConfigReader:
    """Read the keys of a JSON object, check their values, and record which keys were read.

    A default replaces a key that is absent, not a key that is null: null is a value like any other, and most
    keys refuse it. A null key that is never read counts as absent.

    Attributes:
        config: The JSON object.
        where: Its name in error messages.
        harmless: Keys that need not be read.
        spelled: Keys that the object may spell otherwise, as `transformers` reads it too -> that spelling.
        seen: Keys that were read.
        ignored: Keys that were found to change nothing, with their values.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        where: str = "config.json",
        harmless: frozenset[str] = frozenset(),
        spelled: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config
        self.where = where
        self.harmless = harmless
        self.spelled = spelled or {}
        self.seen: set[str] = set()
        self.ignored: dict[str, object] = {}

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, unchecked, and record the key as read."""
        own = self.key(key)
        self.seen |= {key, own}
        if own != key and key in self.config and self.config[key] != self.config[own]:
            raise CheckpointError(
                f"{self.where}: {key} is {shortened(self.config[key])}",
                remedy=f"{own} is {shortened(self.config[own])}; keep one of them",
            )
        return self.config.get(own, default)

    def key(self, key: str) -> str:
        """Return a key as the object spells it."""
        own = self.spelled.get(key, key)
        return own if own in self.config else key

    def set_default(self, key: str, default: Any) -> None:
        """Give a key a value if it is absent, in both spellings."""
        if self.key(key) not in self.config:
            self.config = {**self.config, key: default}

    def section(self, key: str) -> ConfigReader | None:
        """Return a reader of the JSON object under a key; None if it is absent, null or empty."""
        value = self.take(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, "it must be a JSON object or null")
        return ConfigReader(value, f"{self.where}, {key}") if value else None

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_FLOAT:
            raise self.error(key, "it must be a finite number above 0")
        return float(value)

    def count(
        self, key: str, default: int | None = None, *, if_null: int | None = None, allow_zero: bool = False
    ) -> int:
        """Return a whole number above 0.

        Args:
            key: The key.
            default: The value of an absent key.
            if_null: The value of a null key; None refuses null.
            allow_zero: Accept 0 too.
        """
        value = self.take(key, default)
        if value is None and if_null is not None:
            return if_null
        if allow_zero and value == 0 and not isinstance(value, bool):
            return 0
        value, most = self.number(key, default), MOST.get(key, 2**31 - 1)
        if value != int(value) or value > most:
            raise self.error(key, f"it must be a whole number, at most {most:,}")
        return int(value)

    def optional_number(
        self, key: str, default: float | None = None, *, zero_is_null: bool = False
    ) -> float | None:
        """Return a finite number above 0; None for null and, with `zero_is_null`, for 0."""
        value = self.take(key, default)
        return None if value is None or (zero_is_null and value == 0) else self.number(key, default)

    def flag(self, key: str, default: bool = False, *, if_null: bool | None = None) -> bool:
        """Return true or false; `if_null` is the value of a null key, and None refuses null."""
        value = self.take(key, default)
        if value is None and if_null is not None:
            return if_null
        if not isinstance(value, bool):
            raise self.error(key, "it must be true or false")
        return value

    def choice(self, key: str, accepted: Sequence[Any], default: Any = NO_DEFAULT) -> Any:
        """Return a value that equals an accepted one, in type too; without a default, it must be there."""
        value = self.take(key, default)
        if not any(type(value) is type(each) and value == each for each in accepted):
            raise self.error(key, f"supported are {', '.join(_as_json(each) for each in accepted)}")
        return value

    def error(self, key: str, remedy: str) -> CheckpointError:
        """Return the error of a key with a wrong value; `remedy` says which values are accepted."""
        own = self.key(key)
        found = f"is {shortened(self.config[own])}" if own in self.config else "is missing"
        return CheckpointError(f"{self.where}: {own} {found}", remedy=remedy)

    def unread(self) -> dict[str, Any]:
        """Return the keys that are neither read nor harmless nor null, with their values."""
        known = self.seen | self.harmless
        return {key: value for key, value in self.config.items() if key not in known and value is not None}

    def named(self, key: str) -> str:
        """Return the key with those of the objects around it, as in "rope_scaling.factor"."""
        return ".".join([*self.where.split(", ")[1:], key])

    def reject_unknown_keys(self) -> None:
        """Check that every key was read or is harmless.

        Raises:
            CheckpointError: A key might change the model's output; the message names it.
        """
        for key, value in self.unread().items():
            raise CheckpointError(
                f"{self.where}: {key} = {shortened(value)} is not known, and ignoring it could change the"
                " model's output",
                remedy="use a checkpoint without it, or remove the key if it does not affect the model",
            )
