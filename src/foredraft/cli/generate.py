"""`foredraft generate`: text, streamed in the colours of who wrote it, and what it took."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from foredraft.cli.compare import Comparison, alternate
from foredraft.cli.interrupt import Interrupt
from foredraft.cli.render import Painter, ProgressBars, compare_line, document, stats_line
from foredraft.errors import ConfigError

if TYPE_CHECKING:
    from foredraft import LLM, Output, Piece, SamplingParams

__all__ = ["STDIN", "generate"]

FAILED, INTERRUPTED = 1, 130
STDIN = "\0"  # what `-` reads as: no real argument can hold it

Flag = Annotated[bool, Parameter(negative=())]  # one that is off unless given
MODEL = Group("Model", sort_key=1)
DRAFTING = Group("Drafting", sort_key=2)
SAMPLING = Group("Sampling", sort_key=3)
OUTPUT = Group("Output", sort_key=4)


@Parameter(name="*", group=MODEL)
@dataclass(frozen=True, slots=True)
class ModelOptions:
    model: str | None = None
    """The target: a folder, or a Hugging Face id. Without it, the demo models that ship with Foredraft."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """Arithmetic of the models; without it, what the checkpoint is stored as."""
    device: str | None = None
    """cpu, cuda, or cuda:N; without it, cuda where there is one."""
    max_batch: int | None = None
    """Sequences that are decoded side by side at most; without it, by free memory."""
    max_length: int | None = None
    """Room for prompt and output together, in tokens; without it, the model's, as memory allows."""
    truncate: Literal["left"] | None = None
    """Drop the beginning of a prompt that is too long, instead of refusing it."""
    deterministic: bool = True
    """Keep to shapes whose results agree bit for bit, so that greedy output is plain decoding's."""


@Parameter(name="*", group=DRAFTING)
@dataclass(frozen=True, slots=True)
class DraftOptions:
    drafter: Literal["none", "draft-model", "lookup"] | None = None
    """What guesses ahead: nothing (plain decoding), a small model (--draft), or look-up in the text so
    far. Without it, draft-model where there is one and none otherwise."""
    draft: str | None = None
    """The draft model: a folder, or a Hugging Face id."""
    policy: Literal["fixed", "heuristic"] = "fixed"
    """Always --max-draft tokens, or a length that follows what was accepted."""
    max_draft: int = 5
    """Longest draft, in tokens."""
    draft_sampling: Literal["sampled", "greedy"] = "sampled"
    """How a draft model picks: as the target would, or its likeliest token."""
    acceptance: Literal["speculative", "coupled"] | None = None
    """speculative accepts more; coupled gives one text per seed, however it is drafted. Without it,
    coupled with --seed and speculative otherwise. Both are lossless."""


@Parameter(name="*", group=SAMPLING)
@dataclass(frozen=True, slots=True)
class SamplingOptions:
    max_new_tokens: int = 128
    """Tokens to generate at most."""
    temperature: float | None = None
    """0 is greedy. Without it 1, and 0 with --compare."""
    top_k: int = 0
    """Keep only the k likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Keep the likeliest tokens that make up this mass; 1 is off."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest; 0 is off."""
    seed: int | None = None
    """For a text that can be had again; without it a fresh one, which --json reports."""
    n: int = 1
    """Samples of the prompt."""
    ignore_eos: Flag = False
    """Go on past the end-of-text token."""


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True, slots=True)
class OutputOptions:
    compare: Flag = False
    """Also time plain decoding, in alternation, and say whether the outputs are identical."""
    json: Flag = False
    """Print one JSON document instead of text."""
    color: bool = True
    """Colour the text by who wrote it, where stdout is a terminal."""


def generate(
    prompt: str | None = None,
    /,
    *,
    model: ModelOptions = ModelOptions(),
    drafting: DraftOptions = DraftOptions(),
    sampling: SamplingOptions = SamplingOptions(),
    output: OutputOptions = OutputOptions(),
) -> int:
    """Generate text: the target's own, drafted ahead and checked.

    Parameters
    ----------
    prompt
        The text to go on from; - reads it from stdin, less one closing newline. May be left out with the
        demo models.
    """
    text = read_prompt(prompt, model.model)
    check(model, drafting, output)
    from foredraft import SamplingParams

    options = asdict(sampling)
    n = options.pop("n")
    if sampling.temperature is None:
        options["temperature"] = 0.0 if output.compare else 1.0
    params = SamplingParams(**options, acceptance=drafting.acceptance)
    bars = ProgressBars()
    try:
        job = Job(load(model, drafting, bars), text, params, n, model.truncate)
        return run(job, output, bars)
    finally:
        bars.clear()


