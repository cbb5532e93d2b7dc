"""Errors on stderr: one line each, with options spelled as flags."""

from __future__ import annotations

import shlex
import sys

from cyclopts import UnknownOptionError, UnusedCliTokensError

from foredraft.cli.foreign_options import name_here
from foredraft.cli.words import STDIN
from foredraft.errors import NO_VALUE, ConfigError, ForedraftError, Option

__all__ = ["as_flag", "one_line", "print_error"]

# Parameters of the Python API that the command line calls otherwise.
FLAG_NAMES = {"policy_options": "policy-option", "choices": "choice"}


def as_flag(option: Option) -> str:
    """Return the option as a flag.

    Examples:
        >>> as_flag(Option("max_batch")), as_flag(Option("dtype", "bfloat16")), as_flag(Option("json", True))
        ('--max-batch', '--dtype bfloat16', '--json')
    """
    name = FLAG_NAMES.get(option.name, option.name).replace("_", "-")
    if isinstance(option.value, bool):
        return f"--{name}" if option.value else f"--no-{name}"
    return f"--{name}" if option.value is NO_VALUE else f"--{name} {shlex.quote(str(option.value))}"


def one_line(error: Exception | str) -> str:
    """Return the message on one line, with options as flags and the stdin marker as `-`."""
    message = str(error)
    if isinstance(error, ForedraftError):
        message = error.describe(as_flag)
    elif isinstance(error, UnusedCliTokensError):
        message = _too_many(error).describe(as_flag)
    elif isinstance(error, UnknownOptionError):
        message = _unknown(error) or message
    return " ".join(message.split()).replace(repr(STDIN), "'-'").replace(STDIN, "-")


def _too_many(error: UnusedCliTokensError) -> ForedraftError:
    """Return the error of arguments beyond those that a command takes; most are a prompt without quotes."""
    words = error.unused_tokens or []
    command = next(iter(error.command_chain or ()), "foredraft")
    remedies = {
        "generate": "put a prompt of several words in quotes",
        "info": "give one model",
    }
    remedy = remedies.get(command, "give options as --name value")
    return ConfigError(f"{command} has no place for {' '.join(words)!r}", remedy=remedy)


def _unknown(error: UnknownOptionError) -> str | None:
    """Return the error of an option that another program has; None where the parser's own error says more."""
    word = error.token.keyword or error.token.value
    options = [name for argument in error.argument_collection for name in argument.names]
    here = name_here(word, options, next(iter(error.command_chain or ()), "foredraft"))
    return None if here is None else f"Unknown option: {word}; here it is {here}"


def print_error(error: Exception | str) -> None:
    """Print `foredraft: error: ...` to stderr."""
    print(f"foredraft: error: {one_line(error)}", file=sys.stderr)
