"""The OpenAPI document: it names every route, and its types are those of what the server takes and gives."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import TypeAdapter

from foredraft.llm import LLM
from foredraft.serve.openapi import ROUTES
from foredraft.serve.problems import Error
from tests.support.serving import Served, serving

MESSAGES = [{"role": "user", "content": "def add(a, b):"}]
PATHS = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": MESSAGES, "max_tokens": 6},
    "completion": {"prompt": "def add(", "max_tokens": 6},
    "responses": {"input": "def add(", "max_output_tokens": 6},
    "messages": {"messages": MESSAGES, "max_tokens": 6},
}
FURTHER: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {}, {"logprobs": True, "top_logprobs": 2, "n": 2}, {"provenance": True, "drafter": "draft-model"},
        {"stop": ["\n", " "]}, {"regex": "[0-9]{2}"}, {"return_token_ids": True},
    ],
    "completion": [
        {}, {"logprobs": 2, "echo": True}, {"provenance": True, "drafter": "lookup"}, {"max_tokens": 0, "echo": True, "logprobs": 1},
        {"prompt": ["a", "b"]}, {"prompt": [[5, 6], [7]], "n": 2},
    ],
    "responses": [{}, {"instructions": "be brief", "stop": " "}, {"top_logprobs": 2}],
    "messages": [{}, {"stop_sequences": [" "]}, {"system": "be brief"}],
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
    for schema in found["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for kind, path in PATHS.items():
        body = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert "model" in found["components"]["schemas"][body["$ref"].split("/")[-1]]["properties"], kind


@pytest.mark.parametrize("kind", PATHS)
def test_replies_and_events_have_the_documented_types(served: Served, kind: str) -> None:
    found = document(served)
    for further in FURTHER[kind]:
        body = {"model": "demo", "temperature": 0, **BODIES[kind], **further}
        whole = served.client.post(PATHS[kind], json=body)
        assert whole.status_code == 200, whole.text
        jsonschema.validate(whole.json(), schema_of(found, PATHS[kind], "post", 200))
        if kind in ("chat", "completion"):
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": bool(further)}
        streamed = served.client.post(PATHS[kind], json={**body, "stream": True}).text
        data = [line[6:] for line in streamed.splitlines() if line.startswith("data: {")]
        assert len(data) > 1
        for each in data:
            jsonschema.validate(
                json.loads(each), schema_of(found, PATHS[kind], "post", 200, "text/event-stream")
            )


@pytest.mark.parametrize("kind", PATHS)
def test_errors_have_the_documented_type(served: Served, kind: str) -> None:
    found = document(served)
    for wrong, status in (({"model": "nope"}, 404), ({"temperature": -1}, 400), ({"stream": 3}, 400)):
        reply = served.client.post(PATHS[kind], json={"model": "demo", **BODIES[kind], **wrong})
        assert reply.status_code == status
        jsonschema.validate(reply.json(), schema_of(found, PATHS[kind], "post", status))
    stranger = served.client.post(PATHS[kind], json={}, headers={"origin": "https://evil.example"})
    jsonschema.validate(stranger.json(), schema_of(found, PATHS[kind], "post", stranger.status_code))


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
    missing = served.client.get("/v1/models/nope")
    jsonschema.validate(missing.json(), schema_of(found, "/v1/models/{name}", "get", missing.status_code))


def test_a_type_is_closed() -> None:
    reply = {"error": {"message": "", "type": "", "param": None, "code": None}}
    TypeAdapter(Error).validate_python(reply)
    with pytest.raises(ValueError, match="Extra inputs"):
        TypeAdapter(Error).validate_python({**reply, "more": 1})


def test_a_server_with_keys_shows_the_document_to_their_holders_only(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("secret\n")
    with serving(llm, api_key_file=file) as served:
        assert served.client.get("/openapi.json").status_code == 401
        found = served.client.get("/openapi.json", headers={"authorization": "Bearer secret"}).json()
        assert set(found["components"]["securitySchemes"]) == {"bearer", "x-api-key"}
        for path, operations in found["paths"].items():
            for method, operation in operations.items():
                status = served.client.request(method, path).status_code
                assert (status == 401) == ("security" in operation), path
    with serving(llm) as served:
        open_ = served.client.get("/openapi.json").json()
        assert "securitySchemes" not in open_["components"] and '"security"' not in json.dumps(open_)


def test_tokens_take_the_model_and_judge_fields_as_the_others_do(served: Served) -> None:
    http = served.client
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
        reply = http.post(path, json={**body, "model": "demo", "wibble": 1})
        assert reply.status_code == 200 and reply.headers["x-ignored-fields"] == "wibble"
        for wrong, status in (
            ({"model": "nope"}, 404), ({"messages": []}, 400), ({"prompt": 3, "tokens": 3}, 400),
            ({"add_special_tokens": "no", "tokens": [10**9]}, 400), ({"tokens": [True], "prompt": "\ud800"}, 400),
        ):  # fmt: skip
            refused = http.post(path, content=json.dumps({**body, **wrong}))
            assert refused.status_code == status, (path, wrong)
            assert refused.json()["error"]["param"] in (*wrong, None)


@pytest.mark.parametrize(
    ("path", "body", "work"),
    [("/tokenize", {"prompt": "x"}, "encode"), ("/detokenize", {"tokens": [5]}, "detokenizer")],
)
def test_a_long_text_makes_no_other_request_wait(
    served: Served, llm: LLM, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], work: str
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    real = getattr(type(llm.tokenizer), work)

    def long(*args: Any, **more: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return real(*args, **more)

    monkeypatch.setattr(type(llm.tokenizer), work, long)
    with ThreadPoolExecutor(1) as pool:
        try:
            waiting = pool.submit(served.client.post, path, json=body)
            assert begun.wait(10)
            assert served.client.get("/health", timeout=5).status_code == 200
        finally:
            go_on.set()
        assert waiting.result().status_code == 200
