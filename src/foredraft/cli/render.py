"""What a person or a program sees: coloured text, lines of figures, the JSON document.

Contract: text that goes to a terminal carries no control characters of the model's making; text that
goes anywhere else is the model's, byte for byte. The JSON document holds no NaN.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from foredraft import Output, Score, Stats
    from foredraft.cli.compare import Comparison

__all__ = ["Painter", "document", "last_line", "table"]

# Who wrote a token -> (ANSI colour, its name, what to call it in the legend).
ORIGINS = {
    "drafter": ("32", "green", "drafted, and accepted by the target"),
    "target": ("33", "yellow", "the target's own word"),
    "bonus": ("36", "cyan", "the target's bonus after a fully accepted draft"),
}


class Painter:
    """Writes text to a stream, in the colours of who wrote it if the stream is a terminal."""

    def __init__(self, stream: TextIO, *, color: bool) -> None:
        self.stream = stream
        self.terminal = stream.isatty()
        dumb = os.environ.get("TERM") == "dumb" or bool(os.environ.get("NO_COLOR"))
        self.color = color and self.terminal and not dumb
        self._explained = False
        self._fresh_line = True

    def explain(self) -> None:
        """Say what the colours mean, once."""
        if self.color and not self._explained:
            print(legend(color=sys.stderr.isatty()), file=sys.stderr)
            self._explained = True

    def end_line(self) -> None:
        if not self._fresh_line:
            self.write("\n")

    def write(self, text: str, origin: str | None = None) -> None:
        """Text that spans tokens gets the colour of the token that completed it."""
        if not text:
            return
        self._fresh_line = text.endswith("\n")
        if self.terminal:
            text = "".join(map(visible, text))
        if self.color and origin in ORIGINS:
            text = f"\x1b[{ORIGINS[origin][0]}m{text}\x1b[0m"
        self.stream.write(text)
        self.stream.flush()


def visible(character: str) -> str:
    """A control character as its picture, so that generated text cannot drive the terminal."""
    code = ord(character)
    if character in "\n\t" or 32 <= code < 127 or code >= 160:
        return character
    return chr(0x2400 + code) if code < 32 else "\N{REPLACEMENT CHARACTER}"


def legend(*, color: bool) -> str:
    return "; ".join(
        f"\x1b[{code}m{name}\x1b[0m: {what}" if color else f"{name}: {what}"
        for code, name, what in ORIGINS.values()
    )


def last_line(stats: Stats, comparison: Comparison | None, *, compared: bool, lossless: bool) -> str:
    """All the figures; `compared` without a comparison means that it did not come to its end."""
    parts = [f"{stats.tokens} tokens in {stats.seconds:.2f} s: {stats.tokens_per_second:.1f} tokens/s"]
    if stats.drafted:
        parts.append(f"acceptance rate {stats.acceptance_rate:.0%}")
        parts.append(f"mean accepted length {stats.mean_accepted_length:.2f}")
    else:
        parts.append("nothing drafted")
    if comparison is not None:
        parts.append(speedup(comparison))
    elif compared:
        parts.append("comparison not finished")
    if not lossless:
        parts.append("NOT LOSSLESS: the text need not be the target's")
    return ", ".join(parts)


def speedup(comparison: Comparison) -> str:
    flag = {
        True: "outputs identical: yes",
        False: "outputs identical: NO",
        None: "outputs not comparable token by token",
    }[comparison.identical]
    low, high, count = min(comparison.speedups), max(comparison.speedups), len(comparison.speedups)
    return (
        f"median speed-up over plain decoding {comparison.speedup:.2f} x "
        f"(spread {low:.2f}-{high:.2f} over {count} alternations; {flag})"
    )


def document(outputs: Sequence[Output], stats: Stats, comparison: Comparison | None) -> dict[str, Any]:
    """The `--json` document."""
    deterministic = all(output.deterministic for output in outputs)
    differs = comparison is not None and comparison.identical is False
    figures: dict[str, Any] = {
        "outputs": [_told(output) for output in outputs],
        "usage": {
            "prompt_tokens": outputs[0].prompt_tokens,
            "completion_tokens": sum(len(output.token_ids) for output in outputs),
        },
        "stats": stats.as_dict(),
        "lossless": all(output.lossless for output in outputs) and deterministic and not differs,
    }
    if not deterministic:
        figures["deterministic"] = False
    if comparison is not None:
        figures["compare"] = comparison.as_dict()
    return figures


def _told(output: Output) -> dict[str, Any]:
    told: dict[str, Any] = {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "seed": output.seed,
    }
    if output.stopped_by is not None:
        told["stopped_by"] = output.stopped_by
    if output.logprobs is not None:
        told["logprobs"] = [_scored(score) for score in output.logprobs]
    if output.prompt_logprobs is not None:
        told["prompt_logprobs"] = [score and _scored(score) for score in output.prompt_logprobs]
    if output.error:
        told["error"] = output.error
    return told


def _scored(score: Score) -> dict[str, Any]:
    """null where the model or the law gives the token no probability, which only a prompt's can have, or one
    that a lossy rule let stand."""
    both = {"logprob": score.logprob, "processed": score.processed}
    return asdict(score) | {name: None if x == -math.inf else x for name, x in both.items()}


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
