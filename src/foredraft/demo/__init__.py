"""The demo models that ship inside the package, so that every command works offline.

Contract: paths to two ordinary Hugging Face folders, a target and a draft with one tokenizer, and the
held-out prompts. How they were made is in `recipe`; what they can do is in `MODEL_CARD.md`.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path


def target_path() -> Path:
    """The folder of the target."""
    return Path(str(files(__package__) / "target"))


def draft_path() -> Path:
    """The folder of the draft."""
    return Path(str(files(__package__) / "draft"))


def prompts() -> list[str]:
    """Beginnings of functions that neither model was trained on."""
    text = (files(__package__) / "prompts.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["prompt"] for line in text.splitlines()]


def prompt() -> str:
    """The one that commands go on from unless given another: its continuation loops less than most."""
    return prompts()[39]
