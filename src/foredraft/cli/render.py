"""What `generate` shows: progress on stderr, coloured text, the line of figures and the JSON document.

Text for a terminal contains no control characters of the model's making. Text for any other stream is the
model's, byte for byte. Commands that measure show their progress in the same way.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self, TextIO

from foredraft.cli.words import as_flag, terminal_width, writing_stdout
from foredraft.pages.trace import ORIGINS

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from foredraft import Output, Score, Stats
    from foredraft.cli.job import Comparison
    from foredraft.errors import Option


TRIAL_LINES = 10  # lines that `ProgressLines` prints during the trials, one after each tenth
START = "start"
# Name of a stage -> its description. A stage that is not listed is its own description.
STAGES = {
    START: "Importing PyTorch",
    "kernels": "Compiling kernels, once for this machine",
    "profile": "Measuring the costs of this machine",
    "methods": "Loading the methods",
    "bandwidth": "Measuring the memory bandwidth",
    "download": "Downloading (MB)",
    "load": "Loading the models",
    "prefill": "Reading the prompt",
    "compare": "Comparing",
    "calibrate": "Generating calibration texts (tokens)",
    "read": "Reading calibration texts (tokens)",
    "costs": "Timing passes (turns)",
    "rank": "Ranking seed plans (sub-layers run)",
    "trials": "Trials",
    "decode": "Decoding held-out prompts",
    "self-generate": "Continuing the prompts of the data",
    "train": "Training",
    "validate": "Validated",
    "examine": "Trying settings",
}


def started() -> ProgressBars:
    """Return the progress of a command that measures, with its first stage shown."""
    shown = ProgressBars() if sys.stderr.isatty() else ProgressLines()
    shown.show(START, 0, 1)
    return shown


class ProgressBars:
    """One bar per stage on stderr, removed when the stage is done; nothing if stderr is not a terminal.

    Bars are drawn only within `show`, without a refresh thread, so that they take no time from a timed run.
    """

    def __init__(self) -> None:
        self._bars: Progress | None = None
        self._only: str | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def show(self, stage: str, done: int, total: int, note: str = "") -> None:
        if not sys.stderr.isatty() or self._only not in (None, stage):
            return
        if START in self._tasks and stage != START:
            self.clear()  # importing has no end of its own
        if self._bars is None:
            self._bars = self._start()
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(STAGES.get(stage, stage))
        description = ", ".join(filter(None, (STAGES.get(stage, stage), note)))
        self._bars.update(self._tasks[stage], completed=done, total=total, description=description)
        self._bars.refresh()
        if done >= total:
            self.clear()

    @contextmanager
    def only(self, stage: str) -> Iterator[None]:
        self._only = stage
        try:
            yield
        finally:
            self._only = None

    def clear(self) -> None:
        """Remove the bars, so that text can follow; printed lines stay."""
        if self._bars is not None:
            self._bars.stop()
        self._bars, self._tasks = None, {}

    def _start(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        bars = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
        bars.start()
        return bars


class ProgressLines(ProgressBars):
    """One line per stage, and one per tenth of the trials, for a stderr that is not a terminal."""

    _printed: tuple[str, int] | None = None

    def show(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Print a line if the stage, or a tenth of the trials, is new."""
        tenth = TRIAL_LINES * done // max(1, total) if stage == "trials" else 0
        if (stage, tenth) == self._printed:
            return
        self._printed = stage, tenth
        parts = [STAGES.get(stage, stage) + (f" {done}/{total}" if stage == "trials" else ""), note]
        print(f"foredraft: {', '.join(filter(None, parts))}", file=sys.stderr, flush=True)


DIM = 2  # ANSI code of the prompt
# Characters of a long prompt's end that a terminal shows before the text: about a screen of 25 lines.
TAIL = 2000


class Painter:
    """Writes text to stdout; on a terminal, each token in the colour of its origin."""

    def __init__(self, stream: TextIO, *, color: bool) -> None:
        self.stream = stream  # stdout
        self.terminal = stream.isatty()
        dumb = os.environ.get("TERM") == "dumb" or bool(os.environ.get("NO_COLOR"))
        # use colours if the stream is a terminal that has them and NO_COLOR is not set
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
        if not self._at_line_start:
            self.write("\n")

    def write(self, text: str, origin: str | None = None) -> None:
        """Write text in the colour of its origin, a key of `ORIGINS`: that of the token that completed it."""
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
    return f"\x1b[{code}m{text}\x1b[0m"


def visible(character: str) -> str:
    """Return the character, or a printable stand-in for one that could control the terminal."""
    code = ord(character)
    if character in "\n\t" or 32 <= code < 127 or code >= 160:
        return character
    return chr(0x2400 + code) if code < 32 else "\N{REPLACEMENT CHARACTER}"


def legend(*, color: bool, separator: str = "; ") -> str:
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
    flag = {
        True: "outputs identical: yes",
        False: "outputs identical: NO",
        None: "outputs not comparable token by token",
    }[comparison.identical]
    return (
        f"median speed-up over plain decoding {comparison.speedup:.2f} x "
        f"(spread {comparison.speedup_low:.2f}-{comparison.speedup_high:.2f} over {comparison.alternations}"
        f" alternations; {flag})"
    )


def document(
    outputs: Sequence[Output], stats: Stats, comparison: Comparison | None, weights: str | None = None
) -> dict[str, Any]:
    """Return the `--json` document; `weights` says how the target's weights are quantised."""
    deterministic = all(output.deterministic for output in outputs)
    differs = comparison is not None and comparison.identical is False
    some = {
        "deterministic": None if deterministic else False,
        "weights": weights,
        "compare": None if comparison is None else asdict(comparison),
    }
    return {
        "outputs": [_output_dict(output) for output in outputs],
        "usage": {
            "prompt_tokens": outputs[0].prompt_tokens,
            "completion_tokens": sum(len(output.token_ids) for output in outputs),
        },
        "stats": stats.as_dict(),
        "lossless": all(output.lossless for output in outputs) and deterministic and not differs,
    } | {name: value for name, value in some.items() if value is not None}


def _output_dict(output: Output) -> dict[str, Any]:
    logprobs, prompt_logprobs = output.logprobs, output.prompt_logprobs
    some = {
        "stopped_by": output.stopped_by,
        "why_plain": output.why_plain,
        "logprobs": None if logprobs is None else [_score_dict(score) for score in logprobs],
        "prompt_logprobs": None
        if prompt_logprobs is None
        else [score and _score_dict(score) for score in prompt_logprobs],
        "error": output.error or None,
    }
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "seed": output.seed,
    } | {name: value for name, value in some.items() if value is not None}


def _score_dict(score: Score) -> dict[str, Any]:
    """Return a score for JSON, with null for -inf, which tokens of a prompt and of lossy rules can have."""
    both = {"logprob": score.logprob, "processed": score.processed}
    return asdict(score) | {name: None if x == -math.inf else x for name, x in both.items()}
