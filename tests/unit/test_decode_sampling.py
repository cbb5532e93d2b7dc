"""logits -> laws, against the definition in plain Python and against transformers' warpers."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from foredraft.decode.law import Law
from foredraft.decode.sampling import SamplingParams, SamplingTable, law_of
from foredraft.errors import RequestError

sys.path.insert(0, str(Path(__file__).parents[1] / "exactness"))
import laws

CPU = torch.device("cpu")
V = 7

PARAMS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.5},
    {"temperature": 0.01},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 100},
    {"top_p": 0.9},
    {"top_p": 0.35},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 1.5, "top_k": 4},
    {"temperature": 0.7, "top_p": 0.6},
    {"top_k": 4, "top_p": 0.7},
    {"top_p": 0.8, "min_p": 0.3},
    {"temperature": 2.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 0},
    {"temperature": 0, "top_k": 2, "top_p": 0.1},
]


def table(*params: dict[str, Any]) -> SamplingTable:
    return SamplingTable.of([SamplingParams(**p) for p in params], CPU)


def logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_law_is_the_definition(params: dict[str, Any]) -> None:
    x = logits(1, 20, V)
    law, finite = law_of(x, table(params))
    assert finite.all()
    weights = law.weights(V)
    assert weights.dtype == torch.float32
    for t in range(20):
        want = laws.transformed(x[0, t].tolist(), SamplingParams(**params))
        assert weights[0, t].tolist() == pytest.approx(want, abs=2e-6)
        for got, wanted in zip(weights[0, t].tolist(), want, strict=True):
            assert wanted > 0 or got == 0, "an impossible token"
            assert got > 0 or wanted < 1e-37, "a possible one, and float32 can hold it"


def test_masks_come_before_every_cut() -> None:
    x, masks = logits(1, 20, V), torch.rand(1, 20, V, generator=torch.Generator().manual_seed(1)) < 0.6
    masks[..., 2] = True
    for params in PARAMS:
        weights = law_of(x, table(params), masks)[0].weights(V)
        for t in range(20):
            want = laws.transformed(x[0, t].tolist(), SamplingParams(**params), masks[0, t].tolist())
            assert weights[0, t].tolist() == pytest.approx(want, abs=2e-6)


@pytest.mark.parametrize("params", [p for p in PARAMS if p.get("temperature") != 0], ids=str)
def test_a_law_is_that_of_transformers(params: dict[str, Any]) -> None:
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    p = SamplingParams(**params)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(p.temperature))])
    if p.top_k:
        warpers.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        warpers.append(TopPLogitsWarper(p.top_p))
    if p.min_p:
        warpers.append(MinPLogitsWarper(p.min_p))
    x = logits(1, 50, V, seed=3)  # no ties: transformers drops some at a top-p cut
    want = warpers(torch.zeros(50, 1, dtype=torch.int64), x[0].clone()).softmax(-1)
    torch.testing.assert_close(law_of(x, table(params))[0].weights(V)[0], want, atol=2e-6, rtol=0)


def test_ties_at_a_cut_are_kept() -> None:
    x = torch.tensor([[[1.0, 3.0, 2.0, 2.0, 0.0, 2.0, -1.0]]])
    for params in ({"top_k": 2}, {"top_p": 0.6}):
        weights = law_of(x, table(params))[0].weights(V)[0, 0]
        assert (weights > 0).tolist() == [False, True, True, True, False, True, False], params


def test_greedy_ties_go_to_the_smallest_id() -> None:
    x = torch.tensor([[[0.0, 5.0, 5.0, 1.0]]])
    law, _ = law_of(x, table({"temperature": 0}))
    assert law.ids is not None
    assert law.ids.tolist() == [[1]]
    law, _ = law_of(x, table({}), argmax=True)
    assert law.probs is None


def test_mixed_rows_are_each_their_own() -> None:
    x = logits(len(PARAMS), 4, V)
    together = law_of(x, table(*PARAMS))[0].weights(V)
    for row, params in enumerate(PARAMS):
        alone = law_of(x[row : row + 1], table(params))[0].weights(V)
        assert torch.equal(together[row : row + 1], alone), params


@given(st.lists(st.sampled_from(PARAMS), min_size=1, max_size=6), st.integers(0, 10_000))
def test_a_rows_bits_do_not_depend_on_its_batch(params: list[dict[str, Any]], seed: int) -> None:
    """Seeded text must not depend on the load."""
    x = logits(len(params), 3, 33, seed=seed)
    together = law_of(x, table(*params))[0].weights(33)
    for row, own in enumerate(params):
        alone = law_of(x[row : row + 1], table(own))[0].weights(33)
        assert torch.equal(together[row : row + 1], alone)


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38, 1e-20, 1e38, 1e39, 1e300])
def test_no_temperature_is_too_extreme(temperature: float) -> None:
    x = torch.tensor([[[1.0, 2.0, -math.inf, 2.0]]])
    masks = torch.tensor([[[True, True, True, False]]])
    want = [0.0, 1.0, 0.0, 0.0] if temperature < 1 else [0.5, 0.5, 0.0, 0.0]
    law, finite = law_of(x, table({"temperature": temperature}), masks)
    assert finite.all()
    assert law.weights(4)[0, 0].tolist() == pytest.approx(want)


@pytest.mark.parametrize("top_p", [1e-300, 1e-45, 1e-9])
def test_a_tiny_top_p_keeps_the_first(top_p: float) -> None:
    weights = law_of(logits(1, 5, V), table({"top_p": top_p}))[0].weights(V)
    assert torch.equal(weights.amax(-1), torch.ones(1, 5))


def test_huge_logits_do_not_overflow() -> None:
    weights = law_of(torch.tensor([[[3e38, -3e38, 3e38]]]), table({"temperature": 0.1}))[0].weights(3)
    assert weights[0, 0].tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_harms_no_other(params: dict[str, Any], bad: float) -> None:
    x = logits(3, 2, V)
    want = law_of(x, table(*[params] * 3))[0].weights(V)
    x[1, 1, 4] = bad
    law, finite = law_of(x, table(*[params] * 3))
    assert finite.tolist() == [[True, True], [True, False], [True, True]]
    weights = law.weights(V)
    assert torch.equal(weights[[0, 2]], want[[0, 2]])
    assert torch.equal(weights[1, 0], want[1, 0])
    all_bad = torch.full((1, 1, V), math.nan)
    assert not law_of(all_bad, table(params))[1].any()


def test_a_mask_that_allows_nothing_is_not_finite() -> None:
    _, finite = law_of(logits(1, 1, V), table({}), torch.zeros(1, 1, V, dtype=torch.bool))
    assert not finite.any()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("max_new_tokens", 0),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.0),
        ("acceptance", "both"),
    ],
)
def test_a_bad_value_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(RequestError, match=option):
        SamplingParams(**{option: value})


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="top_q"):
        SamplingParams.of(top_q=1)
    assert SamplingParams.of(top_k=3) == SamplingParams(top_k=3)


def test_acceptance_follows_the_seed() -> None:
    assert not SamplingParams().is_coupled
    assert SamplingParams(seed=1).is_coupled
    assert SamplingParams(acceptance="coupled").is_coupled
    assert not SamplingParams(seed=1, acceptance="speculative").is_coupled


def test_a_law_mixes_its_two_representations() -> None:
    probs = torch.tensor([[[0.2, 0.3, 0.5]], [[1.0, 0.0, 0.0]]])
    law = Law(probs, torch.tensor([[0], [2]]), torch.tensor([False, True]))
    assert law.at(torch.tensor([[1], [2]])).tolist() == [[pytest.approx(0.3)], [1.0]]
    assert law.at(torch.tensor([[1], [0]]))[1].tolist() == [0.0]
    assert law.weights(3)[1].tolist() == [[0.0, 0.0, 1.0]]
    assert law.position(torch.tensor([0, 0])).weights(3).shape == (2, 1, 3)


def test_a_residual_is_p_less_q_or_p() -> None:
    p = Law(torch.tensor([[[0.5, 0.2, 0.3]], [[0.5, 0.2, 0.3]], [[0.5, 0.5, 0.0]]]))
    q = Law(torch.tensor([[[0.1, 0.6, 0.3]], [[0.1, 0.6, 0.3]], [[0.5, 0.5, 0.0]]]))
    left = p.minus(q, torch.tensor([True, False, True])).weights(3)
    assert left[0, 0].tolist() == [pytest.approx(0.4), 0.0, 0.0]
    assert torch.equal(left[1], p.weights(3)[1])
    assert torch.equal(left[2], p.weights(3)[2]), "a zero residual falls back to p"


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 40}, {}], ids=str)
def test_a_position_has_the_same_law_alone_and_among_others(params: dict[str, Any]) -> None:
    """Bit for bit, with a vocabulary so large that reductions of one row are split over threads."""
    logits = torch.randn(3, 5, 128_256, generator=torch.Generator().manual_seed(0)) * 3
    one, all_ = (SamplingTable.of([SamplingParams(**params)] * rows, torch.device("cpu")) for rows in (1, 3))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together, _ = law_of(logits, all_)
        alone = [[law_of(logits[b : b + 1, t : t + 1], one)[0] for t in range(5)] for b in range(3)]
    finally:
        torch.set_num_threads(threads)
    assert together.probs is not None
    for b in range(3):
        for t in range(5):
            assert torch.equal(alone[b][t].probs[0, 0], together.probs[b, t])  # type: ignore[index]
