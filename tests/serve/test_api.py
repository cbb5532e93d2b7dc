"""The API by the openai client and by plain HTTP, its OpenAPI document, and the routes beside those of texts."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

import foredraft
from foredraft.llm import LLM
from foredraft.serve.openapi import ROUTES
from foredraft.serve.settings import Settings
from tests.serve.routes import CHAT, MESSAGE, MESSAGES, NEEDED, PROMPT, RESPONSES, TEXT, post
from tests.support.checkpoints import save_checkpoint
from tests.support.serving import Served, events_of, serving


def test_a_reply_says_how_it_was_made(served: Served) -> None:
    found = post(served, CHAT, max_tokens=6, n=2).json()
    assert found["object"] == "chat.completion" and found["model"] == "demo"
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    for choice in found["choices"]:
        assert choice["finish_reason"] == "length" and choice["message"]["role"] == "assistant"
        assert choice["lossless"] is True and choice["deterministic"] is True
    usage = found["usage"]
    assert usage["completion_tokens"] == 12 and usage["total_tokens"] == usage["prompt_tokens"] + 12
    drafting = found["metrics"]["speculative_decoding"]
    assert drafting["num_accepted_tokens"] <= drafting["num_draft_tokens"]


@pytest.mark.parametrize("path", NEEDED)
def test_unknown_fields_are_listed_on_every_route(served: Served, path: str) -> None:
    for stream in (False, True):
        reply = post(served, path, wibble=1, **{"\u00e9\n\u00e9\x00": 2}, user="me", stream=stream)
        assert reply.status_code == 200 and reply.headers["x-ignored-fields"] == r"wibble, \xe9\n\xe9\x00"
    many = post(served, path, **{f"field{i:05}": 1 for i in range(20_000)})
    assert many.status_code == 200 and many.headers["x-ignored-fields"].endswith(", and 19980 more")


def test_a_name_that_leads_here_from_anywhere_is_refused(served: Served, llm: LLM) -> None:
    def status(server: Served, host: str, path: str = "/v1/models") -> int:
        return server.client.get(path, headers={"host": host}).status_code

    for path in ("/", "/v1/models", "/metrics", "/health", "/version"):
        assert status(served, "rebound.evil.example:8000", path) == 403
        for own in ("127.0.0.1", "localhost:8000", "[::1]:1", "192.168.1.2"):
            assert status(served, own, path) == 200
    for no_host in ({"host": "[abc"}, {"host": "[abc", "origin": "http://[abc"}):
        assert served.client.get("/v1/models", headers=no_host).status_code == 403
    raw = socket.create_connection((served.client.base_url.host, served.client.base_url.port or 80))
    with raw, pytest.raises(InvalidStatus):
        connect("ws://evil.example/v1/stream", sock=raw)
    with serving(llm, cors=("https://proxied.example",)) as behind_a_proxy:
        assert status(behind_a_proxy, "proxied.example") == 200
        assert status(behind_a_proxy, "evil.example") == 403
    with serving(llm, host="0.0.0.0") as open_to_others:  # its names are the network's
        assert status(open_to_others, "llm.example") == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1"])
def test_pages_of_other_origins_are_refused(served: Served, origin: str) -> None:
    body = json.dumps({"model": "demo", "prompt": "x", "max_tokens": 1})
    for headers in ({"origin": origin, "content-type": "text/plain"}, {"origin": origin}):
        assert served.client.post(TEXT, content=body, headers=headers).status_code == 403
    with pytest.raises(InvalidStatus):
        served.websocket(origin=Origin(origin))
    assert served.client.post(TEXT, content=body, headers={"origin": served.url}).status_code == 200


def test_models_health_and_capabilities(served: Served, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "foredraft"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")
    http = served.client
    assert http.get("/health").status_code == http.get("/ready").status_code == 200
    capabilities = http.get("/v1/capabilities").json()
    assert capabilities["drafters"]["draft-model"] == {"lossless": True} and capabilities["chat"]
    assert capabilities["weights"] is None and capabilities["lora"] == []
    assert http.get("/nowhere").json()["error"]["message"] == "there is no '/nowhere'"
    assert http.get(TEXT).status_code == 405


def test_a_gguf_file_is_served_under_its_name(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.support.gguf_files import write_gguf

    file = write_gguf(save_checkpoint(tmp_path / "model", tokenizer=True), tmp_path / "tiny.gguf")
    with serving(foredraft.load(file, device="cpu", max_length=64)) as served:
        [model] = served.client.get("/v1/models").json()["data"]
        assert model["id"] == "tiny.gguf"
        for given in ("tiny.gguf", str(file)):
            body = {"model": given, "prompt": "a", "max_tokens": 2}
            assert served.client.post(TEXT, json=body).json()["model"] == "tiny.gguf"


FURTHER: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {}, {"logprobs": True, "top_logprobs": 2, "n": 2}, {"provenance": True, "drafter": "draft-model"},
        {"stop": ["\n", " "]}, {"regex": "[0-9]{2}"}, {"return_token_ids": True},
    ],
    TEXT: [
        {}, {"logprobs": 2, "echo": True}, {"provenance": True, "drafter": "lookup"}, {"max_tokens": 0, "echo": True, "logprobs": 1},
        {"prompt": ["a", "b"]}, {"prompt": [[5, 6], [7]], "n": 2},
    ],
    RESPONSES: [{}, {"instructions": "be brief", "stop": " "}, {"top_logprobs": 2}],
    MESSAGE: [{}, {"stop_sequences": [" "]}, {"system": "be brief"}],
}  # fmt: skip


def document(served: Served) -> dict[str, Any]:
    return dict(served.client.get("/openapi.json").json())


def schema_of(
    document: dict[str, Any], path: str, method: str, status: int, media: str = "application/json"
) -> Any:
    content = document["paths"][path][method]["responses"][str(status)]["content"][media]
    if media == "text/event-stream":
        schema = content["itemSchema"]["properties"]["data"]["anyOf"][0]["contentSchema"]
    else:
        schema = content["schema"]
    return {**schema, "components": document["components"]}


def test_every_route_is_in_the_document_and_every_reference_leads_somewhere(served: Served) -> None:
    found = document(served)
    assert set(found["paths"]) == set(ROUTES)
    text = json.dumps(found)
    named = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert named <= set(found["components"]["schemas"])
    assert found["components"]["schemas"]["Error"]["additionalProperties"] is False
    for schema in found["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for path in NEEDED:
        body = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert "model" in found["components"]["schemas"][body["$ref"].split("/")[-1]]["properties"], path


@pytest.mark.parametrize("path", NEEDED)
def test_replies_and_events_have_the_documented_types(served: Served, path: str) -> None:
    found = document(served)
    for further in FURTHER[path]:
        whole = post(served, path, **further)
        assert whole.status_code == 200, whole.text
        jsonschema.validate(whole.json(), schema_of(found, path, "post", 200))
        options = {"include_usage": True, "continuous_usage_stats": bool(further)}
        more = {"stream_options": options} if path in (CHAT, TEXT) else {}
        events = events_of(post(served, path, **further, **more, stream=True).text)
        assert len(events) > 1
        for event in events:
            jsonschema.validate(event, schema_of(found, path, "post", 200, "text/event-stream"))


@pytest.mark.parametrize("path", NEEDED)
def test_errors_have_the_documented_type(served: Served, path: str) -> None:
    found = document(served)
    for wrong, status in (({"model": "nope"}, 404), ({"temperature": -1}, 400), ({"stream": 3}, 400)):
        reply = post(served, path, **wrong)
        assert reply.status_code == status
        jsonschema.validate(reply.json(), schema_of(found, path, "post", status))
    stranger = served.client.post(path, json={}, headers={"origin": "https://evil.example"})
    jsonschema.validate(stranger.json(), schema_of(found, path, "post", stranger.status_code))


def test_further_replies_have_the_documented_types(served: Served) -> None:
    found = document(served)
    for path, method, body in (
        ("/health", "get", None), ("/ready", "get", None), ("/version", "get", None), ("/v1/models", "get", None),
        ("/v1/capabilities", "get", None), ("/tokenize", "post", {"prompt": "x"}),
        ("/tokenize", "post", {"messages": MESSAGES}), ("/tokenizer_info", "get", None), ("/detokenize", "post", {"tokens": [5]}),
    ):  # fmt: skip
        reply = served.client.request(method, path, json=body)
        jsonschema.validate(reply.json(), schema_of(found, path, method, 200))
    card = served.client.get("/v1/models/demo").json()
    jsonschema.validate(card, schema_of(found, "/v1/models/{name}", "get", 200))
    missing = served.client.get("/v1/models/nope").json()
    jsonschema.validate(missing, schema_of(found, "/v1/models/{name}", "get", 404))


def test_a_server_with_keys_shows_document_and_metrics_to_their_holders_only(llm: LLM, keys: Path) -> None:
    with serving(llm, api_key_file=keys) as served:
        own = {"authorization": "Bearer one"}
        assert served.client.get("/openapi.json").status_code == 401
        found = served.client.get("/openapi.json", headers=own).json()
        assert "foredraft_requests_running" in served.client.get("/metrics", headers=own).text
        assert "security" in found["paths"]["/metrics"]["get"]
        assert set(found["components"]["securitySchemes"]) == {"bearer", "x-api-key"}
        for path, operations in found["paths"].items():
            for method, operation in operations.items():
                status = served.client.request(method, path).status_code
                assert (status == 401) == ("security" in operation), path
    with serving(llm) as served:
        open_ = served.client.get("/openapi.json").json()
        assert "securitySchemes" not in open_["components"] and '"security"' not in json.dumps(open_)


def tokens(served: Served, **fields: Any) -> Any:
    reply = served.client.post("/tokenize", json=fields)
    assert reply.status_code == 200, reply.text
    assert reply.json()["count"] == len(reply.json()["tokens"])
    return reply.json()["tokens"]


def test_a_conversation_has_the_tokens_of_its_chat(served: Served, llm: LLM) -> None:
    assert llm.tokenizer is not None
    assert tokens(served, messages=MESSAGES) == llm.tokenizer.encode_chat(MESSAGES)
    bare = llm.tokenizer.encode_chat(MESSAGES, add_generation_prompt=False)
    assert tokens(served, messages=MESSAGES, add_generation_prompt=False) == bare
    pieces = [{"type": "text", "text": "def add"}, {"type": "text", "text": "(a, b):"}]
    parts = [{"role": "user", "content": pieces}]
    assert tokens(served, messages=parts) == llm.tokenizer.encode_chat(MESSAGES)
    tools = [{"type": "function", "function": {"name": "stop"}}]
    usage = post(served, CHAT, tools=tools, max_tokens=1).json()["usage"]
    assert len(tokens(served, messages=MESSAGES, tools=tools)) == usage["prompt_tokens"]


def test_content_is_llama_cpp_s_name_of_the_text(ending: Served) -> None:
    """Its special tokens are added on request alone; this tokenizer puts <s>, id 1, in front."""
    bare = tokens(ending, content="a b")
    assert bare == tokens(ending, prompt="a b", add_special_tokens=False) and 1 not in bare
    assert tokens(ending, content="a b", add_special=True) == tokens(ending, prompt="a b") == [1, *bare]


@pytest.mark.parametrize(
    ("path", "wrong", "param"),
    [("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": "a", "content": "b"}, "content"), ("/tokenize", {"prompt": 3}, "prompt"),
     ("/tokenize", {"content": "a", "messages": MESSAGES}, "messages"), ("/tokenize", {"messages": []}, "messages"),
     ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
     ("/tokenize", {"prompt": "a", "tools": []}, "tools"), ("/tokenize", {"content": "a", "with_pieces": True}, "with_pieces"),
     ("/tokenize", {"prompt": "a", "model": "nope"}, "model"), ("/tokenize", {"prompt": "x", "add_special_tokens": "no"}, "add_special_tokens"),
     ("/detokenize", {"tokens": [5], "model": "nope"}, "model"), ("/detokenize", {"tokens": 3}, "tokens"), ("/detokenize", {"tokens": [True]}, "tokens"),
     ("/detokenize", {"tokens": [-1]}, "tokens"), ("/detokenize", {"tokens": [10**9]}, "tokens"), ("/detokenize", {"tokens": [5], "messages": []}, "messages")],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_read_is_refused(served: Served, path: str, wrong: dict[str, Any], param: str) -> None:
    reply = served.client.post(path, json=wrong)
    assert reply.status_code == (404 if param == "model" else 400), reply.text
    assert reply.json()["error"]["param"] == param


def test_the_tokenizer_is_described_for_clients(served: Served, llm: LLM) -> None:
    info = served.client.get("/tokenizer_info").json()
    assert llm.tokenizer is not None and llm.tokenizer.chat is not None
    [end] = llm.tokenizer.encode(info["eos_token"], False)
    assert end in llm.loaded.spec.eos_token_ids
    assert info["chat_template"] == llm.tokenizer.chat.templates["default"]
    assert info["bos_token"] is None or llm.tokenizer.encode(info["bos_token"], False) == [
        llm.loaded.spec.bos_token_id
    ]
    ids = tokens(served, prompt=PROMPT, add_special_tokens=False)
    reply = served.client.post("/detokenize", json={"tokens": ids, "model": "demo", "wibble": 1})
    assert reply.json()["prompt"] == PROMPT and reply.headers["x-ignored-fields"] == "wibble"


def test_paths_without_v1_are_the_same(served: Served) -> None:
    for path in (CHAT, TEXT):
        sent = {"messages": MESSAGES} if path == CHAT else {"prompt": PROMPT}
        sent |= {"temperature": 0, "max_tokens": 8, "seed": 1}
        short, long = (served.client.post(each, json=sent).json() for each in (path[3:], path))
        assert short["choices"] == long["choices"]
        streamed = served.client.post(path[3:], json={**sent, "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("origin", "remedy"),
    [("localhost:3000", "http://localhost:3000"), ("http://localhost:3000/", "http://localhost:3000"),
     ("https://a.example/page", "http://a.example"), ("a.example", "http://a.example"), ("//x", "http://x")],
)  # fmt: skip
def test_an_origin_without_a_scheme_is_refused(origin: str, remedy: str) -> None:
    from foredraft.errors import ConfigError

    with pytest.raises(ConfigError, match="^cors is ") as caught:
        Settings(cors=("https://right.example", origin))
    assert origin in str(caught.value) and f'"{remedy}"' in str(caught.value)


def test_origins_are_taken(llm: LLM) -> None:
    given = ("http://localhost:3000", "https://a.example", "*", "null")
    assert Settings(cors=given).cors == given
    with serving(llm, cors=("http://localhost:3000",)) as served:
        headers = {"origin": "http://localhost:3000"}
        reply = served.client.get("/v1/models", headers=headers)
        assert reply.headers["access-control-allow-origin"] == "http://localhost:3000"
