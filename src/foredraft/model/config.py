"""Reading a `config.json` strictly: every key is consumed, known to be harmless, or checked to be neutral.

Contract: `ConfigReader` remembers which keys its caller took; `refuse_rest` refuses whatever is left and
could change the mathematics, by name and value. Which keys mean what is the business of `spec.py`,
`families.py` and `rope_config.py` alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError

LARGEST = sys.float_info.max
# Keys that say how a model was made, saved, trained or called, never what it computes.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _flash_attn_2_enabled _name_or_path architectures attention_dropout attn_implementation bad_words_ids
    begin_suppress_tokens cache_implementation chunk_size_feed_forward decoder_start_token_id
    diversity_penalty do_sample early_stopping embd_pdrop encoder_no_repeat_ngram_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing hidden_dropout id2label ignore_index initializer_range is_llama_config label2id
    length_penalty low_cpu_mem_usage max_length max_sequence_length min_length model_max_length model_type
    name_or_path neftune_noise_alpha no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id padding_side prefix pretraining_tp
    problem_type remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate
    sep_token_id seq_length summary_type suppress_tokens task_specific_params temperature tf_legacy_loss
    tokenizer_class tokenizer_padding_side top_k top_p torchscript transformers.js_config transformers_version
    trust_remote_code typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache use_return_dict
    """.split()
)
HARMLESS_IN_ROPE = frozenset({"finetuned"})
# Keys that would change the mathematics, with the values that do not, besides null.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "attn_logit_softcapping": (),
    "auto_map": ({},),  # modelling code that the checkpoint brings along
    "cross_attention_hidden_size": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "logits_scaling": (1.0,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "pruned_heads": ({},),
    "quantization_config": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1.0,),
    "rope_interleaved": (False,),
    "sliding_window": (),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "use_sliding_window": (False,),
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
    """A JSON object whose every key must be accounted for; `where` names it in messages.

    A default stands in for a key that is absent. null is a value like any other to whoever takes a key, and
    mostly a wrong one; a key that nobody takes may as well be absent.
    """

    def __init__(
        self, config: Mapping[str, Any], where: str = "config.json", harmless: frozenset[str] = HARMLESS
    ) -> None:
        self.config = config
        self.where = where
        self.harmless = harmless
        self.seen: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return self.config.get(key, default)

    def part(self, key: str) -> ConfigReader | None:
        """The object under a key; None where it is absent, null or empty."""
        value = self.take(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "it must be a JSON object or null")
        return ConfigReader(value, f"{self.where}, {key}", HARMLESS_IN_ROPE) if value else None

    def number(self, key: str, default: float | None = None) -> float:
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST:
            raise self.wrong(key, "it must be a finite number above 0")
        return float(value)

    def count(
        self, key: str, default: int | None = None, *, null: int | None = None, zero: bool = False
    ) -> int:
        """A whole number above 0, or from it with `zero`; `null` is what null stands for, if for anything."""
        value = self.take(key, default)
        if value is None and null is not None:
            return null
        if zero and value == 0 and not isinstance(value, bool):
            return 0
        value = self.number(key, default)
        if value != int(value) or value >= 2**31:
            raise self.wrong(key, "it must be a whole number below 2^31")
        return int(value)

    def optional(self, key: str, default: float | None = None, *, zero: bool = False) -> float | None:
        """A number, or None for null, and with `zero` for 0."""
        value = self.take(key, default)
        return None if value is None or (zero and value == 0) else self.number(key, default)

    def flag(self, key: str, default: bool = False, *, null: bool | None = None) -> bool:
        """true or false; `null` is what null stands for, if for anything."""
        value = self.take(key, default)
        if value is None and null is not None:
            return null
        if not isinstance(value, bool):
            raise self.wrong(key, "it must be true or false")
        return value

    def wrong(self, key: str, remedy: str) -> CheckpointError:
        found = f"is {shortened(self.config[key])}" if key in self.config else "is missing"
        return CheckpointError(f"{self.where}: {key} {found}; {remedy}")

    def refuse_rest(self) -> None:
        for key, value in self.config.items():
            if key in self.seen or key in self.harmless or value is None:
                continue
            if key in NEUTRAL and value in NEUTRAL[key]:
                continue
            found = f"{self.where}: {key} = {shortened(value)}"
            if key in NEUTRAL:
                raise CheckpointError(
                    f"{found} is not supported, and ignoring it would change the model's output; use a"
                    " checkpoint without it"
                )
            raise CheckpointError(
                f"{found} is not known, and ignoring it could change the model's output; use a checkpoint"
                " without it, or take it out if it says nothing of the model"
            )


def shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
