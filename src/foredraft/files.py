"""Files that are whole or absent: written beside their place, then renamed."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from foredraft.errors import ConfigError

__all__ = ["write_whole"]


def write_whole(file: Path, text: str, option: str) -> None:
    """Write UTF-8 text; a file that is there is replaced, and kept where that fails.

    Raises ConfigError that names the option whose value the file is.
    """
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise ConfigError(f"{option} is {str(file)!r}, which cannot be written ({error.strerror})") from error
