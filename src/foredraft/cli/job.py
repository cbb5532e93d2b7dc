"""One request of `generate`: its parameters, its streamed text and its figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from foredraft.cli.errors import as_flag
from foredraft.cli.progress import ProgressBars
from foredraft.cli.render import Painter
from foredraft.errors import Option, RequestError

if TYPE_CHECKING:
    from foredraft import LLM, Output, Piece, SamplingParams, Stats

__all__ = ["Job", "Run", "show_samples", "stream"]


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt with everything that decides its output.

    Attributes:
        llm: The loaded models.
        prompt: Text, or the token ids of a conversation.
        params: Parameters of the request.
        n: Number of samples.
        truncate: "left" drops the oldest tokens of a prompt that is too long.
        show_special: Keep special tokens in the text.
        trace: Record every round, for the --trace page.
        limit_given: The user chose the number of new tokens.
        open_ended: The text ends where the model ends it, or with the positions that the model has.
    """

    llm: LLM
    prompt: str | list[int]
    params: SamplingParams
    n: int
    truncate: Literal["left"] | None
    show_special: bool
    trace: bool = False
    limit_given: bool = False
    open_ended: bool = False

    @property
    def limit(self) -> Option:
        """The option that bounds the text, with its value."""
        if self.open_ended:
            return Option("max_length", self.llm.max_length)
        return Option("max_new_tokens", self.params.max_new_tokens)

    def with_prompt(self, prompt: list[int]) -> Job:
        """Return the job for the messages of a chat; an open-ended reply gets all positions that they leave.

        Messages that may be truncated leave it a quarter at least.

        Raises:
            RequestError: They leave none.
        """
        if not self.open_ended:
            return replace(self, prompt=prompt)
        positions = self.llm.max_length
        left = positions - len(prompt)
        if self.truncate is not None:
            left = max(left, positions // 4)
        if left < 1:
            raise RequestError(
                f"the messages have {len(prompt)} tokens, and the context has {positions}",
                remedy=(
                    "shorten them (/clear in a conversation), give ", Option("truncate", "left"),
                    ", or raise ", Option("max_length"),
                ),
            )  # fmt: skip
        return replace(self, prompt=prompt, params=self.params.replace(max_new_tokens=left))

    def cuts(self, outputs: list[Output]) -> list[str]:
        """Return a sentence on texts that a limit cut which the user did not choose."""
        if self.limit_given or all(output.finish_reason != "length" for output in outputs):
            return []
        name = as_flag(Option(self.limit.name))
        if self.open_ended:
            return [f"the reply was cut where the {self.limit.value} tokens of the context end ({name})"]
        return [f"the text was cut after {self.limit.value} new tokens, the default; {name} gives more"]

    def outputs(self, params: SamplingParams, *, trace: bool = False) -> list[Output]:
        """Generate all samples with these parameters instead of the job's own."""
        return self.llm.generate(
            self.prompt, params, n=self.n, truncate=self.truncate, show_special=self.show_special, trace=trace
        )

    def stream(self) -> Iterator[Piece]:
        """Generate one sample, piece by piece."""
        return self.llm.stream(
            self.prompt,
            self.params,
            truncate=self.truncate,
            show_special=self.show_special,
            trace=self.trace,
        )

    def prompt_text(self, length: int) -> str:
        """Return the prompt as text; of a truncated prompt, its last `length` tokens."""
        tokenizer = self.llm.tokenizer
        assert tokenizer is not None  # the engine refuses a text prompt without one
        ids = tokenizer.encode(self.prompt) if isinstance(self.prompt, str) else self.prompt
        if isinstance(self.prompt, str) and len(ids) <= length:
            return self.prompt
        return tokenizer.decode(ids[-length:], skip_special=False)


@dataclass(frozen=True, slots=True)
class Run:
    """The outputs of one request.

    Attributes:
        outputs: One per sample.
        stats: Figures over all samples. Seconds are wall-clock time of the whole request, prefill included.
    """

    outputs: list[Output]
    stats: Stats

    @classmethod
    def timed(cls, request: Callable[[], list[Output]]) -> Run:
        """Run a request and time it."""
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


def stream(job: Job, painter: Painter, bars: ProgressBars) -> list[Output]:
    """Generate one sample, and print each token's text as soon as later tokens cannot change it."""
    origins: list[str] = []
    output = None
    for piece in job.stream():
        bars.clear()
        origins += piece.origins
        painter.print_legend()
        for index, text in piece.parts or []:
            painter.write(text, origins[index])
        output = piece.output
    assert output is not None
    painter.end_line()
    return [output]


def show_samples(outputs: list[Output], painter: Painter) -> None:
    """Print several samples one after the other, each under its number."""
    for number, output in enumerate(outputs, start=1):
        painter.write(f"[{number}/{len(outputs)}]\n")
        painter.print_legend()
        for text, origin in zip(output.pieces or [], output.origins, strict=True):
            painter.write(text, origin)
        painter.end_line()
