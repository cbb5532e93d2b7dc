"""DFlash and DSpark in real forwards: the tokens of plain decoding, the exact distribution, caches that never lag.

The heads are random. The vocabulary is so small that their drafts are accepted at times.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.decode.policy import Confidence, Fixed, Policy
from foredraft.decode.sequence import Sequence
from foredraft.drafters import waiting_states
from tests.exactness import test_conformance as conformance
from tests.exactness.head_checks import (
    HeadWorld,
    check_distribution,
    check_joint_distribution,
    check_seeds,
    check_siblings,
    drafter_of,
)
from tests.exactness.test_bits import prompts_of
from tests.exactness.test_eagle3 import CHECKS, near  # noqa: F401
from tests.parity.test_blocks import load
from tests.parity.test_heads import KEYS, V
from tests.support import coded
from tests.support.blocks import SPELLINGS, save_block
from tests.support.caches import held
from tests.support.checkpoints import reference_model
from tests.support.loaded import engine_of
from tests.support.nan_weights import check_nan_weights

NEW = 28
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
PROMPTS = prompts_of(8, V)
MADE = [("z-lab", "bfloat16", "kernels"), ("gated", "float32", "operators")]


@pytest.fixture(scope="module", params=MADE, ids="-".join)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    spelling, dtype, by = request.param
    return load(tmp_path_factory.mktemp("model"), spelling, by, dtype)


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    """Each prompt alone, one token a pass."""
    return [llm.generate([p], replace(GREEDY, drafter="none"))[0].token_ids for p in PROMPTS]


def test_greedy_ids_in_a_batch_and_alone(llm: LLM, plain: list[list[int]]) -> None:
    name = drafter_of(llm).name
    for policy in (Fixed(3), Confidence(6, threshold=0.2)):
        engine_of(llm).policy = policy
        kinds = [name, "none"] if policy.stops_by_content else [name, "lookup", "none", name]
        for shift in (0, 1):
            params = [replace(GREEDY, drafter=kinds[(at + shift) % len(kinds)]) for at in range(len(PROMPTS))]
            assert [output.token_ids for output in llm.generate(PROMPTS, params)] == plain
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == plain
    accepted, drafted = (sum(getattr(o.stats, each) for o in outputs) for each in ("accepted", "drafted"))
    assert 0 < accepted < drafted
    for index in (0, 4):
        assert llm.generate([PROMPTS[index]], GREEDY)[0].token_ids == plain[index]


def test_a_seed_gives_the_text_of_plain_decoding(llm: LLM) -> None:
    check_seeds(llm, PROMPTS, NEW)


def test_siblings_kept_prompts_and_penalties(llm: LLM, plain: list[list[int]]) -> None:
    check_siblings(llm, {tuple(PROMPTS[7]): plain[7]}, GREEDY)
    barred = replace(GREEDY, logit_bias={plain[0][2]: -100.0, plain[1][3]: -100.0}, repetition_penalty=1.3)
    want = llm.generate(PROMPTS[:3], replace(barred, drafter="none"))
    found = llm.generate(PROMPTS[:3], barred)
    assert [output.token_ids for output in found] == [output.token_ids for output in want]


def steps_of(llm: LLM, prompt: list[int], count: int) -> Iterator[Any]:
    """A greedy request with neighbours, held after `count` new tokens: its row is still there to look at."""
    engine = engine_of(llm)
    params = replace(GREEDY, max_new_tokens=count + 20)
    texts = [PROMPTS[0], PROMPTS[2], prompt]
    sequences = [
        Sequence(-1 - n, text, params, 0, drafters=(drafter_of(llm).name,)) for n, text in enumerate(texts)
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


def row_of(llm: LLM, sequence: Any) -> torch.Tensor:
    drafter, length = drafter_of(llm), len(sequence.tokens) - 1
    drafter.settle(sequence)
    assert drafter.cache.lengths[sequence.row] == length
    return held(drafter.cache, sequence.row, length)


def check_caches(llm: LLM, policy: Policy) -> None:
    """What a row holds after rounds is what it holds after a prefill of the same text."""
    for row in range(4):  # keys of an earlier text could stand in for missing ones
        for cache in engine_of(llm).rows.caches:
            cache.zero_row(row)
    engine_of(llm).policy = policy
    for prompt in (PROMPTS[1], PROMPTS[4]):
        for sequence in steps_of(llm, prompt, NEW):
            text, grown = list(sequence.tokens), row_of(llm, sequence)
        for sequence in steps_of(llm, text, 1):
            fresh = row_of(llm, sequence)
        shared = min(grown.shape[-2], fresh.shape[-2])
        torch.testing.assert_close(grown[..., :shared, :], fresh[..., :shared, :], rtol=2e-3, atol=2e-4)


class NowAndThen(Fixed):
    def budget(self, sequence: Any) -> int:
        return self.max_draft if len(sequence.tokens) % 21 < 3 else 0


@pytest.mark.parametrize("policy", [Fixed(3), NowAndThen(3)], ids=["always", "now and then"])
def test_the_heads_cache_is_that_of_a_fresh_prefill(
    llm: LLM, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taps wait for a draft, and are read before they are too many."""
    if engine_of(llm).cache.dtype == torch.bfloat16:
        pytest.skip("compared in float32")
    monkeypatch.setattr(waiting_states, "MAX_WAITING", 8)
    check_caches(llm, policy)


