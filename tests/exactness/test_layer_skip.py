"""A model that drafts for itself: real forwards, whatever is left out of them, leave the very bits of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import foredraft
from foredraft import LLM, ConfigError, SamplingParams
from foredraft.decode.policy import Fixed, Heuristic
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.drafters.plan_files import Skips
from foredraft.model.runner import Resume
from foredraft.model.spec import ModelSpec
from foredraft.tune.run import _check_layers as check_layers
from tests.exactness import matrix as bits
from tests.exactness.matrix import *  # noqa: F403
from tests.exactness.matrix import PROMPTS, Ids
from tests.parity.test_heads import Recorder
from tests.support import assistants
from tests.support.checkpoints import FAMILIES, layers_of, reference_model
from tests.support.coded import LOADED, VOCABULARY, loading_by
from tests.support.mutation import assert_caught, defect
from tests.support.mutations import around

NEW = 40
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
BY = ("operators", "kernels")


def skips_of(layers: int) -> dict[str, Skips]:
    every, last = tuple(range(layers)), layers - 1
    return {
        "nothing": Skips(),
        "alternating": Skips(every[1::2], every[::2]),
        "ends": Skips((0, last), (last,)),
        "attention": Skips(every),
        "everything": Skips(every, every),
        "early": Skips(exit=1),
        "late": Skips(exit=last),
    }


def load(folder: Path, family: str, dtype: str, by: str) -> LLM:
    """A model with one drafter for every plan, and a lookup."""
    model = reference_model(family, vocab_size=VOCABULARY, tie_word_embeddings=False)
    model.save_pretrained(folder)
    with loading_by(by):
        llm = foredraft.load(folder, plan="skip:none", dtype=dtype, **LOADED)
    runner: Any = llm.loaded.runner
    assert runner.by_kernels == (by == "kernels")
    for name, skips in skips_of(llm.loaded.spec.layers).items():
        drafter = LayerSkip(runner, llm.loaded.engine.cache, skips)
        drafter.name = name
        llm.loaded.engine.drafters[name] = drafter
    return llm


# families that differ most, with each back end and dtype
WORLDS = [
    pytest.param((family, dtype, by), marks=[pytest.mark.slow] * ((dtype, by) == ("float32", "operators")))
    for family, dtype, by in product(("llama", "gemma2"), ("bfloat16", "float32"), BY)
]


OTHERS = [
    pytest.param((family, "float32", by), marks=[pytest.mark.slow] * (by == "operators"))
    for family, by in product([name for name in FAMILIES if name not in ("llama", "gemma2")], BY)
]


@pytest.fixture(scope="module", params=[*WORLDS, *OTHERS], ids="-".join)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load(tmp_path_factory.mktemp("model"), *request.param)


PLANS = tuple(skips_of(3))
KINDS = (*PLANS, "lookup", "none")
POLICIES = [Fixed(1), Fixed(4), Fixed(7), *(Heuristic(n) for n in (1, 4, 7))]
WAYS = ("padded", "gathered", "recorded")


@pytest.mark.heavy
@settings(max_examples=8)
@given(data=st.data())
def test_any_layers_may_be_skipped(llm: LLM, plain: Ids, data: st.DataObject) -> None:
    last = llm.loaded.spec.layers - 1
    layers = st.sets(st.integers(0, last)).map(lambda found: tuple(sorted(found)))
    skips = st.builds(Skips, layers, layers) | st.builds(Skips, exit=st.integers(1, last))
    runner = llm.loaded.runner
    llm.loaded.engine.drafters["layer-skip"] = LayerSkip(runner, llm.loaded.engine.cache, data.draw(skips))
    llm.loaded.engine.policy = Fixed(data.draw(st.integers(1, 7)))
    params = replace(GREEDY, max_new_tokens=16, drafter="layer-skip")
    outputs = llm.generate(PROMPTS[1:5], params)
    assert [output.token_ids for output in outputs] == [ids[:16] for ids in plain[1:5]]


@pytest.mark.parametrize("name", PLANS)
def test_the_cache_after_rollbacks(llm: LLM, name: str) -> None:
    llm.loaded.engine.policy = Fixed(5)
    rounds = bits.check_cache(llm, name, PROMPTS[4], NEW).rounds
    assert name == "nothing" or any(turn.accepted < turn.drafted for turn in rounds)


def test_drafts_of_a_plan_that_skips_nothing_are_accepted_whole(llm: LLM) -> None:
    llm.loaded.engine.policy = Fixed(4)
    for output in llm.generate(PROMPTS, replace(GREEDY, drafter="nothing")):
        assert output.stats.accepted == output.stats.drafted > 0


def test_the_verifying_pass_resumes_from_the_drafts_states(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pending token and all drafted ones but the last are known, of the rows that exit early."""
    llm.loaded.engine.policy = Fixed(3)
    seen: list[Resume | None] = []
    forward = llm.loaded.runner.forward

    def spy(*args: Any, resume: Resume | None = None, **more: Any) -> Any:
        if "plan" not in more:
            seen.append(resume)
        return forward(*args, resume=resume, **more)

    monkeypatch.setattr(llm.loaded.runner, "forward", spy)
    outputs = llm.generate(PROMPTS[:2], [replace(GREEDY, drafter=name) for name in ("early", "ends")])
    resumes = [resume for resume in seen if resume is not None]
    assert {resume.depth for resume in resumes} == {1}
    assert all(1 <= resume.known[0] <= 3 and not any(resume.known[1:]) for resume in resumes)
    assert sum(resume.known[0] for resume in resumes) == outputs[0].stats.drafted


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_early_exit_drafts_the_tokens_of_the_shorter_model(family: str, by: str, tmp_path: Path) -> None:
    """The shorter model is that of transformers without the layers from the exit on."""
    model: Any = reference_model(family, vocab_size=VOCABULARY, tie_word_embeddings=False)
    llm = load(tmp_path, family, "float32", by)
    engine, last = llm.loaded.engine, llm.loaded.spec.layers - 1
    engine.policy = Fixed(4)
    engine.drafters["layer-skip"] = LayerSkip(llm.loaded.runner, engine.cache, Skips(exit=last))
    record = Recorder(llm)
    llm.generate(PROMPTS[1:5], replace(GREEDY, max_new_tokens=5, drafter="layer-skip"))
    assert sum(len(logits) == 4 for *_, logits in record.drafts) >= 4
    holder, name = layers_of(model)
    setattr(holder, name, getattr(holder, name)[:last])
    with torch.inference_mode():
        for text, drafted, logits in record.drafts:
            for at, found in enumerate(logits):
                want = model(torch.tensor([text + drafted[:at]]), use_cache=False).logits[0, -1]
                assert int(want.argmax()) == int(found.argmax())


def refused_plan(target: Path) -> None:
    with pytest.raises(ConfigError, match="attention of layer 1, whose keys and values other layers read"):
        foredraft.load(target, device="cpu", policy="fixed", drafter="layer-skip", plan="skip:attn=1")


unaware = around(lambda check, own, layers, producers=(): check(own, layers))


def test_no_plan_skips_keys_that_other_layers_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = assistants.save_target(tmp_path / "shared", "shared", VOCABULARY)
    refused_plan(target)
    with pytest.raises(ConfigError, match="whose layers read the keys and values of others"):
        check_layers(ModelSpec.from_folder(target))
    check_layers(ModelSpec.from_folder(assistants.save_target(tmp_path / "own", "unified", VOCABULARY)))
    unknown = defect("unknown", Skips.check, unaware, lambda: refused_plan(target), pytest.fail.Exception)
    assert_caught(unknown, monkeypatch)
