"""The command line: one file a command, thin.

Contract: results go to stdout, everything else to stderr. The exit code is 0, 1 when generation itself
failed, 2 with one line `foredraft: error: ...` when the user can mend it, 130 after Ctrl-C. Nothing
here imports torch before a command needs it, so `--help` is quick.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

import foredraft
from foredraft.cli.generate import INTERRUPTED, STDIN, generate
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a model may say what this terminal cannot spell
    logging.basicConfig(format="foredraft: %(message)s")  # the library's warnings, on stderr
    words = sys.argv[1:] if arguments is None else arguments
    try:
        code = app([STDIN if word == "-" else word for word in words])
        sys.stdout.flush()
    except (CycloptsError, ForedraftError) as error:
        print(f"foredraft: error: {spelled_as_options(str(error))}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("foredraft: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has gone, as `| head` does: not a failure
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code if isinstance(code, int) else 0


def spelled_as_options(message: str) -> str:
    """One line, in which a remedy such as truncate='left' reads --truncate left."""
    line = " ".join(message.split())
    return re.sub(r"\b([a-z_]+)='([^']*)'", lambda m: f"--{m[1].replace('_', '-')} {m[2]}", line)
