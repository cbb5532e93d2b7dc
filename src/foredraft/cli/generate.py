"""`foredraft generate`: stream text in the colours of its origins, then print one line of figures."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.cli.interrupt import FAILED, INTERRUPTED, Interrupt
from foredraft.cli.job import (
    Comparison,
    Conversation,
    GenerateJob,
    Repl,
    Run,
    alternate,
    show_samples,
    stream,
    tell,
)
from foredraft.cli.options import (
    ChatOptions,
    ConstraintOptions,
    DraftOptions,
    ModelOptions,
    OutputOptions,
    PrefixOptions,
    SamplingOptions,
    TextsOptions,
    check_drafting_options,
    constraint_options,
    load_options,
    request_options,
)
from foredraft.cli.prompts import read_prompt
from foredraft.cli.render import Painter, ProgressBars, document, finish, last_line, notes
from foredraft.cli.sections import NONE, Given
from foredraft.cli.words import (
    as_json,
    check_places,
    print_error,
    print_text,
    write_document,
)
from foredraft.decode.params import SamplingParams
from foredraft.errors import ConfigError, Option

if TYPE_CHECKING:
    from foredraft import Output, Stats
    from foredraft.model.tokenizer import Tokenizer

# Positions of a conversation, or of a message and a reply that the model ends itself, unless --max-length is
# given or the model has fewer: some dozens of turns, for a moderate KV cache. A long message gets half of it
# on top.
CONVERSATION = 8192
UNLIMITED = SamplingParams().max_new_tokens  # of a model that does not ask for a limit


def generate(
    prompt: str | None = None,
    /,
    *,
    model: ModelOptions = NONE,
    drafting: DraftOptions = NONE,
    texts: TextsOptions = NONE,
    prefixes: PrefixOptions = NONE,
    sampling: SamplingOptions = NONE,
    constraints: ConstraintOptions = NONE,
    chat: ChatOptions = ChatOptions(),
    output: OutputOptions = OutputOptions(),
) -> int:
    """Generate text: the target model's own, proposed by a drafter and verified by the target.

    Parameters
    ----------
    prompt
        The text to continue; - reads it from stdin, without one trailing newline. Optional with the demo
        models, which then continue a text that ships with them, and with --chat.
    """
    drafting = {**drafting, **texts}
    check_drafting_options(model, drafting, compare=output.compare)
    interactive = chat.chat and prompt is None
    check_request(chat, sampling, texts, output, interactive=interactive)
    text = "" if interactive else read_prompt(prompt, model.get("model"))
    from foredraft.loading import load_for

    options = all_options(sampling, drafting, constraints, compare=output.compare)
    conversation, samples = Conversation(chat.system), sampling.get("n", 1)
    encode = partial(encoded, text=text, conversation=conversation if chat.chat else None)

    def is_open_ended(defaults: SamplingParams) -> bool:
        return chat.chat and "max_new_tokens" not in sampling and defaults.max_new_tokens == UNLIMITED

    def needs(tokenizer: Tokenizer | None, defaults: SamplingParams) -> tuple[int, int]:
        is_open = is_open_ended(defaults)
        new = CONVERSATION // 2 if is_open else defaults.replace(**options).max_new_tokens
        length = len(encode(tokenizer)) + new
        return max(samples, 1), max(length, CONVERSATION) if interactive or is_open else length

    with ProgressBars() as bars:
        llm = load_for(
            needs, model.get("model"), **load_options(model, drafting, prefixes), progress=bars.show
        )
        job = GenerateJob(
            llm, text, llm.params(**options), samples, model.get("truncate"), output.show_special,
            trace=output.trace is not None,
            limit_given="max_new_tokens" in sampling,
            open_ended=is_open_ended(llm.default_params),
        )  # fmt: skip
        try:
            if interactive:
                return Repl(job, conversation, Painter(sys.stdout, color=output.color), bars).run()
            if chat.chat:
                job = job.with_prompt(encode(llm.tokenizer))
            shown = prompt is None or (sys.stdout.isatty() and not chat.chat)
            return run(job, output, bars, text if shown else None)
        finally:
            if "texts_file" in texts:  # of drafter "suffix"
                llm.save_texts()


def encoded(tokenizer: Tokenizer | None, text: str, conversation: Conversation | None) -> list[int]:
    """Return the token ids of a text, or of a conversation with the text as its next message."""
    if tokenizer is None:
        from foredraft.model.tokenizer import GIVE_TOKENIZER, NO_TOKENIZER

        raise ConfigError(NO_TOKENIZER, remedy=GIVE_TOKENIZER)
    return tokenizer.encode(text) if conversation is None else conversation.encode(tokenizer, text)


def all_options(sampling: Given, drafting: Given, constraints: Given, *, compare: bool) -> dict[str, Any]:
    """Return the options of the request, checked before the model is loaded."""
    options = request_options(sampling, drafting) | constraint_options(constraints)
    if compare:
        options = {"temperature": 0.0} | options
    if (grammar := SamplingParams().replace(**options).text_grammar) is not None:
        from foredraft.constraints.grammar import check_grammar

        check_grammar(*grammar)
    return options


def check_request(
    chat: ChatOptions, sampling: Given, texts: Given, output: OutputOptions, *, interactive: bool
) -> None:
    """Refuse options that the other options leave without effect."""
    if output.compare and texts:
        raise ConfigError(
            "would copy the text of the run before", option=next(iter(texts)),
            remedy=("leave it out, or ", Option("compare")),
        )  # fmt: skip
    if output.compare and sampling.get("max_new_tokens") == 0:
        raise ConfigError(
            ("has nothing to time with ", Option("max_new_tokens", 0)), option="compare",
            remedy="generate more tokens, or leave it out",
        )  # fmt: skip
    for option in ("logprobs", "prompt_logprobs"):
        if option in sampling and not output.json and output.out is None:
            raise ConfigError(
                ("has no effect without ", Option("json")), option=option,
                remedy=("add ", Option("json"), ", or leave it out"),
            )  # fmt: skip
    check_places(out=output.out, trace=output.trace)
    _ = chat.form  # refuses a system message without a chat
    if not interactive:
        return
    if not on_terminal():
        raise ConfigError(
            "no prompt, and no terminal for a conversation",
            remedy="give a prompt, or - to read it from stdin",
        )
    without_effect = {
        "json": output.json, "out": output.out, "compare": output.compare,
        "n": sampling.get("n", 1) != 1, "trace": output.trace,
    }  # fmt: skip
    for option, given in without_effect.items():
        if given:
            raise ConfigError(
                "has no effect in a conversation", option=option, remedy="give a prompt, or leave it out"
            )


def on_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def run(job: GenerateJob, options: OutputOptions, bars: ProgressBars, prompt: str | None) -> int:
    painter = Painter(sys.stdout, color=options.color)
    streams = job.n == 1 and not options.json
    comparison = None
    # Printing happens inside: otherwise Ctrl-C at this point would discard the finished output.
    with Interrupt(job.llm) as interrupt:
        interrupt.check()
        if prompt is not None and not options.json:
            painter.write_prompt(prompt if streams else f"{prompt}\n")
        shown = Run.timed(
            partial(stream, job, painter, bars)
            if streams
            else partial(job.outputs, job.params, trace=job.trace)
        )
        stats, errors = shown.stats, shown.errors
        if options.compare and not interrupt.received and not errors:
            try:
                comparison, stats = compare(job, shown, interrupt, bars)
            except ComparisonStopped as stopped:
                errors = stopped.errors
            except KeyboardInterrupt:  # the second Ctrl-C, raised by `interrupt`
                pass
        bars.clear()
        made = document(shown.outputs, stats, comparison, job.llm.weights)
        if options.json:
            print_text(as_json(made))
        else:
            if not streams:
                show_samples(shown.outputs, painter)
            line = last_line(
                stats, finish(shown.outputs, job.limit), comparison,
                compared=options.compare, lossless=shown.lossless,
            )  # fmt: skip
            line = ", ".join([line, *notes(job.llm.profile_seconds, shown.outputs)])
            tell(line, sys.stdout)
        for note in job.cuts(shown.outputs):
            print(f"foredraft: {note}", file=sys.stderr)
        for error in errors:
            print_error(error)
    write_document(made, options)
    if options.trace is not None:
        write_page(job, options.trace, shown.outputs)
    return INTERRUPTED if interrupt.received else FAILED if errors else 0


def write_page(job: GenerateJob, file: Path, outputs: list[Output]) -> None:
    from foredraft import write_trace

    tokenizer, spec = job.llm.tokenizer, job.llm.loaded.spec
    assert tokenizer is not None  # the engine refuses a text prompt without one
    drafter = job.llm.default_drafter or "none"
    temperature = job.params.temperature
    about = f"{spec.architecture}, {spec.layers} layers; drafter {drafter}; temperature {temperature:g}"
    if not all(output.lossless for output in outputs):
        about += f"; acceptance {job.params.acceptance}, which is not lossless"
    prompt, count = job.prompt, outputs[0].prompt_tokens
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if not isinstance(prompt, str) or len(ids) > count:  # of a truncated one, the last tokens
        prompt = tokenizer.decode(ids[-count:], skip_special=False)
    write_trace(file, outputs, prompt=prompt, tokenizer=tokenizer, about=about)


class ComparisonStopped(Exception):
    """A run of the comparison was cancelled or failed, so there is no comparison."""

    def __init__(self, errors: list[str]) -> None:
        self.errors = errors  # errors of the failed run; none if it was cancelled


def compare(
    job: GenerateJob, shown: Run, interrupt: Interrupt, bars: ProgressBars
) -> tuple[Comparison, Stats]:
    speculative: list[Stats] = []

    def decode(params: SamplingParams) -> list[list[int]]:
        if interrupt.received:
            raise ComparisonStopped([])
        run = Run.timed(partial(job.outputs, params))
        if interrupt.received or run.errors:
            raise ComparisonStopped(run.errors)
        if params is job.params:
            speculative.append(run.stats)
        return run.tokens

    params = job.params
    with bars.only("compare"):
        comparison = alternate(
            partial(decode, replace(params, drafter="none")),
            partial(decode, params),
            comparable=params.greedy or (params.seed is not None and params.rule == "coupled"),
            earlier=shown.tokens,
            progress=partial(bars.show, "compare"),
        )
    warm = sorted(speculative[1:], key=lambda stats: stats.tokens_per_second)
    return comparison, warm[len(warm) // 2]
