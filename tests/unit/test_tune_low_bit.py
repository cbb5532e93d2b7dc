"""A search over the sub-layers of a copy in few bits drafts with the copy, and keeps its plan apart."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft import LLM, ConfigError, SamplingParams
from foredraft.bench.measurement import measure_costs
from foredraft.cli import main
from foredraft.decode.policy import Fixed
from foredraft.decode.stats import Stats
from foredraft.drafters.layer_skip import LowBit, low_bit_copy
from foredraft.drafters.plan_files import Skips, find_plan, model_hash, read_plan
from foredraft.kernels.compilation import library
from foredraft.model.runner import Runner
from foredraft.tune import finals
from foredraft.tune import run as run_module
from foredraft.tune.teacher_forced import TeacherForced
from foredraft.tune.tune_records import measure_plan_costs
from tests.support.checkpoints import save_checkpoint
from tests.support.loaded import engine_of
from tests.unit.test_tune_teacher_forced import MAX_DRAFT, write_texts

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "eos_token_id": None}
PLANS = ["skip:none", "skip:attn=1/mlp=0"]
QUICK = (
    *("--tokens", "48", "--trials", "12", "--max-draft", "3", "--new-tokens", "6"),
    *("--repeats", "1", "--draft-weights", "int4", "--json"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("models") / "big", tokenizer=True, **SIZES)


def runners(llm: LLM) -> tuple[Runner, Runner]:
    target = llm.loaded.runner
    return target, low_bit_copy(target, 4)


def check_rounds(model: Path, drafting: str = "copy") -> None:
    """Check the rounds that teacher forcing expects against those of decoding with the copy."""
    with foredraft.load(model, device="cpu", max_batch=5, max_length=128, drafter="none") as llm:
        target, copy = runners(llm)
        own = {"copy": copy, "target": None}[drafting]
        scored = TeacherForced(target, write_texts(llm, 0.0), MAX_DRAFT, drafting=own)
        for skips in PLANS:
            counts = scored.rounds(Skips.parse(skips).plan(llm.loaded.spec.layers), every_start=True).counts
            engine_of(llm).drafters["self"] = LowBit(copy, engine_of(llm).cache, Skips.parse(skips))
            for draft in range(1, MAX_DRAFT + 1):
                engine_of(llm).policy = Fixed(draft)
                params = [
                    SamplingParams(temperature=0, max_new_tokens=text.new_tokens, drafter="self")
                    for text in scored.texts
                ]
                prompts = [list(text.ids[: text.prompt_length]) for text in scored.texts]
                stats = Stats.merge(output.stats for output in llm.generate(prompts, params))
                assert stats.rounds == counts[draft - 1], (skips, draft)


def test_expected_rounds_are_those_of_the_copys_drafts(model: Path) -> None:
    check_rounds(model)


def test_drafts_of_the_target_in_the_copys_place_are_caught(model: Path) -> None:
    with pytest.raises(AssertionError):
        check_rounds(model, "target")


@pytest.mark.heavy
def test_a_plan_of_the_copy_is_searched_kept_and_used(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(run_module, "measure_plan_costs", partial(measure_plan_costs, repeats=3))
    monkeypatch.setattr(finals, "measure_costs", partial(measure_costs, repeats=3))
    monkeypatch.setattr(run_module, "_winner", lambda finalists: 0)  # speeds of this model are noise
    prompts, out = tmp_path / "prompts.txt", tmp_path / "plan.json"
    prompts.write_text("".join(f"def accept{word}(draft, p, q)\n" for word in "abcdefgh"))
    words = ["tune", "--model", str(model), "--prompts", str(prompts), "--plan-out", str(out), *QUICK]
    assert main(words) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["options"]["draft_weights"] == "int4" and report["costs"]["exit"] is None
    assert all(finalist["identical"] for finalist in report["finalists"])
    hash, plan = model_hash(model), read_plan(out)
    assert plan.draft_weights == "int4" and "of a copy in int4" in str(plan)
    assert find_plan(hash, "int4") == plan and find_plan(hash) is None and find_plan(hash, "int8") is None

    options: dict[str, Any] = {"device": "cpu", "max_length": 64, "policy": "fixed"}
    with foredraft.load(model, drafter="low-bit", **options) as llm:
        drafter: Any = engine_of(llm).drafters["low-bit"]
        assert drafter.skips == plan.skips and drafter.planned == plan.max_draft
        policy: Any = engine_of(llm).policy
        assert policy.max_draft == plan.max_draft and "layer-skip" not in engine_of(llm).drafters
    with foredraft.load(model, drafter="low-bit", draft_weights="int8", **options) as llm:
        drafter = engine_of(llm).drafters["low-bit"]
        assert drafter.skips is None, "the plan is of another copy"
    with foredraft.load(model, drafter="low-bit", plan=out, **options) as llm:
        assert "layer-skip" not in engine_of(llm).drafters, "it is a plan of the copy alone"
        drafter = engine_of(llm).drafters["low-bit"]
        assert drafter.skips == plan.skips
    for other in ({}, {"drafter": "layer-skip"}, {"drafter": "low-bit", "draft_weights": "int8"}):
        with pytest.raises(ConfigError, match="plan is for drafter low-bit in int4"):
            foredraft.load(model, plan=out, **options, **other)


def test_refuses_impossible_copies(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"def accept{word}(draft, p, q)\n" for word in "abcdefgh"))
    words = ["tune", "--model", str(model), "--prompts", str(prompts), *QUICK]
    assert main([*words, "--no-kernels"]) == 2
    [*_, told] = capsys.readouterr().err.splitlines()
    assert "--draft-weights is 'int4', but a copy needs Foredraft's kernels: they are off" in told
