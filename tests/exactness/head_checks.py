"""What the suites of drafters with a head check alike, on real forwards and on targets of few words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.decode import drafting
from foredraft.decode.policy import Fixed, Policy
from foredraft.decode.prefix_cache import PrefixCache
from foredraft.drafters.lookup import Lookup
from tests.exactness import test_conformance as conformance
from tests.exactness.test_enumeration import case, compare, compare_jointly
from tests.support import coded
from tests.support.forking import joint_outputs_of, outputs_of
from tests.support.harness import ForkingEngine
from tests.support.loaded import engine_of

__all__ = [
    "HeadWorld",
    "check_distribution",
    "check_fused_drafts",
    "check_joint_distribution",
    "check_seeds",
    "check_siblings",
    "drafter_of",
    "fresh_engine",
]


FUSED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"acceptance": "speculative"}, {"top_k": 4, "temperature": 0.7},
)  # fmt: skip


def drafter_of(llm: LLM) -> Any:
    return engine_of(llm).drafters[llm.default_drafter or ""]


def check_seeds(llm: LLM, prompts: list[list[int]], new: int) -> None:
    """Check that a seed gives the text of plain decoding."""
    engine_of(llm).policy = Fixed(4)
    params = [SamplingParams(seed=n, max_new_tokens=new, temperature=0.8) for n in range(len(prompts))]
    want = llm.generate(prompts, [replace(each, drafter="none") for each in params])
    found = llm.generate(prompts, [replace(each, drafter=drafter_of(llm).name) for each in params])
    assert [output.token_ids for output in found] == [output.token_ids for output in want]
    assert sum(output.stats.accepted for output in found) > new // 2


def check_fused_drafts(llm: LLM, kind: str, prompts: list[list[int]]) -> None:
    """Check that drafts by one call are those of single steps, to the bit, in a batch whose rows end early."""
    by_one_call, size, steps = drafting._fused_draft, llm.loaded.spec.vocab_size, 0

    def compared(*given: Any) -> Any:
        nonlocal steps
        draft, single = by_one_call(*given), drafting._draft_loop(*given)
        if draft is None:  # its first token has nothing to read
            return single
        assert draft.lengths.tolist() == single.lengths.tolist()
        assert draft.tokens.tolist() == single.tokens.tolist()
        if draft.q.probs is not None:
            for row, length in enumerate(draft.lengths.tolist()):
                assert torch.equal(draft.q.dense(size)[row, :length], single.q.dense(size)[row, :length])
        steps += draft.tokens.shape[1]
        return draft

    engine_of(llm).policy = Fixed(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting, "_fused_draft", compared)
        for more in FUSED:
            params = [
                SamplingParams(seed=n, max_new_tokens=9 + 3 * n, ignore_eos=True, drafter=kind, **more)
                for n in range(len(prompts))
            ]
            llm.generate(prompts, params)
    assert steps > 40


def check_siblings(llm: LLM, texts: dict[tuple[int, ...], list[int]], greedy: SamplingParams) -> None:
    """Check that samples of one prompt take its rows over, and that a second request restores them.

    Args:
        llm: Its default drafter is a head.
        texts: Prompts, and what plain decoding gives for them.
        greedy: Temperature 0.
    """
    engine: Any = engine_of(llm)
    engine.policy, engine.prefix_cache = Fixed(3), PrefixCache(2**30)
    params = replace(greedy, drafter=drafter_of(llm).name)
    try:
        for _ in range(2):
            for prompt, plain in texts.items():
                outputs = llm.generate([list(prompt)], params, n=3)
                assert [output.token_ids for output in outputs] == [plain] * 3
        assert engine.prefix_cache.hits >= 256
    finally:
        engine.prefix_cache = None


# --- targets of few words -------------------------------------------------------------------------------------


def fresh_engine(llm: LLM, policy: Policy, *, rows: int = 2, noise: Any = None) -> ForkingEngine:
    """Return an engine with caches and a drafter of the head that saw nothing."""
    loaded: Any = engine_of(llm)
    own, cache = drafter_of(llm), loaded.target.new_cache(rows, coded.POSITIONS)
    drafters = [Lookup(), type(own)(loaded.target, cache, own.head)]
    return ForkingEngine(
        loaded.target, cache, policy, {drafter.name: drafter for drafter in drafters},
        vocabulary=loaded.vocabulary, device=loaded.device, vocab_ops=loaded.vocab_ops, noise=noise,
    )  # fmt: skip


def check_distribution(made: LLM, transform: str, constraint: Callable[[], Any] | None = None) -> None:
    """Compare all outputs with the target's exact distribution."""
    one = case(transform, drafter_of(made).name, prompt=(3, 1))
    if constraint is not None:
        one = replace(one, constraint=constraint)
    found = outputs_of(lambda noise: fresh_engine(made, Fixed(2), rows=8, noise=noise), [one])
    compare([one], found, coded.after(made))
    assert found[0].drafted > 0


def check_joint_distribution(made: LLM, drafters: tuple[str | None, str | None]) -> None:
    """Compare the outputs of two rows together with the target's joint distribution."""
    cases = [
        case("cold top-k", drafter, prompt=prompt, new=new)
        for drafter, prompt, new in zip(drafters, ((3,), (1, 3)), (3, 2), strict=True)
    ]
    found = joint_outputs_of(lambda noise: fresh_engine(made, Fixed(2), noise=noise), cases)
    compare_jointly(cases, found, coded.after(made))


@dataclass(frozen=True)
class HeadWorld(conformance.World):
    """The world of a head over a target of few words."""

    made: LLM | None = None

    def engine(self) -> ForkingEngine:
        assert self.made is not None
        return fresh_engine(self.made, self.policy(conformance.GAMMA))
