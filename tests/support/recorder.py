"""A graph capturer for CPUs: a replay runs the captured pass again, on the buffers of the capture.

As with a CUDA graph, each replay overwrites the results of the one before.
"""

from __future__ import annotations

from collections.abc import Callable

from foredraft.model.runner import Forward
from foredraft.model.runner.graphs import CapturedGraph


class Rerun:
    """A `GraphCapturer` that counts its captures and replays.

    Args:
        fails: Captures fail with an error of CUDA.
    """

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.captures, self.replays = fails, 0, 0

    def capture(self, body: Callable[[], Forward]) -> CapturedGraph:
        """Run a pass, and return a graph that runs it again."""
        self.captures += 1
        if self.fails:
            raise RuntimeError("CUDA error: operation not permitted\nCompile with ...")
        output = body()

        def replay() -> None:
            self.replays += 1
            again = body()
            if output.logits is not None and again.logits is not None:
                output.logits.copy_(again.logits)
            output.hidden.copy_(again.hidden)
            for depth, tap in output.taps.items():
                tap.copy_(again.taps[depth])

        return CapturedGraph(replay, output)
