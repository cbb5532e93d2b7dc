"""Make the checkpoint of the next training stage: deepen the target, or start the draft from its layers.

A repeated layer adds nothing to the residual stream at first, so the deeper model computes what the shallow
one did (compare stacking, arXiv:2405.15319). New optimiser states have zero moments; the position in the data
carries over.

    python -m recipes.demo.grow --checkpoints DIR --out DIR --copies 4 4 4 4 --draft-layers 0 3
    python -m recipes.demo.grow --checkpoints DIR --out DIR
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .optimiser import uses_adamw
from .trainer import CHECKPOINT

Weights = dict[str, Tensor]
LAYER_PARAMETERS = ("attention_norm", "qkv", "out", "mlp_norm", "gate_up", "down")


def outside_layers(weights: Weights) -> Weights:
    """Return copies of the weights that belong to no layer."""
    return {name: weight.clone() for name, weight in weights.items() if not name.startswith("layers.")}


def deepen(weights: Weights, copies: Sequence[int]) -> Weights:
    """Return a deeper model with the same output: each layer, `copies` times; further copies add nothing."""
    deeper, position = outside_layers(weights), 0
    for index, count in enumerate(copies):
        for copy in range(count):
            for name in LAYER_PARAMETERS:
                scale = 0.0 if copy and name in ("out", "down") else 1.0
                deeper[f"layers.{position}.{name}"] = weights[f"layers.{index}.{name}"] * scale
            position += 1
    return deeper


def select_layers(weights: Weights, layers: Sequence[int]) -> Weights:
    """Return a model of the given layers alone, in that order."""
    selected = outside_layers(weights)
    for position, index in enumerate(layers):
        for name in LAYER_PARAMETERS:
            selected[f"layers.{position}.{name}"] = weights[f"layers.{index}.{name}"].clone()
    return selected


def new_optimiser_state(weights: Weights) -> dict[str, Any]:
    """Return the state of an `Optimiser` with these master weights and zero moments."""
    first = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    second = {name: torch.zeros_like(weight) for name, weight in weights.items() if uses_adamw(name, weight)}
    return {"steps": 0, "masters": weights, "first_moments": first, "second_moments": second}


def grow(
    checkpoint: dict[str, Any], copies: Sequence[int] | None = None, draft_layers: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return the checkpoint that the next stage starts from.

    `draft_layers` are those of the target before it grows. None leaves the target, or the draft, as it is.
    """
    optimisers, config = list(checkpoint["optimisers"]), dict(checkpoint["config"])
    weights = optimisers[0]["masters"]
    if copies is not None:
        config["target"] = dict(config["target"], layers=sum(copies))
        optimisers[0] = new_optimiser_state(deepen(weights, copies))
    if draft_layers is not None:
        config["draft"] = dict(config["target"], layers=len(draft_layers))
        optimisers[1] = new_optimiser_state(select_layers(weights, draft_layers))
    progress = {"step": 0, "next_block": checkpoint["progress"]["next_block"], "elapsed": 0.0}
    return {"config": config, "progress": progress, "optimisers": optimisers}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the checkpoint of the next training stage.")
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of the finished stage")
    parser.add_argument("--out", type=Path, required=True, help="folder of the next stage")
    parser.add_argument("--copies", type=int, nargs="+", help="how many layers each target layer becomes")
    parser.add_argument(
        "--draft-layers", type=int, nargs="+", help="layers of the target to start the draft from"
    )
    options = parser.parse_args()
    checkpoint: dict[str, Any] = torch.load(options.checkpoints / CHECKPOINT, weights_only=True)
    grown = grow(checkpoint, options.copies, options.draft_layers)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.save(grown, options.out / f"{CHECKPOINT}.partial")
    os.replace(options.out / f"{CHECKPOINT}.partial", options.out / CHECKPOINT)


if __name__ == "__main__":
    main()
