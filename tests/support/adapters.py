"""Save adapters for tiny checkpoints: the target's own last layer, more or less spoilt, so that drafts hit at times."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from foredraft.drafters.asset import WITH_MLP
from foredraft.drafters.kangaroo import VOCABULARY, AdapterConfig, target_hash, write_adapter
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import layer_tensors

WHOLE = WITH_MLP


def save_adapter(
    target: Path,
    folder: Path,
    *,
    depth: int | None = None,
    kind: str = WHOLE,
    noise: float = 0.3,
    vocabulary: list[int] | None = None,
    seed: int = 0,
) -> Path:
    """Write the adapter; without noise, at the depth of the last layer, q is p but for a window.

    `depth` are the layers below it, by default all but the last; `noise` is in standard deviations of each weight.
    """
    spec, random = ModelSpec.from_folder(target), torch.Generator().manual_seed(seed)
    last = f"model.layers.{spec.layers - 1}."
    found = layer_tensors(target, spec.layers - 1)
    tensors: dict[str, Tensor] = {
        name: found.pop(name) for name in [*found] if name.startswith("model.norm.")
    }
    order = [name.replace(last, "model.layers.0.") for name in load_file(target / "model.safetensors")]
    for name in sorted(found, key=lambda name: order.index(name) if name in order else len(order)):
        weight = found[name]
        if kind == WHOLE or ".mlp." not in name:
            deviation = weight.float().std() if weight.numel() > 1 else 0.0
            spoilt = torch.randn(weight.shape, generator=random) * deviation * noise
            tensors[name] = weight + spoilt.to(weight.dtype)
    if kind != WHOLE:  # the norms of the MLP belong to it
        norms = ("pre_feedforward", "post_feedforward") if spec.post_norms else ("post_attention",)
        for name in [name for name in tensors if name.split(".")[-2].removesuffix("_layernorm") in norms]:
            del tensors[name]
    if vocabulary is not None:
        tensors[VOCABULARY] = torch.tensor(vocabulary)
    config = AdapterConfig(
        model=str(target), target_hash=target_hash(target), layers=spec.layers, depth=depth or spec.layers - 1,
        kind=kind, draft_vocabulary=None if vocabulary is None else len(vocabulary), max_draft=4, alpha=0.5,
        tau=2.0, predicted=1.0, temperature=0.0, loss="kl", steps=1, tokens=math.ceil(1), date="2026-01-01",
        foredraft="0",
    )  # fmt: skip
    write_adapter(folder, config, tensors)
    return folder
