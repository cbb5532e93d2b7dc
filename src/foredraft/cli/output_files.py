"""Places for the files that a command writes, looked at before hours are spent on what cannot be written."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

from foredraft.cli.error_text import STDIN
from foredraft.errors import ConfigError
from foredraft.files import check_place

__all__ = ["check_places"]


def check_places(**files: Path | None) -> None:
    """By the option that names each. Raises ConfigError of what is no place for a file, or for two."""
    for option, file in files.items():
        if str(file) == STDIN:
            raise ConfigError(f"--{option} is '-', but the last line of stdout is the document; give a file")
        if file is not None:
            check_place(file, option)
    for (one, first), (other, second) in combinations(files.items(), 2):
        if first and second and first.resolve() == second.resolve():
            raise ConfigError(f"--{other} is {str(second)!r}, and so is --{one}; give each a file of its own")
