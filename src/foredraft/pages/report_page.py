"""The page of a report: one HTML file that needs no network and no scripts.

Every page has a title, verdicts, facts, tables, plots, notes and details, in this order. The verdicts come
first, and a figure that the records lack is a dash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

__all__ = ["DASH", "Cell", "Line", "Plot", "ReportPage", "Table", "Verdict", "plain", "render", "sentence"]

DASH = "–"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A sentence at the top of a page.

    Attributes:
        kind: "good", "doubtful", "bad" or "none"; only the colour depends on it.
        text: The sentence.
    """

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: The figure.
        more: Small print below it.
        kind: Style class: "good", "bad" or none.
    """

    text: str
    more: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a table.

    Attributes:
        heading: Its heading.
        cells: A cell for each column.
        note: Stands in place of the cells, if there is one.
    """

    heading: str
    cells: Sequence[Cell]
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A table of lines in groups.

    Attributes:
        title: The title.
        first: Heading of the first column, which holds the lines' headings.
        columns: Headings of the other columns.
        groups: The lines by the group's heading; "" is no heading.
    """

    title: str
    first: str
    columns: Sequence[str]
    groups: Mapping[str, Sequence[Line]]


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot.

    Attributes:
        name: Unique on a page; also an HTML id.
        title: The title.
        note: How to read it.
        alt: Its figures in words.
        svg: The drawing.
    """

    name: str
    title: str
    note: str
    alt: str
    svg: str


@dataclass(frozen=True, slots=True)
class ReportPage:
    """What a page shows.

    Attributes:
        title: The title.
        verdicts: The sentences at the top.
        facts: What was measured, and where, by label.
        tables: The tables.
        remark: How to read the tables.
        plots: The plots.
        notes: Further sentences.
        details: Lists of plain values, by heading.
        finished: False if the work was interrupted.
    """

    title: str
    verdicts: Sequence[Verdict]
    facts: Mapping[str, str]
    tables: Sequence[Table] = ()
    remark: str = ""
    plots: Sequence[Plot] = ()
    notes: Sequence[str] = ()
    details: Mapping[str, Mapping[str, str]] | None = None
    finished: bool = True


def render(page: ReportPage) -> str:
    """Return the whole HTML document."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = (files("foredraft.pages") / "report_page.html").read_text(encoding="utf-8")
    drawn = [(plot, Markup(plot.svg)) for plot in page.plots]
    return environment.from_string(template).render(page=page, plots=drawn)


def plain(values: Mapping[str, Any]) -> dict[str, str]:
    """Return plain values formatted for a reader, such as "yes" for True."""
    return {name: _formatted(value) for name, value in values.items()}


def sentence(figures: Sequence[str]) -> str:
    """Return figures in words as one sentence."""
    return f"{'; '.join(figures)}."


def _formatted(value: Any) -> str:
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_formatted(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_formatted, value))
    return str(value)
