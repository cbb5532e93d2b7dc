"""Kangaroo, in real forwards. The adapters are the target's last layer, spoilt: without noise, at its depth, q is p."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
from foredraft import LLM, SamplingParams
from foredraft.decode import policy as policies
from foredraft.decode.policy import Fixed, Heuristic
from foredraft.decode.policy.auto import Auto
from foredraft.decode.policy.cost_table import CostTable
from foredraft.decode.prefix_cache import PrefixCache
from foredraft.decode.sequence import Sequence
from foredraft.drafters.kangaroo import Kangaroo, load_adapter, read_adapter
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.drafters.plan_files import Skips
from foredraft.model.runner import Resume
from tests.exactness import matrix as bits
from tests.exactness.matrix import *  # noqa: F403
from tests.exactness.matrix import (
    PROMPTS,
    Ids,
    NowAndThen,
    check_caches,
    check_fused_drafts,
    check_nan_weights,
    in_turn,
    rows_of,
)
from tests.exactness.test_layer_skip import BY, WORLDS
from tests.support.adapters import save_adapter
from tests.support.checkpoints import FAMILIES, reference_model
from tests.support.coded import LOADED, VOCABULARY, loading_by

NEW, ROWS = 40, 8
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
HALF = list(range(0, VOCABULARY, 2))
ADAPTERS: dict[str, dict[str, Any]] = {
    "perfect": {"noise": 0.0},
    "good": {"noise": 0.3},
    "attention": {"noise": 0.3, "kind": "attention"},
    "early": {"noise": 0.5, "depth": 1},
    "half": {"noise": 0.1, "vocabulary": HALF},
}
KINDS = (*ADAPTERS, "exit", "lookup", "none")
POLICIES = [
    Fixed(4),
    Heuristic(7),
    policies.Confidence(6, threshold=0.3),
    policies.AdaptiveExit(6, target=0.5, first=0.3, epsilon=0.05, beta1=0.5, beta2=0.9),
    policies.Fallback(6, threshold=0.2),
]


def load(folder: Path, family: str, dtype: str, by: str, **more: Any) -> LLM:
    """A model with one drafter for every adapter, and a lookup."""
    model = reference_model(family, **{"vocab_size": VOCABULARY, "tie_word_embeddings": False, **more})
    model.save_pretrained(folder / "target")
    for name, options in ADAPTERS.items():
        save_adapter(folder / "target", folder / name, **options)
    with loading_by(by):
        own: Any = {"drafter": "kangaroo", "adapter": folder / "perfect"}
        llm = foredraft.load(folder / "target", dtype=dtype, **own, **LOADED)
    engine: Any = llm.loaded.engine
    assert engine.target.by_kernels == (by == "kernels")
    for name in ADAPTERS:
        adapter = load_adapter(folder / name, read_adapter(folder / name), engine.target)
        add(llm, Kangaroo(engine.target, engine.cache, adapter), name)
    add(llm, LayerSkip(engine.target, engine.cache, Skips(exit=2)), "exit")
    return llm


def add(llm: LLM, drafter: Any, name: str) -> None:
    drafter.name = name
    llm.loaded.engine.drafters[name] = drafter
    llm.loaded.engine.rows.caches = list(dict.fromkeys([*llm.loaded.engine.rows.caches, *drafter.caches]))


@pytest.fixture(scope="module", params=WORLDS, ids="-".join)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load(tmp_path_factory.mktemp("model"), *request.param)


@pytest.mark.heavy
def test_greedy_ids_under_the_cost_model(llm: LLM, plain: Ids) -> None:
    llm.loaded.engine.policy = auto = Auto(6)
    steps = {name: {1: (0.1, 0.1), ROWS: (0.1, 0.1)} for name in llm.loaded.engine.drafters}
    auto.use(CostTable({1: {1: 1.0, 7: 1.1}, ROWS: {ROWS: 1.0, 7 * ROWS: 1.1}}, steps, {}))
    bits.assert_same(llm, ["auto"] * len(PROMPTS), plain, params=GREEDY)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("family", "by"),
    [
        pytest.param(family, by, marks=[pytest.mark.slow] * (family.startswith("gemma4") and by != "kernels"))
        for family in FAMILIES
        for by in BY
    ],
)
def test_every_family(family: str, by: str, tmp_path: Path) -> None:
    llm = load(tmp_path, family, "float32", by)
    want = bits.plain_ids(llm, params=GREEDY)
    llm.loaded.engine.policy = Fixed(4)
    bits.assert_same(llm, in_turn(ADAPTERS, 2), want, params=GREEDY)
    if llm.loaded.spec.windows[-1] is None:  # an adapter has no window
        for output in llm.generate(PROMPTS[:5], replace(GREEDY, drafter="perfect")):
            assert output.stats.accepted == output.stats.drafted > 0


@pytest.mark.parametrize("name", ["good", "half"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_fused_drafts_are_those_of_single_steps(family: str, name: str, tmp_path: Path) -> None:
    check_fused_drafts(load(tmp_path, family, "float32", "kernels"), name, PROMPTS[:4])


def test_the_verifying_pass_resumes_from_the_drafts_states(llm: LLM) -> None:
    """No verifying pass runs the first layers on what a step read, nor on anything committed."""
    llm.loaded.engine.policy = Fixed(3)
    seen: list[tuple[Resume | None, list[int]]] = []
    forward = llm.loaded.runner.forward

    def spy(*args: Any, resume: Resume | None = None, counts: Any = None, **more: Any) -> Any:
        seen.append((resume, list(counts)))
        return forward(*args, resume=resume, counts=counts, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.loaded.runner, "forward", spy)
        found = llm.generate(PROMPTS[:3], replace(GREEDY, drafter="early"))
    known = [sum(resume.known) for resume, _ in seen if resume]
    assert sum(known) == sum(output.stats.drafted for output in found)
    for resume, counts in seen:
        known = [0] * len(counts) if resume is None else resume.known
        assert all(count - n == min(count, 1) for count, n in zip(counts, known, strict=True))


@pytest.mark.parametrize("name", ["good", "early", "attention"])
@pytest.mark.parametrize("policy", [Fixed(1), Fixed(4)], ids=["1", "4"])
def test_the_adapters_cache_is_that_of_a_fresh_prefill(llm: LLM, name: str, policy: Fixed) -> None:
    if llm.loaded.engine.cache.dtype == torch.bfloat16:
        pytest.skip("compared in float32")
    check_caches(llm, name, policy, [PROMPTS[1], PROMPTS[4], PROMPTS[7]], NEW)


@pytest.mark.parametrize("by", BY)
def test_plain_steps_and_prompts_are_read_from_the_targets_states(by: str, tmp_path: Path) -> None:
    """A perfect adapter drafts perfectly whenever it is asked, so it lacks nothing."""
    llm = load(tmp_path, "llama", "float32", by)
    llm.loaded.engine.policy = NowAndThen(4)
    params = replace(GREEDY, drafter="perfect", max_new_tokens=190)
    for output in llm.generate([PROMPTS[4], PROMPTS[6], PROMPTS[2]], params):
        assert output.stats.accepted == output.stats.drafted >= 8


def test_a_parked_row_comes_back_with_all_that_was_read(llm: LLM, plain: Ids) -> None:
    engine = llm.loaded.engine
    engine.policy = NowAndThen(4)
    params = replace(GREEDY, drafter="perfect", max_new_tokens=230)
    paused = Sequence(-1, PROMPTS[4], params, 0, drafters=("perfect",))
    engine.submit(paused)
    while len(paused.new_ids) < 20:
        engine.step()
    engine.pause(paused)
    others = [Sequence(-2 - n, PROMPTS[n % 5], GREEDY, 0, drafters=()) for n in range(ROWS)]
    for other in others:
        engine.submit(other)
    parked = False
    while any(other.finish is None for other in others):
        engine.step()
        parked |= paused not in engine.rows.sequences
    assert parked
    engine.resume(paused)
    while paused.finish is None:
        engine.step()
    assert paused.new_ids[:NEW] == plain[4]
    drafted = [turn for turn in paused.rounds if turn.drafted]
    assert len(drafted) > 2 and all(turn.accepted == turn.drafted for turn in drafted)


def test_a_prefix_is_restored_with_the_adapters_part_of_it(llm: LLM) -> None:
    """A beginning that was kept without it is read again; then it is there."""
    llm.loaded.engine.policy = Fixed(4)
    llm.loaded.engine.prefix_cache = cache = PrefixCache(2**30)
    try:
        prompt = PROMPTS[7]
        hits = []
        for drafter in ("none", "perfect", "perfect", "none"):
            before = cache.hits
            [output] = llm.generate([prompt], replace(GREEDY, drafter=drafter))
            hits.append(cache.hits - before)
            assert output.stats.accepted == output.stats.drafted
        kept = 299 if llm.loaded.runner.by_kernels else 256  # of 300 tokens, by operators whole chunks
        assert hits == [0, 0, kept, kept]
    finally:
        llm.loaded.engine.prefix_cache = None


def test_a_bans_rollback_takes_back_the_adapters_part(llm: LLM, plain: Ids) -> None:
    engine: Any = llm.loaded.engine
    engine.policy = Fixed(3)
    for length in (1, 5, 11):
        for sequence in bits.steps_of(llm, PROMPTS[4], "perfect", 20):
            sequence._roll_back(length)
            sequence.attempts.clear()
            engine.cache.lengths[sequence.row] = len(sequence.tokens) - 1
            engine.drafters["perfect"].rewind(sequence)
            rows_of(llm, "perfect", sequence)  # checks their lengths
            before = len(sequence.rounds)
            engine.step()
            assert sequence.rounds[before].drafted == sequence.rounds[before].accepted == 3
            assert sequence.new_ids == plain[4][: len(sequence.new_ids)]


def test_an_adapter_of_nan_leaves_the_text_as_it_is(llm: LLM, plain: Ids) -> None:
    drafter: Any = llm.loaded.engine.drafters["early"]
    params = replace(GREEDY, drafter="early")
    check_nan_weights(llm, drafter.adapter.norm.weight, params, PROMPTS[2:4], plain[2:4])
