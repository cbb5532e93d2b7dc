"""The argument `-`: a prompt that is read from stdin.

`mark_stdin` replaces a `-` argument by `STDIN` before the arguments are parsed, because the parser cannot
tell it from the value of an option.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from foredraft.cli.constraint_options import ConstraintOptions
from foredraft.cli.measuring import VerifyOptions
from foredraft.cli.options import ChatOptions, DraftOptions, ModelOptions, OutputOptions, SamplingOptions

__all__ = ["STDIN", "mark_stdin"]

STDIN = "\0"  # stands for the argument `-`: no argument of a process can contain a NUL byte

# Option groups of the commands that take a prompt or a model as an argument.
GROUPS = (
    ModelOptions,
    DraftOptions,
    SamplingOptions,
    ConstraintOptions,
    ChatOptions,
    OutputOptions,
    VerifyOptions,
)
FLAGS_WITH_VALUE = {
    f"--{field.name.replace('_', '-')}"
    for group in GROUPS
    for field in fields(group)
    if not isinstance(field.default, bool)
}


def mark_stdin(words: Sequence[str]) -> list[str]:
    """Replace every positional `-` by `STDIN`, and join a `-` that is an option's value to its option.

    Examples:
        >>> mark_stdin(["generate", "-", "--stop", "-"])
        ['generate', '\\x00', '--stop=-']
    """
    marked: list[str] = []
    for word in words:
        if word != "-":
            marked.append(word)
        elif marked and marked[-1] in FLAGS_WITH_VALUE:
            marked[-1] += "=-"
        else:
            marked.append(STDIN)
    return marked
