"""Kept lines: JSON Lines that a run writes as it goes, and reads when it is continued.

The last line may be cut, because the run was killed while it wrote, and does not count. Any other line that
is no JSON was not written by a run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foredraft.errors import ConfigError, Option
from foredraft.model.config import parse_json

__all__ = ["broken_line", "whole_lines"]


def whole_lines(file: Path) -> list[Any]:
    """Return the values of the whole lines of a file; none where there is no file.

    Raises:
        ConfigError: The file cannot be read, or a line is not JSON.
    """
    if not file.is_file():
        return []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    except OSError as error:
        raise _refused(file, f"cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise _refused(file, "is not UTF-8 text") from error
    values = []
    for number, line in enumerate(lines, 1):
        try:
            values.append(parse_json(line))
        except ValueError as error:
            raise broken_line(file, number, "is not JSON") from error
    return values


def broken_line(file: Path, number: int, problem: str) -> ConfigError:
    """Return the error of a line that no run wrote."""
    return _refused(file, f"is broken: line {number} {problem}")


def _refused(file: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"whose {file.name} {problem}", option="work", value=str(file.parent),
        remedy=("start anew with ", Option("fresh")),
    )  # fmt: skip
