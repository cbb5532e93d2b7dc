"""Next-token distributions of logits, against the definition in plain Python and against transformers' warpers."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import transformers
from hypothesis import given

from foredraft.decode.params import SamplingParams
from foredraft.decode.sampling import PenaltyContext, SamplingTable, distribution_of
from foredraft.decode.sequence import Sequence, TokenOrigin
from tests.support import distributions

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
    {"typical_p": 0.6},
    {"typical_p": 0.2},
    {"temperature": 1.5, "typical_p": 0.85},
    {"top_k": 5, "typical_p": 0.5},
    {"min_p": 0.2, "typical_p": 0.7},
    {"top_p": 0.9, "min_p": 0.05, "typical_p": 0.7},
    {"logit_bias": {2: 3.0, 5: -100}},
    {"temperature": 0.5, "logit_bias": {0: -1.5, 6: 2}},
    {"temperature": 2.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 0},
    {"temperature": 0, "top_k": 2, "top_p": 0.1},
    {"temperature": 0, "logit_bias": {3: 4.5}, "typical_p": 0.1},
]
# transforms that depend on the text so far
PAST = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "temperature": 0.8},
    {"presence_penalty": 1.1},
    {"presence_penalty": -0.9, "top_k": 4},
    {"frequency_penalty": 0.6},
    {"frequency_penalty": -0.4, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"min_new_tokens": 4},
    {"min_new_tokens": 3, "ignore_eos": True},
    {"temperature": 0, "repetition_penalty": 2.0},
    {"logit_bias": {1: -2.0}, "repetition_penalty": 1.5, "min_p": 0.05},
    {"min_new_tokens": 5, "frequency_penalty": 0.5, "top_p": 0.9},
]


EOS = frozenset({0, 4})


def table(*params: dict[str, Any]) -> SamplingTable:
    made = [SamplingParams(**p) for p in params]
    return SamplingTable.of(made, CPU, [EOS] * len(params))


def rolled(params: list[dict[str, Any]], seed: int = 0) -> tuple[list[Sequence], torch.Tensor]:
    """Texts of different lengths, with a draft [B, 4] that continues each."""
    random = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(V, (count,), generator=random).tolist()

    texts = []
    for row, own in enumerate(params):
        texts.append(Sequence(row, ids(1 + row % 4), SamplingParams(**own), 0))
        texts[-1].extend(said := ids(row % 3), [TokenOrigin.TARGET] * len(said), [])
    return texts, torch.tensor([ids(4) for _ in params])


def past_of(texts: list[Sequence]) -> PenaltyContext:
    penalty_context = PenaltyContext.of(texts, CPU)
    assert penalty_context is not None
    return penalty_context


def logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_distribution_is_the_definition(params: dict[str, Any]) -> None:
    x, masks = logits(1, 20, V), torch.rand(1, 20, V, generator=torch.Generator().manual_seed(1)) < 0.6
    masks[..., 2] = True
    for mask in (None, masks):  # which applies before the truncation
        distribution, finite = distribution_of(x, table(params), mask)
        assert finite.all()
        weights = distribution.dense(V)
        assert weights.dtype == torch.float32
        for t in range(20):
            allowed = None if mask is None else mask[0, t].tolist()
            want = distributions.transformed(x[0, t].tolist(), SamplingParams(**params), allowed)
            assert weights[0, t].tolist() == pytest.approx(want, abs=2e-6)
            for got, wanted in zip(weights[0, t].tolist(), want, strict=True):
                assert wanted > 0 or got == 0, "an impossible token"
                assert got > 0 or wanted < 1e-37, "a possible one, and float32 can hold it"


def test_what_was_said_and_drafted_counts() -> None:
    texts, drafted = rolled(PAST)
    past, x, own = past_of(texts), logits(len(PAST), 5, V, seed=7), table(*PAST)
    together = distribution_of(x, own, penalty_context=past.along(drafted))[0].dense(V)
    for row, (text, params) in enumerate(zip(texts, PAST, strict=True)):
        for t in range(5):
            new = [*text.new_ids, *drafted[row, :t].tolist()]
            own_params, at = SamplingParams(**params), x[row, t].tolist()
            want = distributions.transformed(at, own_params, None, text.prompt, new, EOS)
            assert together[row, t].tolist() == pytest.approx(want, abs=2e-6), (params, t)
    for t in range(5):
        before = past.along(drafted[:, :t], ahead=t)
        step = distribution_of(x[:, t : t + 1], own, penalty_context=before)[0].dense(V)
        assert torch.equal(step[:, 0], together[:, t]), "a draft is judged by what it is drawn from"


@given(st.lists(st.sampled_from(PAST + PARAMS), min_size=1, max_size=5), st.integers(0, 10_000))
def test_a_past_is_each_rows_own(params: list[dict[str, Any]], seed: int) -> None:
    texts, drafted = rolled(params, seed)
    x = logits(len(params), 5, V, seed=seed)

    def distribution(rows: slice) -> torch.Tensor:
        penalty_context = PenaltyContext.of(texts[rows], CPU)
        along = None if penalty_context is None else penalty_context.along(drafted[rows])
        return distribution_of(x[rows], table(*params[rows]), penalty_context=along)[0].dense(V)

    together = distribution(slice(None))
    for row in range(len(params)):
        assert torch.equal(distribution(slice(row, row + 1)), together[row : row + 1])


def test_a_rollback_restores_the_token_counts() -> None:
    (text,), _ = rolled([{"frequency_penalty": 1.0}])

    def token_counts() -> dict[int, tuple[float, bool]]:
        made = text.token_counts
        assert made is not None
        rows = zip(*(array.tolist() for array in made.arrays()), strict=True)
        return {token: (count, prompted) for token, count, prompted in rows if count or prompted}

    before = token_counts()
    many = [5, 5, text.prompt[0], *range(100, 200)]
    text.extend(many, [TokenOrigin.TARGET] * len(many), [])
    assert token_counts()[5] == (2, False) and token_counts()[199] == (1, False)
    text._roll_back(0)
    assert token_counts() == before


def test_the_logits_are_not_changed() -> None:
    """The model's own log-probabilities are read from them afterwards."""
    texts, drafted = rolled(PAST)
    x = logits(len(PAST), 5, V)
    kept = x.clone()
    distribution_of(x, table(*PAST), torch.rand(x.shape) < 0.7, past_of(texts).along(drafted))
    assert torch.equal(x, kept)


