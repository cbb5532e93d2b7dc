"""EAGLE-3 in real forwards: the tokens of plain decoding, the exact distribution, and caches that never lag.

The heads are random. The vocabulary is so small that their drafts are accepted at times.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.decode.policy import Confidence, Fixed, Heuristic, Policy
from foredraft.decode.sequence import Sequence
from foredraft.drafters import waiting_states
from tests.exactness import test_conformance as conformance
from tests.exactness.head_checks import (
    HeadWorld,
    check_distribution,
    check_joint_distribution,
    check_seeds,
    check_siblings,
)
from tests.exactness.test_bits import prompts_of
from tests.parity.test_heads import KEYS, V, load
from tests.support import coded
from tests.support.caches import held
from tests.support.checkpoints import reference_model
from tests.support.loaded import engine_of
from tests.support.nan_weights import check_nan_weights
from tests.support.spelled_heads import SPELLED

NEW = 40
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
PROMPTS = prompts_of(8, V)
HEADS = ("safeailab", "qwen3")
MADE = [
    (spelling, dtype, by)
    for spelling in HEADS
    for dtype in ("float32", "bfloat16")
    for by in ("operators", "kernels")
]


@pytest.fixture(scope="module", params=MADE, ids="-".join)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    spelling, dtype, by = request.param
    return load(tmp_path_factory.mktemp("model"), spelling, by, dtype)


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    """Each prompt alone, one token a pass."""
    return [llm.generate([p], replace(GREEDY, drafter="none"))[0].token_ids for p in PROMPTS]


@pytest.mark.parametrize("policy", [Fixed(1), Fixed(4), Heuristic(7), Confidence(6, threshold=0.2)], ids=str)
def test_greedy_ids_in_a_batch_and_alone(llm: LLM, plain: list[list[int]], policy: Policy) -> None:
    engine_of(llm).policy = policy
    others = ["none"] if policy.stops_by_content else ["lookup", "none"]
    for shift in (0, 1):
        kinds = list(islice(cycle(["eagle3", *others]), shift, shift + len(PROMPTS)))
        outputs = llm.generate(PROMPTS, [replace(GREEDY, drafter=kind) for kind in kinds])
        assert [output.token_ids for output in outputs] == plain
    outputs = llm.generate(PROMPTS, replace(GREEDY, drafter="eagle3"))
    assert [output.token_ids for output in outputs] == plain
    assert sum(output.stats.drafted for output in outputs) > 0
    for index in (0, 1, 4):
        [alone] = llm.generate([PROMPTS[index]], replace(GREEDY, drafter="eagle3"))
        assert alone.token_ids == plain[index]


def test_some_greedy_drafts_are_accepted(llm: LLM) -> None:
    engine_of(llm).policy = Fixed(4)
    outputs = llm.generate(PROMPTS, replace(GREEDY, drafter="eagle3"))
    accepted, drafted = (sum(getattr(o.stats, name) for o in outputs) for name in ("accepted", "drafted"))
    assert 0 < accepted < drafted


def test_a_seed_gives_the_text_of_plain_decoding(llm: LLM) -> None:
    check_seeds(llm, PROMPTS, NEW)


def test_siblings_and_kept_prompts(llm: LLM, plain: list[list[int]]) -> None:
    check_siblings(llm, {tuple(PROMPTS[index]): plain[index] for index in (4, 7)}, GREEDY)


def steps_of(llm: LLM, prompt: list[int], drafter: str, count: int) -> Iterator[Any]:
    """A greedy request with neighbours, held after `count` new tokens: its row is still there to look at."""
    params = replace(GREEDY, max_new_tokens=count + 20)
    engine = engine_of(llm)
    sequences = [
        Sequence(-1 - n, text, params, 0, drafters=(drafter,))
        for n, text in enumerate([PROMPTS[0], PROMPTS[2], prompt])
    ]
    for one in sequences:
        engine.submit(one)
    try:
        while len(sequences[-1].new_ids) < count:
            engine.step()
        yield sequences[-1]
    finally:
        for one in sequences:
            engine.cancel(one)


def rows_of(llm: LLM, sequence: Any) -> list[torch.Tensor]:
    """Return what the head's caches hold of all committed tokens but those that wait for a draft."""
    drafter: Any = engine_of(llm).drafters["eagle3"]
    drafter.settle(sequence)
    drafter._read(sequence, len(sequence.tokens) - 1)
    found = []
    for cache, first in ((drafter.cache, 1), (drafter.states, 0)):
        length = len(sequence.tokens) - 1
        assert cache.lengths[sequence.row] == length
        found.append(held(cache, sequence.row, length)[..., first:, :])
    return found


