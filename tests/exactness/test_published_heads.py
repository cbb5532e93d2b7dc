"""All published heads in real forwards: plain decoding's tokens in a batch of 8, constraints, bans, exact distributions.

The heads are random. The vocabulary is so small that their drafts are accepted at times.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from foredraft import LLM, SamplingParams
from foredraft.decode.policy import Fixed, Policy
from foredraft.drafters.medusa import Medusa
from tests.exactness import test_conformance as conformance
from tests.exactness.head_checks import HeadWorld, check_distribution, check_seeds, check_siblings
from tests.exactness.test_bits import prompts_of
from tests.exactness.test_eagle3 import CHECKS, near, tiny
from tests.parity.test_heads import V, load
from tests.support import coded
from tests.support.harness import request, run
from tests.support.loaded import engine_of
from tests.support.nan_weights import check_nan_weights
from tests.support.parts import LateBan, NoRepeat
from tests.support.planting import assert_caught, defect
from tests.support.spelled_heads import SPELLED

__all__ = ["near"]

NEW = 32
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
PROMPTS = prompts_of(8, V)
FURTHER = ("eagle-1", "fasterdecoding", "vllm")
MADE = [
    ("specforge", "float32", "kernels"),
    ("eagle-1", "bfloat16", "kernels"),
    ("fasterdecoding", "float32", "operators"),
    ("vllm", "bfloat16", "kernels"),
]


@pytest.fixture(scope="module", params=MADE, ids="-".join)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    spelling, dtype, by = request.param
    return load(tmp_path_factory.mktemp("model"), spelling, by, dtype, max_batch=8)


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    """Each prompt alone, one token a pass."""
    return [llm.generate([p], replace(GREEDY, drafter="none"))[0].token_ids for p in PROMPTS]


@pytest.mark.parametrize("policy", [Fixed(1), Fixed(5)], ids=["1", "5"])
def test_greedy_ids_alone_and_in_a_batch_of_8(llm: LLM, plain: list[list[int]], policy: Policy) -> None:
    engine_of(llm).policy = policy
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == plain
    accepted, drafted = (sum(getattr(o.stats, name) for o in outputs) for name in ("accepted", "drafted"))
    assert 0 < accepted < drafted
    for index in (0, 4):
        [alone] = llm.generate([PROMPTS[index]], GREEDY)
        assert alone.token_ids == plain[index]


def test_a_seed_gives_the_text_of_plain_decoding(llm: LLM) -> None:
    check_seeds(llm, PROMPTS, NEW)


def test_siblings_and_kept_prompts(llm: LLM, plain: list[list[int]]) -> None:
    check_siblings(llm, {tuple(PROMPTS[7]): plain[7]}, GREEDY)


def test_constraints_and_bans_that_take_tokens_back(llm: LLM, plain: list[list[int]]) -> None:
    """Each text is banned from going on as it would, which is found late; its neighbour never repeats a token."""
    engine = engine_of(llm)
    engine.policy = Fixed(4)

    def texts(drafter: str | None) -> list[list[int]]:
        constraints = [
            LateBan(V, tuple(own[4:8])) if index % 2 else NoRepeat(V) for index, own in enumerate(plain)
        ]
        sequences = [
            request(prompt, drafter, constraint=constraint, temperature=0, max_new_tokens=NEW)
            for prompt, constraint in zip(PROMPTS, constraints, strict=True)
        ]
        found = run(engine, sequences)
        assert any(getattr(constraint, "rollbacks", 0) for constraint in constraints)
        return found

    assert texts(llm.default_drafter) == texts(None)


def test_a_head_of_nan_leaves_the_text_as_it_is(llm: LLM, plain: list[list[int]]) -> None:
    drafter: Any = engine_of(llm).drafters[str(llm.default_drafter)]
    if isinstance(drafter, Medusa) and (bias := drafter.head.heads[0].blocks[0].bias) is not None:
        check_nan_weights(llm, bias, GREEDY, PROMPTS[2:4], plain[2:4])


# --- few words: the exact distribution, and rewinding ---------------------------------------------------------


@pytest.mark.parametrize("spelling", FURTHER)
def test_the_exact_distribution(spelling: str) -> None:
    check_distribution(tiny(spelling), "cold top-k")


@pytest.mark.parametrize("spelling", ["specforge", "vllm"])
def test_the_exact_distribution_under_a_late_ban(spelling: str) -> None:
    check_distribution(tiny(spelling), "cold top-k", lambda: LateBan(coded.WORDS, (1, 0)))


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("spelling", FURTHER[:2])
def test_a_rewound_head_equals_a_fresh_one(spelling: str, check: str) -> None:
    CHECKS[check](HeadWorld(made=tiny(spelling)), SPELLED[spelling].drafter)


def test_states_of_the_wrong_positions_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    spelling = "fasterdecoding"

    def check() -> None:
        conformance.check_rejections(HeadWorld(made=tiny(spelling)), SPELLED[spelling].drafter)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conformance, "GAMMA", 2)
        check()
        assert_caught(
            defect("a state early", Medusa.observe, conformance.states_of_the_position_before, check),
            monkeypatch,
        )
