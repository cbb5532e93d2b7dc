"""Teacher forcing against real drafts, and expected rounds against enumeration."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import foredraft
from foredraft import LLM, SamplingParams
from foredraft.decode.policy import Fixed
from foredraft.decode.stats import Stats
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.drafters.plan_files import Skips
from foredraft.errors import ConfigError
from foredraft.tune import teacher_forced as teacher_forced_module
from foredraft.tune.teacher_forced import CalibrationText, CalibrationTexts, ExpectedRounds, TeacherForced
from tests.support.caches import held
from tests.support.checkpoints import save_checkpoint
from tests.support.hybrids import save_hybrid
from tests.support.loaded import engine_of
from tests.support.mutation import Mutation, assert_caught, defect

MAX_DRAFT = 4
PLANS = ["skip:none", "skip:attn=1/mlp=0", "skip:attn=0-1/mlp=1-2", "skip:attn=0-2/mlp=0-2"]
FAMILIES = ["llama", "gemma2"]


@pytest.fixture(scope="module", params=[*FAMILIES, "llama-operators"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return loaded(request.param, tmp_path_factory.mktemp("m"))


@pytest.fixture(scope="module", params=[*FAMILIES, "llama-operators", "hybrid", "hybrid-operators"])
def any_llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return loaded(request.param, tmp_path_factory.mktemp("m"))


def loaded(kind: str, place: Path) -> LLM:
    family, _, vocab_ops = kind.partition("-")
    if family == "hybrid":
        kinds = ["linear_attention", "full_attention", "linear_attention"]
        folder = save_hybrid(place, eos_token_id=None, layer_types=kinds, num_hidden_layers=3)
    else:
        folder = save_checkpoint(place, family, eos_token_id=None, initializer_range=0.12)
    kernels = False if vocab_ops else None
    return foredraft.load(folder, max_batch=3, max_length=128, drafter="none", kernels=kernels)


@functools.cache
def write_texts(llm: LLM, temperature: float, count: int = 5) -> CalibrationTexts:
    """Texts of different lengths, whose prompts exceed gemma's window of 24 tokens."""
    texts = []
    for number in range(count):
        prompt = [(7 * number + 3 * i) % 90 + 5 for i in range(9 + 7 * number)]
        params = SamplingParams(temperature=temperature, max_new_tokens=31 - 5 * number, seed=number)
        [output] = llm.generate(prompt, params)
        texts.append(CalibrationText((*prompt, *output.token_ids), len(prompt)))
    return CalibrationTexts(tuple(texts), temperature)


def make_teacher_forced(llm: LLM, temperature: float) -> TeacherForced:
    runner = llm.loaded.runner
    return TeacherForced(runner, write_texts(llm, temperature), MAX_DRAFT)


def decoded_rounds(llm: LLM, teacher_forced: TeacherForced, skips: str, draft: int) -> int:
    engine = engine_of(llm)
    engine.drafters["self"] = LayerSkip(llm.loaded.runner, engine.cache, Skips.parse(skips))
    engine.policy = Fixed(draft)
    params = [
        SamplingParams(temperature=0, max_new_tokens=text.new_tokens, drafter="self")
        for text in teacher_forced.texts
    ]
    outputs = llm.generate([list(text.ids[: text.prompt_length]) for text in teacher_forced.texts], params)
    assert [tuple(output.token_ids) for output in outputs] == [
        text.ids[text.prompt_length :] for text in teacher_forced.texts
    ]
    return Stats.merge(output.stats for output in outputs).rounds


@pytest.mark.heavy
@pytest.mark.parametrize("skips", PLANS)
def test_expected_rounds_equal_decoded_rounds_at_temperature_0(any_llm: LLM, skips: str) -> None:
    teacher_forced = make_teacher_forced(any_llm, 0.0)
    plan = Skips.parse(skips).plan(any_llm.loaded.spec.layers)
    counts = teacher_forced.rounds(plan, every_start=True).counts
    decoded = [decoded_rounds(any_llm, teacher_forced, skips, draft) for draft in range(1, MAX_DRAFT + 1)]
    assert decoded == counts.tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("skips", PLANS[1:3])
