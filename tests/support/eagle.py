"""Save tiny random EAGLE-1 and EAGLE-2 heads in SafeAILab's spelling, and define their logits.

The definition is plain float64, one draft at a time, the files read anew. It shares no code with the library.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.heads import BODY, HEADS, INNER, KV_HEADS, D, attention

# spelling -> whether `fc` has a bias and the head an embedding, and keys of the config
SPELLINGS: dict[str, dict[str, Any]] = {
    "eagle-1": {"bias": True, "embedding": True},
    "eagle-2": {"bias": False, "config": {"bias": False, "qkv_bias": True, "num_hidden_layers": 2}},
}


def save_eagle(
    folder: Path,
    spelling: str,
    vocabulary: int,
    *,
    words: None = None,
    size: int = D,
    tensors: dict[str, Tensor | None] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write a head.

    Args:
        folder: The head's.
        spelling: A key of SPELLINGS.
        vocabulary: Size of the target's.
        words: None: the words are the target's.
        size: Hidden size of the target.
        tensors: Replace, add or, by None, drop tensors.
        config: Replaces or adds keys of the config.
    """
    form = SPELLINGS[spelling]
    written = {
        **BODY, "architectures": ["LlamaForCausalLM"], "hidden_size": size, "vocab_size": vocabulary,
        "torch_dtype": "float32", **form.get("config", {}), **(config or {}),
    }  # fmt: skip
    random = torch.Generator().manual_seed(2)

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random) / math.sqrt(shape[-1])  # states recur without a norm

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=random)

    made: dict[str, Tensor | None] = {"fc.weight": weight(size, 2 * size)}
    if form["bias"]:
        made["fc.bias"] = weight(size)
    if form.get("embedding"):
        made["embed_tokens.weight"] = weight(vocabulary, size)
    rows = {each: count * size // HEADS for each, count in {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}.items()}
    for index in range(form.get("config", {}).get("num_hidden_layers", 1)):
        name = f"layers.{index}"
        if index:
            made[f"{name}.input_layernorm.weight"] = norm()
        made[f"{name}.post_attention_layernorm.weight"] = norm()
        made |= {f"{name}.self_attn.{each}_proj.weight": weight(count, size) for each, count in rows.items()}
        if written.get("qkv_bias"):
            made |= {f"{name}.self_attn.{each}_proj.bias": weight(count) for each, count in rows.items()}
        made[f"{name}.self_attn.o_proj.weight"] = weight(size, size)
        made |= {f"{name}.mlp.{each}_proj.weight": weight(INNER, size) for each in ("gate", "up")}
        made[f"{name}.mlp.down_proj.weight"] = weight(size, INNER)
    made |= tensors or {}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(written))
    save_file(
        {name: t.contiguous() for name, t in made.items() if t is not None}, folder / "model.safetensors"
    )
    return folder


def defined_eagle(
    folder: Path, model: transformers.PreTrainedModel, text: list[int], drafted: list[int]
) -> Tensor:
    """Return the logits [len(drafted) + 1, V] of a draft after `text`, whose last token is pending."""
    config = json.loads((folder / "config.json").read_text())
    w = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    model = model.double()
    with torch.no_grad():
        states = list(model.model(torch.tensor([text[:-1]]), use_cache=False).last_hidden_state[0])

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * w[name]

    embedding = w.get("embed_tokens.weight", model.model.embed_tokens.weight.detach())
    head = w.get("lm_head.weight", model.lm_head.weight.detach())
    found: list[Tensor] = []
    for step in range(len(drafted) + 1):
        tokens = [*text[1:], *drafted[:step]]
        pairs = torch.cat([embedding[torch.tensor(tokens)], torch.stack(states)], -1)
        x = pairs @ w["fc.weight"].T + w.get("fc.bias", 0)
        for index in range(config["num_hidden_layers"]):
            name = f"layers.{index}"
            entering = rms(x, f"{name}.input_layernorm.weight") if index else x
            x = x + attention(w, name, config, entering, config["rope_theta"], rms)
            y = rms(x, f"{name}.post_attention_layernorm.weight")
            gated = torch.nn.functional.silu(y @ w[f"{name}.mlp.gate_proj.weight"].T)
            x = x + (gated * (y @ w[f"{name}.mlp.up_proj.weight"].T)) @ w[f"{name}.mlp.down_proj.weight"].T
        states.append(x[-1])
        found.append(head @ x[-1])
    model.float()
    return torch.stack(found)
