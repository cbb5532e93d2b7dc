"""The engine of a loaded model, for tests that look into it or change it."""

from __future__ import annotations

from foredraft import LLM
from foredraft.decode.engine import Engine

__all__ = ["engine_of"]


def engine_of(llm: LLM) -> Engine:
    """Return the engine of a model, with its policy, its drafters and its caches."""
    return llm.loaded.engine
