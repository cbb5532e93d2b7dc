"""Inbox: commands of threads to the engine, carried out in order between two steps."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from foredraft.decode.engine import Engine
from foredraft.decode.sequence import Sequence

__all__ = ["Inbox"]

logger = logging.getLogger(__name__)


class Inbox:
    """Commands of all threads: sequences to submit, to pause and to cancel. A method only leaves its command.

    A command is one append to a deque: atomic, without a lock, so it may come from any thread, from a signal
    handler and from the garbage collector, and it is there as a whole or not at all. One thread at a time
    carries the commands out (`Driver`). A command may come twice, and a sequence that is cancelled before it
    is submitted never starts.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: deque[_Command | _Dropped] = deque()
        self._watched: set[_Dropped] = set()  # keeps the references alive until their owners are gone

    def __bool__(self) -> bool:
        return bool(self._commands)

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue sequences."""
        self._commands.append(_Command(lambda: sequences, self._engine.submit))

    def cancel(self, sequences: list[Sequence]) -> None:
        """End sequences; those that have ended, or were never submitted, are left as they are."""
        # last first: otherwise the row of a cancelled sequence would pass to a waiting sibling
        self._commands.append(_Command(lambda: sequences[::-1], self._engine.cancel))

    def pause(self, sequences: list[Sequence]) -> None:
        """Leave sequences out of the rounds."""
        self._commands.append(_Command(lambda: sequences, self._engine.pause))

    def resume(self, sequences: list[Sequence]) -> None:
        """Let paused sequences go on."""
        self._commands.append(_Command(lambda: sequences, self._engine.resume))

    def fail(self, sequences: list[Sequence], error: str) -> None:
        """End sequences with an error; those that have ended are left as they are."""
        self._commands.append(_Command(lambda: sequences, lambda each: self._engine.fail(each, error)))

    def cancel_all(self) -> None:
        """End every sequence that is running or waiting, or whose submission is in the inbox by now."""
        self._commands.append(_Command(self._all, self._engine.cancel))

    def cancel_with(self, owner: object, sequence: Sequence) -> None:
        """End a sequence as soon as its owner is garbage.

        A finaliser in Python might be interrupted, and Python drops what is raised there. This one is the
        deque's own `append`, which runs no Python.
        """
        dropped = _Dropped(owner, self._commands.append)
        dropped.sequence = sequence
        self._watched.add(dropped)

    def carry_out(self) -> None:
        """Carry all commands out. A sequence for which that fails ends with an error; the others go on."""
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, _Dropped):
                self._watched.discard(command)
                self._apply(self._engine.cancel, command.sequence)
                continue
            for sequence in command.sequences():
                self._apply(command.call, sequence)

    def _all(self) -> list[Sequence]:
        return [*self._engine.scheduler.waiting, *self._engine.rows.sequences]

    def _apply(self, call: Callable[[Sequence], None], sequence: Sequence) -> None:
        try:
            call(sequence)
        except Exception as error:
            logger.exception("a request cannot be submitted or cancelled; it ends with an error")
            self._engine.fail(sequence, f"{type(error).__name__}: {error}")


class _Command:
    """A call for each of some sequences, which are listed when the call is due."""

    __slots__ = ("call", "sequences")

    def __init__(self, sequences: Callable[[], list[Sequence]], call: Callable[[Sequence], None]) -> None:
        self.sequences, self.call = sequences, call


class _Dropped(weakref.ref[Any]):
    """A reference to the owner of a sequence; once the owner is garbage, the command to cancel it."""

    __slots__ = ("sequence",)
    sequence: Sequence
