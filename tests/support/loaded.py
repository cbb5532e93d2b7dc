"""The engine of a loaded model, for tests that look into it or change it."""

from __future__ import annotations

from foredraft import LLM
from foredraft.decode.engine import Engine


def engine_of(llm: LLM) -> Engine:
    return llm.loaded.engine
