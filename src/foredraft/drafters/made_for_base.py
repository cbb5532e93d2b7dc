"""What was made for a model without LoRAs still drafts for the model with them, less well perhaps.

The output stays exact whatever a drafter was made for: the target decides about every token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from foredraft.model.lora.record import base_of

__all__ = ["hash_of_base", "say_made_for_base"]

logger = logging.getLogger(__name__)


def hash_of_base(folder: Path, hash_of: Callable[[Path], str]) -> str | None:
    """Return the hash of a model without its LoRAs; None where it has none."""
    base = base_of(folder)
    return None if base == folder else hash_of(base)


def say_made_for_base(what: str) -> None:
    """Log that a plan or an adapter is of the model without LoRAs."""
    logger.warning(
        "%s was made for the model without its LoRA: the output stays exact, but drafts may be accepted less"
        " often", what,
    )  # fmt: skip
