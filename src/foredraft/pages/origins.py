"""The colours and meanings of the origins of tokens: one table, for the terminal and for the pages.

The terminal needs them at once, and nothing else of a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class OriginStyle:
    """How tokens of one origin are shown."""

    color: str  # the colour's name
    ansi: int  # its code on a terminal
    light: tuple[str, str]  # its ink and its background on a light page, as CSS colours
    dark: tuple[str, str]  # the same on a dark page
    meaning: str  # its line of the legend


ORIGINS = {
    "drafter": OriginStyle(
        "blue",
        94,  # the bright one: plain blue is hard to read on a black terminal
        ("#00618f", "#dcecf5"),
        ("#7cc4ea", "#17303f"),
        "drafted, and accepted by the target",
    ),
    "target": OriginStyle(
        "yellow",
        33,
        ("#9a5b00", "#fbe9cc"),
        ("#f2b95f", "#402f12"),
        "the target's own token: a correction or a plain step",
    ),
    "bonus": OriginStyle(
        "green",
        32,
        ("#00664b", "#d5efe6"),
        ("#63d3b0", "#12382d"),
        "the target's bonus token after a fully accepted draft",
    ),
}


def stylesheet() -> str:
    """Return tokens.css with the colours of the origins, as CSS variables."""
    text = (files("foredraft.pages") / "tokens.css").read_text(encoding="utf-8")
    for mode in ("light", "dark"):
        colors = ((name, *getattr(origin, mode)) for name, origin in ORIGINS.items())
        variables = " ".join(f"--{name}: {ink}; --{name}-bg: {paper};" for name, ink, paper in colors)
        text = text.replace(f"__{mode.upper()}__", variables)
    return text
