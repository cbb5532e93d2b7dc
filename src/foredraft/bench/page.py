"""The one look of reports: a template that extends page.html, and values -> one HTML file.

Contract: the page needs no network and no scripts. Every page has a title, verdicts, facts, plots, notes and
details; between the facts and the plots stands the template's own block, `tables`.
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
    """kind: "good", "bad" or "none", which the page shows in words, too."""

    kind: str
    text: str


def render(package: str, *, title: str, plots: Sequence[Plot], **values: Any) -> str:
    """The whole document, by the package's own report.html."""
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
    """Plain values as a person writes them."""
    return {name: _written(value) for name, value in values.items()}


def _written(value: Any) -> str:
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_written(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_written, value))
    return str(value)
