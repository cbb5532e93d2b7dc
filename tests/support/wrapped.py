"""Save tiny random checkpoints of multimodal architectures, in both spellings of their text tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import GEMMA3, MISTRAL
from tests.support.variants_llama_like import (
    BY_LAYER,
    GEMMA4,
    GEMMA4_UNIFIED,
    MINISTRAL3,
    SHARED,
    UNTIED,
    fill_gemma4,
)

OLDER, NEWER = "older", "newer"  # spellings
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
PATCHES: dict[str, Any] = {**VISION, "image_size": 28, "patch_size": 14}
SIGLIP = {**PATCHES, "model_type": "siglip_vision_model"}
PIXTRAL = {"vision_config": {**PATCHES, "model_type": "pixtral", "head_dim": 8}, "image_token_index": 95}
GEMMA_IDS = {"mm_tokens_per_image": 4, "boi_token_index": 93, "eoi_token_index": 94, "image_token_index": 95}
GEMMA = (transformers.Gemma3Config, transformers.Gemma3ForConditionalGeneration)
MISTRAL_3 = (transformers.Mistral3Config, transformers.Mistral3ForConditionalGeneration)
GEMMA4_IDS = {"boi_token_id": 90, "eoi_token_id": 91, "image_token_id": 92, "video_token_id": 93}
GEMMA4_IDS |= {"boa_token_id": 94, "eoa_token_index": 95, "audio_token_id": 96}
GEMMA4_VISION = {**VISION, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 64}
GEMMA4_SOUND = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16}
GEMMA4_SOUND |= {"subsampling_conv_channels": [4, 4]}
UNIFIED_VISION = {"mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 16}
# name -> config class, model class, text config, top-level keys
WRAPPED: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (*GEMMA, {**GEMMA3, "model_type": "gemma3_text"}, {"vision_config": SIGLIP, **GEMMA_IDS}),
    "gemma4": (
        transformers.Gemma4Config,
        transformers.Gemma4ForConditionalGeneration,
        {**GEMMA4, **SHARED, **BY_LAYER, "model_type": "gemma4_text"},
        {"vision_config": GEMMA4_VISION, "audio_config": GEMMA4_SOUND, **GEMMA4_IDS},
    ),
    "gemma4-unified": (
        transformers.Gemma4UnifiedConfig,
        transformers.Gemma4UnifiedForConditionalGeneration,
        {**GEMMA4_UNIFIED, "model_type": "gemma4_unified_text"},
        {"vision_config": UNIFIED_VISION, "audio_config": {"audio_embed_dim": 16}, **GEMMA4_IDS},
    ),
    "muse-glimmer": (
        transformers.MuseGlimmerConfig,
        transformers.MuseGlimmerForConditionalGeneration,
        {
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 24,
            "max_position_embeddings": 512,
            "post_norm_eps": 0.1,
            "rms_norm_eps": 0.01,
            "output_multiplier": 3.0,
            "final_logit_softcapping": 2.0,
            "eos_token_id": 2,
            "bos_token_id": 1,
            "model_type": "muse_glimmer_text",
        },
        {
            "vision_config": {**VISION, "pos_emb_height": 4, "pos_emb_width": 4},
            "image_token_id": 92,
            "video_token_id": 93,
            "out_hidden_size": 64,
            "projector_hidden_size": 16,
        },
    ),
    "mistral3": (*MISTRAL_3, {**MISTRAL, "model_type": "mistral"}, {**PIXTRAL, **UNTIED}),
    "mistral3-ministral3": (*MISTRAL_3, {**MINISTRAL3, "model_type": "ministral3"}, {**PIXTRAL, **UNTIED}),
    "mistral3-tied": (*MISTRAL_3, {**MISTRAL, "model_type": "mistral"}, PIXTRAL),
}


def save_wrapped(folder: Path, name: str, spelling: str = OLDER, **text: Any) -> Path:
    config_class, model_class, base, top = WRAPPED[name]
    folder.mkdir(parents=True, exist_ok=True)
    config = config_class(text_config={**base, **text}, **top)
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config)
        for parameter, tensor in model.named_parameters():
            if "norm" in parameter and tensor.dim() == 1:
                torch.nn.init.normal_(
                    tensor, mean=0.0 if name in ("gemma3", "muse-glimmer") else 1.0, std=0.2
                )
        if name.startswith("gemma4"):
            fill_gemma4(model)
    model.float().eval().save_pretrained(folder)
    if spelling == NEWER:
        rename(folder, newer)
    return folder


def newer(name: str) -> str:
    for prefix in ("vision_tower.", "multi_modal_projector."):
        if name.startswith(prefix):
            return f"model.{name}"
    name = name.replace("language_model.model.", "model.language_model.")
    return name.replace("language_model.lm_head.", "lm_head.")


def rename(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    renamed = {change(name): tensor for name, tensor in tensors.items()}
    kept = {name: tensor.contiguous() for name, tensor in renamed.items() if name is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def edit_config(folder: Path, change: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
