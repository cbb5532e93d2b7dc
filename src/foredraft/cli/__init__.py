"""The command line: one file a command, thin.

Contract: results go to stdout, everything else to stderr. The exit code is 0, 1 when generation itself
failed or, in `bench` and `tune`, gave other tokens than it must, 2 with one line `foredraft: error: ...` when
the user can mend it, 130 after Ctrl-C; `verify` adds one of its own. Nothing here imports torch before a
command needs it, so `--help` is quick.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

import foredraft
from foredraft.cli.bench import bench
from foredraft.cli.error_text import spelled_as_options, with_stdin
from foredraft.cli.generate import INTERRUPTED, generate
from foredraft.cli.tune import tune
from foredraft.cli.verify import verify
from foredraft.errors import ForedraftError

__all__ = ["app", "main"]

USER_ERROR = 2

app = App(
    name="foredraft",
    help="Lossless speculative decoding: the same text from the same model, sooner.",
    version=foredraft.__version__,
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
    suppress_keyboard_interrupt=False,
)
app.command(generate, usage="Usage: foredraft generate [PROMPT | -] [OPTIONS]")
app.command(bench, usage="Usage: foredraft bench [OPTIONS]")
app.command(tune, usage="Usage: foredraft tune [OPTIONS]")
app.command(verify, usage="Usage: foredraft verify [PROMPTS...] [OPTIONS]")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    # Python has None for what the caller closed.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a model may say what this terminal cannot spell
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine())
    logging.basicConfig(handlers=[handler])
    words = sys.argv[1:] if arguments is None else arguments
    code = 0
    try:
        code = app(with_stdin(words))
        sys.stdout.flush()
    except (CycloptsError, ForedraftError) as error:
        print(f"foredraft: error: {spelled_as_options(str(error))}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("foredraft: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has gone, as `| head` does: not a failure
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code if isinstance(code, int) else 0


class OneLine(logging.Formatter):
    """The library's warnings, without tracebacks: what broke a pass off is told as its outputs' error."""

    def format(self, record: logging.LogRecord) -> str:
        return f"foredraft: {' '.join(record.getMessage().split())}"
