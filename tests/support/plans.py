"""A plan of three layers, as a search writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foredraft.drafters.plan_files import PlanFile, model_hash


def plan_of(folder: Path | None, **fields: Any) -> PlanFile:
    """Return a plan for the model in a folder, or for one that is nowhere; other fields may be given."""
    return PlanFile(**{
        "model": "another" if folder is None else "big", "model_hash": "0" * 64 if folder is None else model_hash(folder),
        "layers": 3, "skip_attention": (1,), "device": "cpu", "dtype": "float32", "max_draft": 3, "alpha": 0.8, "c": 0.5,
        "tau": 2.5, "speedup": 1.25, "predicted": 1.3, "date": "2026-11-21", "foredraft": "0.1.0", **fields,
    })  # fmt: skip
