"""Ctrl-C: before a command's own work it ends the process; within, it ends what runs where nothing is lost.

While a command imports and loads (`end_at_once`), the process ends within the handler, with code 130: a
KeyboardInterrupt within an import leaves a half-made module behind. Work that keeps what it has (`Raised`)
gets a KeyboardInterrupt, but never within an import or a finaliser. A request to a model (`Interrupt`) is
cancelled at the end of its round.
"""

from __future__ import annotations

import os
import sys
from time import sleep

TYPE_CHECKING = False  # what `typing` calls so; importing it takes longer than all of this file
if TYPE_CHECKING:
    import signal
    from types import FrameType
    from typing import Any, Self

    from foredraft import LLM
else:
    import _signal as signal  # what `signal` wraps in enumerations, which take milliseconds to import

# Exit codes of every command.
FAILED = 1  # generation failed, or tokens differ from plain decoding
USER_ERROR = 2  # a wrong option, model or request
INCONCLUSIVE = 3  # `verify` found no difference, but its tests were too weak
INTERRUPTED = 130  # Ctrl-C: 128 + SIGINT

IMPORTER = "<frozen importlib._bootstrap>"  # file of the frames that an import has on the stack
AGAIN_SECONDS = 0.05  # until a signal that came at a wrong moment comes again
# For a terminal: erases the line of a progress bar, and shows the cursor that the bar had hidden.
WITHOUT_BAR = b"\r\x1b[K\x1b[?25h"


def end_at_once() -> None:
    """Let SIGINT end this process at once, with one line on stderr, unless the process ignores it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        return
    process = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:  # a forked process ends without a word
            _last_words()
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, end)
    sys.unraisablehook = _forgotten


def _last_words() -> None:
    """Remove unfinished files, say that the command was interrupted, and write what is printed already."""
    try:
        if (files := sys.modules.get("foredraft.files")) is not None:
            files.discard_unfinished()
        line = WITHOUT_BAR if os.isatty(2) else b""
        os.write(2, line + b"foredraft: interrupted\n")
        sys.stdout.flush()
    except Exception:
        pass  # such as a stdout that is closed, or in the midst of a write: the process ends all the same


class Raised:
    """Context manager in which SIGINT raises KeyboardInterrupt, for work that then keeps what it has."""

    def __enter__(self) -> Self:
        self._previous: Any = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt; within an import, once it is over."""
        while frame is not None:
            if frame.f_code.co_filename == IMPORTER:
                _send_again()
                return
            frame = frame.f_back
        raise KeyboardInterrupt


def _forgotten(unraisable: sys.UnraisableHookArgs) -> None:
    """Handle an exception that Python cannot raise: a KeyboardInterrupt of a finaliser comes again."""
    if unraisable.exc_type is KeyboardInterrupt:
        _send_again()
    else:
        sys.__unraisablehook__(unraisable)


def _send_again() -> None:
    from threading import Timer

    timer = Timer(AGAIN_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()


class Interrupt(Raised):
    """Context manager that handles SIGINT: the first signal cancels all requests of `llm`.

    The engine runs in a thread of its own, which no signal reaches. Other work calls `check` where nothing is
    lost: raised anywhere, a KeyboardInterrupt is forgotten in a finaliser, or PyTorch takes it for a file
    that cannot be written. The second signal raises a KeyboardInterrupt all the same.
    """

    def __init__(self, llm: LLM | None = None) -> None:
        self.llm = llm
        self.received = False  # a SIGINT arrived
        self._cancelling: Any = None  # a thread

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.llm = None
        if self._cancelling is not None:
            self._cancelling.join()

    def check(self) -> None:
        """Raise KeyboardInterrupt if a SIGINT arrived, so that the next step does not start."""
        if self.received:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            super()._handle(number, frame)
            return
        self.received = True
        if self.llm is not None:
            from threading import Thread

            self.llm.cancel_all()
            self._cancelling = Thread(target=self._go_on_cancelling, daemon=True)
            self._cancelling.start()

    def _go_on_cancelling(self) -> None:
        """Cancel requests that are submitted after the signal, too: encoding one may take seconds."""
        while (llm := self.llm) is not None:
            llm.cancel_all()
            sleep(AGAIN_SECONDS)
