"""`foredraft generate`: text, streamed in the colours of who wrote it, and what it took.

Seconds are the wall clock of the whole request, its prompt and all its samples included.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from cyclopts import Group, Parameter

from foredraft.cli.compare import Comparison, alternate
from foredraft.cli.interrupt import Interrupt
from foredraft.cli.render import Painter, ProgressBars, document, last_line
from foredraft.errors import ConfigError
from foredraft.kinds import DRAFTERS, POLICIES, default_drafter

if TYPE_CHECKING:
    from foredraft import LLM, Output, SamplingParams, Stats
    from foredraft.model.tokenizer import Detokenizer, Tokenizer

    DrafterName: TypeAlias = str
    PolicyName: TypeAlias = str
else:
    DrafterName = Literal[tuple(DRAFTERS)]
    PolicyName = Literal[tuple(POLICIES)]

__all__ = ["OPTIONS", "STDIN", "generate"]

FAILED, INTERRUPTED = 1, 130
STDIN = "\0"  # what `-` reads as: no real argument can hold it

Flag = Annotated[bool, Parameter(negative=())]  # one that is off unless given
MODEL = Group("Model", sort_key=1)
DRAFTING = Group("Drafting", sort_key=2)
SAMPLING = Group("Sampling", sort_key=3)
OUTPUT = Group("Output", sort_key=4)

DRAFTER_HELP = "; ".join(
    f"{name}: {kind.summary}{'' if kind.lossless else ' (not lossless)'}" for name, kind in DRAFTERS.items()
)
POLICY_HELP = "; ".join(f"{name}: {kind.summary}" for name, kind in POLICIES.items())
MAX_DRAFT_HELP = " and ".join(f"{kind.max_draft} with {name}" for name, kind in POLICIES.items())


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
    """Sequences that are decoded side by side at most; without it, --n or as many as memory allows."""
    max_length: int | None = None
    """Room for prompt and output together, in tokens; without it, what this prompt needs."""
    truncate: Literal["left"] | None = None
    """Drop the beginning of a prompt that is too long, instead of refusing it."""
    deterministic: bool = True
    """Keep to shapes whose results agree bit for bit, so that greedy output is plain decoding's."""


@Parameter(name="*", group=DRAFTING)
@dataclass(frozen=True, slots=True)
class DraftOptions:
    """None: not given, so the library's default holds."""

    drafter: Annotated[
        DrafterName | None,
        Parameter(
            help=f"Who guesses ahead. {DRAFTER_HELP}. Without it, {default_drafter(True)} where there is a"
            f" draft model and {default_drafter(False)} otherwise."
        ),
    ] = None
    draft: str | None = None
    """The draft model: a folder, or a Hugging Face id."""
    policy: Annotated[
        PolicyName | None,
        Parameter(help=f"How long a draft is. {POLICY_HELP}. Without it, {next(iter(POLICIES))}."),
    ] = None
    max_draft: Annotated[
        int | None, Parameter(help=f"Longest draft, in tokens. Without it, {MAX_DRAFT_HELP}.")
    ] = None
    draft_sampling: Literal["sampled", "greedy"] | None = None
    """How a draft model picks: as the target would (the default), or its likeliest token."""
    acceptance: Literal["speculative", "coupled"] | None = None
    """speculative accepts more; coupled gives one text per seed, however it is drafted. Without it,
    coupled with --seed and speculative otherwise. Both are lossless."""


@Parameter(name="*", group=SAMPLING)
@dataclass(frozen=True, slots=True)
class SamplingOptions:
    max_new_tokens: int = 128
    """Tokens to generate at most."""
    temperature: float | None = None
    """0 is greedy: top-k, top-p, min-p, seed and acceptance then change nothing. Without it 1, and 0 with
    --compare."""
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
    """Print one JSON document instead of text. Its seconds are the whole request's, the prompt included;
    with --compare, those of a warm run."""
    color: bool = True
    """Colour the text by who wrote it, where stdout is a terminal."""


OPTIONS = (ModelOptions, DraftOptions, SamplingOptions, OutputOptions)


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
        The text to go on from; - reads it from stdin, less one closing newline, and nothing else reads
        stdin. May be left out with the demo models, which then go on from a text of theirs.
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

    def needs(tokenizer: Tokenizer | None) -> tuple[int, int]:
        length = 0 if tokenizer is None else len(tokenizer.encode(text))
        return max(n, 1), length + params.max_new_tokens

    given = {name: value for name, value in (asdict(model) | asdict(drafting)).items() if value is not None}
    loading = {name: given[name] for name in given.keys() - {"model", "truncate", "acceptance"}}
    try:
        import foredraft

        llm = foredraft.load(model.model, **loading, needs=needs, progress=bars.show)
        return run(Job(llm, text, params, n, model.truncate), output, bars, show_prompt=prompt is None)
    finally:
        bars.clear()


