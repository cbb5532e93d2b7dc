"""Lead from one stage of training to the next: deepen the target, start the draft.

Contract: `deepen` repeats layers; a repeated layer reads what its original reads and writes nothing yet,
so the grown model computes what the shallow one did (compare stacking, arXiv:2405.15319). `keep` starts
the draft from some layers of the target while that is shallow. Moments start at zero; the place in the data
is kept.

    python -m foredraft.demo.recipe.grow --checkpoints DIR --out DIR --copies 4 4 4 4 --draft 0 3
    python -m foredraft.demo.recipe.grow --checkpoints DIR --out DIR
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .optimiser import is_vector

Weights = dict[str, Tensor]
PARTS = ("attention_norm", "qkv", "out", "mlp_norm", "gate_up", "down")


def deepen(weights: Weights, copies: Sequence[int]) -> Weights:
    """Layer i becomes `copies[i]` layers, of which the first writes."""
    grown = {name: weight.clone() for name, weight in weights.items() if not name.startswith("layers.")}
    place = 0
    for index, count in enumerate(copies):
        for copy in range(count):
            for part in PARTS:
                scale = 0.0 if copy and part in ("out", "down") else 1.0
                grown[f"layers.{place}.{part}"] = weights[f"layers.{index}.{part}"] * scale
            place += 1
    return grown


def keep(weights: Weights, layers: Sequence[int]) -> Weights:
    """A decoder of the named layers alone, in that order."""
    kept = {name: weight.clone() for name, weight in weights.items() if not name.startswith("layers.")}
    for place, index in enumerate(layers):
        for part in PARTS:
            kept[f"layers.{place}.{part}"] = weights[f"layers.{index}.{part}"].clone()
    return kept


def fresh_state(weights: Weights) -> dict[str, Any]:
    """An optimiser state with these masters."""
    zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    second = {n: torch.zeros_like(w) for n, w in weights.items() if is_vector(n, w)}
    return {"steps": 0, "masters": weights, "first": zeros, "second": second}


def grow(
    checkpoint: dict[str, Any], copies: Sequence[int] | None = None, draft: Sequence[int] | None = None
) -> dict[str, Any]:
    """The checkpoint with which the next stage starts. draft: the target's layers to start it from."""
    states, recipe = checkpoint["states"], dict(checkpoint["recipe"])
    weights = states[0]["masters"]
    if copies is not None:
        recipe["target"] = dict(recipe["target"], layers=sum(copies))
        states = [fresh_state(deepen(weights, copies)), states[1]]
    if draft is not None:
        recipe["draft"] = dict(checkpoint["recipe"]["target"], layers=len(draft))
        states = [states[0], fresh_state(keep(weights, draft))]
    where = {"step": 0, "cursor": checkpoint["where"]["cursor"], "elapsed": 0.0}
    return {"states": states, "where": where, "recipe": recipe}


def main() -> None:
    parser = argparse.ArgumentParser(description="Lead from one stage of training to the next.")
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--copies", type=int, nargs="+", help="of each layer of the target")
    parser.add_argument("--draft", type=int, nargs="+", help="layers of the target to start the draft from")
    options = parser.parse_args()
    found: dict[str, Any] = torch.load(options.checkpoints / "checkpoint.pt", weights_only=True)
    grown = grow(found, options.copies, options.draft)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.save(grown, options.out / "checkpoint.pt.partial")
    os.replace(options.out / "checkpoint.pt.partial", options.out / "checkpoint.pt")


if __name__ == "__main__":
    main()
