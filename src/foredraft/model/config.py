"""Reading a `config.json` strictly: every key is consumed, known to be harmless, or checked to be neutral.

Contract: `ConfigReader` remembers which keys its caller took; `refuse_rest` refuses whatever is left and
could change the mathematics, by name and value. Which keys mean what is `spec.py`'s business alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError

# Keys that say how a model was made, saved, trained or called, never what it computes.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures
    attention_dropout attn_implementation auto_map bad_words_ids begin_suppress_tokens cache_implementation
    chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id id2label initializer_range is_llama_config label2id length_penalty max_length
    max_sequence_length min_length model_type name_or_path no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix problem_type
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torchscript
    transformers.js_config transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()
)
# Keys that would change the mathematics, with the values that do not.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "partial_rotary_factor": (None, 1, 1.0),
    "pretraining_tp": (None, 1),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "rope_interleaved": (None, False),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (None, False),
}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object; download it again")
    return content


class ConfigReader:
    """A config whose every key must be accounted for."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.seen: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        value = self.config.get(key)
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise CheckpointError(f"config.json: {key} is {value!r}; it must be a number above 0")
        return float(value)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value):
            raise CheckpointError(f"config.json: {key} is {value!r}; it must be a whole number")
        return int(value)

    def optional(self, key: str) -> float | None:
        return None if self.take(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {key} is {value!r}; it must be true or false")
        return value

    def refuse_rest(self) -> None:
        for key, value in self.config.items():
            if key in self.seen or key in HARMLESS:
                continue
            if key in NEUTRAL and value in NEUTRAL[key]:
                continue
            raise CheckpointError(
                f"config.json: {key} = {shortened(value)} is not supported, and ignoring it would change the "
                "model's output; use a checkpoint without it"
            )


def shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