@pytest.mark.parametrize("params", [p for p in PARAMS if p.get("temperature") != 0], ids=str)
def test_distributions_are_those_of_transformers(params: dict[str, Any]) -> None:
    p = SamplingParams(**params)
    bias = [[[token], float(value)] for token, value in (p.logit_bias or {}).items()]
    warpers = transformers.LogitsProcessorList()
    for is_given, warper, value in (
        (bias, transformers.SequenceBiasLogitsProcessor, bias),
        (True, transformers.TemperatureLogitsWarper, float(p.temperature)),
        (p.top_k, transformers.TopKLogitsWarper, p.top_k),
        (p.top_p < 1, transformers.TopPLogitsWarper, p.top_p),
        (p.min_p, transformers.MinPLogitsWarper, p.min_p),
        (p.typical_p < 1, transformers.TypicalLogitsWarper, p.typical_p),
    ):
        if is_given:
            warpers.append(warper(value))
    x = logits(1, 50, V, seed=3)  # no ties: transformers drops some at a top-p cut
    want = warpers(torch.zeros(50, 1, dtype=torch.int64), x[0].clone()).softmax(-1)
    torch.testing.assert_close(distribution_of(x, table(params))[0].dense(V)[0], want, atol=2e-6, rtol=0)


def test_ties_at_a_cut_are_kept() -> None:
    x, likeliest = torch.tensor([[[1.0, 3.0, 2.0, 2.0, 0.0, 2.0, -1.0]]]), {2, 3, 5}
    for params, kept in (
        ({"top_k": 2}, {1, *likeliest}),
        ({"top_p": 0.6}, {1, *likeliest}),
        ({"typical_p": 0.2}, likeliest),  # the three 2.0 are the most typical
    ):
        weights = distribution_of(x, table(params))[0].dense(V)[0, 0]
        assert {*weights.nonzero()[:, 0].tolist()} == kept, params


