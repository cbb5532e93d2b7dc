"""Real forwards: greedy ids, seeded ids and cache contents are the same bits for every drafter and batch."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from foredraft import LLM
from foredraft.decode.policy import Fixed, Heuristic
from foredraft.model.layers import Linear
from foredraft.model.runner import compiled
from tests.exactness.matrix import *  # noqa: F403
from tests.exactness.matrix import (
    PROMPTS,
    assert_same,
    check_cache,
    computed,
    in_turn,
    plain_ids,
)  # fmt: skip
from tests.support.checkpoints import FAMILIES
from tests.support.coded import load_pair, loading_by, save_pair

KINDS = ("draft-model", "lookup", "none")
WAYS = ("padded", "gathered", "recorded")
POLICIES = [Fixed(3), Heuristic(7), Fixed(3, siblings=4), Fixed(1), Fixed(5)]
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
    assert type(runner.decoder.output) is Linear
    alone = plain_ids(llm)
    for runner.backend.gathers in (False, True):
        assert_same(llm, in_turn(KINDS, 0), alone)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prompt", [PROMPTS[1], PROMPTS[4], PROMPTS[7]], ids=len)
@pytest.mark.parametrize("drafter", KINDS[:2])
@pytest.mark.parametrize("siblings", [0, 6])
def test_the_cache_after_rollbacks(
    llm: LLM, drafter: str, prompt: list[int], way: str, siblings: int
) -> None:
    llm.loaded.engine.policy = Fixed(5, siblings)
    with computed(way, llm):
        rounds = check_cache(llm, drafter, prompt, 40).rounds
    assert any(turn.accepted < turn.drafted for turn in rounds)
    leaves = drafter == "draft-model" and llm.loaded.runner.by_kernels
    assert any(turn.sibling for turn in rounds) == (leaves and siblings > 0)
