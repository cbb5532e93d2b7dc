"""Tables and sentences that fit the terminal: columns move to further tables, lines break at spaces."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import TextIO

__all__ = ["fitted", "table", "terminal_width", "with_weights"]

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
    """Return the lines of a table, with the cells aligned in columns.

    Args:
        rows: The headings, then the rows.
        width: Characters of a line. The columns that exceed it follow in further tables; a cell that is too
            wide for one is broken between words. None is no limit.
        keys: Columns at the left that each of these tables repeats.
    """
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
