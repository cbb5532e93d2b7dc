"""Double the depth of the target between two stages of training; make the draft at the first growth.

Contract: every layer becomes two copies of itself whose branches write half as much, so that the grown
model computes nearly what the shallow one did: one step of the residual stream as two half steps
(compare stacking, arXiv:2405.15319). At the first growth the shallow model itself becomes the draft, its
MLPs widened by units that write nothing yet. Moments start at zero; the place in the data is kept.

    python -m foredraft.demo.recipe.grow --checkpoints DIR --out DIR
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .optimiser import is_vector

Weights = dict[str, Tensor]


def deepen(weights: Weights) -> Weights:
    """Layer i becomes layers 2i and 2i + 1, each writing half."""
    grown = {}
    for name, weight in weights.items():
        if not name.startswith("layers."):
            grown[name] = weight.clone()
            continue
        _, index, part = name.split(".")
        for copy in (0, 1):
            scale = 0.5 if part in ("out", "down") else 1.0
            grown[f"layers.{2 * int(index) + copy}.{part}"] = weight * scale
    return grown


def widen(weights: Weights, mlp: int, seed: int = 0) -> Weights:
    """More MLP units: random to read, zero to write."""
    generator = torch.Generator().manual_seed(seed)
    grown = {}
    for name, weight in weights.items():
        part = name.rpartition(".")[2]
        if part == "gate_up":
            width = weight.shape[1]
            extra = mlp - weight.shape[0] // 2
            halves = [
                torch.cat([half, torch.randn(extra, width, generator=generator) * 0.5 * width**-0.5])
                for half in weight.chunk(2)
            ]
            grown[name] = torch.cat(halves)
        elif part == "down":
            grown[name] = torch.cat([weight, torch.zeros(weight.shape[0], mlp - weight.shape[1])], dim=1)
        else:
            grown[name] = weight.clone()
    return grown


def fresh_state(weights: Weights) -> dict[str, Any]:
    """An optimiser state with these masters."""
    zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    second = {n: torch.zeros_like(w) for n, w in weights.items() if is_vector(n, w)}
    return {"steps": 0, "masters": weights, "first": zeros, "second": second}


def grow(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint with which the next stage starts."""
    target, draft = (state["masters"] for state in checkpoint["states"])
    recipe = dict(checkpoint["recipe"])
    if not recipe["draft_learns"]:
        draft_state = fresh_state(widen(target, recipe["draft"]["mlp"]))
    else:
        draft_state = checkpoint["states"][1]
    assert draft.keys() == draft_state["masters"].keys()
    recipe["target"] = dict(recipe["target"], layers=2 * recipe["target"]["layers"])
    where = {"step": 0, "cursor": checkpoint["where"]["cursor"], "elapsed": 0.0}
    return {"states": [fresh_state(deepen(target)), draft_state], "where": where, "recipe": recipe}


def main() -> None:
    parser = argparse.ArgumentParser(description="Double the depth of the target.")
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    grown = grow(torch.load(options.checkpoints / "checkpoint.pt", weights_only=True))
    options.out.mkdir(parents=True, exist_ok=True)
    torch.save(grown, options.out / "checkpoint.pt.partial")
    os.replace(options.out / "checkpoint.pt.partial", options.out / "checkpoint.pt")


if __name__ == "__main__":
    main()
