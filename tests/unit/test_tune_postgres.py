"""A PostgreSQL study that several processes share. Needs a PostgreSQL server and its driver."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft.tune import search as search_module
from tests.support.searching import (
    SEED_PLANS,
    backdate_running_trials,
    run_search,
    start_child,
    stored_trials,
)

pytest.importorskip("psycopg")
SERVER = shutil.which("postgres")
pytestmark = pytest.mark.skipif(SERVER is None, reason="PostgreSQL is not installed")
OWNER = "nobody"  # the server refuses to run as root


@pytest.fixture(autouse=True)
def fake_seed_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "seed_plans", lambda *_: dict(SEED_PLANS))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """URL of a server that runs for these tests only."""
    assert SERVER is not None
    programs = Path(SERVER).resolve().parent
    folder = Path(tempfile.mkdtemp(prefix="foredraft-"))
    as_owner: dict[str, Any] = {"cwd": folder}
    if os.geteuid() == 0:
        owner = pwd.getpwnam(OWNER)
        os.chown(folder, owner.pw_uid, owner.pw_gid)
        as_owner |= {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = str(folder / "data")
    make = [
        str(programs / "initdb"),
        "-D",
        data,
        "-U",
        "me",
        "-A",
        "trust",
        "--no-sync",
        "--no-locale",
        "-E",
        "UTF8",
    ]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL, **as_owner)
    control = [str(programs / "pg_ctl"), "-D", data, "-w"]
    options = f"-c listen_addresses=127.0.0.1 -p {port} -k {folder} -c fsync=off"
    start = [*control, "-l", str(folder / "log"), "-o", options, "start"]
    subprocess.run(start, check=True, stdout=subprocess.DEVNULL, **as_owner)
    try:
        yield f"postgresql://me@127.0.0.1:{port}/postgres"
    finally:
        stop = [*control, "-m", "immediate", "stop"]
        subprocess.run(stop, check=True, stdout=subprocess.DEVNULL, **as_owner)
        shutil.rmtree(folder)


def test_processes_share_a_study_and_a_later_one_resumes_it_after_a_kill(url: str) -> None:
    """Both processes find an empty database and create its tables at the same time."""
    with (
        start_child(url, 0.05, 30, 1, "before the first heartbeat") as killed,
        start_child(url, 0.05, 30, 2) as other,
    ):
        assert (killed.wait(timeout=100), other.wait(timeout=100)) == (-signal.SIGKILL, 0)
    before = stored_trials(url)
    assert len(before) >= 30 and len(stored_trials(url, "RUNNING")) == 1
    backdate_running_trials(url)
    found = run_search(url, trials=len(before) + 3)
    after = stored_trials(url)
    assert after.items() >= before.items() and len(after) == len(before) + 3
    assert not stored_trials(url, "RUNNING") and len(stored_trials(url, "FAIL")) == 1
    assert {trial.origin for trial in found.trials()} >= set(SEED_PLANS)
    found.storage.storage.engine.dispose()
