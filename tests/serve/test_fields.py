"""Every field of the API: honoured, taken because it changes nothing, or refused with a remedy."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foredraft.llm import LLM
from foredraft.serve.fields import DEPENDENT, FOREIGN, Body
from foredraft.serve.requests import ChatRequest, CompletionRequest
from tests.serve.routes import CHAT, MESSAGE, MESSAGES, NEEDED, PROMPT, TEXT, post, whole_and_streamed
from tests.support.serving import Served


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
