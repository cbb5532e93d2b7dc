"""The trace: one self-contained HTML page that shows who wrote each token, and what every round did.

Contract: the page loads nothing from anywhere, tells the kinds of tokens apart without colour, and holds the
model's text as data, never as markup. It is written beside its place and then renamed, so a file that was
there before is whole or replaced, never half-written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.errors import ConfigError
from foredraft.files import write_whole

if TYPE_CHECKING:
    from foredraft import Output
    from foredraft.decode.trace import RoundTrace
    from foredraft.model.tokenizer import Tokenizer

__all__ = ["write_trace"]


def write_trace(
    file: str | Path, outputs: Sequence[Output], *, prompt: str, tokenizer: Tokenizer, about: str = ""
) -> None:
    """Write a page that shows who wrote each token, and what every round did.

    Args:
        file: Where to; a file that is there is replaced.
        outputs: Generated with `trace=True`.
        prompt: What they go on from.
        tokenizer: The model's.
        about: A line on how they were made.

    Raises:
        ConfigError: An output has no trace, or the file cannot be written.
    """
    file = Path(file)
    if any(output.trace is None for output in outputs):
        raise ConfigError("an output has no trace; generate it with trace=True")
    samples = [
        {"number": number, "prompt": prompt} | _sample(output, tokenizer)
        for number, output in enumerate(outputs, start=1)
    ]
    page = (files("foredraft.pages") / "trace.html").read_text(encoding="utf-8")
    page = page.replace("__DATA__", _embedded({"about": about, "samples": samples}))
    write_whole(file, page, "trace")


def _embedded(data: object) -> str:
    """JSON that no text in it can end the script element of."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def _sample(output: Output, tokenizer: Tokenizer) -> dict[str, Any]:
    assert output.trace is not None and output.pieces is not None

    def named(token: int) -> dict[str, Any]:
        return {"id": token, "text": tokenizer.text([token], skip_special=False)}

    def round_of(one: RoundTrace) -> dict[str, Any]:
        return {
            "start": one.start,
            "drafter": one.drafter,
            "budget": one.budget,
            "draft": [named(token) for token in one.draft],
            "p": one.p,
            "q": one.q,
            "accepted": one.accepted,
            "next": named(one.next_token),
            "next_p": one.next_p,
            "emitted": one.emitted,
            "discarded": one.discarded,
            "least": None if one.rollback is None else math.exp(-one.rollback),
        }

    tokens = zip(output.pieces, output.origins, strict=True)
    return {
        "figures": _figures(output),
        "tokens": [{"text": piece, "origin": origin} for piece, origin in tokens],
        "rounds": [round_of(one) for one in output.trace],
    }


def _figures(output: Output) -> list[tuple[str, str]]:
    stats = output.stats
    figures = [
        ("tokens", f"{stats.tokens}"),
        ("rounds", f"{stats.rounds}"),
        ("tokens per round (τ)", _rounded(stats.mean_accepted_length)),
        ("acceptance rate", _rounded(stats.acceptance_rate)),
        ("alpha", _rounded(stats.alpha)),
        ("tokens/s, tracing included", f"{stats.tokens_per_second:.1f}"),
        ("lossless", "" if output.lossless else "no"),
        ("ended by", output.stopped_by or output.finish_reason),
        ("seed", f"{output.seed}"),
    ]
    return [(name, value) for name, value in figures if value]


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
