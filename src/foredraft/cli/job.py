"""One prompt and what becomes of it: the request, its text as it comes, and its figures.

Seconds are the wall clock of the whole request, its prompt and all its samples included.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from foredraft.cli.interrupt import Interrupt
from foredraft.cli.render import Painter, ProgressBars

if TYPE_CHECKING:
    from foredraft import LLM, Output, SamplingParams, Stats
    from foredraft.model.tokenizer import Detokenizer

__all__ = ["Job", "Run", "show", "stream"]


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt, and all that decides what becomes of it.

    prompt: text, or the ids of a conversation. special: special tokens are shown.
    """

    llm: LLM
    prompt: str | list[int]
    params: SamplingParams
    n: int
    truncate: Literal["left"] | None
    special: bool

    def detokenizer(self) -> Detokenizer:
        tokenizer = self.llm.tokenizer
        assert tokenizer is not None  # without one, a prompt of text was refused
        before = tokenizer.encode(self.prompt) if isinstance(self.prompt, str) else self.prompt
        return tokenizer.detokenizer(after=before, skip_special=not self.special)

    def outputs(self, params: SamplingParams) -> list[Output]:
        return self.llm.generate(self.prompt, params, n=self.n, truncate=self.truncate)

    def spelled(self, output: Output) -> Output:
        """The output with the special tokens in its text, if they are shown."""
        if not self.special:
            return output
        detokenizer = self.detokenizer()
        return replace(output, text=detokenizer.push(output.token_ids) + detokenizer.flush())


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one request, and its figures by the wall clock."""

    outputs: list[Output]
    stats: Stats

    @classmethod
    def of(cls, request: Callable[[], list[Output]]) -> Run:
        from foredraft import Stats

        start = time.perf_counter()
        outputs = request()
        seconds = time.perf_counter() - start
        return cls(outputs, Stats.merge((output.stats for output in outputs), seconds))

    @property
    def tokens(self) -> list[list[int]]:
        return [output.token_ids for output in self.outputs]

    @property
    def errors(self) -> list[str]:
        return [output.error for output in self.outputs if output.error]


def stream(job: Job, painter: Painter, bars: ProgressBars, interrupt: Interrupt) -> list[Output]:
    """Show every token as it comes."""
    pieces = job.llm.stream(job.prompt, job.params, truncate=job.truncate)
    detokenizer = job.detokenizer()
    output = None
    for piece in pieces:
        bars.clear()
        painter.tokens(detokenizer, piece.token_ids, piece.origins)
        output = piece.output
        if interrupt.came:  # perhaps before there was a request to end
            job.llm.cancel_all()
    assert output is not None
    painter.finish(detokenizer)
    return [output]


def show(job: Job, outputs: list[Output], painter: Painter) -> None:
    """Several samples, one after the other."""
    for number, output in enumerate(outputs, start=1):
        painter.write(f"[{number}/{len(outputs)}]\n")
        detokenizer = job.detokenizer()
        painter.tokens(detokenizer, output.token_ids, output.origins)
        painter.finish(detokenizer)