@pytest.mark.parametrize("policy", [Fixed(1), Fixed(4)], ids=["1", "4"])
def test_the_heads_caches_are_those_of_a_fresh_prefill(llm: LLM, policy: Fixed) -> None:
    if engine_of(llm).cache.dtype == torch.bfloat16:
        pytest.skip("compared in float32")
    for row in range(4):  # keys of an earlier text could stand in for missing ones
        for cache in engine_of(llm).rows.caches:
            cache.zero_row(row)
    engine_of(llm).policy = policy
    for prompt in (PROMPTS[1], PROMPTS[4]):
        for sequence in steps_of(llm, prompt, "eagle3", NEW):
            text, grown = list(sequence.tokens), rows_of(llm, sequence)
        for sequence in steps_of(llm, text, "eagle3", 1):
            fresh = rows_of(llm, sequence)
        for one, other in zip(grown, fresh, strict=True):
            shared = min(one.shape[-2], other.shape[-2])
            torch.testing.assert_close(one[..., :shared, :], other[..., :shared, :], rtol=2e-3, atol=2e-4)


def test_long_stretches_of_plain_steps(
    llm: LLM, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taps wait for a draft, and are read before they are too many."""
    monkeypatch.setattr(waiting_states, "MAX_WAITING", 8)

    class NowAndThen(Fixed):
        def budget(self, sequence: Any) -> int:
            return self.max_draft if len(sequence.tokens) % 21 < 3 else 0

    engine_of(llm).policy = NowAndThen(3)
    outputs = llm.generate(PROMPTS, replace(GREEDY, drafter="eagle3"))
    assert [output.token_ids for output in outputs] == plain


def test_a_head_of_nan_leaves_the_text_as_it_is(llm: LLM, plain: list[list[int]]) -> None:
    drafter: Any = engine_of(llm).drafters["eagle3"]
    params = replace(GREEDY, drafter="eagle3")
    check_nan_weights(llm, drafter.head.norm.weight, params, PROMPTS[2:4], plain[2:4])


# --- few words: the exact distribution, and rewinding ---------------------------------------------------------


@functools.cache
def tiny(spelling: str) -> LLM:
    """A target of few words, few enough to enumerate its outputs."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        keys = {**KEYS, "vocab_size": coded.WORDS, "num_hidden_layers": 2}
        taps = {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        reference_model(**keys).save_pretrained(folder / "target")
        spelled = SPELLED[spelling]
        more = {"config": taps} if spelled.drafter == "eagle3" else {}
        words = None if spelled.words is None else 3
        spelled.save(folder / spelling, spelling, coded.WORDS, words=words, **more)
        return load(folder, spelling, "kernels")


@pytest.mark.parametrize("transform", [pytest.param("as it is", marks=pytest.mark.slow), "cold top-k"])
@pytest.mark.parametrize("spelling", ["specforge", "whole"])
def test_the_exact_distribution(spelling: str, transform: str) -> None:
    check_distribution(tiny(spelling), transform)


@pytest.mark.parametrize("drafters", [("eagle3", "eagle3"), ("eagle3", None), ("lookup", "eagle3")], ids=str)
def test_the_joint_distribution_of_two_rows(drafters: tuple[str | None, str | None]) -> None:
    check_joint_distribution(tiny("specforge"), drafters)


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare q but for rounding: the passes of a head have any shape."""

    def same(one: Any, other: Any) -> None:
        assert one.lengths.tolist() == other.lengths.tolist()
        assert one.tokens.tolist() == other.tokens.tolist()
        torch.testing.assert_close(one.q.dense(coded.WORDS), other.q.dense(coded.WORDS), rtol=1e-3, atol=1e-5)

    monkeypatch.setattr(conformance, "same", same)


CHECKS: dict[str, Callable[[conformance.World, str], None]] = {
    "rewound": conformance.check_rewound,
    "rejections": conformance.check_rejections,
    "plain steps": conformance.test_a_drafter_catches_up_after_plain_steps,
}


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("spelling", ["specforge", "whole"])
def test_a_rewound_head_equals_a_fresh_one(spelling: str, check: str) -> None:
    CHECKS[check](HeadWorld(made=tiny(spelling)), "eagle3")
