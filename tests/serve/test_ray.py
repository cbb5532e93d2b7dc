"""Two replicas of the demo pair on this machine: routing, streams, and replicas that die or are replaced."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray")
pytest.importorskip("psutil")

from websockets.sync.client import connect

import foredraft
from foredraft import LLM, demo
from foredraft.errors import ConfigError
from tests.support.raying import MODEL, Cluster, cluster
from tests.support.serving import chat_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
PROMPTS = [f"def function_{n}(a, b):\n" for n in range(8)]
KEYS = {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = chat_model(tmp_path_factory.mktemp("chat") / "demo")
    with cluster(model=str(model), draft=str(demo.draft_path())) as found:
        found.deploy()
        yield found


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with foredraft.load(max_batch=8, **MODEL) as found:  # type: ignore[arg-type]
        yield found


def texts(llm: LLM, tokens: int, prompts: list[str] = PROMPTS) -> list[str | None]:
    params = llm.params(temperature=0, max_new_tokens=tokens, ignore_eos=True)
    return [output.text for output in llm.generate(prompts, params)]


def greedy(prompt: Any, tokens: int, **more: Any) -> dict[str, Any]:
    common = {"model": "demo", "temperature": 0, "ignore_eos": True}
    return {**common, "prompt": prompt, "max_tokens": tokens, **more}


def idle(running: Cluster) -> bool:
    return not any(running.metric("foredraft_requests_running").values())


async def stream(
    client: httpx.AsyncClient, prompt: str, tokens: int, begins: Callable[[str], object] = str
) -> tuple[str, list[str]]:
    """Return the text of a stream, and its other events; tell `begins` the prompt when text comes."""
    text, others = "", []
    body = greedy(prompt, tokens, stream=True)
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            return "", [(await response.aread()).decode()]
        async for line in response.aiter_lines():
            if line.startswith('data: {"id"'):
                text += json.loads(line[6:])["choices"][0]["text"]
                begins(prompt)
            elif line and line != ": ping":
                others.append(line)
    return text, others


def test_texts_are_those_of_the_library(running: Cluster, llm: LLM) -> None:
    want = texts(llm, 60)

    async def all_of_them() -> list[tuple[str, list[str]]]:
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
            return await asyncio.gather(*(stream(client, prompt, 60) for prompt in PROMPTS))

    assert asyncio.run(all_of_them()) == [(text, ["data: [DONE]"]) for text in want]
    whole = running.client.post("/v1/completions", json=greedy(PROMPTS, 60))
    assert [choice["text"] for choice in whole.json()["choices"]] == want
    assert len(whole.headers.get_list("x-request-id")) == 1
    with connect(running.url.replace("http", "ws") + "/v1/stream") as ws:
        for place, prompt in enumerate(PROMPTS):
            ws.send(json.dumps({"id": str(place), **greedy(prompt, 60)}))
        found, open_ = [""] * len(PROMPTS), len(PROMPTS)
        while open_:
            frame = json.loads(ws.recv(timeout=30))
            if "chunk" in frame:
                found[int(frame["id"])] += frame["chunk"]["choices"][0]["text"]
            else:
                assert frame["reason"] == "finished"
                open_ -= 1
    assert found == want


def test_errors_are_those_of_a_replica(running: Cluster) -> None:
    wrong = running.client.post("/v1/completions", json=greedy("x", 5, top_p=7))
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "top_p"
    assert running.client.post("/v1/completions", content=b"{").json()["error"]["code"] == "invalid_json"
    assert running.client.get("/v1/nothing").json()["error"]["code"] == "not_found"
    assert running.client.post("/v1/completions", content=b"x" * (9 << 20)).status_code == 413
    other = {"origin": "http://elsewhere.example"}
    assert running.client.get("/v1/models", headers=other).status_code == 403
    with connect(running.url.replace("http", "ws") + "/v1/stream") as ws:
        ws.send(json.dumps({"id": "a", **greedy("x", 5, model="nope")}))
        error, done = (json.loads(ws.recv(timeout=30)) for _ in range(2))
        assert error["error"]["code"] == "model_not_found" and done["reason"] == "error"


def test_a_replica_logs_its_requests(running: Cluster) -> None:
    logs = Path("/tmp/ray/session_latest/logs")
    assert running.client.post("/v1/completions", json=greedy("def logged(", 1)).is_success

    def is_logged() -> bool:
        return any(" info request request_id=" in file.read_text() for file in logs.glob("worker-*.err"))

    running.wait(is_logged, seconds=20)


def test_without_keys_a_client_is_an_address(running: Cluster) -> None:
    running.deploy(replicas=1, server={"max_per_key": 1})
    try:
        with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2")) as other:
            body = greedy("x", 900, stream=True)
            url = f"{running.url}/v1/completions"
            with running.client.stream("POST", url, json=body) as stream:
                pieces = stream.iter_lines()
                next(pieces)
                assert running.client.post(url, json=greedy("x", 1)).status_code == 429
                assert other.post(url, json=greedy("x", 1), timeout=60).status_code == 200
                with connect(running.url.replace("http", "ws") + "/v1/stream") as ws:
                    ws.send(json.dumps({"id": "a", **greedy("x", 1)}))
                    assert json.loads(ws.recv(timeout=30))["error"]["code"] == "rate_limit_exceeded"
    finally:
        running.deploy()


def test_prompts_that_begin_alike_meet_one_replica(running: Cluster) -> None:
    before = running.metric("foredraft_prefix_cache_hits_total")
    beginnings = ["".join(f"# line {n} of {name}\n" for n in range(75)) for name in ("one", "two", "three")]
    used: list[set[str]] = []
    for beginning in beginnings:
        cached = []
        prompts = running.metric("foredraft_prompt_tokens_total")
        for tail in range(5):
            body = greedy(f"{beginning}def f{tail}():\n", 4)
            usage = running.client.post("/v1/completions", json=body).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] == 0 and min(cached[1:]) >= 256, cached
        after = running.metric("foredraft_prompt_tokens_total")
        used.append({replica for replica in after if after[replica] > prompts[replica]})
    assert all(len(each) == 1 for each in used)
    hits = running.metric("foredraft_prefix_cache_hits_total")
    assert sum(hits.values()) - sum(before.values()) >= 3 * 4 * 256


@pytest.mark.parametrize("kind", ["events", "whole", "socket"])
def test_a_client_that_leaves_frees_the_row_of_its_replica(running: Cluster, kind: str) -> None:
    cancelled = sum(running.metric("foredraft_requests_cancelled_total").values())
    finished = sum(running.metric("foredraft_requests_finished_total").values())
    body = greedy(PROMPTS[0], 900, drafter="none")
    if kind == "socket":
        with connect(running.url.replace("http", "ws") + "/v1/stream") as ws:
            ws.send(json.dumps({"id": "a", **body}))
            ws.recv(timeout=30)
    elif kind == "events":
        with running.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            next(response.iter_bytes())
    else:

        async def leave() -> None:
            async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
                task = asyncio.create_task(client.post("/v1/completions", json=body))
                while not sum(
                    (await asyncio.to_thread(running.metric, "foredraft_requests_running")).values()
                ):
                    await asyncio.sleep(0.01)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        asyncio.run(leave())
    running.wait(lambda: idle(running), 10)
    assert sum(running.metric("foredraft_requests_cancelled_total").values()) == cancelled + 1
    assert sum(running.metric("foredraft_requests_finished_total").values()) == finished + 1  # as cancelled


def prompts_of_both(running: Cluster, count: int) -> list[str]:
    found: dict[str, list[str]] = {}
    for n in range(32):
        prompt, before = f"def of_both_{n}():\n", running.metric("foredraft_prompt_tokens_total")
        running.client.post("/v1/completions", json=greedy(prompt, 1))
        after = running.metric("foredraft_prompt_tokens_total")
        [replica] = [replica for replica in after if after[replica] > before[replica]]
        found.setdefault(replica, []).append(prompt)
    one, other = found.values()
    return [prompt for pair in zip(one, other, strict=False) for prompt in pair][: 2 * count]


def test_a_killed_replica_loses_only_its_own_texts(running: Cluster, llm: LLM) -> None:
    tokens = 700
    prompts = prompts_of_both(running, 3)
    want = texts(llm, tokens, prompts)
    victim, other = running.processes("Replica")
    begun: set[object] = set()

    async def named(client: httpx.AsyncClient, prompt: str) -> list[dict[str, Any]]:
        body = {"model": "demo", "max_output_tokens": tokens, "input": prompt, "stream": True}
        found = []
        async with client.stream("POST", "/v1/responses", json=body | {"ignore_eos": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    found.append(json.loads(line[6:]))
                    begun.add((prompt, "events"))
        return found

    async def load() -> list[Any]:
        async with httpx.AsyncClient(base_url=running.url, timeout=120) as client:
            bodies = [greedy(prompt, tokens) for prompt in prompts]
            streams = [asyncio.create_task(stream(client, prompt, tokens, begun.add)) for prompt in prompts]
            wholes = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies]
            events = [asyncio.create_task(named(client, prompt)) for prompt in prompts[:2]]
            while len(begun) < len(streams) + len(events):
                await asyncio.sleep(0.01)
            os.kill(victim.pid, signal.SIGKILL)
            return [await asyncio.gather(*tasks) for tasks in (streams, wholes, events)]

    streams, wholes, events = asyncio.run(load())
    broken = 0
    for (text, others), right in zip(streams, want, strict=True):
        assert right is not None and others[-1] == "data: [DONE]"
        if others == ["data: [DONE]"]:
            assert text == right
        else:
            broken += 1
            error = json.loads(others[0].removeprefix("data: "))["error"]
            assert error.keys() == KEYS and error["code"] == "replica_died" and right.startswith(text)
    assert broken == len(streams) // 2
    assert sorted(response.status_code for response in wholes) == [200] * 3 + [503] * 3
    for response, right in zip(wholes, want, strict=True):
        if response.status_code == 200:
            assert response.json()["choices"][0]["text"] == right
        else:
            assert response.json()["error"]["code"] == "replica_died" and response.headers["retry-after"]
    assert sorted(each[-1]["type"] for each in events) == ["error", "response.incomplete"]
    for each in events:
        assert [event["sequence_number"] for event in each] == list(range(len(each)))
        assert each[-1]["type"] != "error" or each[-1]["code"] == "replica_died"
    assert other.is_running()
    for prompt, right in zip(PROMPTS, texts(llm, 30), strict=True):  # at once, before the replica is replaced
        found = running.client.post("/v1/completions", json=greedy(prompt, 30))
        assert found.json()["choices"][0]["text"] == right
    running.wait(lambda: len(running.metric("foredraft_requests_running")) == 2)


def test_a_rolling_restart_loses_no_request(running: Cluster, llm: LLM) -> None:
    want = texts(llm, 200)
    before = set(running.metric("foredraft_requests_running"))
    assert len(before) == 2
    over, wrong, count = threading.Event(), [], 0

    async def client_of(place: int) -> None:
        nonlocal count
        async with httpx.AsyncClient(base_url=running.url, timeout=120) as client:
            while not over.is_set():
                found = await stream(client, PROMPTS[place], 200)
                count += 1
                if found != (want[place], ["data: [DONE]"]):
                    wrong.append(found)

    async def clients() -> None:
        await asyncio.gather(*map(client_of, range(4)))

    thread = threading.Thread(target=asyncio.run, args=(clients(),))
    thread.start()
    try:
        running.deploy(server={"max_queued": 100})
    finally:
        over.set()
        thread.join(60)
    assert not thread.is_alive() and wrong == [] and count > 10
    assert len(running.metric("foredraft_requests_running")) == 2
    assert not before & set(running.metric("foredraft_requests_running"))


@pytest.mark.filterwarnings("ignore")  # of Ray's own, and of a `__del__` that Ray awaits and Python does not
def test_a_replica_whose_engine_has_ended_is_not_healthy() -> None:
    from foredraft.serve.ray.deployments import Replica
    from foredraft.serve.settings import Settings

    async def live() -> None:
        replica = Replica.__new__(Replica)
        await Replica.__init__(replica, None, {"max_batch": 1, **MODEL}, Settings())
        replica.check_health()
        replica._state.ready().service.stop()
        with pytest.raises(RuntimeError, match="thread has ended"):
            replica.check_health()
        await replica.__del__()

    asyncio.run(live())
    gc.collect()


@pytest.mark.filterwarnings("ignore")  # of Ray's own
def test_options_are_honoured_or_refused() -> None:
    from pydantic import ValidationError
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as run

    from foredraft.serve.ray import Options, app

    for bad in ({"replica": 2}, {"replicas": 0}, {"replicas": 3, "max_replicas": 2}, {"gpus": "many"}):
        with pytest.raises(ValidationError):
            Options.model_validate(bad)
    assert Options.model_validate({"replicas": "2", "gpus": "0.5"}) == Options(replicas=2, gpus=0.5)
    run(app, {"replicas": "2"})  # as `serve run` calls it
    wrong = {"port": "Ray listens", "max_unread": "do not wait for their readers", "max_wibbles": "unknown"}
    for name, says in wrong.items():
        with pytest.raises(ConfigError, match=says):
            app(Options(server={name: 80}))
    with pytest.raises(ConfigError, match="max_batch is 4, which stands in load"):
        app(Options(load={"max_batch": 4}))
    options = Options(replicas=2, max_replicas=9, max_batch=4, gpus=0.5, server={"drain_seconds": 7})
    ingress = app(options)._bound_deployment
    replica = ingress.init_args[0]._bound_deployment
    scaling = replica._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 9, 4)
    assert replica.max_ongoing_requests == 8 and replica.ray_actor_options["num_gpus"] == 0.5
    assert replica._deployment_config.graceful_shutdown_timeout_s == 7
    assert replica.init_args[1]["max_batch"] == 4
