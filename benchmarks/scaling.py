"""Measure what scaling out costs on this machine with 2 replicas, and compute what follows for up to 1,000.

key, route    seconds to hash a prompt's beginning, and to choose among N replicas (this process)
cluster       Ray with 2 replicas of the demo models: CPU seconds of proxy and ingress for a chunk and for
              a request, bytes of a chunk, and the share of prompt tokens that the prefix caches gave, by
              affinity and with a key of its own for each request
simulated     the same share for N replicas: the shipped rule, the shipped cache's capacity, requests with
              Zipf-distributed beginnings; beside it the largest load over the mean
computed      cores and bytes per second at N replicas, from the measured figures and --step-ms

python -m benchmarks.scaling
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import psutil

from benchmarks.workload import machine, write
from foredraft.serve.affinity import digest, prompt_key, ranked

COUNTS = (2, 10, 100, 1000)
BEGINNING = 75  # lines of a shared beginning: 1,200 characters, two chunks of the prefix cache
PORT = 8799


def seconds_of(call: Callable[[], object], repeats: int) -> float:
    """Return the fastest of some runs: other work on the machine only adds time."""
    best = float("inf")
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begun)
    return best


def measure_rule(repeats: int) -> dict[str, Any]:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 32_000}]})
    routes = {}
    for count in COUNTS:
        names = np.array([digest(str(n)) for n in range(count)], dtype=np.uint64)
        loads = [n % 8 for n in range(count)]
        routes[count] = seconds_of(lambda names=names, loads=loads: ranked(7, names, loads, 8), repeats)
    return {
        "key_seconds_of_32_kB": seconds_of(lambda: prompt_key(json.loads(body), 1024), repeats),
        "route_seconds": routes,
    }


# --- two replicas of Ray ------------------------------------------------------------------------------------


def cpu_seconds(title: str) -> float:
    """Return the CPU seconds of this program's processes whose title begins so."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        if " ".join(process.cmdline()).startswith(title):
            used = process.cpu_times()
            total += used.user + used.system
    return total


def beginning(name: object) -> str:
    return "".join(f"# line {n} of {name}\n" for n in range(BEGINNING))


async def hit_share(client: httpx.AsyncClient, groups: int, requests: int, affine: bool, tag: str) -> float:
    """Return the share of prompt tokens that were not read again."""
    dice, cached, tokens = random.Random(0), 0, 0
    for turn in range(requests):
        body = {
            "model": "demo", "prompt": beginning(f"{tag} {dice.randrange(groups)}") + f"def f{turn}():\n",
            "max_tokens": 1, "prompt_cache_key": "all" if affine else str(turn),
        }  # fmt: skip
        usage = (await client.post("/v1/completions", json=body)).json()["usage"]
        cached += usage["prompt_tokens_details"]["cached_tokens"]
        tokens += usage["prompt_tokens"]
    return cached / tokens


async def stream(client: httpx.AsyncClient, prompt: str, new_tokens: int) -> tuple[int, int]:
    """Return the chunks and the bytes of a stream."""
    body = {
        "model": "demo", "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "drafter": "none",
    }  # fmt: skip
    async with client.stream("POST", "/v1/completions", json=body) as response:
        content = await response.aread()
    return content.count(b"\n\n"), len(content)


