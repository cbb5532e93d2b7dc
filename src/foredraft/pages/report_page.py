"""The page of a report: one HTML file that needs no network and no scripts; its charts are drawn here as SVG.

Every page has a title, verdicts, facts, tables, plots, notes and details. A figure that is missing is a dash.
A chart takes its colours (--paper, --line, --s0 to --s7) from the page around it, and is made of panels from
top to bottom, which share the horizontal axis; a panel holds marks. Coordinates are those of the data. The
same chart gives the same bytes. Series differ by marker or by order as well as by colour.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any, TypeAlias

import jinja2
from markupsafe import Markup

# Lengths are in units of the drawing, about 1 px each on a page of two columns.
WIDTH = 460.0
FONT, SMALL = 11.0, 10.0  # sizes of text
LINE = 14.0  # height of a line of text
GAP = 6.0
LEGEND_MARK = 16.0  # width of a mark in the legend
EM = 0.57  # mean width of a character ÷ the size of its text
MAX_LABELS = 0.45  # of the width, that the labels of the vertical axis may take
MARGIN = 0.05  # of the data's range, free at both ends of an axis
BETWEEN = {"x": 46.0, "y": 20.0}  # smallest distance of two ticks
COLOURS = 8
INK = "currentColor"
MARKERS = (  # shapes around (0, 0)
    "M-2.8,0a2.8,2.8 0 1 0 5.6,0a2.8,2.8 0 1 0 -5.6,0z",
    "M-2.6,-2.6H2.6V2.6H-2.6z",
    "M0,-3.3L3.1,2.5H-3.1z",
    "M0,-3.6L3.6,0L0,3.6L-3.6,0z",
    "M0,3.3L3.1,-2.5H-3.1z",
    "M-1.1,-3.2H1.1V-1.1H3.2V1.1H1.1V3.2H-1.1V1.1H-3.2V-1.1H-1.1z",
    "M-3.1,-1.6L-1.6,-3.1L0,-1.6L1.6,-3.1L3.1,-1.6L1.6,0L3.1,1.6L1.6,3.1L0,1.6L-1.6,3.1L-3.1,1.6L-1.6,0z",
    "M0,-3.8L1,-1.1L3.7,-1.1L1.5,0.6L2.3,3.3L0,1.7L-2.3,3.3L-1.5,0.6L-3.7,-1.1L-1,-1.1z",
)
CROSS = "M-2.4,-2.4L2.4,2.4M-2.4,2.4L2.4,-2.4"


@dataclass(frozen=True, slots=True)
class Axis:
    """How figures become places."""

    title: str = ""  # what they are
    low: float | None = None  # the figure at the left or at the bottom; None: a little below the lowest
    high: float | None = None  # at the other end; lower than `low` for an axis that runs the other way
    ticks: dict[float, str] | None = None  # labels by figure; None: round figures
    log: bool = False  # the logarithm of the figures counts
    grid: bool = False  # lines at the ticks
    whole: bool = False  # all round figures are whole numbers


@dataclass(frozen=True, slots=True)
class Points:
    """A series of points."""

    label: str  # name in the legend; "" is in no legend
    xs: Sequence[float]  # their places along x
    ys: Sequence[float]  # their places along y
    number: int | None = None  # number of the colour and of the marker; None is the ink
    line: str = ""  # "": none, "line" or "steps" join the points
    marked: bool = True  # each point has a marker
    spreads: Sequence[tuple[float, float]] = ()  # for each point, the ends of a bar of errors
    along: str = "y"  # the axis of these bars, "x" or "y"


@dataclass(frozen=True, slots=True)
class Bars:
    """A series of rectangles."""

    label: str  # name in the legend; "" is in no legend
    boxes: Sequence[tuple[float, float, float, float]]  # two places along x, two along y
    number: int | None = None  # number of the colour; None is empty, with a cross


@dataclass(frozen=True, slots=True)
class ReferenceLine:
    """A dashed line at a place along x or y; at neither, through the points where x is y."""

    x: float | None = None
    y: float | None = None


Mark: TypeAlias = Points | Bars | ReferenceLine


@dataclass(frozen=True, slots=True)
class Panel:
    """A part of a chart."""

    height: float  # of the area of the marks
    marks: Sequence[Mark]  # what is drawn, the lowest first
    y: Axis = field(default_factory=Axis)  # the vertical axis
    title: str = ""  # above the marks


@dataclass(frozen=True, slots=True)
class _Scale:
    """Takes the figures from `low` to `high` to the places from `start` to `stop`."""

    axis: Axis
    low: float
    high: float
    start: float
    stop: float

    @classmethod
    def of(cls, axis: Axis, figures: Sequence[float], start: float, stop: float) -> _Scale:
        def moved(figure: float, by: float) -> float:
            return figure * math.exp(by) if axis.log else figure + by

        least, most = min(figures, default=0.0), max(figures, default=1.0)
        free = MARGIN * (math.log(most / least) if axis.log else most - least) or 0.5
        low = moved(least, -free) if axis.low is None else axis.low
        high = moved(most, free) if axis.high is None else axis.high
        return cls(axis, low, high if high != low else low + 1, start, stop)

    def __call__(self, figure: float) -> float:
        low, high, at = self.low, self.high, figure
        if self.axis.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return self.start + (at - low) / (high - low) * (self.stop - self.start)

    def ticks(self, between: float) -> dict[float, str]:
        """Return the labels of ticks by figure, `between` or more apart."""
        if self.axis.ticks is not None:
            return self.axis.ticks
        room = max(1.0, abs(self.stop - self.start) / between)
        least = (max(self.low, self.high) - min(self.low, self.high)) / room
        power = 10.0 ** math.floor(math.log10(least))
        step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= least * (1 - 1e-9))
        step = max(1.0, math.ceil(step)) if self.axis.whole else step
        decimals = next(count for count in range(9) if math.isclose(step, round(step, count), rel_tol=1e-6))
        first = math.ceil(min(self.low, self.high) / step - 1e-9)
        last = math.floor(max(self.low, self.high) / step + 1e-9)
        return {n * step: f"{n * step:.{decimals}f}" for n in range(first, last + 1)}


def chart(name: str, panels: Sequence[Panel], x: Axis) -> str:
    """Return the SVG element of a chart."""
    legend, top = _legend(panels)
    bodies, left = [], _left(panels)
    scale = _Scale.of(x, [at for panel in panels for at in _figures(panel, "x")], left, WIDTH - GAP)
    for number, panel in enumerate(panels):
        top += LINE + GAP if panel.title else GAP
        bodies.append(_panel(panel, scale, top, last=number == len(panels) - 1))
        top += panel.height + GAP
    height = top + LINE + (LINE if x.title else 0)
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" id="{escape(name)}-chart" font-size="{FONT:g}"'
        f' fill="{INK}">{legend}{"".join(bodies)}</svg>'
    )


def _panel(panel: Panel, x: _Scale, top: float, *, last: bool) -> str:
    bottom = top + panel.height
    y = _Scale.of(panel.y, [*_figures(panel, "y")], bottom, top)
    parts = [_text(x.start, top - GAP, panel.title)] if panel.title else []
    parts += _vertical(panel, y, x)
    parts += _horizontal(x, top, bottom, labelled=last)
    parts += [part for mark in panel.marks for part in _drawn(mark, x, y)]
    return "".join(parts)


def _vertical(panel: Panel, y: _Scale, x: _Scale) -> Iterator[str]:
    """Yield the vertical axis, with the lines of its grid."""
    room = x.start - GAP - (LINE if panel.y.title else 0)
    for figure, label in y.ticks(BETWEEN["y"]).items():
        if panel.y.grid:
            yield _line(x.start, y(figure), x.stop, y(figure), "var(--line)", 0.6)
        yield _text(x.start - GAP, y(figure) + 0.35 * SMALL, _shortened(label, room), "end", SMALL)
    yield _line(x.start, y.start, x.start, y.stop, "var(--line)", 1)
    if panel.y.title:
        middle = (y.start + y.stop) / 2
        yield (
            f'<text transform="translate({FONT - 1:g},{middle:.1f}) rotate(-90)" text-anchor="middle">'
            f"{escape(panel.y.title, quote=False)}</text>"
        )


def _horizontal(x: _Scale, top: float, bottom: float, *, labelled: bool) -> Iterator[str]:
    """Yield the horizontal axis, with the lines of its grid; labels that would touch are left out."""
    ticks = x.ticks(BETWEEN["x"])
    if x.axis.grid:
        yield from (_line(x(at), top, x(at), bottom, "var(--line)", 0.6) for at in ticks)
    yield _line(x.start, bottom, x.stop, bottom, "var(--line)", 1)
    if labelled:
        free = math.inf
        for at, label in sorted(ticks.items(), reverse=True):
            half = _wide(label, SMALL) / 2
            if x(at) + half + GAP / 2 <= free:
                free = x(at) - half
                yield _text(x(at), bottom + LINE - 2, label, "middle", SMALL)
        if x.axis.title:
            yield _text((x.start + x.stop) / 2, bottom + 2 * LINE - 1, x.axis.title, "middle")


def _drawn(mark: Mark, x: _Scale, y: _Scale) -> Iterator[str]:
    if isinstance(mark, ReferenceLine):
        ends = (max(x.low, y.low), min(x.high, y.high))
        (x1, x2), (y1, y2) = (ends, ends) if mark.x is mark.y is None else ((x.low, x.high), (y.low, y.high))
        x1, x2 = (x1, x2) if mark.x is None else (mark.x, mark.x)
        y1, y2 = (y1, y2) if mark.y is None else (mark.y, mark.y)
        yield _line(x(x1), y(y1), x(x2), y(y2), INK, 1, dashed=True)
    elif isinstance(mark, Bars):
        for x1, x2, y1, y2 in mark.boxes:
            yield _box(x(x1), y(y1), x(x2), y(y2), mark.number)
    else:
        yield from _points(mark, x, y)


def _points(mark: Points, x: _Scale, y: _Scale) -> Iterator[str]:
    colour, places = _colour(mark.number), [(x(a), y(b)) for a, b in zip(mark.xs, mark.ys, strict=True)]
    if mark.line and places:
        path = f"M{places[0][0]:.1f},{places[0][1]:.1f}"
        for right, down in places[1:]:
            path += f"H{right:.1f}V{down:.1f}" if mark.line == "steps" else f"L{right:.1f},{down:.1f}"
        yield f'<path d="{path}" fill="none" style="stroke:{colour}" stroke-width="1.4"/>'
    for (right, down), (low, high) in zip(places, mark.spreads, strict=False):
        ends = (x(low), down, x(high), down) if mark.along == "x" else (right, y(low), right, y(high))
        yield _line(*ends, colour, 1.1)
    if mark.marked:
        yield from (_marker(right, down, mark.number) for right, down in places)


def _legend(panels: Sequence[Panel]) -> tuple[str, float]:
    """Return the legend of all panels, which stands above them, and its height."""
    entries: dict[str, Points | Bars] = {}
    for mark in (mark for panel in panels for mark in panel.marks):
        if not isinstance(mark, ReferenceLine) and mark.label:
            entries.setdefault(mark.label, mark)
    parts, left, top = [], 0.0, 0.0
    for label, mark in entries.items():
        shown = _shortened(label, WIDTH - LEGEND_MARK - 2 * GAP)
        wide = LEGEND_MARK + GAP + _wide(shown, FONT) + 2 * GAP
        if left and left + wide > WIDTH:
            left, top = 0.0, top + LINE + 2
        middle, height = left + LEGEND_MARK / 2, top + LINE / 2
        if isinstance(mark, Bars):
            parts.append(_box(left + 2, height - 4, left + LEGEND_MARK - 2, height + 4, mark.number))
        else:
            if mark.line:
                parts.append(_line(left, height, left + LEGEND_MARK, height, _colour(mark.number), 1.4))
            if mark.marked:
                parts.append(_marker(middle, height, mark.number))
        parts.append(_text(left + LEGEND_MARK + GAP, height + 0.35 * FONT, shown))
        left += wide
    return "".join(parts), top + LINE + GAP if entries else 0.0


def _left(panels: Sequence[Panel]) -> float:
    """Return where the horizontal axis begins: to the right of the labels of all vertical ones."""
    labels = [
        label
        for panel in panels
        for label in _Scale.of(panel.y, [*_figures(panel, "y")], panel.height, 0).ticks(BETWEEN["y"]).values()
    ]
    widest = max((_wide(label, SMALL) for label in labels), default=0.0)
    title = LINE if any(panel.y.title for panel in panels) else 0
    return min(widest, MAX_LABELS * WIDTH) + GAP + title


def _figures(panel: Panel, along: str) -> Iterator[float]:
    """Yield the data of a panel along x or y."""
    for mark in panel.marks:
        if isinstance(mark, Points):
            yield from mark.xs if along == "x" else mark.ys
            if mark.along == along:
                yield from (end for spread in mark.spreads for end in spread)
        elif isinstance(mark, Bars):
            first = 0 if along == "x" else 2
            yield from (end for box in mark.boxes for end in box[first : first + 2])
        else:
            at = mark.x if along == "x" else mark.y
            yield from () if at is None else (at,)


def _colour(number: int | None) -> str:
    return INK if number is None else f"var(--s{number % COLOURS})"


def _text(x: float, y: float, text: str, anchor: str = "start", size: float = FONT) -> str:
    more = "" if anchor == "start" else f' text-anchor="{anchor}"'
    more += "" if size == FONT else f' font-size="{size:g}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(text, quote=False)}</text>'


def _line(
    x1: float, y1: float, x2: float, y2: float, colour: str, width: float, *, dashed: bool = False
) -> str:
    more = ' stroke-dasharray="4 3"' if dashed else ""
    path = f"M{x1:.1f},{y1:.1f}L{x2:.1f},{y2:.1f}"
    return f'<path d="{path}" style="stroke:{colour}" stroke-width="{width:g}"{more}/>'


def _box(x1: float, y1: float, x2: float, y2: float, number: int | None) -> str:
    (left, right), (top, bottom) = sorted((x1, x2)), sorted((y1, y2))
    fill, edge = ("none", "var(--line)") if number is None else (_colour(number), "var(--paper)")
    box = (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}"'
        f' style="fill:{fill};stroke:{edge}"/>'
    )
    if number is not None:
        return box
    middle = f"translate({(left + right) / 2:.1f},{(top + bottom) / 2:.1f})"
    return f'{box}<path d="{CROSS}" transform="{middle}" fill="none" stroke="{INK}"/>'


def _marker(x: float, y: float, number: int | None) -> str:
    shape, colour = MARKERS[(number or 0) % len(MARKERS)], _colour(number)
    style = f"fill:{colour};stroke:{colour}"
    return f'<path d="{shape}" transform="translate({x:.2f},{y:.2f})" style="{style}"/>'


def _wide(text: str, size: float) -> float:
    """Return about how wide a text is."""
    return EM * size * sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text)


def _shortened(text: str, room: float) -> str:
    """Return a text with its middle left out, if it is too wide for the room."""
    most = max(3, int(room / (EM * SMALL)))
    return text if _wide(text, SMALL) <= room else f"{text[: most // 2]}…{text[-(most - 1) // 2 :]}"


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
    plots: Sequence[Plot | None] = ()  # the plots
    notes: Sequence[str] = ()  # further sentences
    details: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # plain values, by heading
    finished: bool = True  # False if the work was interrupted

    def html(self) -> str:
        """Return the whole document; a table without lines is left out."""
        environment = jinja2.Environment(
            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        environment.filters["plain"] = _formatted
        template = (files("foredraft.pages") / "report_page.html").read_text(encoding="utf-8")
        drawn = [(plot, Markup(plot.svg)) for plot in self.plots if plot is not None]
        tables = [table for table in self.tables if any(table.groups.values())]
        return environment.from_string(template).render(page=self, tables=tables, plots=drawn)


def make_plot(
    name: str, title: str, note: str, alt: str | Sequence[str], panels: Sequence[Panel], x: Axis
) -> Plot | None:
    """Return a plot; `alt` is a sentence, or the figures of one. None where there are no figures."""
    words = alt if isinstance(alt, str) else f"{'; '.join(alt)}."
    return Plot(name, title, note, words, chart(name, panels, x)) if alt else None


def _formatted(value: Any) -> str:
    """Return a plain value for a reader, such as "yes" for True."""
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
