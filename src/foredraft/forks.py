"""Forked processes: a model works in the process that loaded it, and nowhere else.

A fork copies the memory and one thread. Locks that other threads held stay locked in the child, and OpenMP
waits for ever for the threads of the parent's pool, even where the parent was idle. So a child gets an error
instead of a text that never comes.
"""

from __future__ import annotations

import os

from foredraft.errors import ConfigError, RequestError

__all__ = ["Loads", "check_process"]


class Loads:
    """Remembers the process whose threads loaded a model, because they do not survive a fork."""

    def __init__(self) -> None:
        self._process: int | None = None  # a forked child inherits its parent's

    def note(self, threads: int) -> None:
        """Note that this process loads a model.

        Args:
            threads: That compute. With one there is no pool, so the child of an idle parent may load.

        Raises:
            ConfigError: This process was forked after its parent had loaded a model.
        """
        if threads == 1:
            return
        if self._process is None:
            self._process = os.getpid()
        elif self._process != os.getpid():
            raise ConfigError(
                f"process {self._process} loaded a model and then forked this one, in which its threads are "
                "missing",
                remedy="start this process by 'spawn', or fork it before the first model is loaded",
            )


def check_process(home: int) -> None:
    """Check that this process is the one that loaded a model.

    Args:
        home: The id of the process that did.

    Raises:
        RequestError: It is another process, forked from that one.
    """
    if home != os.getpid():
        raise RequestError(
            f"process {home} loaded this model and then forked this one, in which its threads are missing",
            remedy="start this process by 'spawn' and load the model in it",
        )