async def measure_cluster(requests: int, new_tokens: int) -> dict[str, Any]:
    titles = {"proxy": "ray::ProxyActor", "ingress": "ray::ServeReplica:default:Ingress"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", timeout=120) as client:

        async def costs(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
            before = {name: cpu_seconds(title) for name, title in titles.items()}
            done = await work()
            return done, {name: cpu_seconds(title) - before[name] for name, title in titles.items()}

        async def short() -> None:
            for turn in range(requests):
                await stream(client, f"def f{turn}():\n", 1)

        async def long() -> list[tuple[int, int]]:
            return [await stream(client, f"def f{turn}():\n", new_tokens) for turn in range(requests // 4)]

        await short()  # warms up
        _, by_request = await costs(short)
        streams, by_chunk = await costs(long)
        chunks, size = (sum(column) for column in zip(*streams, strict=True))
        return {
            "cpu_seconds_per_request": {name: used / requests for name, used in by_request.items()},
            "cpu_seconds_per_chunk": {name: used / chunks for name, used in by_chunk.items()},
            "bytes_per_chunk": size / chunks,
            "hit_share": {
                "affinity": await hit_share(client, 12, 5 * 12, True, "affine"),
                "own_key_each": await hit_share(client, 12, 5 * 12, False, "other"),
            },
        }


def run_cluster(requests: int, new_tokens: int) -> dict[str, Any]:
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)
    }  # fmt: skip
    import ray
    from ray import serve

    from foredraft.serve.ray import Options, app

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        serve.run(app(Options(replicas=2, cpus=0.5, load={"policy": "fixed", "max_length": 1024})))
        return asyncio.run(measure_cluster(requests, new_tokens))
    finally:
        serve.shutdown()
        ray.shutdown()


# --- many replicas ------------------------------------------------------------------------------------------


def simulate(
    count: int, affine: bool, *, per_replica: int = 60, held: int = 8, free: int = 8
) -> dict[str, float]:
    """Return the share of requests whose beginning was cached, and the largest load over the mean.

    Args:
        count: Replicas, each at 6 requests on the average.
        affine: Route by the beginning; else by a key of each request's own.
        per_replica: Requests in all, for each replica.
        held: Beginnings that one replica's cache holds; there are 4 for each replica, Zipf-distributed.
        free: As `ranked` takes it.
    """
    dice = np.random.default_rng(0)
    names = np.array([digest(f"replica {n}") for n in range(count)], dtype=np.uint64)
    groups, total = 4 * count, per_replica * count
    weights = 1 / np.arange(1, groups + 1)
    wanted = dice.choice(groups, size=total, p=weights / weights.sum())
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(count)]
    loads, going, hits, worst = [0] * count, deque[int](), 0, 0.0
    for turn, group in enumerate(wanted.tolist()):
        key = digest(f"group {group}" if affine else f"turn {turn}")
        place = ranked(key, names, loads, free)[0]
        hits += group in caches[place]
        caches[place][group] = None
        caches[place].move_to_end(group)
        if len(caches[place]) > held:
            caches[place].popitem(last=False)
        loads[place] += 1
        going.append(place)
        if len(going) > 6 * count:  # a request ends when so many later ones have come
            loads[going.popleft()] -= 1
            worst = max(worst, loads[place] / 6)
    return {"hit_share": hits / total, "largest_over_mean_load": worst}


def compute(cluster: dict[str, Any], rule: dict[str, Any], step_ms: float, rows: int) -> dict[str, Any]:
    """Return cores and bytes per second of passing all chunks on, without the engines."""
    found = {}
    for count in COUNTS:
        chunks = count * rows * 1000 / step_ms
        found[count] = {
            "chunks_per_second": chunks,
            "cores": {
                name: chunks * used for name, used in cluster["cpu_seconds_per_chunk"].items()
            },
            "cores_per_replica": sum(cluster["cpu_seconds_per_chunk"].values()) * chunks / count,
            "bytes_per_second": chunks * cluster["bytes_per_chunk"],
            "requests_per_second_of_one_core_of_routing": 1 / rule["route_seconds"][count],
        }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100, help="in each measurement of the cluster")
    parser.add_argument("--new-tokens", type=int, default=300, help="of a long stream")
    parser.add_argument("--step-ms", type=float, default=50, help="assumed: one round of a large model")
    parser.add_argument("--rows", type=int, default=8, help="assumed: rows that decode in each replica")
    parser.add_argument("--name", default="scaling")
    given = parser.parse_args()
    rule = measure_rule(200)
    cluster = run_cluster(given.requests, given.new_tokens)
    simulated = {
        count: {"affinity": simulate(count, True), "own_key_each": simulate(count, False)} for count in COUNTS
    }
    write(given.name, {
        "what": vars(given), "machine": machine(),
        "measured": {"rule": rule, "cluster": cluster}, "simulated": simulated,
        "computed": compute(cluster, rule, given.step_ms, given.rows),
    })  # fmt: skip


if __name__ == "__main__":
    main()
