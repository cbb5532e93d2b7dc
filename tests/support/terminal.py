"""A command on a pseudo-terminal of its own: what it shows, lines that are typed, Ctrl-C."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from contextlib import suppress

from tests.support.command import COMMAND
from tests.support.interrupting import handler_of_sigint
from tests.support.running import environment

CTRL_C, CTRL_D = "\x03", "\x04"
SECONDS = 60


class TerminalSession:
    """A process on a pseudo-terminal, which shows stderr, too, if `all_shown`; otherwise `wait` returns its lines."""

    def __init__(self, *arguments: str, command: list[str] | None = None, all_shown: bool = False) -> None:
        self.shown, terminal = pty.openpty()
        with handler_of_sigint():  # a process in the background would have its own start with SIGINT ignored
            err = terminal if all_shown else subprocess.PIPE
            command = ["setsid", "--ctty", *(command or COMMAND), *arguments]
            own = environment(TERM="xterm", INPUTRC="/dev/null")
            self.process = subprocess.Popen(command, env=own, stdin=terminal, stdout=terminal, stderr=err)
        os.close(terminal)
        self.text_buffer, self.read = "", 0
        while os.tcgetpgrp(self.shown) != self.process.pid:  # until then no key reaches it
            time.sleep(0.0005)

    def __enter__(self) -> TerminalSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self.shown)

    def wait_for(self, text: str) -> None:
        while text not in self.text_buffer[self.read :]:
            assert self._read(), f"it ended without {text!r}: {self.text_buffer!r}"
        self.read = self.text_buffer.index(text, self.read) + len(text)

    def type(self, line: str) -> None:
        self.wait_for("> ")
        self.press(line)

    def interrupt(self) -> None:
        """Press Ctrl-C at the next prompt, once readline waits: it misses a signal just after it shows a prompt."""
        self.wait_for("> ")
        time.sleep(0.3)
        self.press(CTRL_C)

    def press(self, keys: str) -> None:
        with suppress(OSError):  # the process has ended
            os.write(self.shown, keys.encode())

    def wait(self) -> tuple[int, list[str]]:
        while self._read():
            pass
        _, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, (err or b"").decode().splitlines()

    def _read(self) -> bool:
        ready, _, _ = select.select([self.shown], [], [], SECONDS)
        assert ready, f"nothing within {SECONDS} s after {self.text_buffer!r}"
        try:
            self.text_buffer += os.read(self.shown, 4096).decode(errors="replace")
        except OSError:  # Linux raises EIO when the other end is closed
            return False
        return True
