"""The table of commands, their help, and the frame of one: streams, warnings, errors, exit code."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cyclopts import App, CycloptsError

import foredraft
from foredraft.cli.interrupt import INTERRUPTED, USER_ERROR
from foredraft.cli.words import as_flag, made_ready, print_error, writing_stdout
from foredraft.errors import ConfigError, ForedraftError, Option

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions


HELP_ALL = "--help-all"


@dataclass(frozen=True, slots=True)
class Command:
    """One line of the table of commands, whose list imports none of their files."""

    module: str  # its file in `cli`
    summary: str  # the first line of its help
    usage: str  # its arguments in the line of usage, and below them examples with their meaning


COMMANDS = {
    "generate": Command(
        "generate",
        "Generate text: the target model's own, proposed by a drafter and verified by the target.",
        """[PROMPT | -] [OPTIONS]
        foredraft generate "def fibonacci(n):"  # the demo models
        foredraft generate --model ./big --draft ./small "Once"  # your models
        foredraft generate --compare  # the speed-up""",
    ),
    "serve": Command(
        "serve",
        "Serve one model by the OpenAI API: chat, completions, streams over SSE and WebSocket, metrics.",
        """[OPTIONS]
        foredraft serve  # the demo models
        foredraft serve --model ./big --draft ./small  # your models
        foredraft serve --port 0 --api-key-file keys.txt  # a free port, with keys""",
    ),
    "bench": Command(
        "bench",
        "Time decoding methods and other programs on the same prompts, and report which outputs are "
        "identical.",
        """[OPTIONS]
        foredraft bench --html report.html  # the demo models
        foredraft bench --model ./big --draft ./small  # your models
        foredraft bench --model ./big --workload my.jsonl  # your prompts""",
    ),
    "tune": Command(
        "bench",
        "Search the layers that this model can leave out while it drafts for itself, and keep the best plan.",
        """[OPTIONS]
        foredraft tune  # the demo model
        foredraft tune --model ./big --prompts my.txt  # your model
        foredraft tune --model ./big --prompts my.txt --timeout 600  # ten minutes""",
    ),
    "quantise": Command(
        "info",
        "Write a model with weights of 4 or 8 bits as a checkpoint, which other programs load too.",
        """--out DIR [OPTIONS]
        foredraft quantise --out ./few  # the demo target in 8 bits
        foredraft quantise --model ./big --weights int4 --out ./few  # your model in 4 bits
        foredraft quantise --model ./big --out ./few --data my.jsonl  # and what it lost""",
    ),
    "verify": Command(
        "verify",
        "Verify that the drafter does not change the output.",
        """[PROMPTS...] [OPTIONS]
        foredraft verify  # the demo models
        foredraft verify --model ./big --draft ./small "Once"  # your models
        foredraft verify --self-test  # with a planted defect""",
    ),
    "doctor": Command(
        "info",
        "Measure how well a head or a draft model is accepted, and find the setting that it was trained "
        "with.",
        """--draft DIR [TEXTS...] [OPTIONS]
        foredraft doctor --model ./big --draft ./head  # a head
        foredraft doctor --model ./big --draft ./small  # a draft model
        foredraft doctor --model ./big --draft ./head --dry-run  # write nothing""",
    ),
    "export": Command(
        "info",
        "Write an EAGLE-3 head in the format of another engine, value for value.",
        """--draft DIR --format FORMAT --out PLACE [OPTIONS]
        foredraft export --model ./big --draft ./head --format speculators --out ./vllm  # for vLLM
        foredraft export --model ./big --draft ./head --format gguf --out head.gguf  # for llama.cpp""",
    ),
    "info": Command(
        "info",
        "Show what a model is, which memory it needs, which drafters it has, and whether a draft model "
        "fits it.",
        """[MODEL] [OPTIONS]
        foredraft info  # the demo models
        foredraft info ./big --draft ./small  # whether the draft model fits
        foredraft info owner/name --json  # on the hub: no weights are downloaded""",
    ),
    "train adapter": Command(
        "train",
        "Train the adapter of drafter kangaroo: one layer on top of the model's own first layers.",
        """--data FILES... [OPTIONS]
        foredraft train adapter --data my.jsonl  # for the demo model
        foredraft train adapter --model ./big --data my.jsonl  # for your model
        foredraft train adapter --model ./big --data prompts.jsonl --self-generate 256  # it writes""",
    ),
    "train eagle3": Command(
        "train",
        "Train an EAGLE-3 head: one layer over the model's states at three depths, in the published format.",
        """--data FILES... --out DIR [OPTIONS]
        foredraft train eagle3 --data my.jsonl --out ./head  # for the demo model
        foredraft train eagle3 --model ./big --data my.jsonl --out ./head  # for your model
        foredraft train eagle3 --data my.jsonl --out ./head --draft-vocabulary 2048  # a cheaper head""",
    ),
    "train dflash": Command(
        "train",
        "Train a DFlash head: it drafts a whole block in one pass, in the published format.",
        """--data FILES... --out DIR [OPTIONS]
        foredraft train dflash --data my.jsonl --out ./head  # for the demo model
        foredraft train dflash --model ./big --data my.jsonl --out ./head --block 16  # longer drafts""",
    ),
    "train mtp": Command(
        "train",
        "Train the layer with which a model predicts further tokens (MTP) on, from its own or a trained one.",
        """--data FILES... --out DIR [OPTIONS]
        foredraft train mtp --model ./big --data my.jsonl --out ./head  # from the model's own layer
        foredraft train mtp --model ./big --data my.jsonl --out ./head2 --from-head ./head  # further""",
    ),
    "train draft": Command(
        "train",
        "Train a small draft model that imitates the model, as an ordinary Hugging Face checkpoint.",
        """--data FILES... --out DIR [OPTIONS]
        foredraft train draft --model ./big --data my.jsonl --out ./small  # from scratch
        foredraft train draft --data my.jsonl --out ./small --from-layers 0,15  # from two layers""",
    ),
}
NAMES = {command.rpartition(" ")[2] for command in COMMANDS}
ALWAYS = {"Arguments", "Commands"}  # panels that are no section of options


