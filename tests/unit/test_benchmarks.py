"""The scripts of benchmarks/: their shared code, their timers, what drafts would have met along a text, and `auto`."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import auto, timing, workload
from benchmarks.tree_replay import MISSED, SIZES, Met, _followed, _kept, _met
from benchmarks.trees import block_chain, chosen_tree, even_tree, gains, lengths_along, line
from foredraft.profiling.others import Counters


def test_the_index_lists_every_script() -> None:
    index = (workload.HERE / "README.md").read_text(encoding="utf-8")
    assert {file.stem for file in workload.HERE.glob("[!_]*.py")} == {
        name for name in re.findall(r"`(\w+)`", index) if (workload.HERE / f"{name}.py").exists()
    }


def test_a_result_is_written_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workload, "HERE", tmp_path)
    workload.write("found", {"machine": workload.machine()})
    (file,) = (tmp_path / "results").iterdir()
    assert file.name == "found.json"
    assert json.loads(file.read_text()) == json.loads(capsys.readouterr().out.splitlines()[-1])


# --- timers: disturbed turns are repeated, and every spread says what happened beside -----------------------

CPU = torch.device("cpu")


class Machine:
    """A pretended clock, and other programs that use so many CPUs from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.busy, self.others = 100.0, 0.0, 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        monkeypatch.setattr("foredraft.profiling.others.read_counters", self.read)
        monkeypatch.setattr(timing, "_surroundings", timing.Surroundings())

    def read(self) -> Counters:
        return Counters(self.now, self.busy, 0.0)

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.busy += self.others * seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_disturbed_turn_is_repeated_and_counted(machine: Machine) -> None:
    turns = iter([9.0, 2.0, 9.0, 3.0, 4.0])  # the first one warms up

    def work() -> None:
        seconds = next(turns)
        machine.others = 1.0 if seconds == 9.0 else 0.0
        machine.work(seconds)

    seconds = timing.interleaved({"it": work}, CPU, 3, warm=1)
    assert seconds == {"it": [2.0, 3.0, 4.0]}
    found = timing.spread(seconds["it"])
    assert found == {
        "median": 3.0, "lower": 2.5, "upper": 3.5, "count": 3, "others": round(18 / 27, 3), "repeated": 1,
    }  # fmt: skip


def test_all_spreads_of_a_measurement_have_one_load_and_the_next_its_own(machine: Machine) -> None:
    machine.others = 0.5
    machine.work(10.0)
    first = timing.spread([1.0])
    machine.others = 2.0
    machine.work(timing.APART / 2)  # making figures takes a while
    again = timing.spread([2.0])
    assert [found["others"] for found in (first, again)] == [0.5, 0.5]
    machine.others = 0.1
    machine.work(10.0)
    assert timing.spread([1.0])["others"] == pytest.approx(0.1, abs=0.02)


def test_repeated_turns_are_those_of_the_measurement(machine: Machine) -> None:
    machine.others = 1.0
    quiet = timing.Quiet(2)
    assert [quiet.take(lambda at=at: machine.work(1.0) or at) for at in "ab"] == ["a", "b"]  # type: ignore[misc, func-returns-value]
    assert timing.spread([1.0])["repeated"] == 2
    machine.work(1.0)
    assert timing.spread([1.0])["repeated"] == 0


