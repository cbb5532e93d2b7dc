"""Ctrl-C at any moment ends a command with exit code 130 and without a traceback.

Until the first line of `main`, a process is Python's own: it dies of the signal, or prints a traceback of the start.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.command import foredraft
from tests.support.interrupting import handler_of_sigint
from tests.support.running import python
from tests.support.terminal import CTRL_C, TerminalSession

SCRIPT = "import sys; from foredraft.cli import main; sys.exit(main())"  # what pip installs as `foredraft`
STARTS = ("-c", SCRIPT), ("-m", "foredraft"), ("-m", "foredraft.cli")
PROGRAMS = [[sys.executable, *words] for words in STARTS]
LONG = ["def f():", "--ignore-eos", "--max-new-tokens", "1000"]  # it outlasts the start by a second
COMMANDS = {
    "generate": ["generate", *LONG],
    "json": ["generate", *LONG, "--json"],
    "bench": ["bench", "--repeats", "1000"],
    "verify": ["verify", "--samples", "1000000"],
    "tune": ["tune", "--trials", "1000000"],
    "serve": ["serve", "--port", "0"],
}
# Files in a traceback of the start: Python's own, and those that run before the first line of `main`.
OWN = r"(__init__|__main__|lazy|cli/(__init__|__main__|interrupt))\.py"
START = re.compile(rf'File "(<.*>|.*/lib/python[^/]*/(?!site-packages/).*|.*/foredraft/{OWN})"')
DIED = -signal.SIGINT  # which a shell reports as 130, too


def ended_well(program: list[str], command: list[str], delay: float, again: float | None) -> str | None:
    """Press Ctrl-C after a delay, perhaps again after another one; return what is wrong with the end."""
    with TerminalSession(*command, command=program, all_shown=True) as session:
        time.sleep(delay)
        session.press(CTRL_C)
        if again is not None:
            time.sleep(again)
            session.press(CTRL_C)
        code, _ = session.wait()
    shown = session.text_buffer
    ends = (130, 0) if command[0] == "serve" else (130,)  # Ctrl-C is how a server that listens ends
    if code in ends and "Traceback" not in shown:
        return None
    files = re.findall(r'File ".*?"', shown)
    if code in (1, DIED) and all(START.match(file) for file in files):
        return None  # before `main`
    return f"{delay:.3f} s, {command[0]}: exit code {code}, {shown[-800:]!r}"


def try_often(tries: int, until: float, names: Sequence[str]) -> list[str]:
    """Interrupt commands at so many moments, spread evenly, by programs and commands in turn."""
    found = []
    for number in range(tries):
        program = PROGRAMS[number % len(PROGRAMS)]
        command = COMMANDS[names[number % len(names) if number % 2 else 0]]
        again = (None, 0.0, 0.05, 0.3)[number % 4]
        found.append(ended_well(program, command, until * number / tries, again))
    return [problem for problem in found if problem is not None]


@pytest.mark.heavy
def test_ctrl_c_at_any_moment_ends_a_command() -> None:
    assert try_often(8, 1.5, [*COMMANDS]) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("tries", "until", "names"), [(200, 1.5, [*COMMANDS]), (80, 8.0, ["bench", "verify", "tune", "serve"])]
)
def test_ctrl_c_at_many_moments_ends_a_command(tries: int, until: float, names: list[str]) -> None:
    assert try_often(tries, until, names) == []


def test_what_runs_before_main_is_short() -> None:
    """No module beyond these is imported before Ctrl-C is handled."""
    code = "import sys; before = set(sys.modules); import foredraft.cli; print(*sorted(set(sys.modules) - before))"
    own = "foredraft foredraft.cli foredraft.cli.interrupt foredraft.lazy"
    assert set(python("-c", code).split()) - set(own.split()) <= {"__future__"}


UNFINISHED = """
import os, pathlib, signal, sys
from foredraft.cli.interrupt import end_at_once
from foredraft.files import replacing, replacing_folder
end_at_once()
print("shown", end="")
with replacing(pathlib.Path("file")) as file, replacing_folder(pathlib.Path("folder")) as folder:
    file.write_text("half"), (folder / "weights").write_text("half")
    os.kill(os.getpid(), signal.SIGINT)
print("not reached")
"""
IMPORTING = """
import sys
from foredraft.cli.interrupt import Raised
try:
    with Raised():
        import interrupted
        while True:
            pass
except KeyboardInterrupt:
    print(interrupted.whole)
"""
FORGETTING = """
import os, signal
from foredraft.cli.interrupt import Raised, end_at_once
class Finalised:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
end_at_once()
try:
    with Raised():
        Finalised()
        while True:
            pass
except KeyboardInterrupt:
    print("raised")
"""


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        (UNFINISHED, (130, "shown", "foredraft: interrupted\n")),
        (IMPORTING, (0, "whole\n", "")),
        (FORGETTING, (0, "raised\n", "")),
    ],
    ids=["unfinished files go", "an import ends first", "what a finaliser forgot comes again"],
)
def test_an_interrupt_in_a_process_of_its_own(code: str, ends: tuple[int, str, str], tmp_path: Path) -> None:
    module = tmp_path / "interrupted.py"
    module.write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.3)\nwhole = 'whole'\n"
    )
    with handler_of_sigint():
        done = foredraft(command=[sys.executable, "-Bc", code], cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == ends
    assert list(tmp_path.iterdir()) == [module]


@pytest.mark.heavy
def test_ctrl_c_while_the_model_loads_shows_the_cursor_that_the_bar_hid() -> None:
    with TerminalSession(*COMMANDS["generate"], all_shown=True) as session:
        session.wait_for("\x1b[?25l")
        session.press(CTRL_C)
        assert session.wait()[0] == 130
    assert session.text_buffer.endswith("\x1b[?25hforedraft: interrupted\r\n")
