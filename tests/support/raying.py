"""A cluster of Ray on this machine, of this process alone, with the demo models in replicas."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

MODEL = {"policy": "fixed", "drafter": "draft-model", "max_length": 1024}


@dataclass
class Cluster:
    url: str
    client: httpx.Client
    driver: subprocess.Popen[str]  # runs Ray
    model: dict[str, Any]  # the options that give the model

    def deploy(self, **options: Any) -> None:
        given = {"replicas": 2, "cpus": 0.5, "max_batch": 8, "load": MODEL, **self.model, **options}
        print(json.dumps(given), file=self.driver.stdin, flush=True)
        assert "up\n" in self.driver.stdout, "the application did not come up"  # after lines of Ray's

    def metric(self, name: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith((name + " ", name + "{")):
                replica = line.partition('replica="')[2].partition('"')[0]
                found[replica] = found.get(replica, 0) + float(line.split()[-1])
        return found

    def wait(self, holds: Callable[[], bool], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "it never came true"
            time.sleep(0.02)

    def processes(self, name: str) -> list[psutil.Process]:
        name = f"ray::ServeReplica:default:{name}"
        return [each for each in children(self.driver.pid) if title(each).startswith(name)]


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""


@contextmanager
def cluster(**model: Any) -> Iterator[Cluster]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # Ray's own ports listen on every address of the machine, so they ask for a token.
    own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    command = [sys.executable, "-m", "tests.support.raying", str(port)]
    with (
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | own,
            cwd=Path(__file__).parents[2],
        ) as driver,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client,
    ):  # fmt: skip
        try:
            yield Cluster(f"http://127.0.0.1:{port}", client, driver, model)
        finally:
            started = children(driver.pid)
            driver.stdin.close()
            _, left = psutil.wait_procs([psutil.Process(driver.pid), *started], timeout=40)
            for process in left:
                process.kill()
    assert not left, f"processes of Ray are left: {left}"


def main(port: int) -> None:
    import ray
    from ray import serve

    from foredraft.serve.ray import Options, app

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        for line in sys.stdin:
            serve.run(app(Options(**json.loads(line))))
            print("up", flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