def usage(command: str) -> str:
    """Return the head of a command's help: its usage and its examples."""
    arguments, *examples = COMMANDS[command].usage.splitlines()
    lines = [example.strip().partition("  # ") for example in examples]
    width = max(len(line) for line, _, _ in lines)
    shown = (f"  {line:{width}}{mark}{meaning}" for line, mark, meaning in lines)
    return "\n".join([f"Usage: foredraft {command} {arguments}", "", *shown])


class HelpPages:
    """Renders the panels of the help: under `--help` the common options, under `--help-all` every section."""

    show_metavar = True

    def __init__(self, *, everything: bool) -> None:
        self.everything = everything  # show every section

    def render_usage(self, console: Console, options: ConsoleOptions, usage: object) -> None:
        """Print the usage and the examples, to be copied: on a narrow terminal, meanings come first."""
        lines = str(usage or "").splitlines()
        if max(map(len, lines), default=0) > console.width:
            parts = [line.partition("  # ") for line in lines]
            lines = [f"# {meaning}\n{line.strip()}" if mark else line for line, mark, meaning in parts]
        if lines:
            console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print a panel where it belongs on the page."""
        from cyclopts.help import DefaultFormatter

        if panel.title not in ALWAYS:
            from foredraft.cli.sections import COMMON

            if (panel.title != COMMON.name) != self.everything:
                return
        DefaultFormatter()(console, options, panel)


app = App(
    name="foredraft",
    usage="Usage: foredraft COMMAND [OPTIONS]",
    help="Lossless speculative decoding: the same text from the same model, sooner.",
    version=foredraft.__version__,
    help_flags=["--help", "-h", HELP_ALL],
    help_format="plaintext",  # the list of commands has no markup, and need not load what renders it
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
    suppress_keyboard_interrupt=False,
)
training = App(
    name="train",
    usage="Usage: foredraft train COMMAND [OPTIONS]",
    help="Train a drafter for a model on your own text.",
    help_flags=app.help_flags,
    help_format="markdown",
)
for command, each in COMMANDS.items():
    parent, _, name = command.rpartition(" ")
    (training if parent else app).command(
        f"foredraft.cli.{each.module}:{name}", usage=usage(command), help=each.summary, help_format="markdown"
    )
app.command(training)


def run(words: Sequence[str]) -> int:
    """Run one command, given with its arguments, and return its exit code."""
    # Python sets a stream to None when its file descriptor is closed.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # the terminal's encoding may lack characters of the output
    handler = logging.StreamHandler()
    handler.setFormatter(OneLineFormatter())
    logging.basicConfig(handlers=[handler])
    app.help_formatter = HelpPages(everything=HELP_ALL in words)
    code = 0
    try:
        for command in app.parse_commands([*words])[1]:
            if command.name[0] in NAMES:
                command.help = None  # all of its docstring, whose first line stands in the list of commands
        code = app(made_ready(words, app))
        with writing_stdout():
            sys.stdout.flush()
    except (CycloptsError, ForedraftError) as error:
        print_error(error)
        return USER_ERROR
    except KeyboardInterrupt:
        print("foredraft: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does: not a failure
        _discard_stdout()
    except OSError as error:  # a full disk, a device that fails
        what = "stdout" if error.filename is None else str(error.filename)
        print_error(ConfigError(f"{what} cannot be read or written ({error.strerror or error})"))
        _discard_stdout()
        return USER_ERROR
    except MemoryError:
        remedy = "end other programs, or give a smaller model"
        print_error(ConfigError("there is too little memory", remedy=remedy))
        return USER_ERROR
    return code if isinstance(code, int) else 0


def _discard_stdout() -> None:
    """Let what stdout still holds back go nowhere, because Python writes it once more at its end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class OneLineFormatter(logging.Formatter):
    """Formats a warning as one line, with flags, without its traceback; the field `error` has the cause."""

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record.args, tuple):
            record.args = tuple(as_flag(arg) if isinstance(arg, Option) else arg for arg in record.args)
        return f"foredraft: {' '.join(record.getMessage().split())}"
