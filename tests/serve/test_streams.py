"""Streams: events, plain text and WebSocket frames, whole whatever cuts the bytes."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import httpx_sse
import openai
import pytest

from tests.support.raw import TEXT, RawClient, frame, request_bytes
from tests.support.serving import Served, events_of

PROMPT = "def fibonacci(n):\n"
LONG = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
PATH = "/v1/completions"


def greedy(**more: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **more}


def whole(served: Served, **more: Any) -> str:
    return str(served.client.post(PATH, json=greedy(**more)).json()["choices"][0]["text"])


@pytest.mark.parametrize("usage", [None, "at the end", "always"])
def test_events_keep_to_the_contract(served: Served, usage: str | None) -> None:
    body = greedy(stream=True, messages=[{"role": "user", "content": "x"}], n=2, prompt=None)
    if usage:
        stats = {"continuous_usage_stats": usage == "always", "include_obfuscation": False}
        body["stream_options"] = {"include_usage": True, **stats}
    response = served.client.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "no-transform" in response.headers["cache-control"]
    chunks = events_of(response.text)
    assert response.text.endswith("}\n\ndata: [DONE]\n\n") and response.text.count("\n\n") == len(chunks) + 1
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    if usage:
        end = chunks.pop()
        assert end["choices"] == [] and end["usage"]["completion_tokens"] == 48
        assert all((chunk["usage"] is None) == (usage == "at the end") for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    for sample in range(2):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == sample]
        assert own[0]["delta"]["role"] == "assistant" and all("role" not in each["delta"] for each in own[1:])
        assert own[-1]["delta"] == {} and own[-1]["finish_reason"] == "length"
        assert all(each["finish_reason"] is None for each in own[:-1])
    assert "speculative_decoding" in chunks[-1]["metrics"]


def test_plain_text_is_the_text(served: Served) -> None:
    found = served.client.post(PATH, json=greedy(stream=True), headers={"accept": "text/plain"})
    assert found.headers["content-type"] == "text/plain; charset=utf-8" and found.text == whole(served)


def test_clients_read_streams_and_requests_may_come_byte_by_byte(
    served: Served, client: openai.OpenAI
) -> None:
    want = whole(served)
    stream = client.completions.create(**greedy(), stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == want
    with httpx_sse.connect_sse(served.client, "POST", PATH, json=greedy(stream=True)) as source:
        *chunks, done = [event.data for event in source.iter_sse()]
    assert done == "[DONE]"
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == want
    with RawClient(served.url) as raw, RawClient(served.url) as ws:
        for byte in request_bytes(greedy(stream=True)):
            raw.send(bytes([byte]))
        events = re.findall(rb"data: (\{.*\})\n\n", raw.rest())
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == want
        ws.upgrade()
        for byte in frame(TEXT, json.dumps({"id": "a", "prompt": "x", "max_tokens": 1}).encode()):
            ws.send(bytes([byte]))
        assert b'"chunk"' in ws.socket.recv(1 << 16)


def frames_of(ws: Any, count: int = 10**6, *, until: str | None = None) -> list[dict[str, Any]]:
    found = []
    while len(found) < count:
        found.append(json.loads(ws.recv(timeout=30)))
        if until is not None and found[-1]["id"] == until and "done" in found[-1]:
            break
    return found


def text_of(ws: Any, id: str) -> str:
    frames = frames_of(ws, until=id)
    return "".join(frame["chunk"]["choices"][0]["text"] for frame in frames if "chunk" in frame)


def test_requests_of_one_socket_run_side_by_side(served: Served) -> None:
    prompts = {id: f"def {id}(x):\n" for id in ("one", "two", "three")}
    with served.websocket() as ws:
        for id, prompt in prompts.items():
            ws.send(json.dumps(greedy(id=id, prompt=prompt)))
        texts, open_ = dict.fromkeys(prompts, ""), set(prompts)
        while open_:
            [frame] = frames_of(ws, 1)
            if "done" in frame:
                assert frame["reason"] == "finished"
                open_.discard(frame["id"])
            else:
                texts[frame["id"]] += frame["chunk"]["choices"][0]["text"]
    assert texts == {id: whole(served, prompt=prompt) for id, prompt in prompts.items()}


def test_a_request_that_is_cancelled_before_it_begins_ends_too(served: Served) -> None:
    with served.websocket() as ws:
        for turn in range(20):
            frame = json.dumps(greedy(id="a", **LONG))
            ws.send(frame)
            ws.send('{"id": "a", "cancel": true}')
            assert frames_of(ws, until="a")[-1] == {"id": "a", "done": True, "reason": "cancelled"}, turn
        ws.send(json.dumps(greedy(id="a")))
        assert text_of(ws, "a") == whole(served)
    served.wait(served.idle)


def test_a_cancelled_request_ends_and_the_socket_goes_on(served: Served) -> None:
    with served.websocket() as ws:
        ws.send(json.dumps(greedy(id="long", **LONG)))
        frames_of(ws, 2)
        ws.send(json.dumps(greedy(id="long")))  # open already
        ws.send('{"id": "long", "cancel": true}')
        frames = frames_of(ws, until="long")
        assert next(frame for frame in frames if frame.get("of") == "long")["error"]["param"] == "id"
        assert frames[-1]["reason"] == "cancelled"
        served.wait(served.idle)
        ws.send('{"id": "long", "cancel": true}')
        assert frames_of(ws, 1)[0]["error"]["type"] == "not_found_error"
        ws.send(json.dumps(greedy(id="long")))
        assert text_of(ws, "long") == whole(served)


@pytest.mark.parametrize(
    "frame", ["{", "[]", "3", '{"prompt": "x"}', '{"id": ""}', '{"id": 3}', '{"id": "' + "x" * 300 + '"}', b"x", "[" * 50_000, '{"id": "a", "seed": NaN}']
)  # fmt: skip
def test_a_wrong_frame_is_answered_and_the_socket_goes_on(served: Served, frame: str | bytes) -> None:
    with served.websocket() as ws:
        ws.send(frame)
        [answer] = frames_of(ws, 1)
        assert answer["id"] is None and set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["code"] == (None if answer["error"]["param"] == "id" else "invalid_json")
        ws.send(json.dumps({"id": "a", "model": "nope", "prompt": "x"}))
        error, done = frames_of(ws, 2)
        assert error["error"]["code"] == "model_not_found" and done["reason"] == "error"
        ws.send(json.dumps(greedy(id="b")))
        assert text_of(ws, "b") == whole(served)


@pytest.mark.parametrize("kind", ["events", "text", "whole", "socket", "queued"])
def test_a_client_that_goes_away_frees_its_row(served: Served, kind: str) -> None:
    body = greedy(**LONG, stream=kind in ("events", "text"))
    cancelled, whole_texts = served.metric("foredraft_requests_cancelled_total"), served.finished("length")
    if kind == "socket":
        with served.websocket() as ws:
            ws.send(json.dumps({**body, "id": "a"}))
            frames_of(ws, 1)
    elif kind in ("whole", "queued"):
        count = 1 if kind == "whole" else 6  # of four rows

        async def leave() -> None:
            async with httpx.AsyncClient(base_url=served.url) as http:
                tasks = [asyncio.create_task(http.post(PATH, json=body)) for _ in range(count)]
                model = served.state.model
                assert model is not None
                while model.limits.samples.total < count:
                    await asyncio.sleep(0.01)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(leave())
    else:
        headers = {"accept": "text/plain"} if kind == "text" else {}
        with served.client.stream("POST", PATH, json=body, headers=headers) as response:
            next(response.iter_bytes())
    served.wait(served.idle, 5)
    assert served.metric("foredraft_requests_cancelled_total") == cancelled + (6 if kind == "queued" else 1)
    assert served.finished("length") == whole_texts
    assert served.metric("foredraft_requests_running") == 0
