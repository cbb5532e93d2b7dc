"""The colours and meanings of the origins of tokens: one table, for the terminal and for the pages."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

__all__ = ["ORIGINS", "Origin", "stylesheet"]


@dataclass(frozen=True, slots=True)
class Origin:
    """How tokens of one origin are shown.

    Attributes:
        color: The colour's name.
        ansi: Its code on a terminal.
        light: Its ink and its background on a light page, as CSS colours.
        dark: The same on a dark page.
        meaning: Its line of the legend.
    """

    color: str
    ansi: int
    light: tuple[str, str]
    dark: tuple[str, str]
    meaning: str


ORIGINS = {
    "drafter": Origin(
        "blue",
        94,  # the bright one: plain blue is hard to read on a black terminal
        ("#00618f", "#dcecf5"),
        ("#7cc4ea", "#17303f"),
        "drafted, and accepted by the target",
    ),
    "target": Origin(
        "yellow",
        33,
        ("#9a5b00", "#fbe9cc"),
        ("#f2b95f", "#402f12"),
        "the target's own token: a correction or a plain step",
    ),
    "bonus": Origin(
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
