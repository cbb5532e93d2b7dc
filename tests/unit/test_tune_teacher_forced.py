"""Trials against real drafts: the same chances, and at temperature 0 the same rounds."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import foredraft
from foredraft import LLM, SamplingParams
from foredraft.decode.policy import Fixed
from foredraft.decode.stats import Stats
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.drafters.skips import Skips
from foredraft.errors import ConfigError
from foredraft.model.runner import Runner
from foredraft.tune import teacher_forced as teacher_module
from foredraft.tune.calibration import CalibrationTexts, Text
from foredraft.tune.teacher_forced import TeacherForced
from tests.support.caches import held
from tests.support.checkpoints import save_checkpoint
from tests.support.planting import Edit, Mutant, assert_caught

LONGEST = 4
PLANS = ["skip:none", "skip:attn=1/mlp=0", "skip:attn=0-1/mlp=1-2", "skip:attn=0-2/mlp=0-2"]
FAMILIES = ["llama", "gemma2"]


@pytest.fixture(scope="module", params=[*FAMILIES, "llama-operators"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    family, _, vocab_ops = request.param.partition("-")
    folder = save_checkpoint(
        tmp_path_factory.mktemp(request.param), family, eos_token_id=None, initializer_range=0.12
    )
    kernels = False if vocab_ops else None
    return foredraft.load(folder, max_batch=3, max_length=128, drafter="none", kernels=kernels)


def written(llm: LLM, temperature: float, count: int = 5) -> CalibrationTexts:
    """Texts of unlike lengths: their prompts reach over gemma's window of 24."""
    texts = []
    for number in range(count):
        prompt = [(7 * number + 3 * i) % 90 + 5 for i in range(9 + 7 * number)]
        params = SamplingParams(temperature=temperature, max_new_tokens=31 - 5 * number, seed=number)
        [output] = llm.generate(prompt, params)
        texts.append(Text((*prompt, *output.token_ids), len(prompt)))
    return CalibrationTexts(tuple(texts), temperature)


def made(llm: LLM, temperature: float) -> TeacherForced:
    runner = llm.engine.target
    assert isinstance(runner, Runner)
    return TeacherForced(runner, written(llm, temperature), LONGEST)


def rounds_of_decoding(llm: LLM, teacher: TeacherForced, spelled: str, draft: int) -> int:
    engine = llm.engine
    assert isinstance(engine.target, Runner)
    engine.drafters["self"] = LayerSkip(engine.target, engine.cache, Skips.spelled(spelled))
    engine.policy = Fixed(draft)
    params = [
        SamplingParams(temperature=0, max_new_tokens=text.new, drafter="self") for text in teacher.texts
    ]
    outputs = llm.generate([list(text.ids[: text.start]) for text in teacher.texts], params)
    assert [tuple(output.token_ids) for output in outputs] == [
        text.ids[text.start :] for text in teacher.texts
    ]
    return Stats.merge(output.stats for output in outputs).rounds