def read_prompt(prompt: str | None, model: str | None) -> str:
    if prompt is None and model is None:
        from foredraft import demo

        return demo.prompt()
    if prompt is None:
        raise ConfigError("no prompt; give one, or - to read it from stdin")
    if prompt != STDIN:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the prompt is not UTF-8 text (character {error.start}); convert it first"
            ) from error
        return prompt
    if sys.stdin is None:
        raise ConfigError("stdin is closed; give the prompt as an argument, or something to read it from")
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"stdin is not UTF-8 text (byte {error.start}); convert it first") from error


def check(model: ModelOptions, drafting: DraftOptions, output: OutputOptions) -> None:
    """Refuse what could only be ignored: no request of this command names another drafter."""
    name = drafting.drafter or default_drafter(drafting.draft is not None or model.model is None)
    drafter = DRAFTERS[name]
    if drafting.draft is not None and not drafter.needs_draft:
        raise ConfigError(f"--draft has no use with --drafter {name}; leave one out")
    if output.compare and drafter.make is None:
        raise ConfigError("--compare finds only plain decoding; give --draft, or --drafter lookup")
    inert = [] if drafter.stepper else ["draft_sampling"]
    if drafter.make is None:
        inert += ["policy", "max_draft"]
    for option in inert:
        if getattr(drafting, option) is not None:
            raise ConfigError(f"--{option.replace('_', '-')} has no use with drafter {name}; leave it out")


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt, and all that decides what becomes of it."""

    llm: LLM
    prompt: str
    params: SamplingParams
    n: int
    truncate: Literal["left"] | None

    def detokenizer(self) -> Detokenizer:
        assert self.llm.tokenizer is not None  # without one, a prompt of text was refused
        return self.llm.tokenizer.detokenizer(after=self.llm.tokenizer.encode(self.prompt))

    def outputs(self, params: SamplingParams) -> list[Output]:
        return self.llm.generate(self.prompt, params, n=self.n, truncate=self.truncate)


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


def run(job: Job, options: OutputOptions, bars: ProgressBars, *, show_prompt: bool) -> int:
    painter = Painter(sys.stdout, color=options.color)
    streams = job.n == 1 and not options.json
    comparison = None
    # Printing is inside: a Ctrl-C now would otherwise take back what there is.
    with Interrupt(job.llm) as interrupt:
        interrupt.check()
        if show_prompt and not options.json:
            painter.write(job.prompt if streams else f"{job.prompt}\n")
        shown = Run.of(
            partial(stream, job, painter, bars, interrupt) if streams else partial(job.outputs, job.params)
        )
        stats, errors = shown.stats, shown.errors
        if options.compare and not interrupt.came and not errors:
            try:
                comparison, stats = compare(job, shown, interrupt, bars)
            except Stopped as stopped:
                errors = stopped.errors
            except KeyboardInterrupt:  # the second one, which `interrupt` raises
                pass
        bars.clear()
        if options.json:
            print(json.dumps(document(shown.outputs, stats, comparison), allow_nan=False))
        else:
            if not streams:
                show(job, shown.outputs, painter)
            print(last_line(stats, comparison, compared=options.compare))
        for error in errors:
            print(f"foredraft: error: {error}", file=sys.stderr)
    return INTERRUPTED if interrupt.came else FAILED if errors else 0


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


class Stopped(Exception):
    """A run of a comparison did not come to its end, so there is nothing to compare."""

    def __init__(self, errors: list[str]) -> None:
        self.errors = errors


def compare(job: Job, shown: Run, interrupt: Interrupt, bars: ProgressBars) -> tuple[Comparison, Stats]:
    """The comparison, and the figures of its median speculative run: the first one, shown, was cold."""
    speculative: list[Stats] = []

    def timed(params: SamplingParams) -> Run:
        if interrupt.came:
            raise Stopped([])
        run = Run.of(partial(job.outputs, params))
        if interrupt.came or run.errors:
            raise Stopped(run.errors)
        return run

    def plain() -> list[list[int]]:
        return timed(replace(job.params, speculation="none")).tokens

    def drafted() -> list[list[int]]:
        run = timed(job.params)
        speculative.append(run.stats)
        return run.tokens

    params = job.params
    with bars.alone("compare"):
        comparison = alternate(
            plain,
            drafted,
            comparable=params.greedy or (params.seed is not None and params.is_coupled),
            shown=shown.tokens,
            progress=partial(bars.show, "compare"),
        )
    warm = sorted(speculative[1:], key=lambda stats: stats.tokens_per_second)
    return comparison, warm[len(warm) // 2]
