"""Every field of the API: honoured, taken because it changes nothing, or refused with a remedy; errors as their clients
recognise them: by words, codes, shapes and paths, before a stream begins."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from foredraft.llm import LLM
from foredraft.serve.fields import DEPENDENT, FOREIGN, Body
from foredraft.serve.requests import ChatRequest, CompletionRequest
from tests.serve.routes import (
    CHAT,
    MESSAGE,
    MESSAGES,
    NEEDED,
    PROMPT,
    RESPONSES,
    TEXT,
    post,
    whole_and_streamed,
)
from tests.support.serving import Served, serving


def choice(served: Served, path: str, **fields: Any) -> tuple[str, Any]:
    reply = post(served, path, **fields)
    assert reply.status_code == 200, reply.text
    assert "x-ignored-fields" not in reply.headers
    [found] = reply.json()["choices"]
    return (found["message"]["content"] if path == CHAT else found["text"]), found


# A field -> the option of the library that gives the same text.
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *((own, own) for own in (
        {"temperature": 0.9, "seed": 5}, {"temperature": 1, "seed": 5, "top_p": 0.5}, {"temperature": 1, "seed": 5, "top_k": 3},
        {"temperature": 1, "seed": 5, "min_p": 0.3}, {"presence_penalty": 1.5}, {"frequency_penalty": 1.5},
        {"repetition_penalty": 1.6}, {"stop": ["return", "a"]}, {"ban": ["return"]}, {"regex": "[0-9]{4}"},
    )),
    ({"logit_bias": {"300": 100}}, {"logit_bias": {300: 100}}),
    ({"max_tokens": 3}, {"max_new_tokens": 3}),
    ({"stop": "return"}, {"stop": ["return"]}),
    ({"ignore_eos": True, "min_tokens": 12}, {"ignore_eos": True, "min_new_tokens": 12}),
    ({"drafter": "lookup"}, {"drafter": "none"}),
    ({"drafter": "draft-model", "temperature": 0.7, "seed": 3, "top_p": 0.9}, {"temperature": 0.7, "seed": 3, "top_p": 0.9, "drafter": "none"}),
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
    [want] = llm.chat(MESSAGES, **given) if path == CHAT else llm.generate(PROMPT, **given)
    assert choice(served, path, **fields)[0] == want.text


def test_fields_of_one_route(served: Served, llm: LLM) -> None:
    long, found = choice(served, CHAT, max_tokens=2, max_completion_tokens=5)  # the newer name counts
    assert len(llm.encode(long)[0]) <= 5 and long != choice(served, CHAT, max_tokens=2)[0]
    assert found["finish_reason"] == "length" and found["logprobs"] is None
    ids, text = llm.encode(PROMPT)[0], choice(served, TEXT)[0]
    assert choice(served, TEXT, echo=True)[0] == PROMPT + text
    assert choice(served, TEXT, prompt=ids)[0] == choice(served, TEXT, prompt=[ids])[0] == text
    json_form = {"type": "json_object"}
    assert choice(served, CHAT, response_format=json_form, max_tokens=3)[0].lstrip().startswith("{")
    assert choice(served, CHAT, response_format={"type": "text"})[0] == choice(served, CHAT)[0]
    assert len(post(served, TEXT, n=2, best_of=2, seed=1, temperature=1).json()["choices"]) == 2


HARMLESS: dict[str, Any] = {
    "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "reasoning_effort": "low",
    "verbosity": "low", "prompt_cache_key": "x", "safety_identifier": "x", "parallel_tool_calls": True,
}  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_fields_that_change_nothing_are_taken(served: Served, path: str) -> None:
    assert choice(served, path, **HARMLESS)[0] == choice(served, path)[0]


# A value of each foreign field that would change the text.
ON: dict[str, Any] = {
    name: next(value for value in (True, 0.5, "x", False) if value not in foreign.off)
    for name, foreign in FOREIGN.items()
}


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
    dependent = dict.fromkeys(DEPENDENT, 1)
    assert choice(served, path, **off, **dependent)[0] == choice(served, path)[0]
    assert choice(served, path, **dict.fromkeys(FOREIGN))[0] == choice(served, path)[0]


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
def test_a_field_that_changes_a_text_elsewhere_is_honoured_or_refused(server: str, kind: type[Body]) -> None:
    decided = kind.model_fields.keys() | kind.unsupported.keys() | DEPENDENT
    assert {*KNOWN[server].split()} <= decided


def test_fields_exclude_each_other(served: Served) -> None:
    for fields in (
        {"best_of": 3, "n": 2},
        {"regex": "a", "guided_regex": "b"}, {"response_format": {"type": "json_object"}, "ebnf": 'root ::= "a"'},
        {"structured_outputs": {"regex": "a"}, "guided_choice": ["x"]}, {"structured_outputs": {"regex": "a", "choice": ["x"]}},
    ):  # fmt: skip
        reply = post(served, TEXT, **fields)
        assert reply.status_code == 400 and reply.json()["error"]["param"] in fields, reply.text


def test_a_prompt_is_cut_to_its_last_tokens(served: Served, llm: LLM) -> None:
    ids = llm.encode(PROMPT)[0]
    [want] = llm.generate([ids[-3:]], temperature=0, max_new_tokens=12)
    found = post(served, TEXT, truncate_prompt_tokens=3, truncation_side="left").json()
    assert found["choices"][0]["text"] == want.text and found["usage"]["prompt_tokens"] == 3
    chat = post(served, CHAT, truncate_prompt_tokens=3, max_tokens=1).json()
    assert chat["usage"]["prompt_tokens"] == 3
    long = [{"role": "user", "content": "x y " * 400}]
    assert post(served, CHAT, messages=long).status_code == 400
    assert post(served, CHAT, messages=long, truncate_prompt_tokens=-1).status_code == 200


def test_the_end_of_a_text_by_a_stop_token_is_told(served: Served, llm: LLM) -> None:
    text, _ = choice(served, TEXT, ignore_eos=True)
    ids = llm.encode(text)[0]
    stop = next(id for id in ids[2:] if id not in ids[:2])
    found = choice(served, TEXT, stop_token_ids=[stop], ignore_eos=True, logprobs=0)[1]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop)
    assert text.startswith(found["text"]) and "".join(found["logprobs"]["tokens"]) == found["text"]


@pytest.mark.parametrize("more", [{}, {"max_tokens": 0}, {"n": 2}, {"prompt": ["def f(", "x"]}], ids=str)
def test_a_streamed_echo_has_the_scores_of_the_whole_one(served: Served, more: dict[str, Any]) -> None:
    fields = {"echo": True, "logprobs": 2, "temperature": 1, **more}
    for choice, parts in whole_and_streamed(served, TEXT, **fields):
        assert choice["logprobs"]["token_logprobs"][0] is None  # it has no context to be scored by
        assert len(parts) > 1 or not fields.get("max_tokens", 1)


KEYS = {"message", "type", "param", "code"}
LONG = "word " * 700
ONE, STOP = (
    {"type": "function", "function": {"name": "x"}},
    {"type": "function", "function": {"name": "stop"}},
)
# A route, wrong fields, and what the message begins with; the first field is the wrong one.
BOTH: dict[str, Any] = {
    "suffix": "x", "best_of": 3, "audio": {}, "modalities": ["audio"], "web_search_options": {},
    "bad_words": ["x"], "banned_strings": ["x"], "structured_outputs": {}, "guided_choice": [],
    "stop_token_ids": ["x"], "allowed_token_ids": [], "n_predict": -2,
    "truncate_prompt_tokens": 0, "prompt_logprobs": 21, "max_new_tokens": 3, "min_new_tokens": 3,
    "ebnf": "root ::= other", "guided_regex": "[a-",
    "repeat_penalty": 1.5, "json_schema": {}, "json_object": True, "chat_template": "x", "documents": [{}], "add_special_tokens": False,
}  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((path, {name: value}, "") for path in (CHAT, TEXT) for name, value in BOTH.items()),
    (TEXT, {"temperature": -1}, ""), (TEXT, {"temperature": "hot"}, ""), (TEXT, {"top_p": -1}, ""), (TEXT, {"n": 0}, ""),
    (TEXT, {"n": True}, ""), (TEXT, {"max_tokens": -1}, ""), (TEXT, {"min_tokens": 99}, ""), (TEXT, {"stop": [""]}, ""),
    (TEXT, {"stop": 3}, ""), (TEXT, {"logit_bias": {"x": 1}}, ""), (TEXT, {"logit_bias": {"999999": 1}}, ""),
    (TEXT, {"logit_bias": {"9" * 5000: 1}}, ""), (TEXT, {"regex": "[a-"}, ""), (TEXT, {"logprobs": 21}, ""),
    (TEXT, {"echo": True, "truncate_prompt": "left"}, ""), (TEXT, {"response_format": {"type": "xml"}}, ""),
    (TEXT, {"response_format": {"type": "json_schema"}}, ""),
    (TEXT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}, "strict": True}}}, "the answer is strict"),
    (TEXT, {"drafter": "oracle"}, ""), (TEXT, {"tools": [{"type": "function"}]}, ""), (TEXT, {"guided_json": {"not": {}}}, ""),
    (TEXT, {"prompt": ""}, ""), (TEXT, {"prompt": []}, ""), (TEXT, {"prompt": [[]]}, ""), (TEXT, {"prompt": ["x", ""]}, ""),
    (TEXT, {"prompt": [["a"]]}, "prompt.0.0: Input should be a valid integer"),
    (TEXT, {"prompt": {}}, "prompt: Input should be a valid string"),
    (TEXT, {"messages": MESSAGES}, ""), (TEXT, {"max_completion_tokens": 3}, ""), (TEXT, {"top_logprobs": 1}, ""),
    (TEXT, {"add_generation_prompt": False}, ""), (TEXT, {"continue_final_message": True}, ""),
    (TEXT, {"chat_template_kwargs": {"a": 1}}, ""), (TEXT, {"logprobs": True}, ""), (TEXT, {"echo": "yes"}, ""),
    (CHAT, {"prompt": "x"}, ""), (CHAT, {"echo": True}, ""), (CHAT, {"logprobs": 1}, ""), (CHAT, {"top_logprobs": 1}, ""),
    (CHAT, {"continue_final_message": True}, ""), (CHAT, {"stream_options": 5}, "stream_options: Input should be a valid dictionary"),
    (CHAT, {"messages": None}, "messages: Input should be a valid list"), (CHAT, {"messages": "x"}, ""), (CHAT, {"messages": []}, ""),
    (CHAT, {"messages": [3]}, ""), (CHAT, {"messages": [{"role": "user", "content": 3}]}, ""),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": 5}]}, ""),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]}, ""),
    (CHAT, {"tools": 5}, "tools: Input should be a valid list"), (CHAT, {"tools": [{"type": "retrieval"}]}, ""),
    (CHAT, {"tools": [{"type": "function"}]}, "tools.0.function: Field required"), (CHAT, {"tools": [ONE] * 2}, ""), (CHAT, {"tools": [ONE] * 130}, ""),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, ""),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "zebra"}}}]}, "the schema of the tool 'x' is no JSON schema: type: "),
    (CHAT, {"tool_choice": "required"}, ""), (CHAT, {"tool_choice": ONE, "tools": [STOP]}, ""),
    (CHAT, {"tool_choice": "always"}, "tool_choice: Input should be 'none', 'auto' or 'required'"),
    (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice.function: Field required"),
    (CHAT, {"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name: Field required"),
    (CHAT, {"regex": "x", "tools": [ONE], "tool_choice": "required"}, ""), (CHAT, {"functions": [{"name": "x"}]}, ""),
    (CHAT, {"prediction": {"type": "content"}}, ""), (CHAT, {"prediction": {"type": "content", "content": [{"type": "image"}]}}, ""),
    (CHAT, {"prediction": {"type": "content", "content": "x"}, "drafter": "lookup"}, ""),
    (CHAT, {"policy": "fixd"}, ""), (CHAT, {"max_draft": 0}, ""),
    (RESPONSES, {"n": 2}, ""), (RESPONSES, {"max_tokens": 3}, ""), (RESPONSES, {"messages": MESSAGES}, ""), (RESPONSES, {"input": 3}, ""),
    (RESPONSES, {"input": [{"type": "file"}]}, ""), (RESPONSES, {"response_format": {"type": "json_object"}}, ""),
    (RESPONSES, {"logprobs": True}, ""), (RESPONSES, {"provenance": True}, ""), (RESPONSES, {"previous_response_id": "x"}, ""),
    (RESPONSES, {"conversation": "x"}, ""), (RESPONSES, {"background": True}, ""), (RESPONSES, {"top_logprobs": 21}, ""),
    (RESPONSES, {"prompt_logprobs": 1}, ""), (RESPONSES, {"tool_choice": "always"}, "tool_choice: Input should be 'none', 'auto' or 'required'"),
    (RESPONSES, {"tools": [{"type": "function", "parameters": {}}]}, "tools.0.name: Field required"),
    (RESPONSES, {"tools": [{"type": 5}]}, "tools.0.type: Input should be a valid string"),
    (MESSAGE, {"n": 2}, ""), (MESSAGE, {"stop": "x"}, ""), (MESSAGE, {"logprobs": True}, ""), (MESSAGE, {"max_completion_tokens": 3}, ""),
    (MESSAGE, {"provenance": True}, ""), (MESSAGE, {"mcp_servers": [{}]}, ""), (MESSAGE, {"messages": []}, ""),
    (MESSAGE, {"temperature": -1}, ""), (MESSAGE, {"thinking": {"type": "deep"}}, ""), (MESSAGE, {"max_tokens": "x"}, ""),
    (MESSAGE, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, ""),
    (MESSAGE, {"max_tokens": None}, "max_tokens: Input should be a valid integer"), (MESSAGE, {"output_format": {"type": "text"}}, ""),
    (MESSAGE, {"tools": [{"name": "x"}]}, "tools.0.input_schema: Field required"),
    (MESSAGE, {"tool_choice": {"type": "always"}}, "tool_choice.type: Input should be 'auto', 'any', 'tool' or 'none'"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields", "says"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_a_wrong_field_is_refused_by_its_path_before_a_stream_begins(
    served: Served, path: str, fields: dict[str, Any], says: str, stream: bool
) -> None:
    reply = post(served, path, **fields, stream=stream)
    name, error = next(iter(fields)), reply.json()["error"]
    assert reply.status_code == 400, reply.text
    assert error["message"].startswith(says) if says else name in error["message"]
    assert "\n" not in error["message"]
    if path == MESSAGE:
        assert reply.json()["type"] == "error" and error["type"] == "invalid_request_error"
    else:
        assert set(error) == KEYS and error["param"] == name
    served.wait(served.idle)


def test_what_no_one_field_is_wrong_about_is_refused(served: Served) -> None:
    for path, fields, status in (
        (TEXT, {"model": "gpt-9"}, 404), (MESSAGE, {"model": "nope"}, 404), (TEXT, {"prompt": [10**9]}, 400),
        (TEXT, {"prompt": "\ud800"}, 400), (TEXT, {"stream_options": {"include_usage": True}}, 400),
        (CHAT, {"messages": [{}]}, 400), (CHAT, {"messages": [{"content": "x"}]}, 400),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400),
        (CHAT, {"messages": [*MESSAGES, {"content": "x"}], "tools": [ONE]}, 400),
    ):  # fmt: skip
        assert post(served, path, **fields).status_code == status, (path, fields)
    for path, needed in NEEDED.items():
        assert served.client.post(path, json=needed).json()["model"] == "demo", "it may be left out"
    assert served.idle()


@pytest.mark.parametrize("path", [*NEEDED, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "content",
    [b'{"model": "demo", "x": "\xff\xfe"}', b"\xc3(", b'{"model": NaN}', b'{"temperature": Infinity}',
     b'{"seed": 1' + b"0" * 5000 + b"}", b'{"model": "demo",}', b"[1]", b'"x"', b"", b"{", b"{" * 9999, b"[" * 50_000],
    ids=lambda content: repr(content[:24]),
)  # fmt: skip
def test_what_is_no_json_object_is_refused(served: Served, path: str, content: bytes) -> None:
    reply = served.client.post(path, content=content)
    assert reply.status_code == 400 and "JSON" in reply.json()["error"]["message"]
    assert path == MESSAGE or reply.json()["error"]["code"] == "invalid_json"


def test_numbers_and_texts_that_no_reply_could_repeat_are_refused(served: Served) -> None:
    for value in ("1e999", "-1e999", '"\\ud800"', '{"\\uDFFF": 1}', '["\\ude00\\ud83d"]', '"\ud800"'):
        for path, prompt in ((RESPONSES, '"input"'), (TEXT, '"prompt"')):
            body = f'{{"model": "demo", {prompt}: "x", "metadata": {{"a": {value}}}}}'
            refused = served.client.post(path, content=body.encode(errors="surrogatepass"))
            assert refused.status_code == 400, (path, value)
            assert refused.json()["error"]["code"] == "invalid_json"
    pair = '{"input": "x", "max_output_tokens": 1, "metadata": {"a": "\\ud83d\\ude00"}}'
    assert served.client.post(RESPONSES, content=pair).json()["metadata"] == {"a": "\N{GRINNING FACE}"}


@pytest.mark.parametrize(
    ("path", "field"),
    [
        *((TEXT, field) for field in ("prompt", "stop", "ban")),
        *((MESSAGE, field) for field in ("messages", "system", "stop_sequences", "tools")),
        (CHAT, "messages"),
        (RESPONSES, "input"),
        (RESPONSES, "tools"),
    ],
)
def test_a_long_list_with_a_wrong_item_is_refused_at_once(served: Served, path: str, field: str) -> None:
    begun = time.process_time()
    assert post(served, path, **{field: [1] * 250_000 + ["x"] * (field == "prompt")}).status_code == 400
    assert time.process_time() - begun < 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "asked"),
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "max_tokens"),
        (TEXT, {"prompt": LONG}, "max_tokens"),
        (RESPONSES, {"input": LONG}, "max_output_tokens"),
    ],
    ids=[CHAT, TEXT, RESPONSES],
)
def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(
    served: Served, path: str, fields: dict[str, Any], asked: str, stream: bool
) -> None:
    for more in ({asked: None}, {asked: 5}):
        reply = post(served, path, **fields, **more, stream=stream)
        error = reply.json()["error"]
        assert reply.status_code == 400
        assert "this model's maximum context length is 512 tokens" in error["message"].lower()
        assert (error["code"], error["param"]) == ("context_length_exceeded", next(iter(fields)))
        assert (asked in error["message"]) is bool(more[asked]), "the field is named only where it was given"
    error = post(served, path, **{asked: 10**6}, stream=stream).json()["error"]
    assert f"{asked} asks for 1000000" in error["message"] and error["code"] == "context_length_exceeded"


def test_a_number_of_tokens_that_does_not_fit_is_named_by_its_own_field(served: Served) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        body = {"model": "demo", "messages": MESSAGES, name: 1000}
        assert f"lower {name}" in served.client.post(CHAT, json=body).json()["error"]["message"]
    message = post(served, TEXT, prompt=[5] * 500, max_tokens=None).json()["error"]["message"]
    assert "the reply needs 16" in message and "max_tokens" not in message


def test_a_message_that_is_too_long_is_told_as_anthropic_does(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 511 maximum"):
        claude.messages.create(model="demo", max_tokens=5, messages=[{"role": "user", "content": LONG}])


def test_messages_get_as_many_tokens_as_there_is_room_for(served: Served) -> None:
    reply = post(served, MESSAGE, max_tokens=32_000, ignore_eos=True)
    assert reply.status_code == 200 and reply.json()["stop_reason"] == "max_tokens"
    usage = reply.json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] == 512


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"])
def test_every_refusal_below_messages_has_anthropic_s_shape(llm: LLM, keys: Path, path: str) -> None:
    own = {"x-api-key": "one"}
    with serving(llm, api_key_file=keys, max_body=1000) as served:
        body = {"model": "nope", "messages": MESSAGES, "max_tokens": 1}
        replies = {
            "authentication_error": served.client.post(path, json={}),
            "permission_error": served.client.post(path, json={}, headers=own | {"origin": "http://else"}),
            "request_too_large": served.client.post(path, content=b"x" * 2000, headers=own),
            "not_found_error": served.client.post(path, json=body, headers=own),
            "invalid_request_error": served.client.delete(path, headers=own),
        }
    for kind, reply in replies.items():
        assert 400 <= reply.status_code < 500 and reply.json()["type"] == "error"
        assert reply.json()["error"].keys() == {"type", "message"}
        assert reply.json()["error"]["type"] == kind or path.endswith("batches")


def test_a_key_may_come_in_the_header_of_either_api(llm: LLM, keys: Path) -> None:
    with serving(llm, api_key_file=keys) as served:
        for path in ("/v1/models", "/v1/models/demo", "/v1/capabilities"):
            for headers, status in (
                ({"x-api-key": "one"}, 200), ({"authorization": "Bearer one"}, 200), ({"x-api-key": "no"}, 401), ({}, 401),
            ):  # fmt: skip
                assert served.client.get(path, headers=headers).status_code == status, (path, headers)
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="one") as client:
            assert [model.id for model in client.models.list()] == ["demo"]