def test_acceptance_equals_that_of_drafts_made_step_by_step(
    any_llm: LLM, skips: str, temperature: float
) -> None:
    """Brute force: at every start, the target prefills the text before it, and the draft runs step by step."""
    teacher_forced = make_teacher_forced(any_llm, temperature)
    runner = teacher_forced.runner
    plan = Skips.parse(skips).plan(any_llm.loaded.spec.layers)
    every, trial = teacher_forced.acceptance(plan, every_start=True), teacher_forced.acceptance(plan)
    for row, text in list(enumerate(teacher_forced.texts))[1:3]:
        cache = runner.new_cache(1, len(text.ids) + MAX_DRAFT)
        ids = torch.tensor([text.ids])
        whole = runner.forward(cache, ids, [0]).logits
        assert whole is not None
        for start in range(0, text.new_tokens, 5):
            runner.forward(cache, ids, [0])  # restores the target's keys and values
            at = text.prompt_length - 1 + start
            for k in range(min(MAX_DRAFT, text.new_tokens - start)):
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
        # a trial has each token at one place in a draft, with the value that `every_start` has there
        offset = row % MAX_DRAFT
        for first in range(offset, text.new_tokens, MAX_DRAFT):
            span = min(MAX_DRAFT, text.new_tokens - first)
            assert trial[row, first, :span] == pytest.approx(every[row, first, :span], abs=1e-6)


def check_trials_are_independent(llm: LLM, temperature: float) -> None:
    teacher_forced = make_teacher_forced(llm, temperature)
    layers = llm.loaded.spec.layers
    plan, other = (Skips.parse(skips).plan(layers) for skips in PLANS[1:3])
    before = teacher_forced.acceptance(plan).copy()
    teacher_forced.acceptance(other)
    assert np.array_equal(teacher_forced.acceptance(plan), before)


def check_restore_gives_the_targets_rows(llm: LLM) -> None:
    """All positions but the last, which no draft reads: prompts too, of which there is no copy."""
    teacher_forced = make_teacher_forced(llm, 0.0)
    read = [len(text.ids) - 1 for text in teacher_forced.texts]
    before = [held(teacher_forced.cache, row, length) for row, length in enumerate(read)]
    for skips in PLANS:
        teacher_forced.acceptance(Skips.parse(skips).plan(llm.loaded.spec.layers), every_start=True)
    teacher_forced.restore()
    for row, length in enumerate(read):
        assert torch.equal(held(teacher_forced.cache, row, length), before[row])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trials_are_independent(any_llm: LLM, temperature: float) -> None:
    check_trials_are_independent(any_llm, temperature)
    check_restore_gives_the_targets_rows(any_llm)


def overwritten(change: Callable[[int, int], tuple[int, int]]) -> Mutation:
    return lambda sound: lambda text: change(*sound(text))


# name -> (point, mutation)
DEFECTS: dict[str, tuple[Any, Mutation]] = {
    "starts late": (teacher_forced_module._overwritten, overwritten(lambda start, stop: (start + 1, stop))),
    "ends early": (teacher_forced_module._overwritten, overwritten(lambda start, stop: (start, stop - 1))),
    "not restored": (TeacherForced.restore, lambda restore: lambda teacher_forced: None),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["starts late", "not restored"])