@pytest.mark.parametrize("spelled", PLANS)
def test_rounds_are_those_of_decoding_at_temperature_0(llm: LLM, spelled: str) -> None:
    teacher = made(llm, 0.0)
    plan = Skips.spelled(spelled).plan(llm.spec.layers)
    counts = teacher.rounds(plan, every_start=True).counts
    assert [rounds_of_decoding(llm, teacher, spelled, draft) for draft in range(1, LONGEST + 1)] == (
        counts.tolist()
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("spelled", PLANS[1:3])
def test_chances_are_those_of_drafts_taken_step_by_step(llm: LLM, spelled: str, temperature: float) -> None:
    """Brute force: for every start, the target reads what comes before, and the draft steps on alone."""
    teacher = made(llm, temperature)
    runner = teacher.runner
    plan = Skips.spelled(spelled).plan(llm.spec.layers)
    every, trial = teacher.chances(plan, every_start=True), teacher.chances(plan)
    for row, text in list(enumerate(teacher.texts))[1:4]:
        cache = runner.new_cache(1, len(text.ids) + LONGEST)
        ids = torch.tensor([text.ids])
        whole = runner.forward(cache, ids, [0]).logits
        assert whole is not None
        for start in range(0, text.new, 3):
            runner.forward(cache, ids, [0])  # the target's keys and values everywhere again
            at = text.start - 1 + start
            for k in range(min(LONGEST, text.new - start)):
                drafted = runner.forward(cache, ids[:, at + k : at + k + 1], [at + k], plan=plan).logits
                assert drafted is not None
                token = text.ids[at + k + 1]
                if temperature == 0:
                    expected = float(drafted[0, 0].argmax() == token)
                else:
                    q, p = (
                        (logits / temperature).softmax(-1)[token]
                        for logits in (drafted[0, 0], whole[0, at + k])
                    )
                    expected = min(1.0, float(q / p))
                assert every[row, start, k] == pytest.approx(expected, abs=2e-5)
        # a trial has each token's chance at one place in a draft, the same ones as every start has there
        offset = row % LONGEST
        for first in range(offset, text.new, LONGEST):
            span = min(LONGEST, text.new - first)
            assert trial[row, first, :span] == pytest.approx(every[row, first, :span], abs=1e-6)


def check_that_a_trial_leaves_nothing_behind(llm: LLM, temperature: float) -> None:
    teacher = made(llm, temperature)
    layers = llm.spec.layers
    plan, other = (Skips.spelled(spelled).plan(layers) for spelled in PLANS[1:3])
    before = teacher.chances(plan).copy()
    teacher.chances(other)
    assert np.array_equal(teacher.chances(plan), before)


def check_that_rows_are_the_targets_again(llm: LLM) -> None:
    """Prompts, which no copy holds, too; no draft reads the last token."""
    teacher = made(llm, 0.0)
    before = [held(teacher.cache, row, len(text.ids) - 1) for row, text in enumerate(teacher.texts)]
    for spelled in PLANS:
        teacher.chances(Skips.spelled(spelled).plan(llm.spec.layers), every_start=True)
    teacher.restore()
    for row, text in enumerate(teacher.texts):
        assert torch.equal(held(teacher.cache, row, len(text.ids) - 1), before[row])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_trial_leaves_nothing_behind(llm: LLM, temperature: float) -> None:
    check_that_a_trial_leaves_nothing_behind(llm, temperature)
    check_that_rows_are_the_targets_again(llm)


SHORT = (teacher_module._overwritten, "text.start - 1", "text.start")
LATE = (teacher_module._overwritten, "len(text.ids) - 1", "len(text.ids) - 2")
NOT_PUT_BACK = (TeacherForced.restore, "self.cache.put_back(span)", "pass")


@pytest.mark.parametrize("edit", [SHORT, NOT_PUT_BACK], ids=["begins late", "not put back"])
def test_chances_tell_of_a_copy_that_is_wrong(llm: LLM, edit: Edit, monkeypatch: pytest.MonkeyPatch) -> None:
    check = partial(check_that_a_trial_leaves_nothing_behind, llm, 0.8)
    assert_caught(Mutant("a copy that is wrong", (edit,), check), monkeypatch)


@pytest.mark.parametrize(
    "edit", [SHORT, LATE, NOT_PUT_BACK], ids=["begins late", "ends early", "not put back"]
)
def test_rows_tell_of_a_copy_that_is_wrong(llm: LLM, edit: Edit, monkeypatch: pytest.MonkeyPatch) -> None:
    check = partial(check_that_rows_are_the_targets_again, llm)
    assert_caught(Mutant("a copy that is wrong", (edit,), check), monkeypatch)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_several_plans_have_what_each_has_alone(llm: LLM, temperature: float) -> None:
    """Plans that begin alike, that differ from the first layer on, and one that comes twice."""
    teacher = made(llm, temperature)
    layers = llm.spec.layers
    spelled = [*PLANS, "skip:attn=1/mlp=0", "skip:attn=1-2/mlp=0", "skip:attn=1/mlp=0,2", "skip:attn=2/mlp=0"]
    plans = [Skips.spelled(each).plan(layers) for each in spelled]
    alone = [teacher.rounds(plan) for plan in plans]
    assert len({tuple(one.taus) for one in alone}) > 3, "plans that differ in nothing show nothing"
    for plan, one, several in zip(spelled, alone, teacher.rounds_of(plans), strict=True):
        assert several.taus == pytest.approx(one.taus, abs=1e-6), plan
        assert several.emitted == pytest.approx(one.emitted, abs=1e-6), plan
    before = teacher.chances(plans[1])
    for chosen in (plans[:1], plans[3:5]):
        list(teacher.rounds_of(chosen))
    assert np.array_equal(teacher.chances(plans[1]), before)


def test_what_plans_begin_with_is_computed_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the layers that passes over the last drafts of the texts ran."""
    teacher = made(llm, 0.0)
    last = llm.spec.layers - 1
    plans = [Skips.spelled(each).plan(last + 1) for each in ("skip:none", f"skip:attn={last}/mlp={last}")]
    ran: list[tuple[int, int]] = []
    forward = teacher.runner.forward

    def watched(*given: Any, **named: Any) -> Any:
        ran.append((named["resume"].depth if named["resume"] else 0, named["stop"]))
        return forward(*given, **named)

    monkeypatch.setattr(teacher.runner, "forward", watched)
    list(teacher.rounds_of(plans))
    assert ran[:3] == [(0, last), (last, last + 1), (last, last + 1)]
    assert set(ran) == set(ran[:3])


def test_memory_is_bounded_and_changes_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits in pieces, and passes over few columns, give the same chances."""
    teacher = made(llm, 0.8)
    plan = Skips.spelled(PLANS[2]).plan(llm.spec.layers)
    whole = teacher.chances(plan).copy()
    widest = 0
    head = teacher.runner.head

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal widest
        widest = max(widest, hidden.shape[1])
        return head(hidden)

    monkeypatch.setattr(teacher_module, "LOGITS", 3 * llm.spec.vocab_size)
    monkeypatch.setattr(teacher_module, "COLUMNS", 2 * LONGEST)
    monkeypatch.setattr(teacher.runner, "head", watched)
    assert teacher.chances(plan) == pytest.approx(whole, abs=1e-6)
    assert widest == 3


def test_a_trial_costs_one_forward_of_the_texts(llm: LLM) -> None:
    teacher = made(llm, 0.0)
    before = teacher.runner.forwarded
    teacher.rounds(Skips().plan(llm.spec.layers))
    assert teacher.runner.forwarded - before == teacher.tokens


def test_what_is_raised_between_passes_ends_a_trial(llm: LLM) -> None:
    def stop() -> None:
        raise TimeoutError

    runner = llm.engine.target
    assert isinstance(runner, Runner)
    teacher = TeacherForced(runner, written(llm, 0.0, count=2), LONGEST, stop)
    with pytest.raises(TimeoutError):
        teacher.rounds(Skips().plan(llm.spec.layers))


def taken(teacher: TeacherForced) -> int:
    return teacher.cache.memory.nbytes + sum(span.bytes for span in teacher.targets)


def test_keys_and_values_are_held_once_and_those_of_new_tokens_twice(llm: LLM) -> None:
    teacher = made(llm, 0.0)
    spec, memory = llm.spec, teacher.cache.memory
    position = 2 * spec.layers * spec.kv_heads * spec.head_dim * memory.itemsize
    assert memory.nbytes == len(teacher.texts) * teacher.cache.stored * position
    assert taken(teacher) == memory.nbytes + teacher.tokens * position
    assert taken(teacher) < 1.05 * memory.nbytes


def test_texts_that_do_not_fit_are_told_before_they_are_read(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = taken(made(llm, 0.0))
    monkeypatch.setattr(teacher_module, "free_memory", lambda device: need)
    made(llm, 0.0)
    monkeypatch.setattr(teacher_module, "free_memory", lambda device: need - 1)
    with pytest.raises(ConfigError, match="of keys and values, but .* free on cpu; give fewer tokens"):
        made(llm, 0.0)