def read_prompt(prompt: str | None, model: str | None) -> str:
    if prompt is None and model is None:
        from foredraft import demo

        return demo.prompts()[0]
    if prompt is None:
        raise ConfigError("no prompt; give one, or - to read it from stdin")
    if prompt != STDIN:
        return prompt
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"stdin is not UTF-8 text (byte {error.start}); convert it first") from error


def check(model: ModelOptions, drafting: DraftOptions, output: OutputOptions) -> None:
    """Refuse what could only be ignored."""
    if drafting.draft is not None and drafting.drafter not in (None, "draft-model"):
        raise ConfigError(f"--draft has no use with --drafter {drafting.drafter}; leave one out")
    if drafting.drafter == "draft-model" and drafting.draft is None and model.model is not None:
        raise ConfigError("--drafter draft-model needs --draft, the small model's folder or Hugging Face id")
    drafts = drafting.drafter or drafting.draft or ("none" if model.model else "draft-model")
    if output.compare and drafts == "none":
        raise ConfigError("--compare finds only plain decoding; give --draft, or --drafter lookup")


def load(model: ModelOptions, drafting: DraftOptions, bars: ProgressBars) -> LLM:
    import foredraft

    options = asdict(model) | asdict(drafting)
    del options["truncate"], options["acceptance"]
    return foredraft.load(options.pop("model"), **options, progress=bars.show)


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt, and all that decides what becomes of it."""

    llm: LLM
    prompt: str
    params: SamplingParams
    n: int
    truncate: Literal["left"] | None

    def outputs(self, params: SamplingParams) -> list[Output]:
        return self.llm.generate(self.prompt, params, n=self.n, truncate=self.truncate)

    def pieces(self) -> Iterator[Piece]:
        return self.llm.stream(self.prompt, self.params, truncate=self.truncate)


def run(job: Job, options: OutputOptions, bars: ProgressBars) -> int:
    from foredraft import Stats

    painter = Painter(sys.stdout, color=options.color)
    comparison = None
    with Interrupt(job.llm) as interrupt:
        start = time.perf_counter()
        streams = job.n == 1 and not options.json
        outputs = [stream(job, painter, bars)] if streams else job.outputs(job.params)
        seconds = time.perf_counter() - start
        failures = [output.error for output in outputs if output.error]
        if options.compare and not interrupt.came and not failures:
            comparison = compare(job, interrupt, bars)
    bars.clear()
    # Samples run side by side: their time is the clock's, not their sum.
    stats = outputs[0].stats if job.n == 1 else Stats.merge((output.stats for output in outputs), seconds)
    if options.json:
        print(json.dumps(document(outputs, stats, comparison), allow_nan=False))
    else:
        if not streams:
            show(job, outputs, painter)
        print(stats_line(stats))
        if comparison is not None:
            print(compare_line(comparison))
    for failure in failures:
        print(f"foredraft: error: {failure}", file=sys.stderr)
    return INTERRUPTED if interrupt.came else FAILED if failures else 0


def stream(job: Job, painter: Painter, bars: ProgressBars) -> Output:
    """Show every token as it comes."""
    pieces = job.pieces()
    assert job.llm.tokenizer is not None  # without one, a prompt of text was refused
    detokenizer = job.llm.tokenizer.detokenizer()
    output = None
    for piece in pieces:
        bars.clear()
        painter.tokens(detokenizer, piece.token_ids, piece.origins)
        output = piece.output
    assert output is not None
    painter.finish(detokenizer)
    return output


def show(job: Job, outputs: list[Output], painter: Painter) -> None:
    """Several samples, one after the other."""
    assert job.llm.tokenizer is not None
    for number, output in enumerate(outputs, start=1):
        painter.write(f"[{number}/{len(outputs)}]\n")
        detokenizer = job.llm.tokenizer.detokenizer()
        painter.tokens(detokenizer, output.token_ids, output.origins)
        painter.finish(detokenizer)


class Stopped(Exception):
    """A run of a comparison did not come to its end, so there is nothing to compare."""


def compare(job: Job, interrupt: Interrupt, bars: ProgressBars) -> Comparison | None:
    def timed(params: SamplingParams) -> list[list[int]]:
        outputs = job.outputs(params)
        if interrupt.came or any(output.error for output in outputs):
            raise Stopped
        return [output.token_ids for output in outputs]

    params = job.params
    try:
        return alternate(
            partial(timed, replace(params, speculation="none")),
            partial(timed, params),
            comparable=params.greedy or (params.seed is not None and params.is_coupled),
            progress=partial(bars.show, "compare"),
        )
    except Stopped:
        return None