def test_a_head_of_nan_leaves_the_text_as_it_is(llm: LLM, plain: list[list[int]]) -> None:
    check_nan_weights(llm, drafter_of(llm).head.norm.weight, GREEDY, PROMPTS[2:4], plain[2:4])


# --- few words: the exact distribution, and rewinding ---------------------------------------------------------


@functools.cache
def tiny(spelling: str) -> LLM:
    """A target of few words, few enough to enumerate its outputs."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        keys = {**KEYS, "vocab_size": coded.WORDS, "num_hidden_layers": 2}
        reference_model(**keys).save_pretrained(folder / "target")
        spec = "spec" in SPELLINGS[spelling]
        changed: dict[str, Any] = {"config": {"aux_hidden_state_layer_ids": [0, 2], "mask_token_id": 2}}
        if not spec:
            changed = {
                "config": {"num_target_layers": None},
                "section": {"target_layer_ids": [0], "mask_token_id": 2},
            }
        save_block(folder / spelling, spelling, coded.WORDS, words=3 if spec else None, **changed)
        return load(folder, spelling)


@pytest.mark.parametrize(
    ("spelling", "transform", "constraint"),
    [
        ("z-lab", "cold top-k", "free"),
        ("gated", "cold top-k", "free"),
        ("z-lab", "cold top-k", "no repeat"),
        ("gated", "cold top-k", "late ban"),
        pytest.param("speculators", "as it is", "free", marks=pytest.mark.slow),
        pytest.param("rnn", "as it is", "free", marks=pytest.mark.slow),
    ],
)
def test_the_exact_distribution(spelling: str, transform: str, constraint: str) -> None:
    """Independent slots by their marginals, and slots that follow each other."""
    constrained = None if constraint == "free" else conformance.CONSTRAINTS[constraint]
    check_distribution(tiny(spelling), transform, constrained)


@pytest.mark.parametrize("other", ["own", "lookup"])
def test_the_joint_distribution_of_two_rows(other: str) -> None:
    made = tiny("gated")
    name = drafter_of(made).name
    check_joint_distribution(made, (name, name if other == "own" else other))


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("spelling", ["z-lab", "gated"])
def test_a_rewound_head_equals_a_fresh_one(spelling: str, check: str) -> None:
    CHECKS[check](HeadWorld(made=tiny(spelling)), SPELLINGS[spelling]["of"])
