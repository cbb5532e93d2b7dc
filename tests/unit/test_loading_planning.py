"""`load` with a plan: given in every form or found, errors, draft lengths and draft costs."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft import ConfigError, SamplingParams
from foredraft.bench.bench_records import DraftCost
from foredraft.bench.forward_costs import measure_costs
from foredraft.drafters.plan_files import PlanFile, keep_plan, model_hash, plan_place, write_plan
from foredraft.drafters.skips import Skips
from tests.support import checkpoints
from tests.support.loaded import engine_of

GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
NO_PLAN = "no plan for this model; make one with `foredraft tune`, or give plan"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    checkpoints.save_checkpoint(folder / "big", tokenizer=True, seed=1)
    checkpoints.save_checkpoint(folder / "small", tokenizer=True, seed=2, num_hidden_layers=1)
    checkpoints.save_checkpoint(folder / "foreign", tokenizer=True, vocab_size=300, num_hidden_layers=1)
    return folder


@pytest.fixture
def plan(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlanFile:
    """A plan of the big model that is not kept yet."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return PlanFile(
        model="big", model_hash=model_hash(models / "big"), layers=3, skip_attention=(1,), skip_mlp=(2,),
        device="cpu", dtype="float32", max_draft=3, alpha=0.8, c=0.5, tau=2.5, speedup=1.25, predicted=1.3,
        date="2026-11-21", foredraft="0.1.0",
    )  # fmt: skip


def load(models: Path, **options: Any) -> foredraft.LLM:
    given = {"device": "cpu", "max_batch": 2, "max_length": 96, "policy": "fixed", **options}
    return foredraft.load(models / "big", **given)


def self_draft(llm: foredraft.LLM) -> Any:
    return engine_of(llm).drafters["layer-skip"]


