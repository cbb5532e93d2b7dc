"""`foredraft generate`: text, streamed in the colours of who wrote it, and what it took."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.cli.compare import Comparison, alternate
from foredraft.cli.conversation import CONVERSATION, Conversation, converse
from foredraft.cli.error_text import STDIN
from foredraft.cli.interrupt import Interrupt
from foredraft.cli.job import Job, Run, show, stream
from foredraft.cli.options import (
    ChatOptions,
    DraftingOptions,
    DraftOptions,
    ModelOptions,
    OutputOptions,
    SamplingOptions,
    loading,
    requested,
)
from foredraft.cli.progress import ProgressBars
from foredraft.cli.render import Painter, document, last_line
from foredraft.errors import ConfigError
from foredraft.files import check_place
from foredraft.kinds import DRAFTERS, RULES, default_drafter, suits

if TYPE_CHECKING:
    from foredraft import Output, SamplingParams, Stats
    from foredraft.model.tokenizer import Tokenizer

__all__ = ["INTERRUPTED", "check", "generate", "named", "read_prompt", "refuse_lossy"]

FAILED, INTERRUPTED = 1, 130


def generate(
    prompt: str | None = None,
    /,
    *,
    model: ModelOptions = ModelOptions(),
    drafting: DraftOptions = DraftOptions(),
    sampling: SamplingOptions = SamplingOptions(),
    chat: ChatOptions = ChatOptions(),
    output: OutputOptions = OutputOptions(),
) -> int:
    """Generate text: the target's own, drafted ahead and checked.

    Parameters
    ----------
    prompt
        The text to go on from; - reads it from stdin, less one closing newline, and nothing else reads
        stdin. May be left out with the demo models, which then go on from a text of theirs, and with --chat.
    """
    check(model, drafting, output)
    talking = chat.chat and prompt is None
    check_request(chat, sampling, output, talking=talking)
    text = "" if talking else read_prompt(prompt, model.model)
    import foredraft

    given = requested(sampling, drafting)
    if output.compare:
        given = {"temperature": 0.0} | given
    foredraft.SamplingParams().replace(**given)  # a mistake need not wait for the model
    conversation = Conversation(chat.system)
    bars = ProgressBars()

    def encoded(tokenizer: Tokenizer | None) -> list[int]:
        if chat.chat:
            return conversation.ids(tokenizer, text)
        return [] if tokenizer is None else tokenizer.encode(text)

    def needs(tokenizer: Tokenizer | None, defaults: SamplingParams) -> tuple[int, int]:
        length = len(encoded(tokenizer)) + defaults.replace(**given).max_new_tokens
        return max(sampling.n, 1), max(length, CONVERSATION) if talking else length

    try:
        llm = foredraft.load(model.model, **loading(model, drafting), needs=needs, progress=bars.show)
        asked = encoded(llm.tokenizer) if chat.chat else text
        params, traced = llm.params(**given), output.trace is not None
        job = Job(llm, asked, params, sampling.n, model.truncate, output.show_special, traced)
        if talking:
            return converse(job, conversation, Painter(sys.stdout, color=output.color), bars)
        return run(job, output, bars, text if prompt is None else None)
    finally:
        bars.clear()


def read_prompt(prompt: str | None, model: str | None) -> str:
    if prompt is None and model is None:
        from foredraft import demo

        return demo.prompt()
    if prompt is None:
        raise ConfigError("no prompt; give one, or - to read it from stdin")
    if prompt != STDIN:
        check_text("the prompt", prompt)
        return prompt
    if sys.stdin is None:
        raise ConfigError("stdin is closed; give the prompt as an argument, or something to read it from")
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"stdin is not UTF-8 text (byte {error.start}); convert it first") from error


def check_request(
    chat: ChatOptions, sampling: SamplingOptions, output: OutputOptions, *, talking: bool
) -> None:
    """Refuse what the other options leave without a meaning."""
    if output.compare and sampling.max_new_tokens == 0:
        raise ConfigError("--compare has nothing to time with --max-new-tokens 0; give more, or leave it out")
    for option in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, option) is not None and not output.json:
            flag = option.replace("_", "-")
            raise ConfigError(f"--{flag} has no use without --json; add --json, or leave it out")
    if output.trace is not None:
        check_place(output.trace, "trace")
    if chat.system is not None and not chat.chat:
        raise ConfigError("--system has no use without --chat; add --chat, or leave it out")
    if chat.system is not None:
        check_text("the system's message", chat.system)
    if not talking:
        return
    if not on_terminal():
        raise ConfigError(
            "no prompt, and no terminal to keep a conversation on; give a prompt, or - to read it from stdin"
        )
    inert = {
        "json": output.json,
        "compare": output.compare,
        "n": sampling.n != 1,
        "trace": output.trace is not None,
    }
    for option, given in inert.items():
        if given:
            raise ConfigError(f"--{option} has no use in a conversation; give a prompt, or leave it out")


def on_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def check_text(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} is not UTF-8 text (character {error.start}); convert it first") from error


def check(model: ModelOptions, drafting: DraftOptions, output: OutputOptions) -> None:
    """Refuse what could only be ignored: no request of this command names another drafter."""
    name = named(drafting, model)
    drafter = DRAFTERS[name]
    if drafting.draft is not None and not drafter.needs_draft and not drafter.chooses:
        raise ConfigError(f"--draft has no use with --drafter {name}; leave one out")
    if output.compare and name == "none":
        raise ConfigError("--compare finds only plain decoding; give --draft, or --drafter lookup")
    inert = [] if drafter.stepper or drafter.chooses else ["draft_sampling"]
    inert += [] if drafter.needs_plan or drafter.chooses else ["plan"]
    if name == "none":
        inert += ["policy", "policy_option", "max_draft"]
    for option in inert:
        if getattr(drafting, option) not in (None, ()):
            raise ConfigError(f"--{option.replace('_', '-')} has no use with drafter {name}; leave it out")
    policy, rule = drafting.policy, drafting.acceptance
    if policy is not None and not drafter.chooses and not suits(name, policy):
        raise ConfigError(f"--policy {policy} has no use with drafter {name}; give another")
    if rule is not None and not RULES[rule].lossless and name == "none":
        raise ConfigError(f"--acceptance {rule} has no use with drafter {name}; leave it out")


def refuse_lossy(drafting: DraftingOptions) -> None:
    """In commands that hold the output against plain decoding's."""
    rule = drafting.acceptance
    if rule is not None and not RULES[rule].lossless:
        raise ConfigError(f"--acceptance {rule} is not lossless: there is nothing to compare; leave it out")
    if drafting.rollback is not None:
        raise ConfigError("--rollback is for --acceptance bild alone, which is not lossless; leave it out")


