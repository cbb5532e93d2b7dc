"""Checks of the files that a command writes at its end, made before the long work starts."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

from foredraft.cli.stdin import STDIN
from foredraft.errors import ConfigError, Option
from foredraft.files import check_place

__all__ = ["check_places"]


def check_places(**files: Path | None) -> None:
    """Refuse files that cannot be written, and one file for two options.

    Args:
        **files: The value of each option, by the option's name.

    Raises:
        ConfigError: A file cannot be written, is stdout, or is given twice.
    """
    for option, file in files.items():
        if str(file) == STDIN:
            raise ConfigError(
                "but the last line of stdout is the document",
                option=option,
                value="-",
                remedy="give a file",
            )
        if file is not None:
            check_place(file, option)
    for (one, first), (other, second) in combinations(files.items(), 2):
        if first and second and first.resolve() == second.resolve():
            raise ConfigError(
                ("and so is ", Option(one)),
                option=other,
                value=str(second),
                remedy="give each a file of its own",
            )
