"""Text files that options name."""

from __future__ import annotations

from pathlib import Path

from foredraft.errors import ConfigError

__all__ = ["read_text"]


def read_text(option: str, file: Path) -> str:
    """Return the text of a file.

    Args:
        option: The option that names it, for the error.
        file: The path.

    Raises:
        ConfigError: The file cannot be read, or is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"which cannot be read ({error.strerror})", option=option, value=str(file),
            remedy="give a text file",
        ) from error  # fmt: skip
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"which is not UTF-8 text (byte {error.start})", option=option, value=str(file),
            remedy="convert it first",
        ) from error  # fmt: skip
