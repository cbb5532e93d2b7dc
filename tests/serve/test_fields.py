"""Every field of the API: honoured, taken because it changes nothing, or refused by name before a stream begins."""

from __future__ import annotations

import json
from functools import reduce
from operator import add
from typing import Any

import pytest

from foredraft.llm import LLM
from tests.support.serving import Served

MESSAGES = [{"role": "user", "content": "def add(a, b):"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGE = "/v1/responses", "/v1/messages"
NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 12}, TEXT: {"prompt": "def add(a, b):", "max_tokens": 12},
    RESPONSES: {"input": "def add(a, b):", "max_output_tokens": 12}, MESSAGE: {"messages": MESSAGES, "max_tokens": 12},
}  # fmt: skip


def post(served: Served, path: str, **fields: Any) -> Any:
    body = {"model": "demo", "temperature": 0, **NEEDED[path], **fields}
    return served.client.post(path, content=json.dumps(body))


def choice(served: Served, path: str, **fields: Any) -> tuple[str, Any]:
    reply = post(served, path, **fields)
    assert reply.status_code == 200, reply.text
    assert "x-ignored-fields" not in reply.headers
    [found] = reply.json()["choices"]
    return (found["message"]["content"] if path == CHAT else found["text"]), found


# A field -> the option of the library that gives the same text.
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.9, "seed": 5}, {"temperature": 0.9, "seed": 5}),
    ({"temperature": 1, "seed": 5, "top_p": 0.5}, {"temperature": 1, "seed": 5, "top_p": 0.5}),
    ({"temperature": 1, "seed": 5, "top_k": 3}, {"temperature": 1, "seed": 5, "top_k": 3}),
    ({"temperature": 1, "seed": 5, "min_p": 0.3}, {"temperature": 1, "seed": 5, "min_p": 0.3}),
    ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
    ({"frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
    ({"repetition_penalty": 1.6}, {"repetition_penalty": 1.6}),
    ({"logit_bias": {"300": 100}}, {"logit_bias": {300: 100}}),
    ({"max_tokens": 3}, {"max_new_tokens": 3}),
    ({"stop": "return"}, {"stop": ["return"]}),
    ({"stop": ["return", "a"]}, {"stop": ["return", "a"]}),
    ({"ignore_eos": True, "min_tokens": 12}, {"ignore_eos": True, "min_new_tokens": 12}),
    ({"ban": ["return"]}, {"ban": ["return"]}),
    ({"regex": "[0-9]{4}"}, {"regex": "[0-9]{4}"}),
    ({"drafter": "lookup"}, {"drafter": "lookup"}),
]


@pytest.mark.parametrize(("fields", "options"), SAME, ids=lambda value: json.dumps(value)[:40])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_field_means_what_the_library_s_option_means(
    served: Served, llm: LLM, path: str, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12} | options
    [want] = llm.chat(MESSAGES, **given) if path == CHAT else llm.generate("def add(a, b):", **given)
    assert choice(served, path, **fields)[0] == want.text


def test_fields_of_one_route(served: Served, llm: LLM) -> None:
    long, found = choice(served, CHAT, max_tokens=2, max_completion_tokens=5)  # the newer name counts
    assert len(llm.encode(long)[0]) <= 5 and long != choice(served, CHAT, max_tokens=2)[0]
    assert found["finish_reason"] == "length" and found["logprobs"] is None
    _, found = choice(served, CHAT, logprobs=True, top_logprobs=3)
    assert {len(each["top_logprobs"]) for each in found["logprobs"]["content"]} == {3}
    assert choice(served, TEXT, echo=True)[0] == "def add(a, b):" + choice(served, TEXT)[0]
    ids = llm.encode("def add(a, b):")[0]
    assert (
        choice(served, TEXT, prompt=ids)[0]
        == choice(served, TEXT, prompt=[ids])[0]
        == choice(served, TEXT)[0]
    )
    json_form = {"type": "json_object"}
    assert choice(served, CHAT, response_format=json_form, max_tokens=3)[0].lstrip().startswith("{")
    assert choice(served, CHAT, response_format={"type": "text"})[0] == choice(served, CHAT)[0]
    two = post(served, CHAT, n=2, seed=1, temperature=1).json()
    assert [each["index"] for each in two["choices"]] == [0, 1]
    stream = {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}
    assert '"choices":[],"usage":{' in post(served, CHAT, **stream).text


HARMLESS: dict[str, Any] = {
    "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "reasoning_effort": "low",
    "verbosity": "low", "prompt_cache_key": "x", "safety_identifier": "x", "parallel_tool_calls": True,
}  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_fields_that_change_nothing_are_taken(served: Served, path: str) -> None:
    assert choice(served, path, **HARMLESS)[0] == choice(served, path)[0]


@pytest.mark.parametrize("path", NEEDED)
def test_unknown_fields_are_listed_on_every_route(served: Served, path: str) -> None:
    for stream in (False, True):
        reply = post(served, path, wibble=1, wobble=2, stream=stream)
        assert reply.status_code == 200 and reply.headers["x-ignored-fields"] == "wibble, wobble"


BOTH: dict[str, Any] = {
    "suffix": "x", "best_of": 3, "audio": {}, "modalities": ["audio"], "web_search_options": {},
    "stop_token_ids": [3], "bad_words": ["x"], "banned_strings": ["x"], "use_beam_search": True,
    "length_penalty": 2, "early_stopping": True, "allowed_token_ids": [3], "guided_choice": ["x"],
    "guided_regex": "x", "guided_grammar": "x", "structured_outputs": {}, "logits_processors": ["x"],
    "prompt_logprobs": 1, "truncate_prompt_tokens": 3, "max_new_tokens": 3, "min_new_tokens": 3,
    "repeat_penalty": 1.5, "json_schema": {}, "json_object": True, "chat_template": "x", "documents": [{}], "add_special_tokens": False,
}  # fmt: skip
REFUSED: list[tuple[str, str, Any]] = [
    *((path, name, value) for path in (CHAT, TEXT) for name, value in BOTH.items()),
    (CHAT, "prompt", "x"), (CHAT, "echo", True), (CHAT, "logprobs", 1), (CHAT, "top_logprobs", 1), (CHAT, "messages", None),
    (TEXT, "messages", MESSAGES), (TEXT, "max_completion_tokens", 3), (TEXT, "top_logprobs", 1),
    (TEXT, "add_generation_prompt", False), (TEXT, "continue_final_message", True), (CHAT, "continue_final_message", True),
    (TEXT, "chat_template_kwargs", {"a": 1}), (TEXT, "logprobs", True), (TEXT, "echo", "yes"),
    (RESPONSES, "n", 2), (RESPONSES, "max_tokens", 3), (RESPONSES, "messages", MESSAGES),
    (RESPONSES, "response_format", {"type": "json_object"}), (RESPONSES, "logprobs", True), (RESPONSES, "provenance", True),
    (RESPONSES, "previous_response_id", "x"), (RESPONSES, "conversation", "x"), (RESPONSES, "background", True),
    (RESPONSES, "top_logprobs", 2), (MESSAGE, "n", 2), (MESSAGE, "stop", "x"), (MESSAGE, "logprobs", True),
    (MESSAGE, "max_completion_tokens", 3), (MESSAGE, "provenance", True), (MESSAGE, "mcp_servers", [{}]),
]  # fmt: skip


@pytest.mark.parametrize(("path", "name", "value"), REFUSED, ids=str)
def test_a_field_with_a_meaning_is_refused_by_name_before_a_stream_begins(
    served: Served, path: str, name: str, value: Any
) -> None:
    for stream in (False, True):
        reply = post(served, path, **{name: value}, stream=stream)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert name in error["message"] and "\n" not in error["message"]
        assert path == MESSAGE or error["param"] == name


@pytest.mark.parametrize("path", NEEDED)
@pytest.mark.parametrize(
    "content",
    [b'{"model": "demo", "x": "\xff\xfe"}', b"\xc3(", b'{"model": NaN}', b'{"temperature": Infinity}',
     b'{"seed": 1' + b"0" * 5000 + b"}", b'{"model": "demo",}', b"[1]", b"{" * 9999],
    ids=lambda content: repr(content[:24]),
)  # fmt: skip
def test_what_is_no_json_object_is_refused(served: Served, path: str, content: bytes) -> None:
    reply = served.client.post(path, content=content)
    assert reply.status_code == 400 and "JSON" in reply.json()["error"]["message"]
    assert path == MESSAGE or reply.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
def test_too_many_tokens_for_the_context_are_refused(served: Served, path: str, stream: bool) -> None:
    name = "max_output_tokens" if path == RESPONSES else "max_tokens"
    reply = post(served, path, **{name: 10**6}, stream=stream)
    assert reply.status_code == 400 and f"{name} asks for 1000000" in reply.json()["error"]["message"]
    assert reply.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("more", [{}, {"max_tokens": 0}, {"n": 2}, {"prompt": ["def f(", "x"]}], ids=str)
def test_a_streamed_echo_has_the_scores_of_the_whole_one(served: Served, more: dict[str, Any]) -> None:
    def parts(choice: dict[str, Any]) -> list[Any]:
        scores = choice["logprobs"] or {}
        return [
            choice["text"],
            *(scores.get(name, []) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")),
        ]

    fields = {"echo": True, "logprobs": 2, "seed": 3, "temperature": 1, **more}
    whole = post(served, TEXT, **fields).json()
    lines = post(served, TEXT, **fields, stream=True).text.splitlines()
    chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    for want in whole["choices"]:
        own = [parts(each) for each in chunks if each["index"] == want["index"]]
        assert [reduce(add, column) for column in zip(*own, strict=True)] == parts(want)
        assert own[0][2][0] is None  # the prompt's first token has no context to be scored by


def test_offsets_are_places_in_the_text_where_tokens_cut_characters(served: Served) -> None:
    """The bytes of one character lie at its place, and the next token behind it."""
    text = "x\u6f22\u6f22y"
    [choice] = post(served, TEXT, prompt=text, echo=True, logprobs=0, max_tokens=0).json()["choices"]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert "\ufffd" in tokens, "a token holds a part of a character"
    assert (choice["text"], tokens[-1], offsets[-1]) == (text, "y", 3)
    assert offsets == sorted(offsets) and {*offsets} <= {0, 1, 2, 3}
