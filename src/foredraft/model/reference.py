"""What becomes of the keys of a `config.json` that the model's reader does not read.

Contract: the reference is `transformers`. A key that its class of the model type does not read cannot change
its output: it is ignored, and the caller names it. A key that it reads (`reference_keys.py`) is refused by
name and value, unless it changes no text or has a value that switches it off. So is a key to which another
implementation gives a meaning: ignoring it, the model could be another than the one that its maker ran.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import ConfigReader
from foredraft.model.reference_keys import GENERATION

__all__ = ["ELSEWHERE", "ELSEWHERE_IN_ROPE", "HARMLESS", "NEUTRAL", "check_unread"]

# Keys that transformers reads, but not to compute a text: they say how a model is saved, trained, run, split
# between devices, or called. Options of `generate` count only in generation_config.json here.
HARMLESS = GENERATION | frozenset(
    """
    _attn_implementation _attn_implementation_internal _commit_hash _experts_implementation
    _experts_implementation_internal _name_or_path _output_attentions
    allow_global_per_layer_attribute_access architectures attention_dropout attn_implementation attn_pdrop
    base_model_ep_plan base_model_fsdp_plan base_model_pp_plan
    base_model_tp_plan chunk_size_feed_forward classifier_dropout dropout embd_pdrop embedding_dropout
    experts_implementation gradient_checkpointing hidden_dropout id2label init_std initializer_range
    is_decoder label2id layerdrop model_type name_or_path num_labels output_cross_attentions pretraining_tp
    problem_type reorder_and_upcast_attn resid_pdrop residual_dropout return_dict
    serialize_explicit_per_layer_config summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    """.split()
)
# Values, besides null, that switch off what transformers reads a key for.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "output_router_logits": (False,),
    "partial_rotary_factor": (1.0,),
    "per_layer_config": ({},),
    "use_bidirectional_attention": (False,),
}
Meanings = Mapping[str, tuple[tuple[object, ...], str]]
# Keys that another implementation reads -> the values without effect, besides null, and what it does.
#   exllamav2: https://github.com/turboderp-org/exllamav2/blob/master/exllamav2/config.py
#   MLX: https://github.com/ml-explore/mlx-lm/tree/main/mlx_lm/models
#   nanotron: https://github.com/huggingface/nanotron/blob/main/src/nanotron/config/models_config.py
#   vLLM: https://github.com/vllm-project/vllm/tree/main/vllm/model_executor
ELSEWHERE: Meanings = {
    "attn_logit_softcapping": ((), "exllamav2 caps attention scores"),
    "auto_map": (({},), "the checkpoint has modelling code of its own"),
    "dual_chunk_attention_config": ((), "vLLM attends in chunks"),
    "embedding_multiplier": ((1.0,), "exllamav2 scales embeddings"),
    "final_logit_softcapping": ((), "exllamav2 caps logits"),
    "llama_4_scaling": ((), "vLLM scales queries by their position"),
    "logit_scale": ((1.0,), "vLLM and exllamav2 scale logits"),
    "logits_scaling": ((1.0,), "exllamav2 divides logits"),
    "norm_head": ((0,), "exllamav2 norms the rows of the head"),
    "quantization": ((), "MLX packs weights in a format of its own"),
    "query_pre_attn_scalar": ((), "exllamav2 scales attention scores"),
    "residual_multiplier": ((1.0,), "exllamav2 scales what each sub-layer adds"),
    "rope_global_base_freq": ((1_000_000.0,), "MLX takes it as the rotary base"),
    "rope_interleaved": ((False,), "nanotron rotates neighbouring dimensions together"),
    "rope_traditional": ((False,), "MLX rotates neighbouring dimensions together"),
    "scale_depth": ((), "exllamav2 scales what each sub-layer adds"),
    "scale_emb": ((1,), "exllamav2 scales embeddings"),
}
# The same, of rotary parameters: https://github.com/vllm-project/vllm/tree/main/vllm/model_executor/layers
ELSEWHERE_IN_ROPE: Meanings = {
    "alpha": ((), "vLLM multiplies the rotary base by a power of it"),
    "apply_yarn_scaling": ((True,), "vLLM leaves out the attention factor"),
    "extrapolation_factor": ((1.0,), "vLLM blends frequencies by it"),
}


def check_unread(
    read: ConfigReader, reference: Collection[str], elsewhere: Meanings = ELSEWHERE
) -> dict[str, object]:
    """Return the keys that are ignored, with their values; refuse those that could change the output.

    Args:
        read: The reader, after all keys were read that are understood.
        reference: The keys that transformers reads.
        elsewhere: The keys that another implementation reads.

    Raises:
        CheckpointError: A key changes the model's output, or might; the message names it.
    """
    ignored: dict[str, object] = {}
    for key, value in read.unread().items():
        neutral, meaning = elsewhere.get(key, (NEUTRAL.get(key, ()), "ignoring it could change the output"))
        if key not in elsewhere and key not in reference:
            ignored[read.named(key)] = value
        elif value not in neutral:
            raise CheckpointError(
                f"{read.where}: {key} = {shortened(value)} is not supported: {meaning}",
                remedy="use a checkpoint without it, or remove the key if the model was made without it",
            )
    return ignored
