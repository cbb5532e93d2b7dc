"""Published heads in real forwards, random ones, over so few words that their drafts are accepted at times."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.decode.policy import Confidence, Fixed, Heuristic, Policy
from foredraft.decode.prefix_cache import PrefixCache
from foredraft.drafters import states
from foredraft.drafters.medusa import Medusa
from tests.exactness import head_checks as heads
from tests.exactness import test_conformance as conformance
from tests.exactness.test_bits import prompts_of
from tests.exactness.test_enumeration import check_joint_law
from tests.parity.test_heads import V, load
from tests.support import coded
from tests.support.harness import request, run
from tests.support.loaded import engine_of
from tests.support.mutation import assert_caught, defect
from tests.support.nan_weights import check_nan_weights
from tests.support.parts import LateBan, NoRepeat

NEW = 40
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
PROMPTS = prompts_of(8, V)
MADE = [
    *itertools.product(("safeailab", "qwen3"), ("float32", "bfloat16"), ("operators", "kernels")),
    ("specforge", "float32", "kernels"),
    ("eagle-1", "bfloat16", "kernels"),
    ("fasterdecoding", "float32", "operators"),
    ("vllm", "bfloat16", "kernels"),
    ("block z-lab", "bfloat16", "kernels"),
    ("block gated", "float32", "operators"),
]


class NowAndThen(Fixed):
    """Drafts after stretches of plain steps, longer than states may wait."""

    name = "now and then"

    def budget(self, sequence: Any) -> int:
        return self.max_draft if len(sequence.tokens) % 21 < 3 else 0


POLICIES = [Fixed(1), Fixed(4), Heuristic(7), Confidence(6, threshold=0.2), NowAndThen(3)]


@pytest.fixture(autouse=True)
def few_states_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "MAX_WAITING", 8)


@pytest.fixture(scope="module", params=MADE, ids="-".join)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    format, dtype, by = request.param
    return load(tmp_path_factory.mktemp("model"), format, by, dtype, max_batch=8)


@pytest.mark.heavy
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_greedy_ids_in_a_batch_and_alone(llm: LLM, plain: list[list[int]], policy: Policy) -> None:
    engine_of(llm).policy = policy
    others = ["none"] if policy.stops_by_content else ["lookup", "none"]
    kinds = [heads.drafter_of(llm).name, *others]
    for shift in (0, 1):
        params = [replace(GREEDY, drafter=kinds[(at + shift) % len(kinds)]) for at in range(len(PROMPTS))]
        assert [output.token_ids for output in llm.generate(PROMPTS, params)] == plain
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == plain
    accepted, drafted = (sum(getattr(o.stats, name) for o in outputs) for name in ("accepted", "drafted"))
    assert 0 < accepted < drafted
    for index in (1, 4):
        assert llm.generate([PROMPTS[index]], GREEDY)[0].token_ids == plain[index]


def test_a_seed_gives_the_text_of_plain_decoding(llm: LLM) -> None:
    heads.check_seeds(llm, heads.drafter_of(llm).name, PROMPTS, NEW // 2)


@pytest.mark.heavy
def test_samples_share_a_prompt_and_a_second_request_restores_it(llm: LLM, plain: list[list[int]]) -> None:
    engine: Any = engine_of(llm)
    engine.policy, engine.prefix_cache = Fixed(3), PrefixCache(2**30)
    try:
        for index in (4, 7, 4, 7):
            outputs = llm.generate([PROMPTS[index]], replace(GREEDY, max_new_tokens=12), n=3)
            assert [output.token_ids for output in outputs] == [plain[index][:12]] * 3
        assert engine.prefix_cache.hits >= 256
    finally:
        engine.prefix_cache = None


@pytest.mark.heavy
def test_penalties_constraints_and_bans(llm: LLM, plain: list[list[int]]) -> None:
    """Each text is banned from going on as it would, which is found late; its neighbour never repeats a token."""
    engine_of(llm).policy = Fixed(4)
    barred = {"logit_bias": {plain[0][2]: -100.0, plain[1][3]: -100.0}, "repetition_penalty": 1.3}

    def texts(drafter: str | None) -> list[list[int]]:
        constraints = [LateBan(V, tuple(own[4:8])) if n % 2 else NoRepeat(V) for n, own in enumerate(plain)]
        params: dict[str, Any] = {"temperature": 0, "max_new_tokens": NEW}
        sequences = [
            request(prompt, drafter, constraint=constraint, **params)
            for prompt, constraint in zip(PROMPTS, constraints, strict=True)
        ]
        penalised = [request(prompt, drafter, **params, **barred) for prompt in PROMPTS[:3]]
        found = run(engine_of(llm), [*sequences, *penalised])
        assert any(getattr(constraint, "rollbacks", 0) for constraint in constraints)
        return found

    assert texts(llm.default_drafter) == texts(None)


@pytest.mark.parametrize("policy", [Fixed(1), Fixed(4), NowAndThen(3)], ids=str)
def test_the_heads_caches_are_those_of_a_fresh_prefill(llm: LLM, policy: Policy) -> None:
    if engine_of(llm).cache.dtype == torch.bfloat16 or isinstance(heads.drafter_of(llm), Medusa):
        pytest.skip("compared in float32, of heads with keys and values")
    heads.check_caches(llm, heads.drafter_of(llm).name, policy, [PROMPTS[1], PROMPTS[4]], NEW)


@pytest.mark.heavy
def test_a_head_of_nan_leaves_the_text_as_it_is(llm: LLM, plain: list[list[int]]) -> None:
    drafter = heads.drafter_of(llm)
    weight = drafter.head.heads[0].blocks[0].bias if isinstance(drafter, Medusa) else drafter.head.norm
    if weight is None:
        pytest.skip("its blocks have no bias, its end no norm")
    check_nan_weights(llm, getattr(weight, "weight", weight), GREEDY, PROMPTS[2:4], plain[2:4])


@pytest.mark.parametrize(
    ("format", "transform", "constraint"),
    [
        *(
            (format, "cold top-k", "free")
            for format in ("specforge", "whole", "eagle-1", "fasterdecoding", "vllm")
        ),
        *((format, "cold top-k", "free") for format in ("block z-lab", "block gated")),
        ("block z-lab", "cold top-k", "no repeat"),
        *((format, "cold top-k", "late ban") for format in ("specforge", "vllm", "block gated")),
        *(
            pytest.param(format, "as it is", "free", marks=pytest.mark.slow)
            for format in ("specforge", "whole", "block speculators", "block rnn")
        ),
    ],
)
def test_the_exact_distribution(format: str, transform: str, constraint: str) -> None:
    constrained = None if constraint == "free" else conformance.CONSTRAINTS[constraint]
    heads.check_distribution(heads.tiny(format), transform, constrained)


@pytest.mark.heavy
@pytest.mark.parametrize("drafters", [("own", "own"), ("own", None), ("lookup", "own")], ids=str)
@pytest.mark.parametrize("format", ["specforge", "block gated"])
def test_the_joint_distribution_of_two_rows(format: str, drafters: tuple[str | None, ...]) -> None:
    made = heads.tiny(format)
    names = [heads.drafter_of(made).name if name == "own" else name for name in drafters]
    check_joint_law(functools.partial(heads.fresh_engine, made), names, coded.after(made))


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare q but for rounding: the passes of a head have any shape."""

    def same(one: Any, other: Any) -> None:
        assert one.lengths.tolist() == other.lengths.tolist()
        assert one.tokens.tolist() == other.tokens.tolist()
        torch.testing.assert_close(one.q.dense(coded.WORDS), other.q.dense(coded.WORDS), rtol=1e-3, atol=1e-5)

    monkeypatch.setattr(conformance, "same", same)


CHECKS: dict[str, Callable[[conformance.World, str], None]] = {
    "rewound": conformance.test_a_rewound_drafter_equals_a_fresh_one,
    "rejections": conformance.test_a_rejection_at_every_place_leaves_no_trace,
    "plain steps": conformance.test_a_drafter_catches_up_after_plain_steps,
}


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    "format", ["specforge", "whole", "eagle-1", "fasterdecoding", "block z-lab", "block gated"]
)
def test_a_rewound_head_equals_a_fresh_one(format: str, check: str) -> None:
    CHECKS[check](heads.HeadWorld(made=heads.tiny(format)), heads.drafter_of(heads.tiny(format)).name)


def test_states_of_the_wrong_positions_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        conformance.test_a_rejection_at_every_place_leaves_no_trace(
            heads.HeadWorld(made=heads.tiny("fasterdecoding")), "medusa"
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conformance, "GAMMA", 2)
        check()
        early = conformance.states_of_the_position_before
        assert_caught(defect("a state early", Medusa.observe, early, check), monkeypatch)