def test_greedy_ties_go_to_the_smallest_id() -> None:
    x = torch.tensor([[[0.0, 5.0, 5.0, 1.0]]])
    distribution, _ = distribution_of(x, table({"temperature": 0}))
    assert distribution.ids is not None
    assert distribution.ids.tolist() == [[1]]
    distribution, _ = distribution_of(x, table({}), argmax=True)
    assert distribution.probs is None


def test_mixed_rows_are_each_their_own() -> None:
    x = logits(len(PARAMS), 4, V)
    together = distribution_of(x, table(*PARAMS))[0].dense(V)
    for row, params in enumerate(PARAMS):
        alone = distribution_of(x[row : row + 1], table(params))[0].dense(V)
        assert torch.equal(together[row : row + 1], alone), params


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38, 1e-20, 1e38, 1e39, 1e300])
def test_extreme_temperatures_give_finite_distributions_unless_nothing_is_allowed(temperature: float) -> None:
    x = torch.tensor([[[1.0, 2.0, -math.inf, 2.0]]])
    masks = torch.tensor([[[True, True, True, False]]])
    want = [0.0, 1.0, 0.0, 0.0] if temperature < 1 else [0.5, 0.5, 0.0, 0.0]
    distribution, finite = distribution_of(x, table({"temperature": temperature}), masks)
    assert finite.all()
    assert distribution.dense(4)[0, 0].tolist() == pytest.approx(want)
    assert not distribution_of(x, table({"temperature": temperature}), ~masks & masks)[1].any()


@pytest.mark.parametrize("params", [*({"top_p": p} for p in (1e-300, 1e-45, 1e-9)), {"temperature": 0.1}])
def test_a_tiny_top_p_keeps_the_likeliest_tokens_of_huge_logits(params: dict[str, Any]) -> None:
    weights = distribution_of(torch.tensor([[[3e38, -3e38, 3e38]]]), table(params))[0].dense(3)
    assert weights[0, 0].tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_harms_no_other(params: dict[str, Any], bad: float) -> None:
    x = logits(3, 2, V)
    want = distribution_of(x, table(*[params] * 3))[0].dense(V)
    x[1, 1, 4] = bad
    distribution, finite = distribution_of(x, table(*[params] * 3))
    assert finite.tolist() == [[True, True], [True, False], [True, True]]
    weights = distribution.dense(V)
    assert torch.equal(weights[[0, 2]], want[[0, 2]])
    assert torch.equal(weights[1, 0], want[1, 0])
    all_bad = torch.full((1, 1, V), math.nan)
    assert not distribution_of(all_bad, table(params))[1].any()


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 40}, {}], ids=str)
def test_a_position_has_the_same_distribution_alone_and_in_a_batch(params: dict[str, Any]) -> None:
    """Bit for bit, with a vocabulary so large that reductions of one row are split over threads."""
    x = torch.randn(3, 5, 128_256, generator=torch.Generator().manual_seed(0)) * 3
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together = distribution_of(x, table(*[params] * 3))[0].probs
        alone = {
            (b, t): distribution_of(x[b : b + 1, t : t + 1], table(params))[0].probs
            for b in range(3)
            for t in range(5)
        }
    finally:
        torch.set_num_threads(threads)
    assert together is not None
    for (b, t), probs in alone.items():
        assert probs is not None and torch.equal(probs[0, 0], together[b, t])
