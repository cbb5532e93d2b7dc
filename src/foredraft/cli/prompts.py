"""Prompts and other texts that a command reads: from its arguments, files and stdin.

A byte order mark, with which editors of Windows begin a file, is no text.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from foredraft.cli.words import STDIN
from foredraft.errors import ConfigError, Option, invalid_at
from foredraft.files import TEXT


def read_text(option: str, file: Path) -> str:
    try:
        return file.read_text(encoding=TEXT)
    except OSError as error:
        raise ConfigError(
            f"which cannot be read ({error.strerror})", option=option, value=str(file),
            remedy="give a text file",
        ) from error  # fmt: skip
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"which is not UTF-8 text (byte {error.start})", option=option, value=str(file),
            remedy="convert it first",
        ) from error  # fmt: skip


GGUF = ".gguf"


def check_is_no_model(prompt: str, model: str | None) -> None:
    """Refuse a prompt that is the path of a model where no model is given; with one, tell of it on stderr."""
    kind = None
    if prompt.endswith(GGUF) and os.path.isfile(prompt):
        kind = "a GGUF file"
    elif os.path.isdir(prompt):  # False, too, for what can be no path
        with suppress(OSError):
            names = {file.name for file in Path(prompt).iterdir()}
            if "config.json" in names or any(name.endswith(GGUF) for name in names):
                kind = "the folder of a model"
    if kind is not None and model is None:
        told = "? To continue it as text, give it on stdin, by -"
        raise ConfigError(
            f"the prompt {prompt!r} is {kind}", remedy=("did you mean ", Option("model", prompt), told)
        )
    if kind is not None:
        print(f"foredraft: the prompt {prompt!r} is {kind}; it is continued as text", file=sys.stderr)


def read_prompt(prompt: str | None, model: str | None) -> str:
    """Return the prompt: the given one, stdin's, or the demo's."""
    if prompt is None and model is None:
        from foredraft import demo

        return demo.prompt()
    if prompt is None:
        raise ConfigError("no prompt", remedy="give one, or - to read it from stdin")
    if prompt != STDIN:
        if (at := invalid_at(prompt)) is not None:
            raise ConfigError(f"the prompt is not UTF-8 text (character {at})", remedy="convert it first")
        check_is_no_model(prompt, model)
        return prompt
    if sys.stdin is None:
        raise ConfigError("stdin is closed", remedy="give the prompt as an argument, or open stdin")
    try:
        return sys.stdin.buffer.read().decode(TEXT).removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"stdin is not UTF-8 text (byte {error.start})", remedy="convert it first"
        ) from error


def read_prompts(texts: tuple[str, ...], file: str | None, model: str | None) -> list[str]:
    """Return the prompts of the command line or the file, or else the demo's."""
    if texts and file is not None:
        raise ConfigError(
            ("prompts are given as arguments and by ", Option("prompts")), remedy="leave one out"
        )
    if texts:
        return [read_prompt(text, model) for text in texts]
    if file is None:
        from foredraft import demo

        return demo.prompts()
    text = read_text("prompts", Path(file))
    numbered = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not numbered:
        raise ConfigError("which has no prompts", option="prompts", value=file, remedy="give one per line")
    if not file.endswith(".jsonl"):
        return [line for _, line in numbered]
    from foredraft.bench.workload import prompt_of

    return [prompt_of(line, f"line {number} of {file}") for number, line in numbered]
