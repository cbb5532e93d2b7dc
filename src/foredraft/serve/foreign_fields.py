"""Foreign fields: those of other public servers' requests that change the text, and that no request has here.

A field that changes the text is honoured or refused by name, whatever server its client was written for. This
table has those that are refused, with the values that leave the text as it is, the servers that know them,
and what to do instead. A field that a request honours under its own name stands with the requests.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["BESIDE", "FOREIGN", "SERVERS", "Foreign"]

# Where each server declares the fields of its requests.
SERVERS = {
    "vllm": "https://github.com/vllm-project/vllm/tree/main/vllm/entrypoints/openai",
    "sglang": "https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/entrypoints/openai/protocol.py",
    "llama.cpp": "https://github.com/ggml-org/llama.cpp/blob/master/tools/server/server-schema.cpp",
    "tgi": "https://github.com/huggingface/text-generation-inference/blob/main/router/src/lib.rs",
    "ollama": "https://github.com/ollama/ollama/blob/main/openai/openai.go",
    "webui": "https://github.com/oobabooga/text-generation-webui/blob/main/extensions/openai/typing.py",
    "transformers": "https://huggingface.co/docs/transformers/main_classes/text_generation",
    "mistral": "https://docs.mistral.ai/api",
}


class Foreign(NamedTuple):
    """A field of other servers.

    Attributes:
        servers: Those that know it, by their names in `SERVERS`, separated by spaces.
        off: Its values that leave the text as it is.
        instead: What to do instead.
    """

    servers: str
    off: tuple[Any, ...] = (None,)
    instead: str = "leave it out"


FALSE, TRUE = (None, False), (None, True)
EMPTY: tuple[Any, ...] = (None, "", [], {})
ZERO, ONE, LESS = (None, 0), (None, 1), (None, 0, -1)  # a float that is whole equals its integer
PENALTIES = "give repetition_penalty, presence_penalty or frequency_penalty"
TRUNCATIONS = "give top_k, top_p, min_p or typical_p"
ADAPTER = "serve a model with its adapter merged"
TEMPLATE = "put a chat_template.jinja into the model's folder"
CONSTRAINT = "give response_format, regex or grammar"
ORDER = "leave it out; the order of the transforms is that of transformers"

FOREIGN: dict[str, Foreign] = {
    # beam search, and other ways to search
    "num_beams": Foreign("transformers", ONE, "leave it out; beam search is not supported"),
    "use_beam_search": Foreign("vllm", FALSE, "leave it out; beam search is not supported"),
    "length_penalty": Foreign("vllm transformers", ONE),
    "early_stopping": Foreign("vllm transformers", FALSE),
    "penalty_alpha": Foreign("webui transformers", ZERO),
    "guidance_scale": Foreign("webui transformers", ONE),
    "negative_prompt": Foreign("webui", EMPTY),
    "do_sample": Foreign("tgi webui transformers", TRUE, "give temperature 0"),
    # truncation and temperature
    "top_n_sigma": Foreign("llama.cpp", LESS, TRUNCATIONS),
    "top_a": Foreign("webui", ZERO, TRUNCATIONS),
    "tfs": Foreign("webui", ONE, TRUNCATIONS),
    "tfs_z": Foreign("llama.cpp", ONE, TRUNCATIONS),
    "epsilon_cutoff": Foreign("webui", ZERO, TRUNCATIONS),
    "eta_cutoff": Foreign("webui", ZERO, TRUNCATIONS),
    "xtc_probability": Foreign("llama.cpp webui", ZERO, TRUNCATIONS),
    "mirostat": Foreign("llama.cpp", ZERO, TRUNCATIONS),
    "mirostat_mode": Foreign("webui", ZERO, TRUNCATIONS),
    "adaptive_target": Foreign("llama.cpp", (None, -1), TRUNCATIONS),
    "min_keep": Foreign("llama.cpp", ZERO),
    "dynatemp_range": Foreign("llama.cpp", ZERO, "give temperature"),
    "dynamic_temperature": Foreign("webui", FALSE, "give temperature"),
    "smoothing_factor": Foreign("webui", ZERO, "give temperature"),
    "temperature_last": Foreign("webui", FALSE, "leave it out; temperature comes before truncation"),
    "samplers": Foreign("llama.cpp", EMPTY, ORDER),
    "sampler_priority": Foreign("webui", EMPTY, ORDER),
    "preset": Foreign("webui", EMPTY, "give its options one by one"),
    "generation_config": Foreign("transformers", EMPTY, "give its options one by one"),
    "options": Foreign("ollama", EMPTY, "give its members as fields of the request"),
    # penalties
    "repeat_last_n": Foreign("llama.cpp", (None, -1), "leave it out; penalties look at the whole text"),
    "repetition_penalty_range": Foreign("webui", ZERO, "leave it out; penalties look at the whole text"),
    "dry_multiplier": Foreign("llama.cpp webui", ZERO, PENALTIES),
    "no_repeat_ngram_size": Foreign("webui transformers", ZERO, PENALTIES),
    "encoder_repetition_penalty": Foreign("webui transformers", ONE, PENALTIES),
    "repetition_detection": Foreign("vllm", EMPTY, PENALTIES),
    "watermark": Foreign("tgi", FALSE),
    "watermarking": Foreign("vllm", FALSE),
    "custom_logit_processor": Foreign("sglang", EMPTY, "give logit_bias"),
    "custom_params": Foreign("sglang", EMPTY),
    "logits_processors": Foreign("vllm", EMPTY, "give logit_bias"),
    "vllm_xargs": Foreign("vllm", EMPTY),
    "random_seed": Foreign("mistral", (None, -1), "its name is seed"),
    # where a text ends
    "stop_regex": Foreign("sglang", EMPTY, "give stop, or regex for the whole text"),
    "no_stop_trim": Foreign("sglang", FALSE, "its name is include_stop_str_in_output"),
    "ban_eos_token": Foreign("webui", FALSE, "its name is ignore_eos"),
    "custom_token_bans": Foreign("webui", EMPTY, "give logit_bias"),
    "thinking_token_budget": Foreign("vllm", (None, -1)),
    "reasoning_budget_tokens": Foreign("llama.cpp", (None, -1)),
    "t_max_predict_ms": Foreign("llama.cpp", LESS, "give max_tokens"),
    "n_indent": Foreign("llama.cpp", ZERO),
    "auto_max_new_tokens": Foreign("webui", FALSE, "give max_tokens"),
    "truncation_length": Foreign("webui", ZERO, "its name is truncate_prompt_tokens"),
    "truncate": Foreign("tgi", (None,), "its name is truncate_prompt_tokens"),
    # constraints
    "grammar_string": Foreign("webui", EMPTY, "its name is grammar"),
    "grammar_lazy": Foreign("llama.cpp", FALSE),
    "grammar_triggers": Foreign("llama.cpp", EMPTY),
    "preserved_tokens": Foreign("llama.cpp", EMPTY),
    "guided_whitespace_pattern": Foreign("vllm", (None,), CONSTRAINT),
    "structural_tag": Foreign("vllm sglang", EMPTY, CONSTRAINT),
    "format": Foreign("ollama", EMPTY, "its name is response_format"),
    # the model
    "lora": Foreign("llama.cpp", EMPTY, ADAPTER),
    "lora_path": Foreign("sglang", EMPTY, ADAPTER),
    "adapter_id": Foreign("tgi", EMPTY, ADAPTER),
    # the prompt
    "prompt_embeds": Foreign("vllm", EMPTY, "give the prompt as text or token ids"),
    "input_ids": Foreign("sglang", EMPTY, "give token ids as the prompt of /v1/completions"),
    "session_params": Foreign("sglang", EMPTY, "give the whole conversation"),
    "add_bos_token": Foreign("webui", TRUE, "give the prompt as token ids"),
    "image_data": Foreign("llama.cpp", EMPTY),
    "mm_processor_kwargs": Foreign("vllm", EMPTY),
    "generation_prompt": Foreign("llama.cpp", EMPTY, TEMPLATE),
    "template": Foreign("ollama", EMPTY, TEMPLATE),
    "chat_template_str": Foreign("webui", EMPTY, TEMPLATE),
    "instruction_template": Foreign("webui", EMPTY, TEMPLATE),
    "instruction_template_str": Foreign("webui", EMPTY, TEMPLATE),
    "mode": Foreign("webui", (None, "instruct"), TEMPLATE),
    "character": Foreign("webui", EMPTY, "give a system message"),
    "context": Foreign("webui ollama", EMPTY, "give a system message"),
    "greeting": Foreign("webui", EMPTY, "give it as a message"),
    "user_bio": Foreign("webui", EMPTY, "give a system message"),
    "chat_instruct_command": Foreign("webui", EMPTY, "give a system message"),
    "continue_": Foreign("webui", FALSE, "its name is continue_final_message"),
    "impersonate": Foreign("webui", FALSE),
    "tool_prompt": Foreign("tgi", EMPTY, "give a system message"),
    "guideline": Foreign("tgi", EMPTY, "give a system message"),
    "safe_prompt": Foreign("mistral", FALSE, "give a system message"),
    "task": Foreign("sglang", EMPTY),
    "_debug_render_only": Foreign("ollama", FALSE, "give the messages to /tokenize"),
    # what the text shows, and its scores
    "spaces_between_special_tokens": Foreign("vllm", TRUE, "leave it out; special tokens stand as they are"),
    "return_full_text": Foreign("tgi", FALSE, "its name is echo, of /v1/completions"),
    "parse_tool_calls": Foreign("llama.cpp", TRUE, "leave out tools"),
    "separate_reasoning": Foreign("sglang", TRUE),
    "stream_reasoning": Foreign("sglang", TRUE),
    "include_reasoning": Foreign("vllm", TRUE),
    "logprob_token_ids": Foreign("vllm", EMPTY, "give the number of the likeliest tokens as logprobs"),
    "return_tokens_as_token_ids": Foreign("vllm", FALSE, "its name is return_token_ids"),
    "return_tokens": Foreign("llama.cpp", FALSE, "its name is return_token_ids"),
    "n_probs": Foreign("llama.cpp", ZERO, "its name is logprobs"),
    "post_sampling_probs": Foreign("llama.cpp", FALSE, "leave it out; scores are by the model's logits"),
    "top_n_tokens": Foreign("tgi", ZERO, "its name is logprobs"),
    "decoder_input_details": Foreign("tgi", FALSE, "its name is prompt_logprobs"),
    "n_cmpl": Foreign("llama.cpp", ONE, "its name is n"),
}  # fmt: skip
# Fields of theirs that act only beside one of the table, or of those that requests honour.
BESIDE = frozenset(
    "xtc_threshold mirostat_tau mirostat_eta adaptive_decay dynatemp_exponent dynatemp_low dynatemp_high"
    " smoothing_curve dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers"
    " reasoning_budget_message reasoning_budget_start_tag reasoning_budget_end_tag reasoning_budget_end_tags"
    " guided_decoding_backend bot_name name1 name2 user_name".split()
)
