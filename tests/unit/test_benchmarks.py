"""The figures of the speed benchmark, of runs made up for the purpose."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft import Stats

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import speedup
import workload

COSTS = {"v": [1.0, 1.1, 1.3, 1.6], "c": 0.25}


def run(speed: float = 2.0, repeated: float = 0.1, **figures: Any) -> dict[str, Any]:
    base = {
        "speedup": speed,
        "identical": True,
        "repeated_4grams": repeated,
        "alpha": 0.5,
        "mean_accepted_length": 2.6,
        "mean_draft_length": 2.0,
        "acceptance_rate": 0.6,
    }
    return base | figures


def test_prediction_takes_the_drafts_as_they_were() -> None:
    assert speedup.predicted(2.6, 2, COSTS["v"], 0.25) == pytest.approx(2.6 / (0.5 + 1.3))
    assert speedup.predicted(2.6, 1.5, COSTS["v"], 0.25) == pytest.approx(
        2.6 / (0.375 + 1.2)
    )  # between 2 and 3
    assert speedup.predicted(2.6, 1.5, COSTS["v"], 0.0) == pytest.approx(2.6 / 1.2)
    assert speedup.predicted(4, 3, COSTS["v"], 0.0) == pytest.approx(4 / 1.6)  # the longest draft
    assert speedup.predicted(1, 0, COSTS["v"], 0.25) == pytest.approx(1)


def test_draft_length_counts_what_was_drafted() -> None:
    assert speedup.mean_draft_length(Stats(rounds=4, drafted=6)) == 1.5
    assert speedup.mean_draft_length(Stats()) == 0


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_a_result_comes_of_however_many_prompts_qualify(count: int) -> None:
    speeds = [1.0, 3.0, 2.0, 1.5, 2.5][:count]
    runs = [*(run(speed) for speed in speeds), run(9.0, repeated=0.3, alpha=None)]
    found = speedup.summary(runs, COSTS, 0.3)
    assert found["speedup"]["prompts"] == count
    assert found["qualifying_share"] == pytest.approx(count / (count + 1))
    if not count:
        assert found["speedup"]["median"] is found["predicted"] is found["alpha"] is None
        return
    low, high = found["speedup"]["quartiles"]
    assert min(speeds) <= low <= found["speedup"]["median"] <= high <= max(speeds)
    assert found["predicted"] == pytest.approx(2.6 / 1.8)
    assert found["measured_over_predicted"] == pytest.approx(found["speedup"]["median"] / (2.6 / 1.8))
    assert speedup.summary(runs, COSTS, 0.31)["qualifying_share"] == 1


def test_one_differing_output_shows() -> None:
    assert speedup.summary([run(), run(identical=False)], COSTS, 0.3)["identical"] is False


def test_prompts_can_begin_anywhere() -> None:
    assert workload.heldout(3, 2) == workload.heldout(5)[2:]
    assert workload.heldout(3, 10**6) == []


@pytest.mark.parametrize("drafter", ["lookup", "draft-model"])
def test_measured_on_the_demo_pair(drafter: str) -> None:
    llm = foredraft.load(device="cpu", max_batch=1, max_length=320, max_draft=2)
    found = speedup.measure(llm, workload.heldout(1)[0], drafter, new_tokens=6, alternations=1)
    assert found["identical"] is True and found["tokens"] == 6
    assert 0 <= found["mean_draft_length"] <= 2
    costs = speedup.cost(llm, drafter, longest=2, repeats=1)
    assert len(costs["v"]) == 3 and costs["v"][0] == 1
    assert (costs["c"] > 0) == (drafter == "draft-model")
