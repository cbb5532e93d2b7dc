"""The common layout of HTML reports: page.html, extended by the report.html of a package.

Contract: the page needs no network and no scripts. Every page has a title, verdicts, facts, plots, notes and
details. A report's template fills the block `tables` between the facts and the plots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from foredraft.bench.plots import Plot

__all__ = ["DASH", "Verdict", "plain", "render"]

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


def render(package: str, *, title: str, plots: Sequence[Plot], **values: Any) -> str:
    """Return the whole HTML document.

    Args:
        package: The package whose report.html extends page.html.
        title: The page's title.
        plots: The plots.
        **values: The template's other values.
    """
    sources = {
        name: (files(owner) / name).read_text(encoding="utf-8")
        for owner, name in (("foredraft.bench", "page.html"), (package, "report.html"))
    }
    environment = jinja2.Environment(
        loader=jinja2.DictLoader(sources),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    drawn = [(plot, Markup(plot.svg)) for plot in plots]
    return environment.get_template("report.html").render(title=title, plots=drawn, **values)


def plain(values: Mapping[str, Any]) -> dict[str, str]:
    """Return plain values formatted for a reader, such as "yes" for True."""
    return {name: _formatted(value) for name, value in values.items()}


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