def named(drafting: DraftOptions, model: ModelOptions) -> str:
    """The drafter, named or by default."""
    draft_given = drafting.draft is not None or model.model is None
    return drafting.drafter or default_drafter(
        drafting.policy or "auto", draft_given, plan_given=drafting.plan is not None
    )


def run(job: Job, options: OutputOptions, bars: ProgressBars, before: str | None) -> int:
    """before: a text to show first."""
    painter = Painter(sys.stdout, color=options.color)
    streams = job.n == 1 and not options.json
    comparison = None
    # Printing is inside: a Ctrl-C now would otherwise take back what there is.
    with Interrupt(job.llm) as interrupt:
        interrupt.check()
        if before is not None and not options.json:
            painter.write(before if streams else f"{before}\n")
        shown = Run.of(
            partial(stream, job, painter, bars, interrupt)
            if streams
            else partial(job.outputs, job.params, trace=job.traced)
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
                show(shown.outputs, painter)
            print(last_line(stats, comparison, compared=options.compare, lossless=shown.lossless))
        for error in errors:
            print(f"foredraft: error: {error}", file=sys.stderr)
    if options.trace is not None:
        write_page(job, options.trace, shown.outputs)
    return INTERRUPTED if interrupt.came else FAILED if errors else 0


def write_page(job: Job, file: Path, outputs: list[Output]) -> None:
    from foredraft import write_trace

    tokenizer, spec = job.llm.tokenizer, job.llm.spec
    assert tokenizer is not None  # without one, a prompt of text was refused
    drafter = job.llm.default_drafter or "none"
    temperature = job.params.temperature
    about = f"{spec.architecture}, {spec.layers} layers; drafter {drafter}; temperature {temperature:g}"
    if not all(output.lossless for output in outputs):
        about += f"; acceptance {job.params.acceptance}, which is not lossless"
    prompt = job.text(outputs[0].prompt_tokens)
    write_trace(file, outputs, prompt=prompt, tokenizer=tokenizer, about=about)


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
        return timed(replace(job.params, drafter="none")).tokens

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
