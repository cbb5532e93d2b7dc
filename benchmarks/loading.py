"""The peak of anonymous memory while a model loads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from foredraft import LLM
from foredraft.bench.model_size import model_record

T = TypeVar("T")


def loading_memory(load: Callable[[], LLM]) -> dict[str, Any]:
    """Return the peak while `load` runs, without the KV cache, and the bytes of the weights."""
    llm, peak = anonymous_peak(load)
    runner = llm.loaded.runner
    cache = llm.loaded.engine.cache.memory.nbytes
    rows = runner.decoder.embedding  # the head itself, where the kernels run a tied one
    held = rows if isinstance(rows, torch.Tensor) else rows.weight
    embedding = 0 if rows is runner.decoder.output else held.nbytes
    weights = model_record("target", "target", runner).step_bytes
    peak -= cache
    return {"peak": peak, "weights": weights, "embedding": embedding, "share": peak / (weights + embedding)}


def anonymous_peak(load: Callable[[], T]) -> tuple[T, int]:
    """Return what `load` returns, and by how many bytes the process grew while it ran."""
    before, stopped, samples = _anonymous_bytes(), threading.Event(), [0]

    def sample() -> None:
        while not stopped.wait(0.002):
            samples.append(_anonymous_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    found = load()
    stopped.set()
    sampler.join()
    return found, max(*samples, _anonymous_bytes()) - before


def _anonymous_bytes() -> int:
    """Return the process's resident memory that is not backed by a file."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))) * 1024
