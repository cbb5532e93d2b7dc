"""A model works in the process that loaded it; a forked child gets an error, and never hangs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from foredraft.errors import ConfigError
from foredraft.workers import Loads
from tests.support import checkpoints
from tests.support.running import forked, run_code

PROGRAM = """
import os, sys, threading, time
import torch
import foredraft

folder, busy = sys.argv[1], sys.argv[2] == "busy"
torch.set_num_threads(2)

def load():
    return foredraft.load(
        folder, drafter="none", dtype="float32", device="cpu", max_batch=2, max_length=256, policy="fixed"
    )

def in_child(name, call):
    child = os.fork()
    if child == 0:
        try:
            call()
            os.write(1, f"{name}: done\\n".encode())
        except foredraft.ForedraftError as error:
            os.write(1, f"{name}: {type(error).__name__}: {error}\\n".encode())
        finally:
            os._exit(0)
    for _ in range(1200):
        if os.waitpid(child, os.WNOHANG)[0]:
            return
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    os.write(1, f"{name}: hangs\\n".encode())

params = foredraft.SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)
in_child("before", lambda: load().generate([5, 6, 7], params.replace(max_new_tokens=2)))
llm = load()
prompt = [5 + i % 60 for i in range(40)]
stream = llm.stream(prompt, params)
next(stream)
over = threading.Event()

def work():
    while not over.is_set():
        llm.generate(prompt, params)

def close():
    rows = list(llm.loaded.engine.rows.sequences)
    stream.close()
    assert rows and llm.loaded.engine.rows.sequences == rows  # no cache row is moved, which might hang

thread = threading.Thread(target=work)
if busy:
    thread.start()
    time.sleep(0.1)
in_child("generate", lambda: llm.generate(prompt, params))
in_child("stream", lambda: llm.stream(prompt, params))
in_child("next", lambda: next(stream))
in_child("cancel_all", llm.cancel_all)
in_child("close", close)
in_child("load", load)
if not busy:
    in_child("load with one thread", lambda: (torch.set_num_threads(1), load().generate(prompt, params)))
over.set()
if busy:
    thread.join()
print("parent:", len(stream.__next__().token_ids) > 0, os.getpid())
"""

CHILD = "then forked this one, in which its threads are missing"
REMEDY = "start this process by 'spawn'"


@pytest.mark.parametrize("parent", ["idle", "busy"])
def test_a_forked_child_gets_an_error_instead_of_hanging(parent: str, tmp_path: Path) -> None:
    folder = checkpoints.save_checkpoint(tmp_path / "model", hidden_size=256, intermediate_size=512)
    done = forked(run_code, PROGRAM, str(folder), parent)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    told = dict(line.split(": ", 1) for line in lines)
    process, calls = f"process {last.split()[-1]} loaded", ("generate", "stream", "next", "cancel_all")
    used = f"RequestError: {process} this model and {CHILD}; {REMEDY} and load the model in it"
    assert [told.pop(name) for name in calls] == [used] * 4
    loaded = f"ConfigError: {process} a model and {CHILD}; {REMEDY}, or fork it before"
    assert told.pop("load").startswith(loaded)
    assert told.pop("load with one thread", "done") == "done"
    assert told == {"before": "done", "close": "done"}
    assert last.startswith("parent: True")


def test_a_child_may_load_unless_its_parent_computed_with_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = os.getpid() + 1
    computed, alone, never = Loads(), Loads(), Loads()
    computed.note(2)
    computed.note(2)
    alone.note(1)
    monkeypatch.setattr(os, "getpid", lambda: child)
    computed.note(1)
    with pytest.raises(ConfigError, match="fork it before the first model is loaded"):
        computed.note(2)
    alone.note(2)
    never.note(2)
