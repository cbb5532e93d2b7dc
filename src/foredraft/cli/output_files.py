"""What a command writes at its end: one document as JSON or as text on stdout, and files.

Every command spells it alike: `--json` prints the JSON document and nothing else, `--out` writes it to a
file, and without `--json` stdout has the text for people. Files are checked before the long work starts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from foredraft.cli.layout import fitted, terminal_width
from foredraft.cli.options import DocumentOptions
from foredraft.cli.stdout import check_stdout, writing_stdout
from foredraft.cli.words import STDIN
from foredraft.errors import ConfigError, Option, Text
from foredraft.files import check_place, write_whole

__all__ = ["check_places", "print_document", "write_document", "write_report"]


def check_places(**files: Path | None) -> None:
    """Refuse files that cannot be written, stdout included, and one file for two options.

    Args:
        **files: The value of each option, by the option's name.

    Raises:
        ConfigError: A file cannot be written, is stdout, or is given twice.
    """
    check_stdout()
    for option, file in files.items():
        if str(file) in ("-", STDIN):
            remedy: Text = ("give ", Option("json"), " instead") if option == "out" else "give a file"
            raise ConfigError("which is stdout, not a file", option=option, value="-", remedy=remedy)
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


def print_document(document: Mapping[str, Any]) -> None:
    """Print the JSON document on one line."""
    _print(_as_json(document))


def write_document(document: Mapping[str, Any], given: DocumentOptions) -> None:
    """Write the JSON document to the file of `--out`, if it is given.

    Raises:
        ConfigError: The file cannot be written.
    """
    if given.out is not None:
        write_whole(given.out, _as_json(document) + "\n", "out")


def write_report(
    document: Mapping[str, Any],
    text: Callable[[int | None], list[str]],
    given: DocumentOptions,
    *,
    html: Path | None = None,
    page: Callable[[], str] | None = None,
) -> None:
    """Write a document to stdout and the files; a stdout that fails does not cost the files.

    Args:
        document: The document.
        text: Returns its lines for people, given the columns of the terminal; None is no limit.
        given: The options that say where it goes.
        html: The file of `--html`.
        page: Returns the page for it.

    Raises:
        ConfigError: stdout or a file cannot be written.
    """
    try:
        # before the files: a full disk must not cost the document
        width = terminal_width(sys.stdout)
        _print(_as_json(document) if given.json else "\n".join(fitted(text(width), width)))
    finally:
        write_document(document, given)
        if html is not None and page is not None:
            write_whole(html, page(), "html")


def _print(text: str) -> None:
    """Print text and flush it.

    Raises:
        BrokenPipeError: The reader closed the pipe, which is not a failure.
        ConfigError: stdout cannot be written.
    """
    with writing_stdout():
        print(text, flush=True)


def _as_json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, allow_nan=False)
