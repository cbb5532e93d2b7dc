"""What a command writes at its end: documents and tables that fit the terminal, on stdout and in files.

`--json` prints the JSON document and nothing else, and `--out` writes it to a file. Files are checked before
the long work starts.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from foredraft.cli.words import STDIN
from foredraft.errors import ConfigError, Option, Text
from foredraft.files import check_place, write_whole

if TYPE_CHECKING:
    from foredraft.cli.options import DocumentOptions


@contextmanager
def writing_stdout() -> Iterator[None]:
    """Turn an OSError of stdout into a ConfigError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _refused(error.strerror) from error


def check_stdout() -> None:
    """Refuse a stdout that is a file on a full disk."""
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # it is no file, or closed
        return
    if hasattr(os, "fstatvfs") and stat.S_ISREG(os.fstat(descriptor).st_mode):
        system = os.fstatvfs(descriptor)
        if system.f_blocks and not system.f_bavail:  # some systems do not count blocks
            raise _refused(os.strerror(errno.ENOSPC))


def _refused(why: str | None) -> ConfigError:
    return ConfigError(f"stdout cannot be written ({why})", remedy="redirect it to another file")


GAP = "  "  # between two columns
NARROWEST = 8  # characters of a column whose cells are wrapped


def terminal_width(stream: TextIO) -> int | None:
    """Return the columns of the terminal that a stream writes to; None where it writes to none."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def fitted(lines: Iterable[str], width: int | None) -> list[str]:
    """Return the lines with those that exceed `width` broken between words, at their own indentation."""
    if width is None:
        return list(lines)
    return [part for line in lines for part in _broken(line, width)]


def table(rows: Sequence[tuple[str, ...]], width: int | None = None, keys: int = 1) -> list[str]:
    """Return the lines of a table, with the cells aligned in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for columns in _groups(widths, width, keys):
        lines += [""] if lines else []
        lines += _aligned([[row[column] for column in columns] for row in rows], width)
    return lines


def _groups(widths: Sequence[int], width: int | None, keys: int) -> list[list[int]]:
    """Return the columns of each table, by index."""
    kept = list(range(keys))
    groups = [[*kept]]
    for column in range(keys, len(widths)):
        taken = _total([widths[other] for other in (*groups[-1], column)])
        if width is not None and taken > width and len(groups[-1]) > keys:
            groups.append([*kept])
        groups[-1].append(column)
    return groups


def _aligned(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Return the rows in aligned columns; too wide ones break the cells of the widest column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is not None and (excess := _total(widths) - width) > 0:
        widest = widths.index(max(widths))
        widths[widest] = max(NARROWEST, widths[widest] - excess)
    lines = []
    for row in rows:
        cells = [_broken(cell, room) for cell, room in zip(row, widths, strict=True)]
        for place in range(max(map(len, cells))):
            parts = [parts[place] if place < len(parts) else "" for parts in cells]
            line = GAP.join(part.ljust(room) for part, room in zip(parts, widths, strict=True))
            lines.append(line.rstrip())
    return lines


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _broken(text: str, width: int) -> list[str]:
    """Return the text in lines of at most `width` characters; a longer word has a line of its own."""
    if len(text) <= width:
        return [text]
    indent = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(
        text.strip(), width, initial_indent=indent, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def with_weights(dtype: str, weights: str | None) -> str:
    """Return the name of a model's dtype, with how its weights are quantised: "bfloat16, weights int4"."""
    return dtype if weights is None else f"{dtype}, weights {weights}"


def check_places(**files: Path | None) -> None:
    """Refuse files that cannot be written, stdout included, and one file for two options."""
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
    _print(_as_json(document))


def write_document(document: Mapping[str, Any], given: DocumentOptions) -> None:
    """Write the JSON document to the file of `--out`, if it is given."""
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
    """Write a document to stdout and the files; a stdout that fails does not cost the files."""
    try:
        # before the files: a full disk must not cost the document
        width = terminal_width(sys.stdout)
        _print(_as_json(document) if given.json else "\n".join(fitted(text(width), width)))
    finally:
        write_document(document, given)
        if html is not None and page is not None:
            write_whole(html, page(), "html")


def _print(text: str) -> None:
    with writing_stdout():
        print(text, flush=True)


def _as_json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, allow_nan=False)
