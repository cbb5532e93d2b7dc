"""The words of a command line, made ready for the parser.

The parser cannot tell the argument `-`, a prompt that is read from stdin, from the value of an option. It
knows options with a value and flags, but none whose value may be left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from cyclopts import App

from foredraft.verify.defects import DEFAULT

__all__ = ["STDIN", "made_ready"]

STDIN = "\0"  # stands for the argument `-`: no argument of a process can contain a NUL byte
DEFAULTS = {"--self-test": DEFAULT}  # option -> the value that it has where none is given


def made_ready(words: Sequence[str], app: App) -> list[str]:
    """Return the words as the parser of a program takes them.

    A positional `-` becomes `STDIN`, and a `-` that is the value of an option is joined to the option. An
    option without its optional value gets the default one; the word after such an option is its value unless
    it begins with a dash.

    Args:
        words: A command with its arguments.
        app: The program.

    Examples:
        >>> from foredraft.cli.commands import app
        >>> made_ready(["generate", "-", "--stop", "-"], app)
        ['generate', '\\x00', '--stop=-']
        >>> made_ready(["verify", "--self-test", "--json"], app)
        ['verify', '--self-test=residual', '--json']
    """
    valued = _options_with_value(words, app) if "-" in words else set()
    made: list[str] = []
    for word, following in zip(words, [*words[1:], "-"], strict=True):
        if word in DEFAULTS and following.startswith("-"):
            made.append(f"{word}={DEFAULTS[word]}")
        elif word != "-":
            made.append(word)
        elif made and made[-1] in valued:
            made[-1] += "=-"
        else:
            made.append(STDIN)
    return made


def _options_with_value(words: Sequence[str], app: App) -> set[str]:
    """Return the options of the command that are followed by a value."""
    _, apps, _ = app.parse_commands([*words])
    return {
        name
        for argument in apps[-1].assemble_argument_collection()
        for name in argument.names
        if argument.token_count()[0]
    }
