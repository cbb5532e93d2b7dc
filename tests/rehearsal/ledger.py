"""The ledger: what happened on the pretended device, by kind and by the line of the project that caused it."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

ROOT = Path(__file__).parents[2]
OWN = str(Path(__file__).parent / "")  # the rehearsal's own frames are no cause
PARTS = tuple(str(ROOT / part) for part in ("src", "tests", "benchmarks"))
TESTS_OF_IT = "test_"  # but those of its tests are


class Violation(RuntimeError):
    """What fails, or reads wrong values, on a real device."""


@dataclass
class Ledger:
    """What happened, since the process began."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # events by kind and line
    waits: int = 0
    launches: int = 0  # kernels and copies that the host launches, those of replays left out
    mode: str = "default"  # or "error" where a wait raises
    capture: Any = None  # that runs
    # sources of copies from pinned memory that may still run, with the values that they had
    uploads: list[tuple[weakref.ref[Tensor], Tensor]] = field(default_factory=list)

    def note(self, kind: str) -> None:
        self.counts[kind, calling_line()] += 1

    def wait(self, kind: str) -> None:
        """Record a wait, which is an error in a capture and where `set_sync_debug_mode` says so."""
        line = calling_line()
        self.counts[kind, line] += 1
        self.waits += 1
        if self.mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {kind} at {line}")
        if self.capture is not None:
            reason = "operation not permitted when stream is capturing"
            raise RuntimeError(f"CUDA error: {reason}: {kind} at {line}")
        self.end_uploads()

    def end_uploads(self) -> None:
        """Check that no source of a copy changed while it ran; after a wait all copies are done."""
        uploads, self.uploads = self.uploads, []
        for source, sent in uploads:
            now = source()
            if now is not None and not _same(now, sent):
                raise Violation("a pinned buffer changed before the copy from it was done")

    def seen(self, kind: str) -> list[str]:
        return [line for known, line in self.counts if known == kind]

    def count(self, kind: str) -> int:
        return sum(n for (known, _), n in self.counts.items() if known == kind)

    def report(self) -> str:
        return "\n".join(f"{n:8d}  {kind} at {line}" for (kind, line), n in self.counts.most_common())


def calling_line() -> str:
    """Return the innermost line of the project outside the rehearsal, as "file:line function"."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PARTS) and (not name.startswith(OWN) or Path(name).name.startswith(TESTS_OF_IT)):
            return f"{Path(name).relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


def _same(one: Tensor, other: Tensor) -> bool:
    return bool((one == other).logical_or((one != one) & (other != other)).all())


LEDGER = Ledger()
