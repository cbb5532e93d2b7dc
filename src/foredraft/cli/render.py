"""Output of `generate`: coloured text, the line of figures and the JSON document.

Text for a terminal contains no control characters of the model's making. Text for any other stream is the
model's, byte for byte. The JSON document contains no NaN.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from foredraft.cli.errors import as_flag
from foredraft.cli.layout import terminal_width
from foredraft.cli.stdout import writing_stdout
from foredraft.pages.origins import ORIGINS

if TYPE_CHECKING:
    from foredraft import Output, Score, Stats
    from foredraft.cli.compare import Comparison
    from foredraft.errors import Option

__all__ = ["Painter", "document", "last_line"]

DIM = 2  # ANSI code of the prompt
# Characters of a long prompt's end that a terminal shows before the text: about a screen of 25 lines.
TAIL = 2000


class Painter:
    """Writes text to stdout; on a terminal, each token in the colour of its origin.

    Args:
        stream: stdout.
        color: Use colours if the stream is a terminal that has them and NO_COLOR is not set.
    """

    def __init__(self, stream: TextIO, *, color: bool) -> None:
        self.stream = stream
        self.terminal = stream.isatty()
        dumb = os.environ.get("TERM") == "dumb" or bool(os.environ.get("NO_COLOR"))
        self.color = color and self.terminal and not dumb
        self._legend_printed = False
        self._at_line_start = True

    def print_legend(self) -> None:
        """Print the meaning of the colours to stderr, once."""
        if self.color and not self._legend_printed:
            width = terminal_width(sys.stderr)
            separator = "; " if width is None or len(legend(color=False)) <= width else "\n"
            print(legend(color=width is not None, separator=separator), file=sys.stderr)
            self._legend_printed = True

    def end_line(self) -> None:
        """Write a newline unless the text ended with one."""
        if not self._at_line_start:
            self.write("\n")

    def write(self, text: str, origin: str | None = None) -> None:
        """Write text in the colour of `origin`, a key of `ORIGINS`.

        Text that spans several tokens takes the origin of the token that completed it.
        """
        if not text:
            return
        self._at_line_start = text.endswith("\n")
        if self.terminal:
            text = "".join(map(visible, text))
        if self.color and origin in ORIGINS:
            text = painted(text, ORIGINS[origin].ansi)
        self._put(text)

    def write_prompt(self, prompt: str) -> None:
        """Write the prompt before its text: on a terminal its end, dimmed, below the legend."""
        self.print_legend()
        if self.terminal:
            prompt = "".join(map(visible, prompt if len(prompt) <= TAIL else f"…{prompt[-TAIL:]}"))
        self._put(painted(prompt, DIM) if self.color else prompt)
        self._at_line_start = False

    def _put(self, text: str) -> None:
        with writing_stdout():
            self.stream.write(text)
            self.stream.flush()


def painted(text: str, code: int) -> str:
    """Return the text with an ANSI code around it."""
    return f"\x1b[{code}m{text}\x1b[0m"


def visible(character: str) -> str:
    """Return the character, or a printable stand-in for one that could control the terminal."""
    code = ord(character)
    if character in "\n\t" or 32 <= code < 127 or code >= 160:
        return character
    return chr(0x2400 + code) if code < 32 else "\N{REPLACEMENT CHARACTER}"


def legend(*, color: bool, separator: str = "; ") -> str:
    """Return the meaning of the colours, themselves in colour if `color`."""
    return separator.join(
        f"{painted(origin.color, origin.ansi) if color else origin.color}: {origin.meaning}"
        for origin in ORIGINS.values()
    )


def last_line(
    stats: Stats,
    finish: str,
    comparison: Comparison | None = None,
    *,
    compared: bool = False,
    lossless: bool = True,
) -> str:
    """Return the line of figures.

    Args:
        stats: Figures of the run.
        finish: Why the text ended.
        comparison: The comparison with plain decoding; None if there is none.
        compared: A comparison was requested; without a `comparison`, the line says that it did not finish.
        lossless: The output follows the target's distribution exactly.
    """
    parts = [
        f"{stats.tokens} tokens in {stats.seconds:.2f} s: {stats.tokens_per_second:.1f} tokens/s",
        finish,
    ]
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


def finish(outputs: Sequence[Output], limit: Option) -> str:
    """Return why the texts ended, with the option that cut one.

    Examples:
        "finish_reason eos", "finish_reason length (--max-new-tokens 128)"
    """
    reasons = dict.fromkeys(output.finish_reason for output in outputs)
    named = [f"length ({as_flag(limit)})" if reason == "length" else reason for reason in reasons]
    return f"finish_reason {', '.join(named)}"


def notes(profile_seconds: float, outputs: Sequence[Output]) -> list[str]:
    """Return what follows the figures: why nothing was drafted, and what measuring costs took before."""
    reasons = dict.fromkeys(output.why_plain for output in outputs if output.why_plain is not None)
    told = [f"no drafts because {reason}" for reason in reasons]
    if profile_seconds:
        told.append(f"costs of this machine measured in {profile_seconds:.1f} s while loading")
    return told


def speedup(comparison: Comparison) -> str:
    """Return the speed-up with its spread and the exactness flag."""
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


def document(
    outputs: Sequence[Output], stats: Stats, comparison: Comparison | None, weights: str | None = None
) -> dict[str, Any]:
    """Return the `--json` document; `weights` says how the target's weights are quantised."""
    deterministic = all(output.deterministic for output in outputs)
    differs = comparison is not None and comparison.identical is False
    figures: dict[str, Any] = {
        "outputs": [_output_dict(output) for output in outputs],
        "usage": {
            "prompt_tokens": outputs[0].prompt_tokens,
            "completion_tokens": sum(len(output.token_ids) for output in outputs),
        },
        "stats": stats.as_dict(),
        "lossless": all(output.lossless for output in outputs) and deterministic and not differs,
    }
    if not deterministic:
        figures["deterministic"] = False
    if weights is not None:
        figures["weights"] = weights
    if comparison is not None:
        figures["compare"] = comparison.as_dict()
    return figures


def _output_dict(output: Output) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "seed": output.seed,
    }
    if output.stopped_by is not None:
        fields["stopped_by"] = output.stopped_by
    if output.why_plain is not None:
        fields["why_plain"] = output.why_plain
    if output.logprobs is not None:
        fields["logprobs"] = [_score_dict(score) for score in output.logprobs]
    if output.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [score and _score_dict(score) for score in output.prompt_logprobs]
    if output.error:
        fields["error"] = output.error
    return fields


def _score_dict(score: Score) -> dict[str, Any]:
    """Return a score for JSON, with null for a log-probability of -inf.

    Only tokens of a prompt, and tokens that a lossy acceptance rule kept, can have one.
    """
    both = {"logprob": score.logprob, "processed": score.processed}
    return asdict(score) | {name: None if x == -math.inf else x for name, x in both.items()}
