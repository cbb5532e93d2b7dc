"""One request of `generate`: its parameters, its text and its figures, and a comparison with plain decoding.

`alternate` runs both in pairs whose order flips every time, so that a machine that slows down affects both
alike. The speed-up is the median of the ratios within the pairs, with the exactness flag of the same runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from foredraft.cli.render import Painter, ProgressBars
from foredraft.cli.words import as_flag
from foredraft.errors import Option, RequestError

if TYPE_CHECKING:
    from foredraft import LLM, Output, Piece, SamplingParams, Stats


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """One prompt with everything that decides its output."""

    llm: LLM  # the loaded models
    prompt: str | list[int]  # text, or the token ids of a conversation
    params: SamplingParams  # parameters of the request
    n: int  # number of samples
    truncate: Literal["left"] | None  # "left" drops the oldest tokens of a prompt that is too long
    show_special: bool  # keep special tokens in the text
    trace: bool = False  # record every round, for the --trace page
    limit_given: bool = False  # the user chose the number of new tokens
    # the text ends where the model ends it, or with the positions that the model has
    open_ended: bool = False

    @property
    def limit(self) -> Option:
        if self.open_ended:
            return Option("max_length", self.llm.max_length)
        return Option("max_new_tokens", self.params.max_new_tokens)

    def with_prompt(self, prompt: list[int]) -> GenerateJob:
        """Return the job for the messages of a chat; an open-ended reply gets the positions that are left."""
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
        return self.llm.generate(
            self.prompt, params, n=self.n, truncate=self.truncate, show_special=self.show_special, trace=trace
        )

    def stream(self) -> Iterator[Piece]:
        return self.llm.stream(
            self.prompt, self.params, truncate=self.truncate, show_special=self.show_special, trace=self.trace
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
    """The outputs of one request."""

    outputs: list[Output]  # one per sample
    # figures over all samples. Seconds are wall-clock time of the whole request, prefill included
    stats: Stats

    @classmethod
    def timed(cls, request: Callable[[], list[Output]]) -> Run:
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


def stream(job: GenerateJob, painter: Painter, bars: ProgressBars) -> list[Output]:
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


ALTERNATIONS = 5  # pairs of timed runs: an odd number, so that the median is one of the ratios
Tokens = Sequence[Sequence[int]]  # the new tokens of every output
Generate = Callable[[], Tokens]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `alternate`."""

    speedups: tuple[float, ...]  # speculative over plain tokens/s, one ratio per pair
    plain_tokens_per_second: float  # median over the pairs
    speculative_tokens_per_second: float  # median over the pairs
    identical: bool | None  # all runs gave the same tokens; None if they need not

    @property
    def speedup(self) -> float:
        return median(self.speedups)

    def as_dict(self) -> dict[str, Any]:
        return {
            "speedup": self.speedup,
            "speedup_low": min(self.speedups),
            "speedup_high": max(self.speedups),
            "alternations": len(self.speedups),
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "speculative_tokens_per_second": self.speculative_tokens_per_second,
            "identical": self.identical,
        }


def alternate(
    plain: Generate,
    speculative: Generate,
    *,
    comparable: bool,
    earlier: Tokens | None = None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    total = 2 * (ALTERNATIONS + 1)
    done = 0
    texts: list[Tokens] = [] if earlier is None else [earlier]

    def rate(generate: Generate) -> float:
        nonlocal done
        start = clock()
        tokens = generate()
        seconds = clock() - start
        texts.append(tokens)
        done += 1
        progress(done, total)
        return sum(len(output) for output in tokens) / seconds

    rates: list[tuple[float, float]] = []
    for index in range(-1, ALTERNATIONS):  # the first pair warms up
        fast = rate(speculative) if index >= 0 and index % 2 else None
        slow = rate(plain)
        rates.append((slow, rate(speculative) if fast is None else fast))
    rates = rates[1:]
    same = all([list(output) for output in text] == [list(output) for output in texts[0]] for text in texts)
    return Comparison(
        speedups=tuple(fast / slow for slow, fast in rates),
        plain_tokens_per_second=median(slow for slow, _ in rates),
        speculative_tokens_per_second=median(fast for _, fast in rates),
        identical=same if comparable else None,
    )
