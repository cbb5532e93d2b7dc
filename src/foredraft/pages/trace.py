"""The trace: a self-contained HTML page that shows the origin of each token and the steps of every round.

Contract: the page loads nothing from anywhere, distinguishes the kinds of tokens without colour, and holds
the model's text as data, never as markup. The colours of the origins are one table for the terminal, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.errors import ConfigError, Option
from foredraft.files import write_whole

if TYPE_CHECKING:
    from foredraft import Output
    from foredraft.decode.stats import RoundTrace
    from foredraft.model.tokenizer import Tokenizer


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


def write_trace(
    file: str | Path, outputs: Sequence[Output], *, prompt: str, tokenizer: Tokenizer, about: str = ""
) -> None:
    """Write a page that shows the origin of each token and the steps of every round.

    Args:
        file: Where to write; an existing file is replaced.
        outputs: Outputs that were generated with `trace=True`.
        prompt: The prompt of the outputs.
        tokenizer: The model's tokenizer.
        about: A line on how the outputs were made.

    Raises:
        ConfigError: An output has no trace, or the file cannot be written.

    Examples:
        >>> prompt = "def add(a, b):"
        >>> outputs = llm.generate(prompt, SamplingParams(max_new_tokens=8), trace=True)
        >>> write_trace("trace.html", outputs, prompt=prompt, tokenizer=llm.tokenizer)
        >>> Path("trace.html").read_text().startswith("<!doctype html>")
        True
    """
    file = Path(file)
    if any(output.trace is None for output in outputs):
        raise ConfigError("an output has no trace", remedy=("generate it with ", Option("trace", True)))
    samples = [
        {"number": number, "prompt": prompt} | _sample(output, tokenizer)
        for number, output in enumerate(outputs, start=1)
    ]
    page = (files("foredraft.pages") / "trace.html").read_text(encoding="utf-8")
    page = page.replace("__TOKENS__", stylesheet())
    page = page.replace("__ROUNDS__", (files("foredraft.pages") / "rounds.js").read_text(encoding="utf-8"))
    meanings = {name: origin.meaning for name, origin in ORIGINS.items()}
    data: dict[str, Any] = {"about": about, "origins": meanings, "samples": samples}
    # no text can end the script element that holds the JSON
    embedded = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    page = page.replace("__DATA__", embedded)
    write_whole(file, page, "trace")


# Fields of a round that the page shows as they are.
AS_THEY_ARE = "start drafter budget p q accepted next_p legal emitted discarded".split()


def _sample(output: Output, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return one output as the page's script reads it."""
    assert output.trace is not None and output.pieces is not None

    def named(token: int) -> dict[str, Any]:
        return {"id": token, "text": tokenizer.text([token], skip_special=False)}

    def round_of(trace: RoundTrace) -> dict[str, Any]:
        return {name: getattr(trace, name) for name in AS_THEY_ARE} | {
            "draft": [named(token) for token in trace.draft],
            "next": named(trace.next_token),
            "after": None if trace.after_sibling is None else named(trace.after_sibling),
            "least": None if trace.rollback is None else math.exp(-trace.rollback),
        }

    tokens = zip(output.pieces, output.origins, strict=True)
    return {
        "figures": _figures(output),
        "tokens": [{"text": piece, "origin": origin} for piece, origin in tokens],
        "rounds": [round_of(trace) for trace in output.trace],
    }


def _figures(output: Output) -> list[tuple[str, str]]:
    """Return the labelled figures of one output, without those that are missing."""
    stats = output.stats
    figures = [
        ("tokens", f"{stats.tokens}"),
        ("rounds", f"{stats.rounds}"),
        ("tokens per round (τ)", _rounded(stats.mean_accepted_length)),
        ("acceptance rate", _rounded(stats.acceptance_rate)),
        ("alpha", _rounded(stats.alpha)),
        ("tokens/s, tracing included", f"{stats.tokens_per_second:.1f}"),
        ("lossless", "" if output.lossless else "no"),
        ("finish reason", output.stopped_by or output.finish_reason),
        ("seed", f"{output.seed}"),
    ]
    return [(name, value) for name, value in figures if value]


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
