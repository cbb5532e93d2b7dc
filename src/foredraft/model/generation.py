"""generation_config.json: how a checkpoint's makers mean it to be sampled from.

Contract: what it sets and a request can ask for becomes the request's default; the rest is known to change
nothing here, or is named in a warning. Keys that are absent say nothing: the values that `transformers` would
put in their place are its own, not the checkpoint's. End-of-text ids are `spec.py`'s to read; those that the
model cannot say are named here.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from foredraft.model.config import read_json, shortened

__all__ = ["generation_defaults"]

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
# Keys that are options of a request, by the same names: those of greedy decoding too, and of sampling alone.
ALWAYS = "max_new_tokens min_new_tokens repetition_penalty".split()
SAMPLING = "min_p temperature top_k top_p typical_p".split()
COUNTS = {"max_new_tokens", "min_new_tokens", "top_k"}
# Keys that decide nothing about the text here: ids read elsewhere, how results are returned, how caches and
# drafts are kept by others, and limits on prompt and output together, which a request's own replace.
HARMLESS = frozenset(
    """
    _from_model_config _commit_hash assistant_confidence_threshold assistant_early_exit assistant_lookbehind
    bos_token_id cache_config cache_implementation compile_config continuous_batching_config
    decoder_start_token_id disable_compile do_sample eos_token_id is_assistant max_length
    max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule output_attentions
    output_hidden_states output_logits output_scores pad_token_id prefill_chunk_size
    prompt_lookup_num_tokens return_dict_in_generate stop_strings target_lookbehind transformers_version
    trust_remote_code use_cache
    """.split()
)
OFF: dict[str, tuple[object, ...]] = {  # values that ask for nothing, besides null
    "diversity_penalty": (0.0,),
    "early_stopping": (False,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "guidance_scale": (1.0,),
    "length_penalty": (1.0,),
    "low_memory": (False,),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
    "token_healing": (False,),
    "top_h": (1.0,),
}


def generation_defaults(folder: Path, vocabulary: int) -> dict[str, Any]:
    """The options of a request that the folder's file sets; none without a file. Their values are the
    caller's to check.

    vocabulary: how many ids the model has. do_sample = false is greedy decoding, whatever the file says of
    sampling. What cannot be honoured gets a warning.
    """
    file = folder / FILE
    if not file.is_file():
        return {}
    config = {key: value for key, value in read_json(file).items() if value is not None}
    for key in sorted(config.keys() - {*ALWAYS, *SAMPLING} - HARMLESS):
        if config[key] not in OFF.get(key, ()):
            value = shortened(config[key])
            logger.warning("%s asks for %s = %s, which is not supported; it is left out", file, key, value)
    for key in ("bos_token_id", "eos_token_id"):
        for id in config[key] if isinstance(config.get(key), list) else [config.get(key)]:
            if isinstance(id, int) and id >= vocabulary:
                told = "%s asks for %s = %s, but the model's vocabulary ends at %d; it is left out"
                logger.warning(told, file, key, shortened(id), vocabulary - 1)
    greedy = config.get("do_sample") is False
    asked = {"temperature": 0.0} if greedy else {key: config[key] for key in SAMPLING if key in config}
    asked |= {key: config[key] for key in ALWAYS if key in config}
    if "stop_strings" in config:
        asked["stop"] = config["stop_strings"]
    return {key: _whole(value) if key in COUNTS else value for key, value in asked.items()}


def _whole(value: Any) -> Any:
    """20 for 20.0, as some write their counts."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
