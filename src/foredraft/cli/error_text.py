"""The library's messages in the words of the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields

from foredraft.cli.measuring import BenchOptions, TuneOptions, VerifyOptions
from foredraft.cli.options import ChatOptions, DraftOptions, ModelOptions, OutputOptions, SamplingOptions

__all__ = ["STDIN", "spelled_as_options", "with_stdin"]

STDIN = "\0"  # what `-` reads as: no real argument can hold it
# of the commands that read `-` as a text from stdin
PROMPTED = (ModelOptions, DraftOptions, SamplingOptions, ChatOptions, OutputOptions, VerifyOptions)
OPTIONS = (*PROMPTED, BenchOptions, TuneOptions)
NAMES = [field.name for group in OPTIONS for field in fields(group)]
ANY_NAME = "|".join(NAMES)
OWN_NAME = "|".join(name for name in NAMES if "_" in name)  # no word of a language is spelled like that

# Options that the next word is a value of.
VALUED = {
    f"--{field.name.replace('_', '-')}"
    for group in PROMPTED
    for field in fields(group)
    if not isinstance(field.default, bool)
}


def with_stdin(words: Sequence[str]) -> list[str]:
    """A `-` that stands by itself as `STDIN`; one that is an option's value, joined to the option."""
    made: list[str] = []
    for word in words:
        if word != "-":
            made.append(word)
        elif made and made[-1] in VALUED:
            made[-1] += "=-"
        else:
            made.append(STDIN)
    return made


def spelled_as_options(message: str) -> str:
    """One line, in which the library's names of options are spelled as they are typed here.

    truncate='left' reads --truncate left, and max_batch reads --max-batch; a name that is also a word
    (draft, seed) is told by what stands around it.
    """
    line = " ".join(message.split()).replace(repr(STDIN), "'-'").replace(STDIN, "-")
    line = re.sub(r"\bpolicy_options\b", "policy_option", line)  # given one by one here
    line = re.sub(rf"\b({ANY_NAME})='([^']*)'((?: or '[^']*')*)", _assigned, line)
    line = re.sub(rf"\b({ANY_NAME})=(?!\w)", _named, line)
    line = re.sub(rf"(?<![\w/.-])({OWN_NAME})(?![\w/.-])", _named, line)
    return re.sub(rf"^({ANY_NAME})(?= is )", _named, line)


def _named(found: re.Match[str]) -> str:
    return f"--{found[1].replace('_', '-')}"


def _assigned(found: re.Match[str]) -> str:
    return f"{_named(found)} {found[2]}{found[3].replace(chr(39), '')}"
