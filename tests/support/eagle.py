"""Save tiny random EAGLE-1 and EAGLE-2 heads in SafeAILab's format, and define their logits, as `heads` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.heads import BODY, NORMS, D, Drawn, Weights, attention, last_states, write_head

# format -> whether `fc` has a bias and the head an embedding, and keys of the config
FORMATS: dict[str, dict[str, Any]] = {
    "eagle-1": {"bias": True, "embedding": True},
    "eagle-2": {"bias": False, "config": {"bias": False, "qkv_bias": True, "num_hidden_layers": 2}},
}


def save_eagle(
    folder: Path,
    format: str,
    vocabulary: int,
    *,
    draft_vocab: None = None,
    size: int = D,
    tensors: dict[str, Tensor | None] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write a head in one of FORMATS; `tensors` and `config` replace, add or, by None, drop some."""
    form = FORMATS[format]
    written = {
        **BODY, "architectures": ["LlamaForCausalLM"], "hidden_size": size, "vocab_size": vocabulary,
        "torch_dtype": "float32", **form.get("config", {}), **(config or {}),
    }  # fmt: skip
    drawn = Drawn(seed=2, scale=1.0)  # states recur without a norm
    drawn.weights(size, 2 * size, of="fc.weight")
    if form["bias"]:
        drawn.weights(size, of="fc.bias")
    if form.get("embedding"):
        drawn.weights(vocabulary, size, of="embed_tokens.weight")
    for index in range(form.get("config", {}).get("num_hidden_layers", 1)):
        drawn.layer(f"layers.{index}", written, size, NORMS if index else NORMS[1:])
    return write_head(folder, written, {**drawn.tensors, **(tensors or {})})


def defined_eagle(folder: Path, model: Any, text: list[int], drafted: list[int]) -> Tensor:
    """Return the logits [len(drafted) + 1, V] of a draft after `text`, whose last token is pending."""
    config = json.loads((folder / "config.json").read_text())
    w = Weights(folder, config["rms_norm_eps"])
    states = list(last_states(model, text))
    embedding = w.get("embed_tokens.weight", model.model.embed_tokens.weight.detach())
    head = w.get("lm_head.weight", model.lm_head.weight.detach())
    found: list[Tensor] = []
    for step in range(len(drafted) + 1):
        tokens = [*text[1:], *drafted[:step]]
        x = w.projected(torch.cat([embedding[torch.tensor(tokens)], torch.stack(states)], -1), "fc")
        for index in range(config["num_hidden_layers"]):
            name = f"layers.{index}"
            entering = w.rms(x, f"{name}.input_layernorm") if index else x
            x = w.mlp(x + attention(w, f"{name}.self_attn", config, entering), name)
        states.append(x[-1])
        found.append(head @ x[-1])
    model.float()
    return torch.stack(found)
