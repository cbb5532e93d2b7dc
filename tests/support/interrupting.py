"""Interrupts at chosen instructions: SIGINT in the main thread, wherever Python may handle a signal."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import foredraft
from foredraft.decode import engine, scheduler

LLM_FOLDER = str(Path(foredraft.__file__).parent / "llm")
LOCKS = tuple(str(module.__file__) for module in (threading, signal, contextlib))
DECODE = tuple(str(module.__file__) for module in (engine, scheduler))


@contextlib.contextmanager
def handler_of_sigint(handler: Callable[[int, Any], Any] = signal.default_int_handler) -> Iterator[None]:
    """Handle SIGINT by `handler`, and check that it is still in place at the end. Background processes ignore it."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        restored = signal.signal(signal.SIGINT, before)
    assert restored == handler, "a call did not restore the handler"


class InterruptAt:
    """Runs a function and sends SIGINT before one instruction of frames of some files, counted from 1.

    The interpreter handles signals at fewer places: calls, jumps and the starts of functions.
    """

    def __init__(self, instruction: int, files: tuple[str, ...] = (LLM_FOLDER, *LOCKS, *DECODE)) -> None:
        self.instruction, self.files = instruction, files
        self.seen = 0  # instructions that ran, up to the signal
        self.raised = False  # the function ended in KeyboardInterrupt

    @property
    def sent(self) -> bool:
        return self.seen >= self.instruction

    def run(self, function: Callable[[], object]) -> InterruptAt:
        tracing = sys.gettrace()
        try:
            sys.settrace(self._trace)
            function()
        except KeyboardInterrupt:
            self.raised = True
        finally:
            sys.settrace(tracing)
        return self

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        if self.sent or not frame.f_code.co_filename.startswith(self.files):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.seen += 1
            if self.sent:
                signal.raise_signal(signal.SIGINT)
        return self._trace
