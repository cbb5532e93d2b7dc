"""Save tiny random Medusa heads in the formats of the projects, and define their logits, as `heads` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.heads import DRAFT_VOCAB, FILE, D, Drawn, Weights, everywhere, last_states, write_head

# format -> heads, blocks of each, and what differs
FORMATS: dict[str, dict[str, Any]] = {
    "fasterdecoding": {"heads": 4, "blocks": 1, "config": {"medusa_num_heads": 5, "medusa_num_layers": 1}},
    "vllm": {
        "heads": 3, "blocks": 2, "draft_vocab": DRAFT_VOCAB,
        "config": {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": 3},
    },
    "one output": {
        "heads": 5, "blocks": 1, "config": {"architectures": ["MedusaModel"], "original_lm_head": True},
    },
}  # fmt: skip


def save_medusa(
    folder: Path,
    format: str,
    vocabulary: int,
    *,
    draft_vocab: int | None = None,
    size: int = D,
    tensors: dict[str, Tensor | None] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write heads in one of FORMATS; `tensors` replace, add or, by None, drop some, and `config` adds keys."""
    form, original = FORMATS[format], format == "fasterdecoding"
    draft_vocab, drawn = draft_vocab or form.get("draft_vocab", vocabulary), Drawn(seed=1)
    for head in range(form["heads"]):
        for block in range(form["blocks"]):
            name = f"{head}.{block}.linear" if original else f"blocks.{head}.layers.{block}"
            drawn.weights(size, size, of=f"{name}.weight")
            if original:
                drawn.weights(size, of=f"{name}.bias")
        name = f"{head}.{form['blocks']}" if original else f"lm_heads.{head}"
        drawn.weights(draft_vocab, size, of=f"{name}.weight", scale=2)
    made = dict[str, Tensor | None](drawn.tensors)
    if draft_vocab != vocabulary:
        made["token_map"] = torch.randperm(vocabulary, generator=drawn.random)[:draft_vocab].sort().values
    file = "medusa_lm_head.safetensors" if original else FILE
    return write_head(folder, {**form["config"], **(config or {})}, made | (tensors or {}), file)


def defined_medusa(folder: Path, model: Any, text: list[int], drafted: list[int]) -> Tensor:
    """Return the logits [len(drafted) + 1, V] of a draft after `text`, whose last token is pending."""
    config = json.loads((folder / "config.json").read_text())
    w, hidden = Weights(folder), last_states(model, text)[-1]
    model.float()
    found = []
    for head in range(len(drafted) + 1):
        x, block = hidden, 0
        for name in (f"{head}.{{}}.linear", f"blocks.{head}.layers.{{}}"):
            while f"{name.format(block)}.weight" in w:
                x, block = x + torch.nn.functional.silu(w.projected(x, name.format(block))), block + 1
        own = 0 if config.get("original_lm_head") else head
        name = f"{head}.{block}" if f"{head}.{block}.weight" in w else f"lm_heads.{own}"
        found.append(w.projected(x, name))
    logits = torch.stack(found)
    return everywhere(logits, w["token_map"].long(), model.config.vocab_size) if "token_map" in w else logits
