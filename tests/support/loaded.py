"""The engine of a loaded model, for tests that look into it or change it."""

from __future__ import annotations

import threading

from foredraft import LLM
from foredraft.decode.engine import Engine
from foredraft.llm import service


def engine_of(llm: LLM) -> Engine:
    return llm.loaded.engine


def between_steps(llm: LLM) -> None:
    """Wait until the engine's thread has carried out all that it was told so far."""
    [thread] = [each for each in service._THREADS if each.engine is llm.loaded.engine]
    done = threading.Event()
    if thread.alive:
        thread._line.queue.put(done.set)
        assert done.wait(60), "the thread hangs"
