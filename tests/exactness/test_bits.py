"""Real forwards: greedy ids, seeded ids and cache contents are the same bits for every drafter and batch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

import foredraft
from foredraft import LLM, demo
from foredraft.decode.policy import Fixed, Heuristic
from foredraft.model.layers import Linear
from foredraft.model.runner import compiled
from tests.exactness.matrix import *  # noqa: F403
from tests.exactness.matrix import (
    GREEDY,
    NEW,
    PROMPTS,
    assert_same,
    check_cache,
    computed,
    in_turn,
    plain_ids,
    prompts_of,
)  # fmt: skip
from tests.support.checkpoints import FAMILIES
from tests.support.coded import LOADED, load_pair, loading_by, save_pair
from tests.support.loaded import engine_of

GAMMAS = (1, 3, 5, 7)
KINDS = ("draft-model", "lookup", "none")
WAYS = ("padded", "gathered", "recorded")
POLICIES = [Fixed(3), Heuristic(7), Fixed(1), Fixed(5)]
# float16 runs through the same operators in every family
PAIRS = [*itertools.product(FAMILIES, ("bfloat16", "float32")), ("llama", "float16"), ("gemma3", "float16")]
# The other pairs run with -m slow. With operators they add float16, and biases of projections, which
# test_greedy_ids_of_unpacked_weights has; with kernels, whose bits test_kernels_passes compares for every pair,
# the other dtype of each family.
OFTEN = {
    "operators": (("llama", "float32"), ("gemma2", "bfloat16"), ("gemma3", "bfloat16")),
    "kernels": tuple(zip(FAMILIES, itertools.cycle(("bfloat16", "float32")), strict=False)),
}
BY = [
    pytest.param((*pair, by), marks=[pytest.mark.slow] * (pair not in OFTEN[by]))
    for by in OFTEN
    for pair in PAIRS
    if by == "operators" or pair[1] != "float16"
]


@pytest.fixture(scope="module", params=BY, ids="-".join)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    family, dtype, by = request.param
    target, draft = save_pair(tmp_path_factory.mktemp(family), family)
    with loading_by(by):
        return load_pair(target, draft, dtype)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_greedy_ids_of_unpacked_weights(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_fault", lambda dtype: "absent")
    with loading_by("operators"):
        llm = load_pair(*save_pair(tmp_path, "qwen2"), dtype)
    runner = llm.loaded.runner
    assert isinstance(runner.decoder.output, Linear)
    alone = plain_ids(llm)
    for runner.backend.gathers in (False, True):
        assert_same(llm, in_turn(KINDS, 0), alone)


def test_the_drafts_are_neither_blind_nor_perfect(llm: LLM) -> None:
    engine_of(llm).policy = Fixed(3)
    for output in llm.generate(PROMPTS[3:5], replace(GREEDY, drafter="draft-model")):
        assert 0.1 < output.stats.acceptance_rate < 0.95
        assert len(output.token_ids) == NEW
        assert len(set(output.token_ids)) > 15


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prompt", [PROMPTS[1], PROMPTS[4], PROMPTS[7]], ids=len)
@pytest.mark.parametrize("drafter", KINDS[:2])
def test_the_cache_after_rollbacks(llm: LLM, drafter: str, prompt: list[int], way: str) -> None:
    engine_of(llm).policy = Fixed(5)
    with computed(way, llm):
        assert any(turn.accepted < turn.drafted for turn in check_cache(llm, drafter, prompt, 40).rounds)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_two_hundred_prompts_of_the_demo(dtype: str) -> None:
    if not demo.target_path().is_dir():
        pytest.skip("the demo pair is not in this tree")
    llm = foredraft.load(dtype=dtype, **LOADED)
    prompts = prompts_of(200, llm.loaded.spec.vocab_size, seed=2)
    params = replace(GREEDY, max_new_tokens=2 * NEW)
    want = [output.token_ids for output in llm.generate(prompts, replace(params, drafter="none"))]
    for gamma in GAMMAS:
        engine_of(llm).policy = Fixed(gamma)
        each = [KINDS[(gamma // 2 + i) % 2] for i in range(len(prompts))]
        assert_same(llm, each, want, prompts, params)
