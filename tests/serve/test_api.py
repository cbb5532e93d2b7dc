"""The API by the openai client and by plain HTTP: what is honoured, and what is refused by name."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

import foredraft
from foredraft.llm import LLM
from tests.support.checkpoints import save_checkpoint
from tests.support.serving import Served, serving

PROMPT = "def fibonacci(n):\n"
MESSAGES: list[Any] = [{"role": "user", "content": "def add(a, b):"}]
ERROR_KEYS = {"message", "type", "param", "code"}


def name(served: Served) -> str:
    assert served.state.model is not None
    return served.state.model.names[0]


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 7},
    {"temperature": 0.7, "seed": 3, "top_p": 0.9},
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_a_streamed_text_is_the_whole_one_with_and_without_a_drafter(
    served: Served, client: openai.OpenAI, llm: LLM, chat: bool, sampling: dict[str, Any]
) -> None:
    def text(stream: bool, drafter: str) -> str:
        common: dict[str, Any] = {
            "model": name(served), "max_tokens": 40, "extra_body": {"drafter": drafter}, "stream": stream, **sampling,
        }  # fmt: skip
        if chat:
            found: Any = client.chat.completions.create(messages=MESSAGES, **common)
            if not stream:
                return str(found.choices[0].message.content)
            return "".join(chunk.choices[0].delta.content or "" for chunk in found)
        found = client.completions.create(prompt=PROMPT, **common)
        return found.choices[0].text if not stream else "".join(chunk.choices[0].text for chunk in found)

    assert llm.tokenizer is not None
    prompt = llm.tokenizer.encode_chat(MESSAGES) if chat else PROMPT
    [want] = llm.generate(prompt, drafter="none", max_new_tokens=40, **sampling)
    found = {
        text(stream, drafter) for stream in (False, True) for drafter in ("none", "draft-model", "lookup")
    }
    assert found == {want.text}


def test_a_reply_has_the_fields_of_the_contract(served: Served) -> None:
    body = {
        "model": name(served),
        "messages": MESSAGES,
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
    }
    response = served.client.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine"})
    found = response.json()
    assert response.headers["x-request-id"] == "mine"
    assert found["object"] == "chat.completion" and found["model"] == name(served)
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    for choice in found["choices"]:
        assert choice["finish_reason"] == "length" and choice["message"]["role"] == "assistant"
        entries = choice["logprobs"]["content"]
        assert b"".join(bytes(each["bytes"]) for each in entries).decode() == choice["message"]["content"]
        assert all(len(each["top_logprobs"]) == 2 for each in entries)
        assert all(each["logprob"] == each["top_logprobs"][0]["logprob"] for each in entries)
        assert choice["lossless"] is True and choice["deterministic"] is True
    usage = found["usage"]
    assert usage["completion_tokens"] == 12 and usage["total_tokens"] == usage["prompt_tokens"] + 12
    drafting = found["metrics"]["speculative_decoding"]
    assert drafting["num_accepted_tokens"] <= drafting["num_draft_tokens"]


def test_echo_scores_the_prompt_as_the_library_does(served: Served, llm: LLM) -> None:
    ids = llm.encode(PROMPT)[0]
    body = {"model": name(served), "prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 1}
    [choice] = served.client.post("/v1/completions", json=body).json()["choices"]
    [output] = llm.generate([ids], max_new_tokens=0, prompt_logprobs=1)
    assert choice["text"] == PROMPT
    scores = output.prompt_logprobs
    assert scores is not None
    assert choice["logprobs"]["token_logprobs"] == [None, *(each.logprob for each in scores[1:] if each)]
    assert "".join(choice["logprobs"]["tokens"]) == PROMPT
    assert choice["logprobs"]["top_logprobs"][0] is None
    tops = choice["logprobs"]["top_logprobs"][1:]
    assert {len(top) for top in tops} == {1, 2}, "the likeliest token, and the prompt's own"


def test_constraints_and_stops_are_honoured(served: Served, client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    chat = client.chat.completions.create(
        model=name(served), messages=MESSAGES, response_format=form, max_tokens=100
    )  # white space included, no object of this schema is longer than 89 bytes
    assert json.loads(chat.choices[0].message.content or "")["a"] in ("x", "y")
    common: dict[str, Any] = {"model": name(served), "prompt": PROMPT, "temperature": 0, "max_tokens": 40}
    free = client.completions.create(**common).choices[0].text
    word = free.split()[1]
    banned = client.completions.create(**common, extra_body={"ban": [word]}).choices[0].text
    assert word in free and word not in banned
    [stopped] = client.completions.create(**common, stop=[word]).choices
    assert stopped.finish_reason == "stop" and stopped.text == free[: free.index(word)]
    assert stopped.model_extra is not None and stopped.model_extra["stop_reason"] == word
    [forced] = client.completions.create(**common, extra_body={"regex": "[0-9]{3}"}).choices
    assert forced.text.isdecimal() and len(forced.text) == 3


def test_provenance_names_the_source_of_every_token(served: Served) -> None:
    body = {
        "model": name(served),
        "prompt": PROMPT,
        "max_tokens": 20,
        "temperature": 0,
        "provenance": True,
        "drafter": "draft-model",
    }
    [choice] = served.client.post("/v1/completions", json=body).json()["choices"]
    assert len(choice["provenance"]) == 20
    assert {each["origin"] for each in choice["provenance"]} <= {"drafter", "target", "bonus"}
    assert sum(each["emitted"] for each in choice["trace"]) == 20


def test_unknown_fields_without_a_meaning_are_ignored_and_listed(served: Served) -> None:
    body = {
        "model": name(served),
        "prompt": "x",
        "max_tokens": 1,
        "wibble": 1,
        "user": "me",
        "\u00e9\n\u00e9\x00": 2,
    }
    response = served.client.post("/v1/completions", json=body)
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == r"wibble, \xe9\n\xe9\x00"


def test_a_header_lists_some_of_many_unknown_fields(served: Served) -> None:
    body = {
        "model": name(served),
        "prompt": "x",
        "max_tokens": 1,
        **{f"field{i:05}": 1 for i in range(20_000)},
    }
    response = served.client.post("/v1/completions", json=body)
    assert response.status_code == 200 and response.headers["x-ignored-fields"].endswith(", and 19980 more")


LISTS = {
    "/v1/completions prompt": [1] * 250_000 + ["x"],
    "/v1/completions stop": [1] * 250_000,
    "/v1/completions ban": [1] * 250_000,
    "/v1/chat/completions messages": [1] * 250_000,
    "/v1/responses input": [1] * 250_000,
    "/v1/responses tools": [1] * 250_000,
    "/v1/messages messages": [1] * 250_000,
    "/v1/messages system": [1] * 250_000,
    "/v1/messages stop_sequences": [1] * 250_000,
    "/v1/messages tools": [1] * 250_000,
}


@pytest.mark.parametrize("where", LISTS)
def test_a_long_list_with_a_wrong_item_is_refused_at_once(served: Served, where: str) -> None:
    path, field = where.split()
    user = [{"role": "user", "content": "x"}]
    least = (
        {"prompt": "x"}
        if path.endswith("/completions")
        else {"messages": user, "input": "x", "max_tokens": 1}
    )
    body = {"model": name(served), **least, field: LISTS[where]}
    begun = time.process_time()
    assert served.client.post(path, json=body).status_code == 400
    assert (
        time.process_time() - begun < 2
    )  # all errors of all kinds of lists took many seconds, and gigabytes


def test_a_host_that_is_none_is_no_error(served: Served) -> None:
    for headers in ({"host": "[abc"}, {"host": "[abc", "origin": "http://[abc"}):
        assert served.client.get("/v1/models", headers=headers).status_code == 403


def test_a_name_that_leads_here_from_anywhere_is_refused(served: Served, llm: LLM) -> None:
    def status(server: Served, host: str, path: str = "/v1/models") -> int:
        return server.client.get(path, headers={"host": host}).status_code

    for path in ("/", "/v1/models", "/metrics", "/health", "/version"):
        assert status(served, "rebound.evil.example:8000", path) == 403
        for own in ("127.0.0.1", "localhost:8000", "[::1]:1", "192.168.1.2"):
            assert status(served, own, path) == 200
    raw = socket.create_connection((served.client.base_url.host, served.client.base_url.port or 80))
    with raw, pytest.raises(InvalidStatus):
        connect("ws://evil.example/v1/stream", sock=raw)
    with serving(llm, cors=("https://proxied.example",)) as behind_a_proxy:
        assert status(behind_a_proxy, "proxied.example") == 200
        assert status(behind_a_proxy, "evil.example") == 403
    with serving(llm, host="0.0.0.0") as open_to_others:  # its names are the network's
        assert status(open_to_others, "llm.example") == 200


def test_numbers_and_texts_that_no_reply_could_repeat_are_refused(served: Served) -> None:
    for value in ("1e999", "-1e999", '"\\ud800"', '{"\\uDFFF": 1}', '["\\ude00\\ud83d"]'):
        for path, prompt in (("responses", '"input"'), ("completions", '"prompt"')):
            body = f'{{"model": "{name(served)}", {prompt}: "x", "metadata": {{"a": {value}}}}}'
            refused = served.client.post(f"/v1/{path}", content=body)
            assert refused.status_code == 400, (path, value)
            assert refused.json()["error"]["code"] == "invalid_json"
    lone = b'{"model": "demo", "input": "x", "metadata": {"a": "\xed\xa0\x80"}}'
    assert served.client.post("/v1/responses", content=lone).status_code == 400
    pair = f'{{"model": "{name(served)}", "input": "x", "max_output_tokens": 1, "metadata": {{"a": "\\ud83d\\ude00"}}}}'
    assert served.client.post("/v1/responses", content=pair).json()["metadata"] == {"a": "\N{GRINNING FACE}"}


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1"])
def test_pages_of_other_origins_are_refused(served: Served, origin: str) -> None:
    body = json.dumps({"model": name(served), "prompt": "x", "max_tokens": 1})
    for headers in ({"origin": origin, "content-type": "text/plain"}, {"origin": origin}):
        assert served.client.post("/v1/completions", content=body, headers=headers).status_code == 403
    with (
        pytest.raises(InvalidStatus),
        connect(served.url.replace("http", "ws") + "/v1/stream", origin=Origin(origin)),
    ):
        pass
    own = {"origin": served.url}
    assert served.client.post("/v1/completions", content=body, headers=own).status_code == 200


WRONG: list[tuple[dict[str, Any], int, str | None]] = [
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"n": 0}, 400, "n"),
    ({"n": True}, 400, "n"),
    ({"max_tokens": 10**6}, 400, "prompt"),
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, 400, "min_tokens"),
    ({"stop": [""]}, 400, "stop"),
    ({"stop": 3}, 400, "stop"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, 400, "logit_bias"),
    ({"regex": "[a-"}, 400, "regex"),
    ({"logit_bias": {"9" * 5000: 1}}, 400, "logit_bias"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"echo": True, "truncate_prompt": "left"}, 400, "echo"),
    ({"response_format": {"type": "xml"}}, 400, "response_format"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}, "strict": True}}}, 400, "response_format"),
    ({"drafter": "oracle"}, 400, "drafter"),
    ({"suffix": "x"}, 400, "suffix"),
    ({"best_of": 4}, 400, "best_of"),
    ({"tools": [{"type": "function"}]}, 400, "tools"),
    ({"prediction": {"type": "content"}}, 400, "prediction"),
    ({"guided_json": {"not": {}}}, 400, "guided_json"),
    ({"model": "gpt-9"}, 404, "model"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": {"a": 1}}, 400, "prompt"),
    ({"prompt": [10**9]}, 400, None),
    ({"prompt": "\ud800"}, 400, None),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("wrong", "status", "param"), WRONG, ids=lambda value: json.dumps(value)[:40])
def test_a_wrong_field_is_refused_by_name_before_a_stream_begins(
    served: Served, wrong: dict[str, Any], status: int, param: str | None, stream: bool
) -> None:
    if stream and "stream_options" in wrong:
        pytest.skip("right in a stream")
    body = {"model": name(served), "prompt": "x", "max_tokens": 3, "stream": stream} | wrong
    response = served.client.post("/v1/completions", content=json.dumps(body))
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == ERROR_KEYS and error["param"] == param
    assert error["message"] and "\n" not in error["message"]
    assert served.idle()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'"x"', b"\xff{}", b"[" * 50_000, b'{"model": NaN}', b'{"prompt": "x"}'],
    ids=lambda content: repr(content[:12]),
)  # fmt: skip
def test_a_body_that_is_no_request_is_refused(served: Served, content: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        response = served.client.post(path, content=content)
        if response.status_code == 200:
            assert path in ("/tokenize", "/v1/completions") and content == b'{"prompt": "x"}'
            continue
        assert response.status_code == 400, (path, response.text)
        assert set(response.json()["error"]) == ERROR_KEYS


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        "x",
        [3],
        [{"role": "user", "content": 3}],
    ],
    ids=str,
)
def test_wrong_messages_are_refused(served: Served, messages: Any) -> None:
    response = served.client.post(
        "/v1/chat/completions", json={"model": name(served), "messages": messages, "max_tokens": 1}
    )
    assert response.status_code == 400, response.text


def test_parts_of_text_are_joined(served: Served, client: openai.OpenAI) -> None:
    parts: list[Any] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "def add"}, {"type": "text", "text": "(a, b):"}],
        }
    ]
    common: dict[str, Any] = {"model": name(served), "temperature": 0, "max_tokens": 12}
    one, other = (client.chat.completions.create(messages=each, **common) for each in (MESSAGES, parts))
    assert one.choices[0].message.content == other.choices[0].message.content


def test_models_tokens_health_and_capabilities(served: Served, client: openai.OpenAI, llm: LLM) -> None:
    assert [model.id for model in client.models.list()] == [name(served)]
    assert client.models.retrieve(name(served)).owned_by == "foredraft"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")
    http = served.client
    tokens = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    assert tokens == llm.encode(PROMPT)[0]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == PROMPT
    assert http.post("/detokenize", json={"tokens": [-1]}).status_code == 400
    assert http.get("/health").status_code == http.get("/ready").status_code == 200
    capabilities = http.get("/v1/capabilities").json()
    assert capabilities["drafters"]["draft-model"] == {"lossless": True} and capabilities["chat"]
    assert capabilities["weights"] is None and capabilities["lora"] == []
    assert http.get("/nowhere").json()["error"]["message"] == "there is no '/nowhere'"
    assert http.get("/v1/completions").status_code == 405
    assert served.metric("foredraft_generation_tokens_total") > 0


def test_a_gguf_file_is_served_under_its_name(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.support.gguf_files import write_gguf

    file = write_gguf(save_checkpoint(tmp_path / "model", tokenizer=True), tmp_path / "tiny.gguf")
    with serving(foredraft.load(file, device="cpu", max_length=64)) as served:
        [model] = served.client.get("/v1/models").json()["data"]
        assert model["id"] == "tiny.gguf"
        for given in ("tiny.gguf", str(file)):
            body = {"model": given, "prompt": "a", "max_tokens": 2}
            assert served.client.post("/v1/completions", json=body).json()["model"] == "tiny.gguf"
