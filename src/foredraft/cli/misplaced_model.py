"""A prompt that is the path of a model: most often its option was forgotten."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from foredraft.errors import ConfigError, Option

__all__ = ["check_is_no_model"]

CONFIG = "config.json"  # of a checkpoint folder
GGUF = ".gguf"


def check_is_no_model(prompt: str, model: str | None) -> None:
    """Refuse a prompt that is the path of a model where no model is given; with one, tell of it on stderr.

    Raises:
        ConfigError: The path of a model stands in the place of the prompt.
    """
    if (kind := _kind_of_model(prompt)) is None:
        return
    if model is None:
        raise ConfigError(
            f"the prompt {prompt!r} is {kind}",
            remedy=(
                "did you mean ",
                Option("model", prompt),
                "? To continue it as text, give it on stdin, by -",
            ),
        )
    print(f"foredraft: the prompt {prompt!r} is {kind}; it is continued as text", file=sys.stderr)


def _kind_of_model(text: str) -> str | None:
    """Return what model the text is the path of; None where it is no such path."""
    if text.endswith(GGUF) and os.path.isfile(text):
        return "a GGUF file"
    if not os.path.isdir(text):  # False, too, for what can be no path
        return None
    try:
        names = {file.name for file in Path(text).iterdir()}
    except OSError:
        return None
    is_model = CONFIG in names or any(name.endswith(GGUF) for name in names)
    return "the folder of a model" if is_model else None
