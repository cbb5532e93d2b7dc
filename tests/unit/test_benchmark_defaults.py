"""The benchmark of what `auto` makes of added assets, on the demo's target and short texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import defaults, workload


def test_every_asset_is_held_against_the_best_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "HERE", tmp_path)
    monkeypatch.setattr(defaults, "heldout", lambda count: ["def add(a, b):\n"])
    options = "--new-tokens 24 --repeats 1 --loads 0 --adapter --plan exit:4 --name small"
    defaults.main(options.split())
    found = json.loads((tmp_path / "results" / "small.json").read_text(), parse_constant=pytest.fail)
    [by_name] = found["loads"].values()
    assert set(by_name) == {"plain", "auto", "draft, demo", "plan, exit:4", "adapter, noise"}
    for each in by_name.values():
        assert each["identical_to_plain"]
        for when, count in (("first", 1), ("later", 2)):
            assert set(each[when]) == {"code", "chat", "random ids", "repetition", "all"}
            assert each[when]["code"]["count"] == count and each[when]["all"]["count"] == 4 * count
