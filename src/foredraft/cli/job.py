"""One prompt and what becomes of it: the request, its text as it comes, and its figures.

Seconds are the wall clock of the whole request, its prompt and all its samples included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from foredraft.cli.interrupt import Interrupt
from foredraft.cli.progress import ProgressBars
from foredraft.cli.render import Painter

if TYPE_CHECKING:
    from foredraft import LLM, Output, Piece, SamplingParams, Stats

__all__ = ["Job", "Run", "show", "stream"]


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt, and all that decides what becomes of it.

    prompt: text, or the ids of a conversation. special: special tokens are shown. traced: what each round did
    is told, for a page of it.
    """

    llm: LLM
    prompt: str | list[int]
    params: SamplingParams
    n: int
    truncate: Literal["left"] | None
    special: bool
    traced: bool = False

    def outputs(self, params: SamplingParams, *, trace: bool = False) -> list[Output]:
        return self.llm.generate(
            self.prompt, params, n=self.n, truncate=self.truncate, show_special=self.special, trace=trace
        )

    def stream(self) -> Iterator[Piece]:
        return self.llm.stream(
            self.prompt, self.params, truncate=self.truncate, show_special=self.special, trace=self.traced
        )

    def text(self, length: int) -> str:
        """The prompt, or its last `length` tokens where it was truncated, spelled out."""
        tokenizer = self.llm.tokenizer
        assert tokenizer is not None  # without one, a prompt of text was refused
        ids = tokenizer.encode(self.prompt) if isinstance(self.prompt, str) else self.prompt
        if isinstance(self.prompt, str) and len(ids) <= length:
            return self.prompt
        return tokenizer.decode(ids[-length:], skip_special=False)


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
    def lossless(self) -> bool:
        return all(output.lossless for output in self.outputs)

    @property
    def errors(self) -> list[str]:
        return [output.error for output in self.outputs if output.error]


def stream(job: Job, painter: Painter, bars: ProgressBars, interrupt: Interrupt) -> list[Output]:
    """Show every token's text as soon as nothing can change it."""
    origins: list[str] = []
    output = None
    for piece in job.stream():
        bars.clear()
        origins += piece.origins
        painter.explain()
        for index, text in piece.parts or []:
            painter.write(text, origins[index])
        output = piece.output
        if interrupt.came:  # perhaps before there was a request to end
            job.llm.cancel_all()
    assert output is not None
    painter.end_line()
    return [output]


def show(outputs: list[Output], painter: Painter) -> None:
    """Several samples, one after the other."""
    for number, output in enumerate(outputs, start=1):
        painter.write(f"[{number}/{len(outputs)}]\n")
        painter.explain()
        for text, origin in zip(output.pieces or [], output.origins, strict=True):
            painter.write(text, origin)
        painter.end_line()
