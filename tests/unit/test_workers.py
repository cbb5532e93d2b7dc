"""Workers of OpenMP end with the work of their thread. Counted in a process of its own, with two threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TASKS = Path("/proc/self/task")
SCRIPT = """
import time
from pathlib import Path
import torch
torch.set_num_threads(2)
import foredraft
from foredraft import workers

def count():
    return len(list(Path("/proc/self/task").iterdir()))

def settled(number):
    end = time.monotonic() + 5
    while count() != number and time.monotonic() < end:
        time.sleep(0.01)
    return count() == number

computed = torch.randn(1_000_000) + 1
with_workers = count()
workers.release_workers()
alone = count()
assert with_workers == alone + 1, (with_workers, alone)
llm = foredraft.load(drafter="none", max_length=64, kernels=False)
assert count() == alone, "loading left workers"
params = llm.params(temperature=0, max_new_tokens=20, ignore_eos=True)
llm.generate(["def f("], params)
assert settled(alone + 1), "a request left workers beside the engine's thread"
for _ in llm.stream("def f(", params):
    pass
assert settled(alone + 1), "a stream left workers"
"""


@pytest.mark.heavy
@pytest.mark.skipif(not TASKS.exists(), reason="threads are counted in /proc")
def test_a_thread_keeps_no_workers_when_its_work_is_done() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


ALONE = """
import threading
import torch
torch.set_num_threads(2)
from foredraft.workers import operators_alone, own_threads

def seen():
    return torch.get_num_threads(), own_threads()

with operators_alone(False):
    assert seen() == (2, 2)
with operators_alone(True):
    assert seen() == (1, 2)
    with operators_alone(True):
        assert seen() == (1, 2)
    assert seen() == (1, 2)
    others = []
    thread = threading.Thread(target=lambda: others.append(seen()))
    thread.start()
    thread.join()
    assert others == [(2, 2)], others
assert seen() == (2, 2)

import foredraft
llm = foredraft.load(drafter="none", max_length=64)
engine, during = llm.loaded.engine, []
accept = engine.accept
engine.accept = lambda *arguments: during.append(seen()) or accept(*arguments)
llm.generate("def f(", temperature=0, max_new_tokens=4)
assert {*during} == {(1 if engine.target.by_kernels else 2, 2)}, during
assert seen() == (2, 2)

from foredraft import demo
from foredraft.decode.drafter import Drafter, DraftPass
operators = foredraft.load(demo.draft_path(), drafter="none", kernels=False, max_length=64)
engine.drafters["other"] = Drafter()
engine.drafters["other"].whole_model = True
engine.drafters["other"].draft_pass = DraftPass(operators.loaded.engine.target)
during.clear()
llm.generate("def f(", temperature=0, max_new_tokens=4)
assert {*during} == {(2, 2)}, "the other model's operators need all threads"
"""


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform == "win32", reason="no library of OpenMP by a name of its own")
def test_operators_beside_the_kernels_work_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
