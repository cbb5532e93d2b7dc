"""Every field of the API: honoured, taken because it changes nothing, or refused by name before a stream begins."""

from __future__ import annotations

import json
from functools import reduce
from operator import add
from typing import Any

import pytest

from foredraft.llm import LLM
from foredraft.serve.foreign_fields import BESIDE, FOREIGN, SERVERS, Foreign
from foredraft.serve.requests import Body, ChatRequest, CompletionRequest
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
    # the names of other servers
    ({"n_predict": 3, "max_tokens": None}, {"max_new_tokens": 3}),
    ({"n_predict": -1, "max_tokens": None, "regex": "[0-9]{40}"}, {"regex": "[0-9]{40}", "max_new_tokens": 99}),
    ({"temperature": 1, "seed": 5, "top_k": -1}, {"temperature": 1, "seed": 5}),
    ({"temperature": 1, "seed": 5, "top_k": 0}, {"temperature": 1, "seed": 5}),
    ({"seed": -1}, {}),
    ({"seed": None, "top_k": None}, {}),
    ({"logit_bias": [[300, 100], [301, -100.0]]}, {"logit_bias": {300: 100, 301: -100.0}}),
    ({"stop_token_ids": [221]}, {"stop_token_ids": (221,)}),
    ({"allowed_token_ids": [300, 301]}, {"allowed_token_ids": (300, 301)}),
    ({"best_of": 1}, {}),
    ({"guided_regex": "[0-9]{4}"}, {"regex": "[0-9]{4}"}),
    ({"guided_choice": ["yes", "no"]}, {"choices": ["yes", "no"]}),
    ({"guided_json": {"enum": ["x", "y"]}}, {"json_schema": {"enum": ["x", "y"]}}),
    ({"guided_json": '{"enum": ["x", "y"]}'}, {"json_schema": {"enum": ["x", "y"]}}),
    ({"guided_grammar": 'start: "a" "b"'}, {"grammar": 'start: "a" "b"'}),
    ({"ebnf": 'root ::= "a" ("b" | "c")'}, {"grammar": 'start: "a" ("b" | "c")'}),
    ({"grammar": 'root ::= "a" ("b" | "c")'}, {"grammar": 'start: "a" ("b" | "c")'}),
    ({"structured_outputs": {"json": {"enum": ["x"]}}}, {"json_schema": {"enum": ["x"]}}),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, {"choices": ["yes", "no"]}),
    ({"structured_outputs": {"regex": "[0-9]{4}"}}, {"regex": "[0-9]{4}"}),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"grammar": 'start: "a"'}),
    ({"response_format": {"type": "json_object", "schema": {"enum": ["x", "y"]}}}, {"json_schema": {"enum": ["x", "y"]}}),
]  # fmt: skip


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


def _on(foreign: Foreign) -> Any:
    """Return a value that is not off."""
    return next(value for value in (True, 0.5, "x", False) if value not in foreign.off)