def test_a_plan_may_be_given_in_any_form(models: Path, plan: PlanFile, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    write_plan(plan, file)
    want = load(models).generate("a b c", GREEDY)[0].token_ids
    for given in (file, str(file), plan, plan.skips, "skip:attn=1/mlp=2"):
        llm = load(models, plan=given)
        assert self_draft(llm).skips == Skips((1,), (2,))
        assert llm.default_drafter == "layer-skip", "a given plan is used by default"
        [output] = llm.generate("a b c", GREEDY)
        assert output.token_ids == want and output.stats.drafted > 0 and output.lossless
        policy: Any = engine_of(llm).policy
        assert policy.max_draft == (5 if given == plan.skips or given == str(plan.skips) else 3)
    assert self_draft(load(models, plan="exit:2")).skips == Skips(exit=2)


def test_layer_skip_drafts_on_the_targets_cache(models: Path) -> None:
    llm = load(models, plan="skip:attn=1")
    assert (
        self_draft(llm).caches == (engine_of(llm).cache,)
        and self_draft(llm).draft_pass.runner is llm.loaded.runner
    )
    assert engine_of(llm).rows.caches == [engine_of(llm).cache]


def test_a_kept_plan_is_found(models: Path, plan: PlanFile) -> None:
    with pytest.raises(ConfigError, match=NO_PLAN):
        load(models, drafter="layer-skip")
    assert set(engine_of(load(models)).drafters) == {"lookup", "prediction"}
    keep_plan(plan)
    llm = load(models, drafter="layer-skip")
    policy: Any = engine_of(llm).policy
    assert (self_draft(llm).skips, policy.max_draft) == (plan.skips, 3)
    assert engine_of(load(models, drafter="layer-skip", max_draft=7)).policy.max_draft == 7  # type: ignore[attr-defined]
    assert engine_of(load(models, drafter="layer-skip", policy="heuristic")).policy.max_draft == 3  # type: ignore[attr-defined]
    assert self_draft(load(models, drafter="layer-skip", plan="exit:1")).skips == Skips(exit=1)
    # a request may name it where another drafter is the default
    llm = load(models, draft=models / "small")
    assert llm.default_drafter == "draft-model" and engine_of(llm).policy.max_draft == 5  # type: ignore[attr-defined]
    names = ("none", "lookup", "draft-model", "layer-skip")
    outputs = llm.generate(["a b c"] * 4, [replace(GREEDY, drafter=name) for name in names])
    assert len({tuple(output.token_ids) for output in outputs}) == 1
    assert outputs[3].stats.drafted > 0


def test_plans_that_do_not_fit_are_refused(models: Path, plan: PlanFile, tmp_path: Path) -> None:
    other = replace(plan, model="another", model_hash="0" * 64)
    write_plan(other, tmp_path / "other.json")
    (tmp_path / "text.json").write_text("exit 1")
    for given, message in (
        (
            tmp_path / "other.json",
            "plan is for 'another', which is another model than .*big; make one with",
        ),
        (other, "plan is for 'another'"),
        (tmp_path / "none.json", "plan is '.*none.json', which cannot be read"),
        (tmp_path / "text.json", "plan is '.*text.json', which is not JSON"),
        ("exit:3", "plan exits before layer 3; give 1 to 2: the model has 3 layers"),
        ("skip:mlp=3", "plan skips the MLP of layer 3; give 0 to 2"),
        ("skip:mlp", "plan is 'skip:mlp'; give exit:LAYER, or skip:"),
        (replace(plan, layers=7), "plan is for a model of 7 layers, but this one has 3; make one with"),
        (replace(plan, layers=9, skip_mlp=(8,)), "plan skips the MLP of layer 8; give 0 to 2"),
    ):
        with pytest.raises(ConfigError, match=message) as refused:
            load(models, plan=given)
        assert "\n" not in str(refused.value)


def test_a_broken_kept_plan_is_left_out_unless_it_is_needed(
    models: Path, plan: PlanFile, caplog: pytest.LogCaptureFixture
) -> None:
    keep_plan(plan)
    place = plan_place(plan.model_hash)
    assert place is not None
    place.write_text("{}")
    with caplog.at_level(logging.WARNING):
        assert set(engine_of(load(models)).drafters) == {"lookup", "prediction"}
    assert "whose format is None" in caplog.text
    with pytest.raises(ConfigError, match="whose format is None"):
        load(models, drafter="layer-skip")


def test_a_plan_of_another_device_or_dtype_is_used_with_a_warning(
    models: Path, plan: PlanFile, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, and only where the plan is given or needed; the output is exact in any case."""
    elsewhere = replace(plan, device="cuda")
    keep_plan(elsewhere)
    for given, doubted in (
        ({"plan": elsewhere}, True),
        ({"drafter": "layer-skip"}, True),
        ({}, False),
        ({"plan": plan}, False),
        ({"plan": plan, "dtype": "bfloat16"}, True),
        ({"plan": "skip:attn=1", "dtype": "bfloat16"}, False),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load(models, **given)
        told = [one.getMessage() for one in caplog.records if "was measured on" in one.getMessage()]
        assert len(told) == doubted, given
        assert not told or "but runs on cpu in " in told[0]


def test_greedy_draft_sampling_works_with_layer_skip(models: Path) -> None:
    llm = load(models, plan="skip:attn=1", draft_sampling="greedy")
    assert llm.generate("a b c", replace(GREEDY, temperature=1.0))[0].stats.drafted > 0
    assert engine_of(
        load(models, plan="exit:1", draft=models / "foreign", draft_sampling="greedy")
    ).greedy_drafts


def test_a_draft_step_costs_the_sub_layers_that_its_plan_keeps(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock counts the sub-layers that run, and one unit for embedding and head."""
    now = 0.0
    for given, c in (("exit:1", 3 / 7), ("skip:attn=0-2", 4 / 7), ("skip:none", 1.0)):
        llm = load(models, plan=given, kernels=False)  # kernels would take all steps in one call
        runner = llm.loaded.runner
        forward, seen = runner.forward, set()

        def timed(*some: Any, plan: Any = None, forward: Any = forward, seen: Any = seen, **more: Any) -> Any:
            nonlocal now
            now += 7 if plan is None else 1 + sum((*plan.attention, *plan.mlp))
            seen.add((plan is not None, more.get("invariant", True)))
            return forward(*some, plan=plan, **more)

        monkeypatch.setattr(runner, "forward", timed)
        monkeypatch.setattr("foredraft.profiling.timing.time.perf_counter", lambda: now)
        costs = measure_costs(llm.loaded, 1, 20, 3, repeats=2)
        own = costs.drafting["layer-skip"]
        assert (own.first, own.further) == pytest.approx((c, c))
        assert costs.drafting["lookup"] == DraftCost(0.0, 0.0)
        assert seen == {(False, True), (True, given.startswith("exit"))}
