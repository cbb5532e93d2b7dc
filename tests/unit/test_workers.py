"""Workers of OpenMP end with the work of their thread. Counted in a process of its own, with two threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TASKS = Path("/proc/self/task")
SCRIPT = """
from pathlib import Path
import torch
torch.set_num_threads(2)
import foredraft
from foredraft import workers

def count():
    return len(list(Path("/proc/self/task").iterdir()))

computed = torch.randn(1_000_000) + 1
with_workers = count()
workers.release_workers()
alone = count()
assert with_workers == alone + 1, (with_workers, alone)
llm = foredraft.load(drafter="none", max_length=64, kernels=False)
assert count() == alone, "loading left workers"
params = llm.params(temperature=0, max_new_tokens=20, ignore_eos=True)
llm.generate(["def f("], params)
assert count() == alone, "a request left workers"
for _ in llm.stream("def f(", params):
    pass
assert count() == alone, "a stream left workers"
"""


@pytest.mark.skipif(not TASKS.exists(), reason="threads are counted in /proc")
def test_a_thread_keeps_no_workers_when_its_work_is_done() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
