"""Tiny Gemma 4 models and their assistants, saved by transformers."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from foredraft import LLM
from tests.support.checkpoints import reference_model
from tests.support.coded import load_pair, loading_by
from tests.support.variants_llama_like import BY_LAYER, FULL, GROUPED, SHARED, SLIDING, UNTIED

WORDS = 5  # of the vocabulary of `tiny`
WINDOW = 8
NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# targets: with a layer of each kind that has keys of its own before those that share them, and without sharing
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "shared": ("gemma4", {**SHARED, **BY_LAYER}),
    "unified": ("gemma4-unified", {"num_hidden_layers": 6, "final_logit_softcapping": None}),
}
CENTROIDS: dict[str, Any] = {
    "use_ordered_embeddings": True, "num_centroids": 5, "centroid_intermediate_top_k": 2,
}  # fmt: skip


def save_target(folder: Path, kind: str, words: int = WORDS, **keys: Any) -> Path:
    family, own = TARGETS[kind]
    if "vocab_size_per_layer_input" in own:
        own = {**own, "vocab_size_per_layer_input": words}
    # untied: a tiny random model with a tied head repeats one token for ever
    options = {**UNTIED, "sliding_window": WINDOW, "vocab_size": words, **NO_IDS, **own, **keys}
    reference_model(family, **options).save_pretrained(folder)
    return folder


def reference_assistant(
    kind: str, words: int = WORDS, seed: int = 3, **keys: Any
) -> transformers.PreTrainedModel:
    unified = kind == "unified"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "global_head_dim": 32}
    text: dict[str, Any] = {**GROUPED, "vocab_size": words, **sizes, **NO_IDS, "sliding_window": WINDOW}
    text["layer_types"] = [SLIDING, FULL, FULL]
    if unified:
        text |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    else:
        text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    own = {key: keys.pop(key) for key in [*keys] if key in text}
    ends, name = ("TextConfig", "AssistantConfig", "AssistantForCausalLM"), "Unified" if unified else ""
    text_class, config_class, model_class = (getattr(transformers, f"Gemma4{name}{end}") for end in ends)
    config = config_class(text_config=text_class(**text | own), **{"backbone_hidden_size": 64, **keys})
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]), pytest.MonkeyPatch.context() as patch:
        torch.manual_seed(seed)
        # transformers 5.23 looks for layers with keys of their own, which an assistant has not
        patch.setattr(text_class, "kv_sharing_modes", property(lambda own: ["reuse"] * own.num_hidden_layers))
        model = model_class(config)
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("token_ordering"):
                weight.copy_(torch.randperm(words))
            elif name.endswith("layer_scalar"):
                torch.nn.init.uniform_(weight, 0.5, 1.5)
            elif "norm" in name:
                torch.nn.init.normal_(weight, mean=0.5 if "q_norm" in name else 1.0, std=0.2)
            elif isinstance(weight, torch.nn.Parameter):
                torch.nn.init.normal_(weight, std=0.3)
    return model.eval()


def save_assistant(folder: Path, kind: str, words: int = WORDS, **keys: Any) -> Path:
    reference_assistant(kind, words, **keys).save_pretrained(folder)
    return folder


def load(folder: Path, kind: str, dtype: str, by: str, **keys: Any) -> LLM:
    target = save_target(folder / "target", kind)
    assistant = save_assistant(folder / "assistant", kind, **keys)
    with loading_by(by):
        llm = load_pair(target, assistant, dtype)
    assert llm.loaded.runner.by_kernels == (by == "kernels")
    return llm


@functools.cache
def tiny(kind: str, dtype: str, by: str, centroids: bool = False) -> LLM:
    with tempfile.TemporaryDirectory() as folder:
        return load(Path(folder), kind, dtype, by, **(CENTROIDS if centroids else {}))
