"""A graph capturer for CPUs: a replay runs the captured pass again, on the buffers of the capture.

As with a CUDA graph, each replay overwrites the results of the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foredraft.model.runner.graphs import CapturedGraph
from foredraft.model.runner.trees import fill, flattened


class Rerun:
    """A `GraphCapturer` that counts its captures and replays.

    Args:
        fails: Captures fail with an error of CUDA.
        warm_up: Runs before a capture.
    """

    def __init__(self, fails: bool = False, warm_up: int = 0) -> None:
        self.fails, self.warm_up, self.captures, self.replays = fails, warm_up, 0, 0

    def capture(self, body: Callable[[], Any]) -> CapturedGraph:
        """Run a computation, and return a graph that runs it again."""
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