BOTH: dict[str, Any] = {
    "suffix": "x", "best_of": 3, "audio": {}, "modalities": ["audio"], "web_search_options": {},
    "bad_words": ["x"], "banned_strings": ["x"], "structured_outputs": {}, "guided_choice": [],
    "stop_token_ids": ["x"], "allowed_token_ids": [], "n_predict": -2,
    "truncate_prompt_tokens": 0, "prompt_logprobs": 21, "max_new_tokens": 3, "min_new_tokens": 3,
    "ebnf": "root ::= other", "guided_regex": "[a-",
    "repeat_penalty": 1.5, "json_schema": {}, "json_object": True, "chat_template": "x", "documents": [{}], "add_special_tokens": False,
}  # fmt: skip
REFUSED: list[tuple[str, str, Any]] = [
    *((path, name, value) for path in (CHAT, TEXT) for name, value in BOTH.items()),
    (CHAT, "prompt", "x"), (CHAT, "echo", True), (CHAT, "logprobs", 1), (CHAT, "top_logprobs", 1), (CHAT, "messages", None),
    (TEXT, "prompt", [[]]), (TEXT, "prompt", ["x", ""]), (TEXT, "prompt", []), (TEXT, "prompt", ""),
    (TEXT, "messages", MESSAGES), (TEXT, "max_completion_tokens", 3), (TEXT, "top_logprobs", 1),
    (TEXT, "add_generation_prompt", False), (TEXT, "continue_final_message", True), (CHAT, "continue_final_message", True),
    (TEXT, "chat_template_kwargs", {"a": 1}), (TEXT, "logprobs", True), (TEXT, "echo", "yes"),
    (RESPONSES, "n", 2), (RESPONSES, "max_tokens", 3), (RESPONSES, "messages", MESSAGES),
    (RESPONSES, "response_format", {"type": "json_object"}), (RESPONSES, "logprobs", True), (RESPONSES, "provenance", True),
    (RESPONSES, "previous_response_id", "x"), (RESPONSES, "conversation", "x"), (RESPONSES, "background", True),
    (RESPONSES, "top_logprobs", 21), (RESPONSES, "prompt_logprobs", 1), (MESSAGE, "n", 2), (MESSAGE, "stop", "x"), (MESSAGE, "logprobs", True),
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


# A value of each foreign field that would change the text.
ON: dict[str, Any] = {name: _on(foreign) for name, foreign in FOREIGN.items()}


@pytest.mark.parametrize("path", NEEDED)
def test_fields_of_other_servers_are_refused_by_name_with_a_remedy(served: Served, path: str) -> None:
    for name, value in ON.items():
        reply = post(served, path, **{name: value})
        assert reply.status_code == 400, (name, reply.text)
        error = reply.json()["error"]
        assert error["message"].startswith(f"{name} is not supported; "), name
        assert path == MESSAGE or (error["param"], error["code"]) == (name, "unsupported_parameter")


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_fields_of_other_servers_are_taken_where_they_are_off(served: Served, path: str) -> None:
    off = {name: value for name, foreign in FOREIGN.items() for value in foreign.off}
    beside = dict.fromkeys(BESIDE, 1)
    assert choice(served, path, **off, **beside)[0] == choice(served, path)[0]
    assert choice(served, path, **dict.fromkeys(FOREIGN))[0] == choice(served, path)[0]


def test_every_foreign_field_names_servers_that_know_it() -> None:
    for name, foreign in FOREIGN.items():
        assert foreign.servers and {*foreign.servers.split()} <= {*SERVERS}, name
        assert None in foreign.off and foreign.instead, name


# The fields of public servers' requests that change the text, as their request models have them.
KNOWN = {
    "vllm": "use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids"
    " include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens"
    " truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words"
    " prompt_embeds response_format structured_outputs vllm_xargs repetition_detection thinking_token_budget"
    " guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern chat_template documents"
    " mm_processor_kwargs add_special_tokens logits_processors best_of return_token_ids suffix seed"
    " include_reasoning",
    "sglang": "top_k min_p min_tokens regex ebnf json_schema repetition_penalty stop_token_ids stop_regex no_stop_trim"
    " ignore_eos skip_special_tokens lora_path session_params custom_params custom_logit_processor input_ids"
    " task separate_reasoning stream_reasoning return_token_ids",
    "llama.cpp": "n_predict n_indent n_cmpl t_max_predict_ms top_k top_p min_p top_n_sigma xtc_probability"
    " xtc_threshold typical_p temperature dynatemp_range dynatemp_exponent repeat_last_n repeat_penalty"
    " frequency_penalty presence_penalty dry_multiplier dry_base dry_allowed_length dry_penalty_last_n mirostat"
    " mirostat_tau mirostat_eta adaptive_target adaptive_decay seed n_probs min_keep post_sampling_probs lora"
    " dry_sequence_breakers json_schema grammar grammar_lazy generation_prompt parse_tool_calls preserved_tokens"
    " grammar_triggers reasoning_budget_tokens reasoning_budget_message logit_bias ignore_eos stop samplers",
    "tgi": "repetition_penalty typical_p top_k do_sample watermark best_of truncate return_full_text adapter_id"
    " tool_prompt guideline",
    "ollama": "seed stop temperature frequency_penalty presence_penalty top_p response_format suffix options format"
    " template _debug_render_only",
    "webui": "preset min_p dynamic_temperature dynatemp_low dynatemp_high smoothing_factor smoothing_curve top_k"
    " repetition_penalty repetition_penalty_range typical_p tfs top_a epsilon_cutoff eta_cutoff guidance_scale"
    " negative_prompt penalty_alpha mirostat_mode temperature_last do_sample encoder_repetition_penalty"
    " no_repeat_ngram_size truncation_length custom_token_bans sampler_priority auto_max_new_tokens"
    " ban_eos_token add_bos_token grammar_string mode instruction_template instruction_template_str character"
    " context greeting user_bio chat_template_str chat_instruct_command continue_ impersonate",
    "transformers": "num_beams length_penalty early_stopping generation_config no_repeat_ngram_size",
}  # fmt: skip


@pytest.mark.parametrize("server", KNOWN)
@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_a_field_that_changes_the_text_elsewhere_is_honoured_or_refused(
    server: str, kind: type[Body]
) -> None:
    decided = kind.model_fields.keys() | kind.unsupported.keys() | BESIDE
    assert {*KNOWN[server].split()} <= decided


def test_forms_of_a_text_exclude_each_other(served: Served) -> None:
    for fields in (
        {"regex": "a", "guided_regex": "b"}, {"response_format": {"type": "json_object"}, "ebnf": 'root ::= "a"'},
        {"structured_outputs": {"regex": "a"}, "guided_choice": ["x"]}, {"structured_outputs": {"regex": "a", "choice": ["x"]}},
    ):  # fmt: skip
        reply = post(served, TEXT, **fields)
        assert reply.status_code == 400 and reply.json()["error"]["param"] in fields, reply.text


def test_best_of_is_taken_where_it_is_n(served: Served) -> None:
    assert len(post(served, TEXT, n=2, best_of=2, seed=1, temperature=1).json()["choices"]) == 2
    assert post(served, TEXT, n=2, best_of=3).status_code == 400


def test_a_prompt_is_cut_to_its_last_tokens(served: Served, llm: LLM) -> None:
    ids = llm.encode("def add(a, b):")[0]
    [want] = llm.generate([ids[-3:]], temperature=0, max_new_tokens=12)
    found = post(served, TEXT, truncate_prompt_tokens=3, truncation_side="left").json()
    assert found["choices"][0]["text"] == want.text and found["usage"]["prompt_tokens"] == 3
    chat = post(served, CHAT, truncate_prompt_tokens=3, max_tokens=1).json()
    assert chat["usage"]["prompt_tokens"] == 3
    long = [{"role": "user", "content": "x y " * 400}]
    assert post(served, CHAT, messages=long).status_code == 400
    assert post(served, CHAT, messages=long, truncate_prompt_tokens=-1).status_code == 200


def test_the_model_may_be_left_out(served: Served) -> None:
    for path, needed in NEEDED.items():
        assert served.client.post(path, json=needed).json()["model"] == "demo"


def test_the_end_of_a_text_by_a_stop_token_is_told(served: Served, llm: LLM) -> None:
    text, _ = choice(served, TEXT, ignore_eos=True)
    ids = llm.encode(text)[0]
    stop = next(id for id in ids[2:] if id not in ids[:2])
    found = choice(served, TEXT, stop_token_ids=[stop], ignore_eos=True, logprobs=0)[1]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop)
    assert text.startswith(found["text"]) and "".join(found["logprobs"]["tokens"]) == found["text"]


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
    assert any(token.startswith("bytes:\\x") for token in tokens), "a token holds a part of a character"
    assert (choice["text"], tokens[-1], offsets[-1]) == (text, "y", 3)
    assert offsets == sorted(offsets) and {*offsets} <= {0, 1, 2, 3}
