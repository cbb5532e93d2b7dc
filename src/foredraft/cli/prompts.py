"""The prompts of a command: its arguments, stdin, a file, or those that ship with Foredraft."""

from __future__ import annotations

import sys
from pathlib import Path

from foredraft.bench.workload import prompt_of
from foredraft.cli.misplaced_model import check_is_no_model
from foredraft.cli.text_files import read_text
from foredraft.cli.words import STDIN
from foredraft.errors import ConfigError, Option
from foredraft.unicode import invalid_at

__all__ = ["read_prompt", "read_prompts"]


def read_prompt(prompt: str | None, model: str | None) -> str:
    """Return the prompt: the given one, stdin's, or the demo's.

    Args:
        prompt: The argument; `STDIN` reads stdin, None takes the demo's prompt if the demo models run.
        model: The --model option.

    Raises:
        ConfigError: There is no prompt, or it is not UTF-8 text, or it is the path of a model.
    """
    if prompt is None and model is None:
        from foredraft import demo

        return demo.prompt()
    if prompt is None:
        raise ConfigError("no prompt", remedy="give one, or - to read it from stdin")
    if prompt != STDIN:
        check_text("the prompt", prompt)
        check_is_no_model(prompt, model)
        return prompt
    if sys.stdin is None:
        raise ConfigError("stdin is closed", remedy="give the prompt as an argument, or open stdin")
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"stdin is not UTF-8 text (byte {error.start})", remedy="convert it first"
        ) from error


def check_text(what: str, text: str) -> None:
    """Refuse text that UTF-8 cannot encode, such as undecodable bytes of an argument."""
    if (at := invalid_at(text)) is not None:
        raise ConfigError(f"{what} is not UTF-8 text (character {at})", remedy="convert it first")


def read_prompts(texts: tuple[str, ...], file: str | None, model: str | None) -> list[str]:
    """Return the prompts of the command line or the file, or else the demo's.

    Args:
        texts: Prompts given as arguments.
        file: The --prompts option.
        model: The --model option.

    Raises:
        ConfigError: Prompts are given twice, or the file cannot be read or has no prompts.
    """
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
    return [prompt_of(line, f"line {number} of {file}") for number, line in numbered]
