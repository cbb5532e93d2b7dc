"""Save tiny random Medusa heads in the spellings of the projects that publish them, and define their logits.

The definition is plain float64, the files read anew. It shares no code with the library.
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

from tests.support.heads import WORDS, D

# spelling -> heads, blocks of each, and what differs
SPELLINGS: dict[str, dict[str, Any]] = {
    "fasterdecoding": {"heads": 4, "blocks": 1, "config": {"medusa_num_heads": 5, "medusa_num_layers": 1}},
    "vllm": {
        "heads": 3, "blocks": 2, "words": WORDS,
        "config": {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": 3},
    },
    "one output": {
        "heads": 5, "blocks": 1, "config": {"architectures": ["MedusaModel"], "original_lm_head": True},
    },
}  # fmt: skip


def save_medusa(
    folder: Path,
    spelling: str,
    vocabulary: int,
    *,
    words: int | None = None,
    size: int = D,
    tensors: dict[str, Tensor | None] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write heads.

    Args:
        folder: Of the heads.
        spelling: A key of SPELLINGS.
        vocabulary: Size of the target's.
        words: Replaces the size of their own vocabulary.
        size: Hidden size of the target.
        tensors: Replace, add or, by None, drop tensors.
        config: Replaces or adds keys of the config.
    """
    form = SPELLINGS[spelling]
    words = words or form.get("words", vocabulary)
    random = torch.Generator().manual_seed(1)

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random) / math.sqrt(shape[-1]) * 1.5

    made: dict[str, Tensor | None] = {}
    for head in range(form["heads"]):
        for block in range(form["blocks"]):
            if spelling == "fasterdecoding":
                made[f"{head}.{block}.linear.weight"] = weight(size, size)
                made[f"{head}.{block}.linear.bias"] = weight(size)
            else:
                made[f"blocks.{head}.layers.{block}.weight"] = weight(size, size)
        name = f"{head}.{form['blocks']}" if spelling == "fasterdecoding" else f"lm_heads.{head}"
        made[f"{name}.weight"] = weight(words, size) * 2
    if words != vocabulary:
        made["token_map"] = torch.randperm(vocabulary, generator=random)[:words].sort().values
    made |= tensors or {}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**form["config"], **(config or {})}))
    file = "medusa_lm_head.safetensors" if spelling == "fasterdecoding" else "model.safetensors"
    save_file({name: t.contiguous() for name, t in made.items() if t is not None}, folder / file)
    return folder


def defined_medusa(
    folder: Path, model: transformers.PreTrainedModel, text: list[int], drafted: list[int]
) -> Tensor:
    """Return the logits [len(drafted) + 1, V] of a draft after `text`, whose last token is pending."""
    config = json.loads((folder / "config.json").read_text())
    [file] = folder.glob("*.safetensors")
    w = {name: tensor.double() for name, tensor in load_file(file).items()}
    model = model.double()
    with torch.no_grad():
        hidden = model.model(torch.tensor([text[:-1]]), use_cache=False).last_hidden_state[0, -1]
    model.float()
    found = []
    for head in range(len(drafted) + 1):
        x, block = hidden, 0
        while (name := f"{head}.{block}.linear") + ".weight" in w:
            x = x + torch.nn.functional.silu(w[f"{name}.weight"] @ x + w[f"{name}.bias"])
            block += 1
        while (name := f"blocks.{head}.layers.{block}") + ".weight" in w:
            x = x + torch.nn.functional.silu(w[f"{name}.weight"] @ x)
            block += 1
        own = 0 if config.get("original_lm_head") else head
        logits = w.get(f"{head}.{block}.weight", w.get(f"lm_heads.{own}.weight")) @ x
        if "token_map" in w:
            everywhere = torch.full((model.config.vocab_size,), -math.inf, dtype=torch.float64)
            everywhere[w["token_map"].long()] = logits
            logits = everywhere
        found.append(logits)
    return torch.stack(found)
