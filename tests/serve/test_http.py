"""What HTTP asks of a server beyond the API: preferences, keys in either header, HEAD, connections of old clients."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx
import pytest

from foredraft.llm import LLM
from foredraft.serve.streaming import prefers_text
from tests.serve.routes import NEEDED, TEXT, post
from tests.support.serving import Served, serving


@pytest.mark.parametrize(
    ("accept", "plain"),
    [
        ("text/plain", True),
        ("text/plain, */*;q=0.5", True),
        ("text/plain;q=0.9, application/json;q=0.1", True),
        ("Text/Plain; charset=utf-8", True),
        ("application/json, text/plain, */*", False),  # the default of axios and Angular
        ("text/plain, */*", False),
        ("text/plain;q=0.5, text/event-stream", False),
        ("text/plain, text/*", False),
        ("text/plain;q=0", False),
        ("text/plain;q=many, application/json", False),
        ("*/*", False),
        ("", False),
    ],
)
def test_plain_text_comes_where_it_is_preferred(served: Served, accept: str, plain: bool) -> None:
    assert prefers_text(accept) == plain
    body = {**NEEDED[TEXT], "stream": True}
    reply = served.client.post(TEXT, json=body, headers={"accept": accept})
    assert reply.headers["content-type"].startswith("text/plain" if plain else "text/event-stream")


@pytest.mark.parametrize("given", ["", "sk-ant-other", "one"])
def test_one_good_key_in_either_header_suffices(llm: LLM, keys: Path, given: str) -> None:
    with serving(llm, api_key_file=keys) as own:
        for bearer, code in (("one", 200), ("wrong", 200 if given == "one" else 401)):
            headers = {"authorization": f"Bearer {bearer}", "x-api-key": given}
            assert own.client.get("/v1/models", headers=headers).status_code == code
        assert own.client.get("/v1/models", headers={"x-api-key": given}).status_code == (200 if given == "one" else 401)  # fmt: skip


@pytest.mark.parametrize(
    "path", ["/", "/health", "/ready", "/version", "/v1/models", "/metrics", "/v1/models/demo"]
)
def test_head_is_answered_as_get_without_a_body(served: Served, path: str) -> None:
    head, get = served.client.head(path), served.client.get(path)
    assert head.status_code == get.status_code == 200 and head.content == b"" and get.content
    assert head.headers["content-type"] == get.headers["content-type"]
    assert served.client.head(TEXT).status_code == 405


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_reply_says_once_what_the_connection_does(served: Served, version: str, stream: bool) -> None:
    body = json.dumps({**NEEDED[TEXT], "temperature": 0, "stream": stream}).encode()
    close = "Connection: close\r\n" if version == "1.1" else ""
    head = f"POST {TEXT} HTTP/{version}\r\nHost: localhost\r\n{close}Content-Length: {len(body)}\r\n\r\n"
    url = httpx.URL(served.url)
    with socket.create_connection((url.host, url.port), timeout=30) as connection:
        connection.sendall(head.encode() + body)
        got = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    first, _, rest = got.partition(b"\r\n\r\n")
    lines = [line.lower() for line in first.decode().split("\r\n")]
    assert [line for line in lines if line.startswith("connection:")] == ["connection: close"]
    assert ("transfer-encoding: chunked" in lines) == (stream and version == "1.1")
    if version == "1.0":
        same = post(served, TEXT, stream=stream)
        assert abs(len(rest) - len(same.content)) < 40  # but for ids and numbers, the same
        assert rest.endswith(b"data: [DONE]\n\n" if stream else b"}")


@pytest.mark.parametrize(
    "given", [{"temperature": 0, "top_p": 0}, {"top_p": 0, "temperature": 1.3}, {"temperature": 0}]
)
def test_top_p_0_keeps_the_likeliest_token(served: Served, given: dict[str, float]) -> None:
    texts = [post(served, TEXT, **each).json()["choices"][0]["text"] for each in (given, {})]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("seed", [-(2**63), -2, 0, 2**63 - 1])
def test_every_seed_of_64_bits_is_one(served: Served, seed: int) -> None:
    texts = {post(served, TEXT, temperature=1, seed=s).json()["choices"][0]["text"] for s in (seed, seed, 1)}
    assert len(texts) == 2
    assert post(served, TEXT, seed=2**63).status_code == 400
