"""The GPU benchmark, run on the CPU at a tiny shape."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_stages, peer, random_model, timing, workload
from foredraft.bench import machine_record as bench_machine
from foredraft.bench.bench_records import Bandwidth
from foredraft.model.runner.invariant_shapes import FALLBACK
from tests.support.panics import raising

CPU = torch.device("cpu")
TINY = random_model.SHAPES["tiny"]
SMALL = "--shape tiny --device cpu --dtype float32 --backend eager --name small".split()
SMALL += "--new-tokens 12 --repeats 1 --prompts 1 --max-draft 3".split()


@pytest.fixture(autouse=True)
def _no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.profiling.others.read_counters", lambda: None)  # no turn is repeated


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (workload, gpu):  # of the figures, and of the page
        monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(bench_machine, "BYTES", 2**20)
    return tmp_path / "results" / "small.json"


@pytest.mark.heavy
def test_every_stage_writes_its_figures(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are limited by batch-invariant shapes."""
    monkeypatch.setattr("foredraft.model.runner.torch_backend.find_shapes", lambda *_: FALLBACK)
    assert gpu.main([*SMALL, "--max-draft", "9", "--stages", "forwards,plain,arranged-0.9"]) == 0
    found: dict[str, Any] = json.loads(results.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    assert found["bandwidth"]["bytes_per_second"] > 0
    stages = found["stages"]
    for way, rows in (("deterministic", [1, 2, 4, 8]), ("not deterministic", [1, 2, 4, 8, 16, 32])):
        costs = stages["forwards"][way]
        assert [cost["rows"] for cost in costs["verifying"]] == rows
        assert costs["verifying"][0]["v"] == 1 and costs["bandwidth_share"] > 0
    contenders = stages["plain"]["contenders"]
    ways = {f"transformers, {way}" for way in peer.WAYS}
    assert set(contenders) == {"foredraft", "foredraft, not deterministic", *ways}
    for name, figures in contenders.items():
        assert "error" not in figures, figures
        assert figures["differs_from_foredraft_at"] is None, "the weights are the same, and so is the text"
        assert figures["tokens_per_second"]["median"] > 0 and 0 <= figures["repeated_4grams"] < 1
        assert ("foredraft_is_faster" in figures) == (name in ways)
    # 4 layers of 64x(64 + 2x32) + 64x64 + 3x64x96 and two norms, the last norm, the head; keys of 134 positions
    assert stages["plain"]["bytes_per_step"] == 4 * (
        4 * (64 * 128 + 64 * 64 + 3 * 64 * 96 + 128) + 64 + 512 * 64 + 2 * 4 * 2 * 16 * 134
    )
    figures = stages["arranged-0.9"]
    assert figures["identical"] is True and 1 <= figures["max_draft"] <= 7
    assert abs(figures["bisection"][-1][1] - 0.9) < 0.01
    share = figures["speedup"]["median"] / figures["predicted"]
    assert figures["measured_over_predicted"] == pytest.approx(share)


@pytest.mark.slow
def test_other_stages_run_after_a_failing_one(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_stages.STAGES, "forwards", raising(RuntimeError("no memory")))
    assert gpu.main([*SMALL, "--stages", "forwards,tests"]) == 1
    stages = json.loads(results.read_text())["stages"]
    failed = stages["forwards"]
    assert failed["error"] == "RuntimeError: no memory" and "in function" in failed["traceback"]
    assert ("passed" if torch.cuda.is_available() else "skipped") in stages["tests"]["summary"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--stages forwards,heat",
            "--stages has 'heat'; give some of tests,verify,forwards,plain,arranged-0.6,",
        ),
        ("--device cuda:99", "device is 'cuda:99', but this PyTorch sees"),
    ],
)
def test_wrong_options_are_refused_before_measuring(
    capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main([*SMALL, *options.split()])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_failing_contender_is_dropped() -> None:
    bench = object.__new__(gpu_stages.Bench)
    bench.new_tokens, bench.repeats, bench.bandwidth = 10, 2, Bandwidth(100.0, "")
    turns: list[str] = []

    def run(name: str, seconds: float, ids: list[int], fails_at: int = 99) -> gpu_stages.Run:
        def once() -> tuple[float, list[int]]:
            turns.append(name)
            if turns.count(name) == fails_at:
                raise ValueError("gone")
            return seconds, ids

        return once

    found = bench._compared(
        {
            "foredraft": run("f", 2.0, [1, 2, 3]),
            "transformers, eager": run("e", 5.0, [1, 2, 4]),
            "transformers, static": run("s", 1.0, [], fails_at=3),
        },
        bytes_per_step=4,
    )["contenders"]
    assert "".join(turns) == "sef" + "fes" + "sef" + "fe"
    assert found["transformers, static"]["error"] == "ValueError: gone"
    assert found["foredraft"]["tokens_per_second"]["median"] == 5
    assert found["foredraft"]["fraction_of_bandwidth"] == 5 * 4 / 100
    assert found["transformers, eager"]["foredraft_is_faster"]["median"] == 2.5
    assert found["transformers, eager"]["differs_from_foredraft_at"] == 2


@pytest.mark.heavy
@pytest.mark.parametrize("alpha", [0.6, 0.9])
def test_the_engine_reaches_the_arranged_acceptance(alpha: float) -> None:
    """Measured on text that the model generates; `find_factor` measures on random text."""
    factor, _ = random_model.find_factor(TINY, CPU, torch.float32, alpha)
    pair = random_model.Pair.of(TINY, CPU, torch.float32, factor)
    draft = random_model.Runner(pair.draft, deterministic=False)
    llm = random_model.make_llm(random_model.Runner(pair.target), draft, 400, longest=4)
    accepted = rejected = 0
    for prompt in random_model.random_prompts(4, 64, 512):
        _, ids, stats = gpu_stages.decoded(llm, prompt, 128, "draft-model")
        assert gpu_stages.repeated(ids) < 0.1
        accepted, rejected = accepted + stats.accepted, rejected + stats.rejections
    assert ids == gpu_stages.decoded(llm, prompt, 128, "none")[1]
    assert abs(accepted / (accepted + rejected) - alpha) < 0.05


def test_the_draft_equals_the_target_at_factor_0() -> None:
    for factor, share in ((0.0, 1.0), (1.0, 0.15)):
        pair = random_model.Pair.of(TINY, CPU, torch.float32, factor)
        assert abs(random_model.agreement(pair, 512) - share) < 0.1
    again = random_model.Pair.of(TINY, CPU, torch.float32, 0.5)
    for name, tensor in pair.tensors.items():  # each is a function of its name alone
        later = name.endswith(random_model.OUTPUTS) and int(name.split(".")[2]) >= TINY.draft_layers
        assert torch.allclose(again.tensors[name], tensor * (0.5 if later else 1.0))


def test_interleaved_works_alternate_direction() -> None:
    turns: list[str] = []
    timing.interleaved({n: lambda n=n: turns.append(n) for n in "abc"}, CPU, 2, warm=1)  # type: ignore[misc]
    assert "".join(turns) == "abc" + "cba" + "abc"


def test_works_run_untimed_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, before = 0.0, ""

    def work(name: str) -> None:
        nonlocal now, before
        now += 1.0 if name == before else 7.0
        before = name

    monkeypatch.setattr("foredraft.profiling.timing.time.perf_counter", lambda: now)
    works = {name: partial(work, name) for name in "ab"}
    assert timing.interleaved(works, CPU, 2, warm=0) == {"a": [7.0, 7.0], "b": [7.0, 1.0]}
    assert timing.interleaved(works, CPU, 2, warm=0, settle=1) == {"a": [1.0, 1.0], "b": [1.0, 1.0]}


@pytest.mark.parametrize(("settle", "before"), [(None, 0), (0.0, 1), (1.0, 1), (4.0, 2), (5.0, 3)])
def test_works_settle_for_the_given_seconds(
    settle: float | None, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = list[None]()
    monkeypatch.setattr("foredraft.profiling.timing.time.perf_counter", lambda: 2.0 * len(runs))
    works = {"it": lambda: runs.append(None)}
    assert timing.interleaved(works, CPU, 1, warm=0, settle=settle) == {"it": [2.0]}
    assert len(runs) == before + 1
