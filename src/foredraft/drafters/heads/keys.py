"""The keys that exporters write into the config of a head, beside those of its layers.

A key is honoured by its reader, ignored, or refused by name where its value changes what the head computes.

    SafeAILab    https://github.com/SafeAILab/EAGLE
    SpecForge    https://github.com/sgl-project/SpecForge, specforge/modeling/draft and configs
    speculators  https://github.com/vllm-project/speculators, src/speculators/models
    ModelOpt     https://github.com/NVIDIA/Model-Optimizer, modelopt/torch/export/plugins/hf_spec_export.py
    DeepSpec     https://github.com/deepseek-ai/DeepSpec, deepspec/modeling
    z-lab        https://github.com/z-lab/dflash, dflash/model.py
    AngelSlim    https://github.com/Tencent/AngelSlim
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foredraft.model.config import ConfigReader

# exporter -> its keys of names, versions and training, which change nothing
IGNORED: dict[str, str] = {
    "all": "architectures model_type tie_word_embeddings torch_dtype dtype transformers_version auto_map"
    " bos_token_id eos_token_id pad_token_id",
    "SpecForge": "target_model_type target_vocab_size num_anchors confidence_head_alpha num_draft_layers",
    "speculators": "speculators_version has_no_defaults_at_init inference_type base_model_ep_plan"
    " embed_requires_grad enable_sp_ulysses num_depths para_depths down_sample_ratio down_sample_ratio_min"
    " max_seq_len ce_loss_alpha l1_loss_alpha loss_decay_gamma auf lambda_base_start lambda_base_decay_ratio"
    " pure_draft_prefix_len emb_dim gru_hidden_dim moe_intermediate_size num_experts num_experts_per_tok",
    "ModelOpt": "parallel_draft_heads_num_layers has_lm_head num_eagle_features",
    # the tensors tell whether there is a confidence head; no reader reads one
    "DeepSpec": "enable_confidence_head confidence_head_with_markov use_confidence_head"
    " target_text_model_type",
    "AngelSlim": "modal_type target_model_name_or_path target_num_hidden_layers",
}
# key -> the values that leave the head as it is; others are refused
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_input_layernorm_in_first_layer": (True,),  # ModelOpt, in `eagle_config`
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "use_aux_hidden_state": (True,),
    "parallel_drafting": (True,),  # NeMo: a P-EAGLE head
    "attention_mode": ("gqa",),  # SpecForge, in `dflash_config`; mla is another attention
    "projector_type": ("dflash", "dspark", "dflash2"),
    "attention_sink_bias": (False,),  # ModelOpt
    "lilicorr_enabled": (False,),
    "draft_ffn_type": ("dense",),  # speculators
}
KNOWN = frozenset(NEUTRAL) | frozenset(key for keys in IGNORED.values() for key in keys.split())


def pass_over(read: ConfigReader) -> None:
    """Mark the keys of a config or a section that change nothing as read, and check their values."""
    for key in KNOWN & read.config.keys():
        value = read.take(key)
        if value is not None and key in NEUTRAL:
            read.choice(key, NEUTRAL[key])


def layer_keys(config: Mapping[str, Any], own: frozenset[str]) -> dict[str, Any]:
    """Return the keys of a head's layers among a config's, without those that its reader has read."""
    return {key: value for key, value in config.items() if key not in KNOWN | own}
