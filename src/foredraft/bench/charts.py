"""How plots are drawn: SVG that takes its colours from the page around it.

Contract: the same figure gives the same bytes. Text stays text. Nothing in an SVG refers to anything outside
it, and its ids begin with the plot's name, so that several can stand in one page. What is told by colour is
told by a marker or by order, too. The page defines --paper, --line and --s0 to --s7.

Raises ConfigError, when it is imported, where matplotlib is not installed.
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

# Colours that stand for the page's own.
INK, LINE, PAPER = "#010101", "#020202", "#030303"
SERIES = tuple(f"#0400{number:02x}" for number in range(8))
PAGE = {INK: "currentColor", LINE: "var(--line)", PAPER: "var(--paper)"} | {
    colour: f"var(--s{number})" for number, colour in enumerate(SERIES)
}
# The colours of a picture that stands alone, legible on light and on dark ground.
ALONE = ("#2f7fb0", "#c2701c", "#1f9470", "#b5578f", "#77808c", "#7f68c9", "#a08320", "#cf5244")
GREY = "#7d8590"
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
WIDTH = 6.4  # inches
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans"],  # to measure by; the page sets its own
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
    """Colour and marker of a series."""
    return {"color": SERIES[number % len(SERIES)], "marker": MARKERS[number % len(MARKERS)]}


@contextmanager
def style() -> Iterator[None]:
    """While entered, figures are made and drawn in the page's style."""
    with matplotlib.rc_context(STYLE):
        yield


def panels(height: float, count: int = 1) -> tuple[Any, list[Any]]:
    """A figure `height` inches high, and its panels from top to bottom."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0])


def whiskers(
    axes: Any, x: Sequence[float], y: Sequence[float], spreads: Sequence[Spread], **keys: Any
) -> None:
    """Medians with quartiles, which lie along the axis that keys["along"] names."""
    along = keys.pop("along")
    errors = [
        [max(0.0, spread.median - spread.lower) for spread in spreads],
        [max(0.0, spread.upper - spread.median) for spread in spreads],
    ]
    axes.errorbar(x, y, **{f"{along}err": errors}, elinewidth=1.1, **keys)


def legend(figure: Any, *axes: Any) -> None:
    """One for all panels, above them."""
    entries: dict[str, Any] = {}
    for one in axes:
        handles, labels = one.get_legend_handles_labels()
        entries = dict(zip(labels, handles, strict=True)) | entries
    columns = 2 if max(map(len, entries)) > 18 else 3
    figure.legend(entries.values(), entries.keys(), loc="outside upper left", ncols=columns)


def svg(figure: Any, name: str) -> str:
    """Drawn, with the page's colours and ids of its own."""
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
    """`svg` as a file of its own, which needs no page around it."""
    colours = {"--paper": "none", "--line": GREY} | {f"--s{i}": colour for i, colour in enumerate(ALONE)}
    own = ";".join(f"{name}:{colour}" for name, colour in colours.items())
    head = f'<svg xmlns="http://www.w3.org/2000/svg" style="color:{GREY};{own};font-family:sans-serif"'
    return svg(figure, name).replace("<svg", head, 1) + "\n"
