"""Deepen the target between two stages of training, and make the draft out of a shallow stage.

Contract: `deepen` repeats layers; a repeated layer reads what its original reads and writes nothing yet,
so the grown model computes what the shallow one did (compare stacking, arXiv:2405.15319). `start_draft`
takes two layers of the four-layer target, each widened by the heads and units of another that write
nothing yet. Moments start at zero; the place in the data is kept.

    python -m foredraft.demo.recipe.grow --checkpoints DIR --out DIR --copies 2 2
    python -m foredraft.demo.recipe.grow --checkpoints DIR --out DIR --shallow DIR
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .model import DRAFT
from .optimiser import is_vector

Weights = dict[str, Tensor]
# Which layers of the four-layer target stand side by side in each layer of the draft.
DRAFT_LAYERS = ((0, 2), (3, 1))
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


def merge(weights: Weights, groups: Sequence[Sequence[int]]) -> Weights:
    """One wide layer per group, with all its members' heads and MLP units side by side.

    Only the first member of a group writes at first; the others read what they read before.
    """
    merged = {name: weight.clone() for name, weight in weights.items() if not name.startswith("layers.")}
    for place, group in enumerate(groups):
        members = [{part: weights[f"layers.{layer}.{part}"] for part in PARTS} for layer in group]
        for name, norm, pieces in (("qkv", "attention_norm", 3), ("gate_up", "mlp_norm", 2)):
            # One norm serves all members, so theirs are folded into what reads it.
            folded = [(member[name] * member[norm]).chunk(pieces) for member in members]
            rows = [torch.cat(piece) for piece in zip(*folded, strict=True)]
            merged[f"layers.{place}.{name}"] = torch.cat(rows)
            merged[f"layers.{place}.{norm}"] = torch.ones_like(members[0][norm])
        for name in ("out", "down"):
            silent = [torch.zeros_like(member[name]) for member in members[1:]]
            merged[f"layers.{place}.{name}"] = torch.cat([members[0][name], *silent], dim=1)
    return merged


def fresh_state(weights: Weights) -> dict[str, Any]:
    """An optimiser state with these masters."""
    zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    second = {n: torch.zeros_like(w) for n, w in weights.items() if is_vector(n, w)}
    return {"steps": 0, "masters": weights, "first": zeros, "second": second}


def grow(checkpoint: dict[str, Any], copies: Sequence[int]) -> dict[str, Any]:
    """The checkpoint with which the next stage starts."""
    target, draft = checkpoint["states"]
    recipe = dict(checkpoint["recipe"])
    recipe["target"] = dict(recipe["target"], layers=sum(copies))
    where = {"step": 0, "cursor": checkpoint["where"]["cursor"], "elapsed": 0.0}
    grown = fresh_state(deepen(target["masters"], copies))
    return {"states": [grown, draft], "where": where, "recipe": recipe}


def start_draft(checkpoint: dict[str, Any], shallow: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint of the draft's own stage: its layers come from the target when that had four."""
    merged = fresh_state(merge(shallow["states"][0]["masters"], DRAFT_LAYERS))
    recipe = dict(checkpoint["recipe"], draft=asdict(DRAFT))
    where = {"step": 0, "cursor": checkpoint["where"]["cursor"], "elapsed": 0.0}
    return {"states": [checkpoint["states"][0], merged], "where": where, "recipe": recipe}


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "checkpoint.pt", weights_only=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Deepen the target, or make the draft.")
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--copies", type=int, nargs="+", help="of each layer")
    what.add_argument("--shallow", type=Path, help="checkpoint of the four-layer stage, to make the draft of")
    options = parser.parse_args()
    found = read(options.checkpoints)
    grown = grow(found, options.copies) if options.copies else start_draft(found, read(options.shallow))
    options.out.mkdir(parents=True, exist_ok=True)
    torch.save(grown, options.out / "checkpoint.pt.partial")
    os.replace(options.out / "checkpoint.pt.partial", options.out / "checkpoint.pt")


if __name__ == "__main__":
    main()
