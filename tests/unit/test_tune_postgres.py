"""A study in a database that several processes search at once. Runs where PostgreSQL and its driver are."""

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
from tests.support.searching import WARM, child, days_later, kept, searched

pytest.importorskip("psycopg")
SERVER = shutil.which("postgres")
pytestmark = pytest.mark.skipif(SERVER is None, reason="PostgreSQL is not installed")
OWNER = "nobody"  # root may not run it


@pytest.fixture(autouse=True)
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "warm_starts", lambda *_: dict(WARM))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a database of its own, which is gone afterwards."""
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


def test_two_search_one_study_one_is_killed_and_another_goes_on(url: str) -> None:
    """Both find an empty database, and make its tables at the same time."""
    with child(url, 0.05, 30, 1, "before its first heartbeat") as dies, child(url, 0.05, 30, 2) as lives:
        assert (dies.wait(timeout=100), lives.wait(timeout=100)) == (-signal.SIGKILL, 0)
    before = kept(url)
    assert len(before) >= 30 and len(kept(url, "RUNNING")) == 1
    days_later(url)
    found = searched(url, trials=len(before) + 3)
    after = kept(url)
    assert after.items() >= before.items() and len(after) == len(before) + 3
    assert not kept(url, "RUNNING") and len(kept(url, "FAIL")) == 1
    assert {trial.origin for trial in found.trials()} >= set(WARM)
    found.place.storage.engine.dispose()