def test_a_defective_copy_changes_acceptance(llm: LLM, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(defect(name, *DEFECTS[name], partial(check_trials_are_independent, llm, 0.8)), monkeypatch)


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defective_copy_changes_the_rows(llm: LLM, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check = partial(check_restore_gives_the_targets_rows, llm)
    assert_caught(defect(name, *DEFECTS[name], check), monkeypatch)


def test_limits_on_memory_do_not_change_acceptance(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher_forced = make_teacher_forced(llm, 0.8)
    plan = Skips.parse(PLANS[2]).plan(llm.loaded.spec.layers)
    whole = teacher_forced.acceptance(plan).copy()
    widest = 0
    head = teacher_forced.runner.head

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal widest
        widest = max(widest, hidden.shape[1])
        return head(hidden)

    monkeypatch.setattr(teacher_forced_module, "MAX_LOGITS", 3 * llm.loaded.spec.vocab_size)
    monkeypatch.setattr(teacher_forced_module, "MAX_COLUMNS", 2 * MAX_DRAFT)
    monkeypatch.setattr(teacher_forced.runner, "head", watched)
    assert teacher_forced.acceptance(plan) == pytest.approx(whole, abs=1e-6)
    assert widest == 3


def test_a_trial_runs_each_new_token_once(llm: LLM) -> None:
    teacher_forced = make_teacher_forced(llm, 0.0)
    before = teacher_forced.runner.forwarded
    teacher_forced.rounds(Skips().plan(llm.loaded.spec.layers))
    assert teacher_forced.runner.forwarded - before == teacher_forced.tokens


def test_an_exception_before_a_pass_ends_the_trial(llm: LLM) -> None:
    def stop() -> None:
        raise TimeoutError

    runner = llm.loaded.runner
    teacher_forced = TeacherForced(runner, write_texts(llm, 0.0, count=2), MAX_DRAFT, stop)
    with pytest.raises(TimeoutError):
        teacher_forced.rounds(Skips().plan(llm.loaded.spec.layers))


def memory_used(teacher_forced: TeacherForced) -> int:
    return teacher_forced.cache.data.nbytes + sum(span.bytes for span in teacher_forced.copies)


def test_only_the_new_tokens_keys_and_values_are_copied(llm: LLM) -> None:
    teacher_forced = make_teacher_forced(llm, 0.0)
    spec, memory = llm.loaded.spec, teacher_forced.cache.data
    position = 2 * spec.layers * spec.kv_heads * spec.head_dim * memory.itemsize
    assert memory.nbytes == len(teacher_forced.texts) * teacher_forced.cache.stored * position
    assert memory_used(teacher_forced) == memory.nbytes + teacher_forced.tokens * position
    assert memory_used(teacher_forced) < 1.05 * memory.nbytes


def test_texts_that_do_not_fit_are_refused_unread(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    need = memory_used(make_teacher_forced(llm, 0.0))
    monkeypatch.setattr(teacher_forced_module, "free_memory", lambda device: need)
    make_teacher_forced(llm, 0.0)
    monkeypatch.setattr(teacher_forced_module, "free_memory", lambda device: need - 1)
    with pytest.raises(ConfigError, match="of keys and values, but cpu has .* free; lower tokens"):
        make_teacher_forced(llm, 0.0)


# --- expected rounds ----------------------------------------------------------------------------------------


def enumerate_rounds(acceptance: NDArray[np.float64], length: int, draft: int, start: int = 0) -> float:
    if start >= length:
        return 0.0
    total, survived = 1.0, 1.0
    for k in range(draft):
        accepted = acceptance[start, k]
        total += survived * (1 - accepted) * enumerate_rounds(acceptance, length, draft, start + k + 1)
        survived *= accepted
    return total + survived * enumerate_rounds(acceptance, length, draft, start + draft + 1)


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_counts_equal_the_enumeration_of_all_branches(greedy: bool) -> None:
    random = np.random.default_rng(3)
    acceptance = random.random((3, 7, 3))
    if greedy:
        acceptance = (acceptance > 0.4).astype(float)
    lengths = np.array([7, 5, 1])
    found = ExpectedRounds.from_acceptance(acceptance, lengths).counts
    for draft in (1, 2, 3):
        each = [enumerate_rounds(acceptance[row], length, draft) for row, length in enumerate(lengths)]
        assert found[draft - 1] == pytest.approx(sum(each), rel=1e-12)


def test_tau_follows_the_formula_at_constant_acceptance() -> None:
    acceptance = np.full((2, 400, 4), 0.7)
    taus = ExpectedRounds.from_acceptance(acceptance, np.array([400, 400])).taus
    expected = [(1 - 0.7 ** (k + 1)) / (1 - 0.7) for k in range(1, 5)]
    assert taus == pytest.approx(expected, rel=1e-9)


def test_tau_weights_starts_as_decoding_visits_them() -> None:
    """Rounds take five tokens each in the accepted half of a text, and one in the rejected half."""
    flat = np.concatenate([np.ones(200), np.zeros(200 + 4)])
    acceptance = np.lib.stride_tricks.sliding_window_view(flat, 4)[None, :400]
    [tau] = ExpectedRounds.from_acceptance(acceptance, np.array([400])).taus[3:]
    assert tau == pytest.approx(400 / (200 / 5 + 200), rel=0.02)
    plain_mean = 1 + np.cumprod(acceptance, 2).sum(2).mean()
    assert plain_mean > 1.7 * tau


def test_acceptance_past_the_end_of_a_text_has_no_effect() -> None:
    random = np.random.default_rng(0)
    acceptance = random.random((1, 9, 3))
    other = acceptance.copy()
    other[0, 6:] = 1.0  # starts past the end of a text of 6
    both = [ExpectedRounds.from_acceptance(each, np.array([6])).counts for each in (acceptance, other)]
    assert np.array_equal(*both)


def test_tau_of_a_text_shorter_than_a_draft_is_tokens_per_round() -> None:
    acceptance = np.ones((1, 3, 4))
    found = ExpectedRounds.from_acceptance(acceptance, np.array([3]))
    assert found.taus.tolist() == [2.0, 3.0, 3.0, 3.0]
