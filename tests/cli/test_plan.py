"""--plan and drafter layer-skip in every command, and their mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli import main
from foredraft.drafters.plan_files import PlanFile, keep_plan, model_hash, write_plan
from tests.support.checkpoints import save_checkpoint

GREEDY = ["--temperature", "0", "--max-new-tokens", "12", "--device", "cpu", "--json"]
FIXED_POLICY = ["--policy", "fixed"]


@pytest.fixture
def plan(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlanFile:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return PlanFile(
        model="big", model_hash=model_hash(models / "big"), layers=3, skip_attention=(1,), device="cpu",
        dtype="float32", max_draft=3, alpha=0.8, c=0.5, tau=2.5, speedup=1.25, predicted=1.3,
        date="2026-11-21", foredraft="0.1.0",
    )  # fmt: skip


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_every_plan_gives_the_same_text(
    models: Path, plan: PlanFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    write_plan(plan, file)
    keep_plan(plan)
    command = ["generate", "def accept", "--model", str(models / "big"), *GREEDY]
    assert main(command) == 0
    want = document(capsys)["outputs"][0]["token_ids"]
    for options in (
        ["--plan", str(file)],
        ["--drafter", "layer-skip"],
        ["--plan", "exit:2"],
        ["--plan", "skip:attn=0-2/mlp=1", "--max-draft", "7", "--draft-sampling", "greedy"],
    ):
        assert main([*command, *FIXED_POLICY, *options]) == 0
        found = document(capsys)
        assert found["outputs"][0]["token_ids"] == want and found["stats"]["drafted"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--drafter", "layer-skip"],
            "no plan for this model; make one with `foredraft tune`, or give --plan",
        ),
        (["--plan", "nowhere.json"], "--plan is 'nowhere.json', which cannot be read"),
        (["--plan", "skip:heads=1"], "--plan is 'skip:heads=1'; give exit:LAYER, or skip:attn=LAYERS/mlp"),
        (["--plan", "exit:3"], "plan exits before layer 3; give 1 to 2: the model has 3 layers"),
        (["--plan", "other.json"], "--plan is for 'big', which is another model than"),
        (
            ["--plan", "exit:1", "--drafter", "lookup"],
            "--plan has no effect with drafter lookup; leave it out",
        ),
        (
            ["--plan", "exit:1", "--draft", "nowhere", "--drafter", "layer-skip"],
            "--draft has no effect with drafter layer-skip",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    models: Path,
    plan: PlanFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_plan(plan, tmp_path / "other.json")
    model = "mute" if "other.json" in arguments else "big"
    assert main(["generate", "x", "--model", str(models / model), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("foredraft: error: ") and message in captured.err


def test_verify_tests_a_plan(plan: PlanFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model's distributions are flat, so drafts without the last layer's attention are accepted about half the
    time."""
    model = save_checkpoint(
        tmp_path / "model", tokenizer=True, seed=3, eos_token_id=None, initializer_range=0.4
    )
    quick = ["--tokens", "6", "--detect", "0.1", "--seed", "3", "--max-batch", "32", "--device", "cpu"]
    command = ["verify", "--model", str(model), *quick, *FIXED_POLICY, "def accept", "Viktor", "x"]
    for given in ("skip:attn=2", "exit:2"):
        assert main([*command, "--plan", given]) == 0
        output = capsys.readouterr().out
        assert f"drafter layer-skip ({given}), policy fixed;" in output and "PASSED" in output
    assert main([*command, "--plan", "skip:attn=2", "--self-test"]) == 1, "a missing residual is found"
    assert "was found" in capsys.readouterr().out
    assert main([*command, "--drafter", "layer-skip"]) == 2
    assert "no plan for this model" in capsys.readouterr().err


def test_bench_has_a_row_for_the_plan(
    models: Path,
    plan: PlanFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("foredraft.bench.machine_record.BYTES", 2**20)
    (tmp_path / "words.jsonl").write_text('{"prompt": "def accept(draft, p):"}\n')
    command = [
        "bench", "--model", str(models / "big"), "--workload", str(tmp_path / "words.jsonl"), "--device", "cpu",
        "--new-tokens", "8", "--repeats", "1", "--methods", "layer-skip", "--json",
    ]  # fmt: skip
    assert main([*command, "--plan", "skip:attn=1"]) == 0
    found = document(capsys)
    assert [row["contender"] for row in found["rows"]] == ["plain", "layer-skip"]
    assert found["rows"][1]["exactness"]["identical"] == 1
    assert found["options"]["plan"] == "skip:attn=1"
    cost = found["costs"][0]["drafting"]["layer-skip"]
    assert 0 < cost["first"] + cost["further"] < 5
    assert [model["role"] for model in found["models"]] == ["target"]
    assert main(command) == 2
    assert "layer-skip has no plan for this model; make one with `foredraft tune`" in capsys.readouterr().err
