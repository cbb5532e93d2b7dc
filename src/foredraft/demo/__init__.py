"""The demo models inside the package, with which every command works offline.

The target and the draft are two ordinary Hugging Face folders with one tokenizer; the adapter is what
`foredraft train adapter` writes, and the head what `foredraft train eagle3` writes. `MODEL_CARD.md` describes
them; `recipes/demo` in the repository makes them.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

DEFAULT_PROMPT = 39  # the plain output for this prompt repeats itself less than for most others


def target_path() -> Path:
    """Return the folder of the target."""
    return Path(str(files(__package__) / "target"))


def draft_path() -> Path:
    """Return the folder of the draft model."""
    return Path(str(files(__package__) / "draft"))


def adapter_path() -> Path:
    """Return the folder of the adapter of drafter kangaroo over the target."""
    return Path(str(files(__package__) / "adapter"))


def head_path() -> Path:
    """Return the folder of the EAGLE-3 head over the target."""
    return Path(str(files(__package__) / "eagle3"))


def prompts() -> list[str]:
    """Return function headers, with the code before them, from modules that neither model was trained on."""
    text = (files(__package__) / "prompts.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["prompt"] for line in text.splitlines()]


def prompt() -> str:
    """Return the prompt that a command continues by default."""
    return prompts()[DEFAULT_PROMPT]
