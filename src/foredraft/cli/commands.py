"""The table of commands, and the frame in which one of them runs: streams, warnings, errors, exit code."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from cyclopts import App, CycloptsError

import foredraft
from foredraft.cli.bench import bench
from foredraft.cli.doctor import doctor
from foredraft.cli.errors import print_error
from foredraft.cli.exit_codes import INTERRUPTED, USER_ERROR
from foredraft.cli.export import export
from foredraft.cli.generate import generate
from foredraft.cli.help import HELP_ALL, HelpPages, usage
from foredraft.cli.info import info
from foredraft.cli.quantise import quantise
from foredraft.cli.serve import serve
from foredraft.cli.stdout import writing_stdout
from foredraft.cli.train import adapter, dflash, draft, eagle3
from foredraft.cli.tune import tune
from foredraft.cli.verify import verify
from foredraft.cli.words import made_ready
from foredraft.errors import ConfigError, ForedraftError

__all__ = ["app", "run"]

app = App(
    name="foredraft",
    usage="Usage: foredraft COMMAND [OPTIONS]",
    help="Lossless speculative decoding: the same text from the same model, sooner.",
    version=foredraft.__version__,
    help_flags=["--help", "-h", HELP_ALL],
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
    suppress_keyboard_interrupt=False,
)
for command in (generate, serve, bench, tune, quantise, verify, doctor, export, info):
    app.command(command, usage=usage(command.__name__))
training = App(
    name="train",
    usage="Usage: foredraft train COMMAND [OPTIONS]",
    help="Train a drafter for a model on your own text.",
    help_flags=app.help_flags,
)
training.command(adapter, usage=usage("train adapter"))
training.command(eagle3, usage=usage("train eagle3"))
training.command(dflash, usage=usage("train dflash"))
training.command(draft, usage=usage("train draft"))
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
    """Formats a warning as one line without its traceback; the output's `error` field has the cause."""

    def format(self, record: logging.LogRecord) -> str:
        return f"foredraft: {' '.join(record.getMessage().split())}"
