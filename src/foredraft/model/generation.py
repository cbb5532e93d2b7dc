"""Read a checkpoint's sampling defaults from its `generation_config.json`.

Contract: a key that is also an option of a request becomes that option's default. Every other key that
`transformers` reads is known to change nothing here, or is named in a warning. An absent key sets nothing:
the defaults of `transformers` are not the checkpoint's. `spec.py` reads the end-of-text ids; this module
warns of ids beyond the vocabulary.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from foredraft.errors import shortened
from foredraft.model.config import read_json
from foredraft.model.reference_keys import GENERATION

__all__ = ["generation_defaults"]

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
# Keys that are options of a request of the same name: those that greedy decoding reads too, and the others.
ALWAYS = "max_new_tokens min_new_tokens repetition_penalty".split()
SAMPLING = "min_p temperature top_k top_p typical_p".split()
COUNTS = {"max_new_tokens", "min_new_tokens", "top_k"}
# Keys that do not affect the generated text here: ids that other modules read, output formats, the caches and
# assistants of transformers, and limits on prompt and output together, which a request's own limits replace.
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
NEUTRAL: dict[str, tuple[object, ...]] = {  # values that switch a feature off, besides null
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


def generation_defaults(folder: Path, vocab_size: int) -> dict[str, Any]:
    """Return the request options that a checkpoint sets, by name; empty without a file.

    `do_sample = false` means temperature 0, whatever the file says about sampling. A warning is logged for
    each key that is not supported, and one line of level INFO for those that transformers does not read.

    Args:
        folder: The checkpoint.
        vocab_size: The number of token ids of the model.

    Returns:
        Option values, which the caller must validate.

    Raises:
        CheckpointError: The file is not a JSON object.
    """
    file = folder / FILE
    if not file.is_file():
        return {}
    config = {key: value for key, value in read_json(file).items() if value is not None}
    unread = []
    for key in sorted(config.keys() - {*ALWAYS, *SAMPLING} - HARMLESS):
        name, value = shortened(key)[1:-1], shortened(config[key])  # a key is any string: without quotes
        if key not in GENERATION:
            unread.append(f"{name} = {value}")
        elif config[key] not in NEUTRAL.get(key, ()):
            logger.warning("%s asks for %s = %s, which is not supported; it is left out", file, name, value)
    if unread:
        logger.info("%s: ignored, because transformers does not read it: %s", file, ", ".join(unread))
    for key in ("bos_token_id", "eos_token_id"):
        for id in config[key] if isinstance(config.get(key), list) else [config.get(key)]:
            if isinstance(id, int) and id >= vocab_size:
                message = "%s asks for %s = %s, but the model's vocabulary ends at %d; it is left out"
                logger.warning(message, file, key, shortened(id), vocab_size - 1)
    greedy = config.get("do_sample") is False
    options = {"temperature": 0.0} if greedy else {key: config[key] for key in SAMPLING if key in config}
    options |= {key: config[key] for key in ALWAYS if key in config}
    if "stop_strings" in config:
        options["stop"] = config["stop_strings"]
    return {key: _integral(value) if key in COUNTS else value for key, value in options.items()}


def _integral(value: Any) -> Any:
    """Return 20 for 20.0: some checkpoints write whole numbers as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
