"""Who steps the engine, where several threads want something of it.

Whichever thread finds nobody stepping the engine steps it, for everyone; the others wait for their own
request. What a thread wants to see of its request is looked at between two steps only, by whoever took the
last one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from foredraft.decode.engine import Engine
from foredraft.decode.sequence import Sequence, State
from foredraft.llm.interrupts import Interrupts

__all__ = ["Driver"]

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Wish(Generic[T]):
    """What a thread waits for."""

    look: Callable[[], T | None]
    found: T | None = None
    error: Exception | None = None  # of `look`: its own thread's to raise, whoever looked

    @property
    def open(self) -> bool:
        return self.found is None and self.error is None

    def see(self) -> None:
        if self.open:
            try:
                self.found = self.look()
            except Exception as error:
                self.error = error


class Driver:
    """Of one engine. progress: told how far the prompt is that is being read."""

    def __init__(self, engine: Engine, progress: Callable[[str, int, int], None] | None) -> None:
        self.engine, self._progress = engine, progress
        self.turn = threading.Condition()
        self._stepping = False
        self._inbox: list[tuple[Callable[[Sequence], None], Sequence]] = []
        self._waiting: list[_Wish[Any]] = []

    def tell(self, what: Callable[[Sequence], None], sequences: list[Sequence]) -> None:
        """Have the engine told between two steps, whoever takes them."""
        with self.turn:
            self._inbox += [(what, sequence) for sequence in sequences]
            if not self._stepping:
                self._read_inbox()

    def _read_inbox(self) -> None:
        inbox, self._inbox = self._inbox, []
        for what, sequence in inbox:
            what(sequence)

    def submit(self, sequences: list[Sequence]) -> None:
        with Interrupts():
            self.tell(self.engine.submit, sequences)

    def drive(self, look: Callable[[], T | None]) -> T:
        """Step the engine, or wait while another thread does, until `look` finds something.

        `look` is called between two steps only, by whichever thread took the last one.
        """
        wish = _Wish(look)
        with self.turn:
            self._waiting.append(wish)
        try:
            with Interrupts() as interrupts:
                while True:
                    interrupts.deliver()
                    with self.turn:
                        while self._stepping and wish.open:
                            interrupts.wait(self.turn)
                        if not self._stepping:
                            wish.see()
                        if wish.error is not None:
                            raise wish.error
                        if wish.found is not None:
                            return wish.found
                        self._stepping = True
                    self._step()
        finally:
            with self.turn:
                self._waiting.remove(wish)

    def _step(self) -> None:
        """One step for everyone; then everyone's news."""
        reading = None if self._progress is None else self.engine.scheduler.prefilling
        try:
            self.engine.step()
        except Exception as error:
            # The batch cannot go on (out of memory, a broken operator): its requests fail by name.
            if not self.engine.rows.sequences:
                raise
            logger.exception("a pass broke off; the requests in it end with an error")
            self.engine.fail_batch(f"{type(error).__name__}: {error}")
        finally:
            with self.turn:
                self._stepping = False
                try:
                    self._read_inbox()
                    for wish in self._waiting:
                        wish.see()
                finally:
                    self.turn.notify_all()
        if self._progress is None:
            return
        reading = reading or self.engine.scheduler.prefilling
        if reading is not None:
            total = len(reading.prompt) - 1
            done = self.engine.cache.lengths[reading.row] if reading.state is State.PREFILLING else total
            self._progress("prefill", done, total)

    def cancel_all(self) -> None:
        """End every request, those included of which the engine has not been told yet."""
        engine = self.engine
        with self.turn:
            coming = [sequence for _, sequence in self._inbox]
            self.tell(engine.cancel, [*coming, *engine.scheduler.waiting, *engine.rows.sequences])
