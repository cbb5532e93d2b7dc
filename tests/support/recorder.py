"""A graph capturer for CPUs: a replay runs the captured pass again and overwrites the results of the one before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foredraft.model.runner.graphs import CapturedGraph, fill, flattened


class Rerun:
    """A stand-in for `CudaGraphCapturer` that counts its captures and replays; `warm_up` are runs before a capture."""

    def __init__(self, fails: bool = False, warm_up: int = 0) -> None:
        self.fails, self.warm_up, self.captures, self.replays = fails, warm_up, 0, 0

    def capture(self, body: Callable[[], Any]) -> CapturedGraph:
        self.captures += 1
        if self.fails:
            raise RuntimeError("CUDA error: operation not permitted\nCompile with ...")
        for _ in range(self.warm_up):
            body()
        output = body()

        def replay() -> None:
            self.replays += 1
            fill(flattened(output)[0], flattened(body())[0])

        return CapturedGraph(replay, output)
