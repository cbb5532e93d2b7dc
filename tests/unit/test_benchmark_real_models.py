"""The benchmark of real models: turns of pretended programs, levels of CPUs, options and the table of a result."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import pytest

from benchmarks import real_models
from foredraft.kernels.building import LEVELS

AVX2 = "CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | BMI2 = 1 | LLAMAFILE = 1 | OPENMP = 1 |"
AVX512 = f"{AVX2} AVX512 = 1 |"
VNNI = f"{AVX512} AVX512_VBMI = 1 | AVX512_VNNI = 1 |"
BF16 = f"{VNNI} AVX512_BF16 = 1 |"
AMX = f"{BF16} AVX_VNNI = 1 | AMX_INT8 = 1 |"
NAMES = {
    "x86-64-v3": AVX2,
    "x86-64-v3-vnni": f"{AVX2} AVX_VNNI = 1 |",
    "x86-64-v4": AVX512,
    "x86-64-v4-vnni": VNNI,
    "x86-64-v4-bf16": BF16,
    "x86-64-v4-amx": AMX,
}


@pytest.fixture(autouse=True)
def _no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.profiling.others.read_counters", lambda: None)  # no turn is repeated


class Program:
    """A program whose passes of n rows take n times so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.asked = seconds, list[Any]()

    def ask(self, request: list[Any]) -> float:
        self.asked.append(request)
        return self.seconds * request[1]


def comparison(turns: int, seconds: float = inf, **programs: float) -> real_models.Comparison:
    both = object.__new__(real_models.Comparison)
    both.turns, both.seconds = turns, seconds
    both.programs = {name: Program(taken) for name, taken in programs.items()}  # type: ignore[misc]
    both.ratios = {"over_peer": ("own", "peer")}
    return both


def medians(found: dict[str, Any]) -> dict[str, float]:
    return {name: figure["median"] for name, figure in found.items() if name != "v"}


def test_ratios_are_of_speeds_and_v_is_of_times() -> None:
    both = comparison(5, own=2.0, peer=3.0)
    found = both.compared({rows: ["forward", rows] for rows in (1, 4)}, float, base=1)
    assert medians(found[4]) == {"own": 8.0, "peer": 12.0, "over_peer": 1.5}
    assert medians(found[4]["v"]) == {"own": 4.0, "peer": 4.0}
    assert found[1]["own"]["count"] == 5
    rates = both.compared({0: ["run", 6]}, float, rate=True)[0]
    assert medians(rates) == {"own": 12.0, "peer": 18.0, "over_peer": pytest.approx(2 / 3)}


def test_only_the_first_request_warms_and_slow_figures_take_fewer_turns() -> None:
    both = comparison(9, seconds=0.0, own=1.0, peer=1.0)
    found = both.compared({rows: ["forward", rows] for rows in (1, 4)}, float)
    assert found[1]["own"]["count"] == real_models.LEAST
    asked = [rows for _, rows in both.programs["own"].asked]  # type: ignore[attr-defined]
    assert asked.count(1) == real_models.LEAST + 1 and asked.count(4) == real_models.LEAST


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_llama_cpp_must_be_built_for_the_level_itself(level: Any) -> None:
    assert [name for name, system in NAMES.items() if real_models.built_for(level, system)] == [level.name]
    assert real_models.variables_of(level.name)["FOREDRAFT_CPU_LEVEL"] == level.name


def test_quick_sets_defaults_that_other_options_change() -> None:
    needed = ["--work", "w", "--llama-cpp", "l"]
    whole = real_models.parsed(needed)
    assert (whole.tokens, whole.busy, whole.seconds, whole.name) == (96, [1, 2, 4], inf, "real_models")
    quick = real_models.parsed([*needed, "--quick", "--tokens", "16", "--level", "x86-64-v3"])
    assert (quick.tokens, quick.busy, quick.trials) == (16, [], 0)
    assert quick.name == "real_models_x86-64-v3"


def test_random_weights_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    keys = {
        "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 96, "tie_word_embeddings": True,
    }  # fmt: skip
    monkeypatch.setattr(real_models, "SHAPES", {"llama-1b": keys})
    file = real_models.random_file("llama1b", tmp_path)
    first = file.stat().st_mtime_ns
    assert real_models.random_file("llama1b", tmp_path).stat().st_mtime_ns == first
    assert [each.name for each in tmp_path.iterdir()] == ["llama1b-BF16.gguf"]
    worker = real_models.Worker(str(file), "bfloat16", drafters=False)
    [prompt] = worker.random(1, 8)
    assert len(worker.run("plain", prompt, 4)[2]) == 4
    assert worker.forward(2, passes=1) > 0
