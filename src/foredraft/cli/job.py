"""Requests of `generate`: one, a comparison with plain decoding, and the turns of a conversation.

`alternate` flips the order of its pairs, so that a machine that slows down affects both alike. In a
conversation a line that begins with `/` is a command. Ctrl-C ends a reply, which stays as far as it came; at
the prompt, twice in a row, it leaves. A turn that failed is not added.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, TextIO

from cyclopts import CycloptsError

from foredraft.bench.workload import chat_ids
from foredraft.cli.commands import app
from foredraft.cli.interrupt import Interrupt, Raised
from foredraft.cli.options import REQUEST, request_options
from foredraft.cli.render import Painter, ProgressBars, finish, last_line
from foredraft.cli.words import as_flag, fitted, print_error, terminal_width
from foredraft.errors import Option, RequestError, did_you_mean
from foredraft.files import TEXT, replacing

if TYPE_CHECKING:
    from foredraft import LLM, Output, SamplingParams, Stats
    from foredraft.model.tokenizer import Tokenizer


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
    pieces = job.llm.stream(
        job.prompt, job.params, truncate=job.truncate, show_special=job.show_special, trace=job.trace
    )
    for piece in pieces:
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

    speedup: float  # speculative over plain tokens/s, the median of one ratio per pair
    speedup_low: float
    speedup_high: float
    alternations: int  # pairs
    plain_tokens_per_second: float  # median over the pairs
    speculative_tokens_per_second: float  # median over the pairs
    identical: bool | None  # all runs gave the same tokens; None if they need not


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
    plain_rates, speculative_rates = zip(*rates[1:], strict=True)
    ratios = [fast / slow for slow, fast in rates[1:]]
    same = all([list(output) for output in text] == [list(output) for output in texts[0]] for text in texts)
    return Comparison(
        *(median(ratios), min(ratios), max(ratios), len(ratios)),
        *(median(plain_rates), median(speculative_rates)),
        identical=same if comparable else None,
    )


ROLES = ("system", "user", "assistant")


class Conversation:
    """The messages of a conversation."""

    def __init__(self, system: str | None) -> None:
        self._system = [] if system is None else [_message("system", system)]
        # messages of the user and the assistant, in order. The system message is kept apart, so that /clear
        # leaves it
        self.turns: list[dict[str, str]] = []

    def encode(self, tokenizer: Tokenizer | None, text: str) -> list[int]:
        return chat_ids(tokenizer, [*self._system, *self.turns, _message("user", text)])

    def save(self, file: Path) -> None:
        """Write all messages to a JSON file, as `{"messages": [{"role": ..., "content": ...}, ...]}`."""
        text = json.dumps({"messages": [*self._system, *self.turns]}, ensure_ascii=False, indent=2) + "\n"
        try:
            with replacing(file.resolve()) as new:
                new.write_text(text, encoding="utf-8")
        except OSError as error:
            raise RequestError(
                f"{file} cannot be written ({error.strerror})", remedy="give another file"
            ) from error

    def load(self, file: Path) -> int:
        """Take the messages of a file that `save` wrote, the system message included, instead of these."""
        try:
            messages = json.loads(file.read_text(encoding=TEXT))["messages"]
            if not isinstance(messages, list) or not all(map(_is_message, messages)):
                raise ValueError("no messages")
        except OSError as error:
            raise RequestError(
                f"{file} cannot be read ({error.strerror})", remedy="give another file"
            ) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RequestError(f"{file} holds no conversation", remedy="give one that was saved") from error
        first = sum(message["role"] == "system" for message in messages[:1])
        self._system, self.turns = messages[:first], messages[first:]
        return len(messages)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _is_message(found: Any) -> bool:
    known = isinstance(found, dict) and found.keys() == {"role", "content"}
    return known and found["role"] in ROLES and isinstance(found["content"], str)


PROMPT = "> "
LEAVING = "Ctrl-D or /bye ends the conversation; so does Ctrl-C again"
# Options of a request that have no effect in a conversation.
NOT_SET = {"n", "logprobs", "prompt_logprobs"}
SETTABLE = [name.replace("_", "-") for name in REQUEST if name not in NOT_SET]


class Leave(Exception):
    """The user ends the conversation."""


class Repl:
    """A conversation on a terminal."""

    def __init__(
        self, job: GenerateJob, conversation: Conversation, painter: Painter, bars: ProgressBars
    ) -> None:
        self.job, self.conversation, self.painter, self.bars = job, conversation, painter, bars

    def run(self) -> int:
        """Read messages and print replies until the user ends the conversation; return the exit code."""
        with suppress(ImportError):  # not every system has it
            import readline  # noqa: F401  gives `input` a history and line editing
        tell(HELP)
        warned = False
        with Raised():
            while True:
                try:
                    line = input(PROMPT)
                    warned = False
                    self.answer(line)
                except (EOFError, Leave) as end:
                    if isinstance(end, EOFError):
                        self.painter.write("\n")
                    return 0
                except KeyboardInterrupt:
                    self.painter.write("\n")
                    if warned:
                        raise
                    warned = True
                    tell(LEAVING)
                except UnicodeDecodeError as error:
                    print_error(f"the message is not UTF-8 text (byte {error.start}); type it again")
                except (RequestError, CycloptsError) as error:
                    print_error(error)

    def answer(self, line: str) -> None:
        if line.startswith("/"):
            word, _, argument = line.partition(" ")
            command = COMMANDS.get(word)
            if command is None:
                tell(f"{word} is no command; {NAMES}")
            else:
                command(self, argument.strip())
        elif text := line.strip():
            self.reply(text)

    def reply(self, text: str) -> None:
        llm = self.job.llm
        with Interrupt(llm) as interrupt:
            prompt = self.conversation.encode(llm.tokenizer, text)
            job = self.job.with_prompt(prompt)
            interrupt.check()
            shown = Run.timed(partial(stream, job, self.painter, self.bars))
            self.bars.clear()
            line = last_line(shown.stats, finish(shown.outputs, job.limit), lossless=shown.lossless)
            tell(line, sys.stdout)
        for note in job.cuts(shown.outputs):
            tell(f"{note}; /clear begins anew" if job.open_ended else note)
        for error in shown.errors:
            print_error(error)
        if not shown.errors:
            [output] = shown.outputs
            assert llm.tokenizer is not None
            # Without special tokens, even under --show-special: the chat template adds them itself.
            answer = llm.tokenizer.decode(output.token_ids, after=prompt)
            self.conversation.turns += [_message("user", text), _message("assistant", answer)]

    def load(self, argument: str) -> None:
        number = self.conversation.load(_file(argument, "/load"))
        tell(f"{number} messages loaded")

    def set(self, argument: str) -> None:
        """Set an option of the replies to come, as `generate` reads it; without one, show them all."""
        name, _, value = argument.partition(" ")
        if not name:
            given = ((option, getattr(self.job.params, option.replace("-", "_"))) for option in SETTABLE)
            tell(", ".join(f"{option} {value}" for option, value in given if value not in (None, ())))
            return
        option, parsed = parse_setting(name, value.strip())
        self.job = replace(self.job, params=self.job.params.replace(**{option: parsed}))
        if option == "max_new_tokens":
            self.job = replace(self.job, open_ended=False, limit_given=True)

    def bye(self, argument: str) -> None:
        raise Leave


NAMES = (
    "/help shows this, /clear forgets the messages, /save FILE and /load FILE keep them, /set OPTION VALUE"
    " changes how replies are sampled, /bye or Ctrl-D ends the conversation"
)
HELP = f"{NAMES}; Ctrl-C ends a reply. With a space before its / a line is a message"
COMMANDS: dict[str, Callable[[Repl, str], None]] = {
    "/help": lambda repl, argument: tell(HELP),
    "/clear": lambda repl, argument: repl.conversation.turns.clear(),
    "/save": lambda repl, argument: repl.conversation.save(_file(argument, "/save")),
    "/load": Repl.load,
    "/set": Repl.set,
    "/bye": Repl.bye,
}


def tell(line: str, stream: TextIO | None = None) -> None:
    """Print a line, to stderr if no stream is given; a narrow terminal gets it in several."""
    stream = stream or sys.stderr
    print("\n".join(fitted([line], terminal_width(stream))), file=stream)


def parse_setting(name: str, value: str) -> tuple[str, Any]:
    """Return an option of `SamplingParams` and its value, parsed as `generate` parses --name VALUE.

    Examples:
        >>> parse_setting("top-p", "0.9")
        ('top_p', 0.9)
    """
    flag = name.removeprefix("--").replace("_", "-")
    if flag not in SETTABLE:
        raise RequestError(
            f"{name!r} is no option of a reply",
            remedy=f"give one of {', '.join(SETTABLE)}{did_you_mean(flag, SETTABLE)}",
        )
    if not value:
        raise RequestError(f"{flag} has no value", remedy=f"give one: /set {flag} VALUE")
    option = flag.replace("-", "_")
    _, bound, _ = app.parse_args(["generate", f"--{flag}={value}"])
    return option, request_options(bound.arguments["sampling"])[option]


def _file(argument: str, command: str) -> Path:
    if not argument:
        raise RequestError(f"{command} has no file", remedy=f"give one: {command} FILE")
    return Path(argument).expanduser()
