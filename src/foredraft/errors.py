"""The exception tree of the package, and strings that are not text.

    ForedraftError
    ├── ConfigError       an option of `load` or of the command line is wrong; also a ValueError
    ├── CheckpointError   a folder is not a checkpoint, or its model cannot be run exactly
    └── RequestError      one request is wrong or failed while it ran; also a ValueError
        └── ContextLengthError    its prompt and its new tokens are longer than the context

An error holds the option, its value, the problem and the remedy in fields of their own. `str(error)` joins
them into one line with the names of the Python API; the command line spells the same fields as flags. The
line can be printed anywhere: what UTF-8 cannot hold, and control characters, are spelled as escapes.

A library in Rust raises `pyo3_runtime.PanicException` where its own code fails. That is no `Exception`, and
no module exports its type, so `is_fault` tells it by its name from Ctrl-C and from the end of the process
(https://pyo3.rs/main/doc/pyo3/panic/).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, TypeAlias


def invalid_at(text: str) -> int | None:
    """Return the index of the first character that UTF-8 cannot encode; None where it can encode all."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


SHOWN = 200  # characters of an option's value in a message: enough for a table of settings


class _NoValue:
    def __repr__(self) -> str:
        return "NO_VALUE"


NO_VALUE: Final = _NoValue()


@dataclass(frozen=True, slots=True)
class Option:
    """An option that a message mentions, with the value to give or without one.

    `Option("max_batch")` reads "max_batch" in Python and "--max-batch" on the command line;
    `Option("dtype", "bfloat16")` reads "dtype='bfloat16'" and "--dtype bfloat16".
    """

    name: str
    value: Any = NO_VALUE

    def __str__(self) -> str:
        return self.name if self.value is NO_VALUE else f"{self.name}={self.value!r}"


Text: TypeAlias = str | tuple[str | Option, ...]
Spelling: TypeAlias = Callable[[Option], str]
python_spelling: Spelling = str  # as the Python API spells an option


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return the end of a remedy that names the known name nearest to the given one; "" if none is near.

    Examples:
        >>> did_you_mean("draftmodel", ["lookup", "draft-model"])
        ". Did you mean 'draft-model'?"
        >>> did_you_mean("oracle", ["lookup", "draft-model"])
        ''
    """
    nearest = get_close_matches(given, list(known), n=1) if isinstance(given, str) else []
    return f". Did you mean {nearest[0]!r}?" if nearest else ""


class ForedraftError(Exception):
    """Base of every error that a user of this package can cause or must handle.

    Args:
        problem: What is wrong; it follows the option and its value where these are given.
        option: The option at fault, as the Python API names it.
        value: The value that it has.
        remedy: What to do instead.

    Examples:
        >>> print(ConfigError(option="max_draft", value=0, remedy="give a whole number, 1 or more"))
        max_draft is 0; give a whole number, 1 or more
    """

    def __init__(
        self, problem: Text = "", *, option: str | None = None, value: Any = NO_VALUE, remedy: Text = ""
    ) -> None:
        super().__init__(problem)
        self.problem, self.option, self.value, self.remedy = problem, option, value, remedy

    def describe(self, spelling: Spelling = python_spelling) -> str:
        """Return the error as one line, with every option spelled by `spelling`."""
        line = "" if self.option is None else spelling(Option(self.option))
        if line and self.value is not NO_VALUE:
            line += f" is {shortened(self.value, SHOWN)}"
        if problem := join_text(self.problem, spelling):
            # "max_draft is 99, but ..." or "logit_bias names token 7"
            line += (" " if self.value is NO_VALUE else ", ") * bool(line) + problem
        remedy = join_text(self.remedy, spelling)
        return _printable(f"{line}; {remedy}" if remedy else line)

    def __str__(self) -> str:
        return self.describe()


def join_text(text: Text, spelling: Spelling) -> str:
    """Return a text as one string, with every option spelled by `spelling`."""
    if isinstance(text, str):
        return text
    return "".join(part if isinstance(part, str) else spelling(part) for part in text)


def _printable(line: str) -> str:
    """Spell lone surrogates and control characters as escapes; a line break becomes a space."""
    line = " ".join(line.splitlines())
    if line.isprintable():
        return line
    return "".join(repr(c)[1:-1] if unicodedata.category(c) in ("Cc", "Cs") else c for c in line)


def is_fault(error: BaseException) -> bool:
    """Return whether an error is a library's: an Exception, or a panic of one in Rust, but not Ctrl-C."""
    is_panic = type(error).__name__ == "PanicException" and type(error).__module__ == "pyo3_runtime"
    return isinstance(error, Exception) or is_panic


def shortened(value: object, most: int = 80) -> str:
    """Return the repr of a value in at most `most` characters, for an error message."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply; or a number with too many digits
        text = f"a large {type(value).__name__}"
    return text if len(text) <= most else text[: most - 3] + "..."


class ConfigError(ForedraftError, ValueError):
    """An option has a value that cannot be honoured."""


class CheckpointError(ForedraftError):
    """A model folder is missing or broken, or needs mathematics that is not supported."""


class RequestError(ForedraftError, ValueError):
    """A request cannot be served, or it failed while it ran."""


class ContextLengthError(RequestError):
    """A prompt and the tokens that are asked for are longer than the context.

    Args:
        problem, remedy: As in `ForedraftError`.
        prompt: Tokens of the prompt.
        new: Tokens that are asked for.
        most: Positions of the context.
        reach: Positions that the model could have.
    """

    def __init__(self, problem: Text, *, remedy: Text, prompt: int, new: int, most: int, reach: int) -> None:
        super().__init__(problem, remedy=remedy)
        self.prompt, self.new, self.most, self.reach = prompt, new, most, reach
