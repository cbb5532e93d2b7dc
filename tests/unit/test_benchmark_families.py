"""The benchmark of families' geometries, at tiny sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import families, workload
from foredraft.model.runner import Runner
from foredraft.model.runner.passes import Forward
from foredraft.profiling import others


def test_every_shape_takes_its_turns_beside_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "HERE", tmp_path)
    monkeypatch.setattr(others, "ATTEMPTS", 1)  # a turn that other programs disturb is not repeated
    families.main("--small --repeats 3 --threads 1".split())
    found = json.loads((tmp_path / "results" / "families_bfloat16.json").read_text())
    assert found["shapes"].keys() | set(found["left_out"]) == families.SHAPES.keys()
    assert {"llama", "phi-4-mini", "olmo-2"} <= found["shapes"].keys()
    for shape in found["shapes"].values():
        assert shape["exact"] and shape["share_of_copy"]["count"] == 3
    llama, olmo = found["shapes"]["llama"], found["shapes"]["olmo-2"]
    assert llama["share_over_llama"]["median"] == 1
    assert 0.5 < olmo["bytes_per_step"] / llama["bytes_per_step"] < 2


def test_the_flag_tells_a_pass_with_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = families.made({**families.SHAPES["llama"], **families.SMALL}, torch.device("cpu"), torch.float32)
    assert families.is_exact(runner)
    forward = Runner.forward

    def wider(own: Runner, cache: Any, tokens: torch.Tensor, starts: list[int]) -> Forward:
        made = forward(own, cache, tokens, starts)
        assert made.logits is not None
        return replace(made, logits=made.logits * (1.0 if tokens.shape[1] == 1 else 1.0 + 2**-20))

    monkeypatch.setattr(Runner, "forward", wider)
    assert not families.is_exact(runner)


def test_shapes_have_about_as_many_bytes() -> None:
    """Otherwise the share of what each step does beside reading weights would differ."""
    from foredraft.model.families import FAMILIES
    from foredraft.model.spec import ModelSpec
    from foredraft.model.weights import parameter_count

    known = {family.model_type for family in FAMILIES.values()}
    counts = {
        name: parameter_count(ModelSpec.from_hf(keys))
        for name, keys in families.SHAPES.items()
        if keys["model_type"] in known
    }
    assert all(0.9 < count / counts["llama"] < 1.1 for count in counts.values()), counts
