"""The page of a report: one HTML file that needs no network and no scripts.

Every page has a title, verdicts, facts, tables, plots, notes and details. A figure that is missing is a dash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from foredraft.pages.drawing import Axis, Panel, chart

DASH = "–"


@dataclass(frozen=True, slots=True)
class PageVerdict:
    """A sentence at the top of a page."""

    kind: str  # "good", "doubtful", "bad" or "none"; only the colour depends on it
    text: str  # the sentence


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table."""

    text: str  # the figure
    more: str = ""  # small print below it
    kind: str = ""  # style class: "good", "bad" or none


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a table."""

    heading: str  # its heading
    cells: Sequence[Cell]  # a cell for each column
    note: str | None = None  # stands in place of the cells, if there is one


@dataclass(frozen=True, slots=True)
class Table:
    """A table of lines in groups."""

    title: str  # the title
    first: str  # heading of the first column, which holds the lines' headings
    columns: Sequence[str]  # headings of the other columns
    groups: Mapping[str, Sequence[Line]]  # the lines by the group's heading; "" is no heading


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot."""

    name: str  # unique on a page; also an HTML id
    title: str  # the title
    note: str  # how to read it
    alt: str  # its figures in words
    svg: str  # the drawing


@dataclass(frozen=True, slots=True)
class ReportPage:
    """What a page shows."""

    title: str  # the title
    verdicts: Sequence[PageVerdict]  # the sentences at the top
    facts: Mapping[str, str]  # what was measured, and where, by label
    tables: Sequence[Table] = ()  # the tables
    remark: str = ""  # how to read the tables
    plots: Sequence[Plot] = ()  # the plots
    notes: Sequence[str] = ()  # further sentences
    details: Mapping[str, Mapping[str, str]] | None = None  # lists of plain values, by heading
    finished: bool = True  # False if the work was interrupted


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


def make_plot(
    name: str, title: str, note: str, alt: str | Sequence[str], panels: Sequence[Panel], x: Axis
) -> Plot:
    """Return a plot; `alt` is a sentence, or the figures of one."""
    words = alt if isinstance(alt, str) else f"{'; '.join(alt)}."
    return Plot(name, title, note, words, chart(name, panels, x))


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
