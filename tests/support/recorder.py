"""A recorder for CPUs: a replay runs the recorded body again, on the very buffers that it was recorded with,
and its results overwrite those of the recording, as a CUDA graph's do."""

from __future__ import annotations

from collections.abc import Callable

from foredraft.model.runner import Forward
from foredraft.model.runner.graphs import Recording


class Rerun:
    """`records` and `replays` count; `fails` makes recording fail as CUDA does."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.records, self.replays = fails, 0, 0

    def record(self, body: Callable[[], Forward]) -> Recording:
        self.records += 1
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

        return Recording(replay, output)
