"""Charts as SVG that takes its colours from the page around it.

Contract: the same figure gives the same bytes. Text stays text. An SVG refers to nothing outside it, and its
ids begin with the plot's name, so that one page can hold several. Series differ by marker or by order as well
as by colour. The page defines --paper, --line and --s0 to --s7.

Importing this module raises ConfigError if matplotlib is not installed.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from foredraft.bench.optional import module
from foredraft.bench.records import Spread

__all__ = ["INK", "PAPER", "legend", "look", "panels", "picture", "style", "svg", "whiskers"]

matplotlib = module("matplotlib", "the HTML report")
Figure = module("matplotlib.figure", "the HTML report").Figure

# Placeholders that `svg` replaces with the page's own colours.
INK, LINE, PAPER = "#010101", "#020202", "#030303"
SERIES = tuple(f"#0400{number:02x}" for number in range(8))
PAGE = {INK: "currentColor", LINE: "var(--line)", PAPER: "var(--paper)"} | {
    colour: f"var(--s{number})" for number, colour in enumerate(SERIES)
}
# Series colours of a picture outside a page, legible on light and on dark backgrounds.
ALONE = ("#2f7fb0", "#c2701c", "#1f9470", "#b5578f", "#77808c", "#7f68c9", "#a08320", "#cf5244")
GREY = "#7d8590"
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
WIDTH = 6.4  # inches
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans"],  # measures the layout; the page shows its own font
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "figure.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 10,
    "lines.linewidth": 1.4,
    "lines.markersize": 5.5,
}


def look(number: int) -> dict[str, Any]:
    """Return the colour and the marker of a series, as keywords of matplotlib."""
    return {"color": SERIES[number % len(SERIES)], "marker": MARKERS[number % len(MARKERS)]}


@contextmanager
def style() -> Iterator[None]:
    """Apply the page's style to the figures that are made and drawn while entered."""
    with matplotlib.rc_context(STYLE):
        yield


def panels(height: float, count: int = 1) -> tuple[Any, list[Any]]:
    """Return a figure `height` inches high, and its `count` panels from top to bottom."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0])


def whiskers(
    axes: Any, x: Sequence[float], y: Sequence[float], spreads: Sequence[Spread], *, along: str, **keys: Any
) -> None:
    """Draw points with quartiles as error bars.

    Args:
        axes: Where to draw.
        x: The points' x coordinates.
        y: The points' y coordinates.
        spreads: The medians and quartiles of the points.
        along: The axis of the error bars: "x" or "y".
        **keys: Keywords of matplotlib's `errorbar`.
    """
    errors = [
        [max(0.0, spread.median - spread.lower) for spread in spreads],
        [max(0.0, spread.upper - spread.median) for spread in spreads],
    ]
    axes.errorbar(x, y, **{f"{along}err": errors}, elinewidth=1.1, **keys)


def legend(figure: Any, *axes: Any) -> None:
    """Draw one legend for all panels, above them."""
    entries: dict[str, Any] = {}
    for one in axes:
        handles, labels = one.get_legend_handles_labels()
        entries = dict(zip(labels, handles, strict=True)) | entries
    columns = 2 if max(map(len, entries)) > 18 else 3
    figure.legend(entries.values(), entries.keys(), loc="outside upper left", ncols=columns)


def svg(figure: Any, name: str) -> str:
    """Return the figure as an SVG element with the page's colours and with ids that begin with `name`."""
    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    text = drawn.getvalue()
    box = re.search(r'viewBox="([^"]*)"', text)
    assert box is not None
    text = re.sub(r"<style.*?</style>", "", text[text.index("<defs>") :], flags=re.DOTALL)
    text = text.replace("xlink:href", "href").replace(' id="', f' id="{name}-')
    text = text.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    text = re.sub(r"#0\d0\d0\d", lambda found: PAGE.get(found[0], found[0]), text)
    return f'<svg viewBox="{box[1]}">{text}'


def picture(figure: Any, name: str) -> str:
    """Return the figure as the text of an SVG file that needs no page around it."""
    colours = {"--paper": "none", "--line": GREY} | {f"--s{i}": colour for i, colour in enumerate(ALONE)}
    own = ";".join(f"{name}:{colour}" for name, colour in colours.items())
    head = f'<svg xmlns="http://www.w3.org/2000/svg" style="color:{GREY};{own};font-family:sans-serif"'
    return svg(figure, name).replace("<svg", head, 1) + "\n"