def test_without_counters_nothing_is_repeated(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.profiling.others.read_counters", lambda: None)
    monkeypatch.setattr(timing, "_surroundings", timing.Surroundings())
    assert timing.interleaved({"it": lambda: machine.work(1.0)}, CPU, 2, warm=0) == {"it": [1.0, 1.0]}
    found = timing.spread([1.0])
    assert found["others"] is None and found["repeated"] == 0


# --- chains, siblings and trees, counted by hand ------------------------------------------------------------

CHOICES = [[5, 6, 7, 8], [1, 2, 3, 4], [9, 8, 7, 6]]
VALUES = [[0.5, 0.3, 0.1, 0.05], [0.6, 0.2, 0.15, 0.05], [0.4, 0.3, 0.2, 0.1]]


def test_a_chain_ends_at_the_first_wrong_token_and_its_sibling_may_be_right() -> None:
    met = _met(CHOICES, VALUES, [5, 3, 9])
    assert (met.hits, met.siblings) == (1, (0.0, 0.0, 1.0, 1.0))
    # the right sibling has 0.5 * 0.15; along a chain of two 0.3, 0.1 and 0.5 * 0.2 are likelier, of three also
    # 0.5 * 0.6 * 0.3
    assert met.order == (MISSED, MISSED, 3, 4)
    assert [even_tree(met, n, 2, n) for n in (1, 2, 3)] == [1, 2, 2]
    assert [even_tree(met, 3, m, 3) for m in range(4)] == [1, 1, 2, 2]
    assert even_tree(met, 3, 2, 1) == 1, "only the first place has siblings"
    assert [chosen_tree(met, 2, m) for m in (3, 4)] == [1, 2]
    assert _met(CHOICES, VALUES, [5, 1, 9]) == Met(3, (0.0,) * 4, (MISSED,) * 4)
    assert not any(_met(CHOICES, VALUES, [4, 1, 9]).siblings)


def test_a_tree_holds_the_likeliest_nodes() -> None:
    nodes = {(5,): 0.5, (6,): 0.3, (5, 1): 0.3, (5, 3): 0.075, (6, 2): 0.09, (6, 4): 0.08}
    pool = [(path, math.log(value)) for path, value in nodes.items()]
    assert _followed(pool, [5, 3], 2) == tuple(2 if size > 5 else 1 for size in SIZES)
    assert _followed(pool, [6, 2], 2) == tuple(2 if size > 3 else 1 for size in SIZES)
    assert set(_followed(pool, [8, 2], 2)) == {0}


def test_rounds_walk_along_a_text() -> None:
    hits = [2, 0, 0, 1, 9, 0]
    text = [Met(n, (0.0,) * 4) for n in hits]
    assert lengths_along([text], lambda met: min(met.hits, 2), walked=True) == (3 + 2 + 1) / 3
    assert lengths_along([text], lambda met: min(met.hits, 2), walked=False) == 1 + (2 + 1 + 2) / 6


def test_rows_cost_what_lies_on_the_line() -> None:
    costs = {1: 1.0, 3: 1.2, 5: 2.0}
    assert [line(costs, n) for n in (1, 2, 4, 7)] == pytest.approx([1.0, 1.1, 1.6, 2.8])
    texts = [[Met(0, (0.0, 1.0, 1.0, 1.0), (0,) * 9)] * 10]
    found = gains(texts, 0.1, 0.1, {1: 1.0, 64: 1.0}, walked=False)
    assert found["comb"]["tokens"] == 2
    assert found["comb"]["gain"] == pytest.approx(2)


def test_two_rules_keep_what_their_ratios_say() -> None:
    """p / q of the drafted tokens: 2, 1/2, 1/2."""
    p = torch.tensor([[0.8, 0.2], [0.3, 0.7], [0.25, 0.75], [0.5, 0.5]])
    q = torch.tensor([[0.4, 0.6], [0.6, 0.4], [0.5, 0.5]])
    found = _kept(torch.tensor([0, 0, 0]), p, q)
    assert found.speculative == pytest.approx((0, 1, 1.5, 1.75))
    assert found.block == pytest.approx((0, 1, 1.5, 1.75)), "the cap holds at each place"
    found = _kept(torch.tensor([0, 0]), p[[1, 0]], q[[1, 0]])  # 1/2, then 2
    assert found.speculative == pytest.approx((0, 0.5, 1.0))
    assert found.block == pytest.approx((0, 0.5, 1.5))
    kept = {"speculative": {1: 1.5, 2: 2.0}, "block": {1: 1.5, 2: 2.5}}
    assert block_chain(kept, 0.5, 0.5, {1: 1.0, 64: 1.0})["gain"] == pytest.approx(1.25)


# --- policy auto with good and bad drafters, on one prompt --------------------------------------------------


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(workload, "HERE", tmp_path)
    prompts = ["def add(a, b):\n", "import os\n"]
    monkeypatch.setattr(auto, "heldout", lambda count: prompts[:count])
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


@pytest.mark.heavy
def test_drafters_are_right_exactly_where_the_case_says(results: Path) -> None:
    options = "--prompts 1 --new-tokens 16 --repeats 1 --lengths 3 --loads 1 --name small"
    auto.main(["--cases", "alternate,dear", *options.split()])
    found = json.loads((results / "small.json").read_text(), parse_constant=pytest.fail)
    cases: dict[str, dict[str, Any]] = {
        case["case"]: {each["name"]: each for each in case["contenders"]} for case in found["cases"]
    }
    for contenders in cases.values():
        assert set(contenders) == {"plain", "plain, again", "auto, first request", "auto", "fixed 3"}
        assert all(each["identical_to_plain"] for each in contenders.values())
        assert contenders["plain"]["mean_accepted_length"] == 1
    # the target corrects a wrong token, so the next draft starts with a right one
    assert 1 < cases["alternate"]["fixed 3"]["mean_accepted_length"] <= 2
    assert cases["dear"]["fixed 3"]["mean_accepted_length"] > 3
