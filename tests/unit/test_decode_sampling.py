"""Next-token distributions of logits, against the definition in plain Python and against transformers' warpers."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from foredraft.decode.distribution import Distribution
from foredraft.decode.params import SamplingParams
from foredraft.decode.penalty_context import PenaltyContext
from foredraft.decode.sampling import SamplingTable, distribution_of
from foredraft.decode.sequence import Origin, Sequence
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
        texts[-1].extend(said := ids(row % 3), [Origin.TARGET] * len(said), [])
    return texts, torch.tensor([ids(4) for _ in params])


def logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_distribution_is_the_definition(params: dict[str, Any]) -> None:
    x = logits(1, 20, V)
    distribution, finite = distribution_of(x, table(params))
    assert finite.all()
    weights = distribution.dense(V)
    assert weights.dtype == torch.float32
    for t in range(20):
        want = distributions.transformed(x[0, t].tolist(), SamplingParams(**params))
        assert weights[0, t].tolist() == pytest.approx(want, abs=2e-6)
        for got, wanted in zip(weights[0, t].tolist(), want, strict=True):
            assert wanted > 0 or got == 0, "an impossible token"
            assert got > 0 or wanted < 1e-37, "a possible one, and float32 can hold it"


def test_masks_apply_before_truncation() -> None:
    x, masks = logits(1, 20, V), torch.rand(1, 20, V, generator=torch.Generator().manual_seed(1)) < 0.6
    masks[..., 2] = True
    for params in PARAMS:
        weights = distribution_of(x, table(params), masks)[0].dense(V)
        for t in range(20):
            want = distributions.transformed(x[0, t].tolist(), SamplingParams(**params), masks[0, t].tolist())
            assert weights[0, t].tolist() == pytest.approx(want, abs=2e-6)


def test_what_was_said_and_drafted_counts() -> None:
    """Every column of a verifying pass and every draft step counts all tokens before it."""
    texts, drafted = rolled(PAST)
    penalty_context = PenaltyContext.of(texts, CPU)
    assert penalty_context is not None
    x, own = logits(len(PAST), 5, V, seed=7), table(*PAST)
    together = distribution_of(x, own, penalty_context=penalty_context.along(drafted))[0].dense(V)
    for row, (text, params) in enumerate(zip(texts, PAST, strict=True)):
        for t in range(5):
            new = [*text.new_ids, *drafted[row, :t].tolist()]
            want = distributions.transformed(
                x[row, t].tolist(), SamplingParams(**params), None, text.prompt, new, EOS
            )
            assert together[row, t].tolist() == pytest.approx(want, abs=2e-6), (params, t)
    for t in range(5):
        step = distribution_of(
            x[:, t : t + 1], own, penalty_context=penalty_context.along(drafted[:, :t], ahead=t)
        )[0].dense(V)
        assert torch.equal(step[:, 0], together[:, t]), (
            "bit for bit, or the draft is judged by another distribution"
        )


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
        rows = zip(made.ids.tolist(), made.counts.tolist(), made.prompted.tolist(), strict=True)
        return {token: (count, prompted) for token, count, prompted in rows if count or prompted}

    before = token_counts()
    many = [5, 5, text.prompt[0], *range(100, 200)]
    text.extend(many, [Origin.TARGET] * len(many), [])
    assert token_counts()[5] == (2, False) and token_counts()[199] == (1, False)
    text._roll_back(0)
    assert token_counts() == before


def test_the_logits_are_not_changed() -> None:
    """The model's own log-probabilities are read from them afterwards."""
    texts, drafted = rolled(PAST)
    penalty_context = PenaltyContext.of(texts, CPU)
    assert penalty_context is not None
    x = logits(len(PAST), 5, V)
    kept = x.clone()
    distribution_of(x, table(*PAST), torch.rand(x.shape) < 0.7, penalty_context.along(drafted))
    assert torch.equal(x, kept)


@pytest.mark.parametrize("params", [p for p in PARAMS if p.get("temperature") != 0], ids=str)
def test_distributions_are_those_of_transformers(params: dict[str, Any]) -> None:
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        SequenceBiasLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        TypicalLogitsWarper,
    )

    p = SamplingParams(**params)
    warpers = LogitsProcessorList()
    if p.logit_bias:
        bias = [[[token], float(value)] for token, value in p.logit_bias.items()]
        warpers.append(SequenceBiasLogitsProcessor(bias))
    warpers.append(TemperatureLogitsWarper(float(p.temperature)))
    if p.top_k:
        warpers.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        warpers.append(TopPLogitsWarper(p.top_p))
    if p.min_p:
        warpers.append(MinPLogitsWarper(p.min_p))
    if p.typical_p < 1:
        warpers.append(TypicalLogitsWarper(p.typical_p))
    x = logits(1, 50, V, seed=3)  # no ties: transformers drops some at a top-p cut
    want = warpers(torch.zeros(50, 1, dtype=torch.int64), x[0].clone()).softmax(-1)
    torch.testing.assert_close(distribution_of(x, table(params))[0].dense(V)[0], want, atol=2e-6, rtol=0)


@pytest.mark.parametrize("penalty", [0.6, 1.4])
def test_a_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    texts, _ = rolled([{"repetition_penalty": penalty}] * 6)
    penalty_context = PenaltyContext.of(texts, CPU)
    assert penalty_context is not None
    x = logits(6, 1, V)
    got = distribution_of(
        x,
        table(*[{"repetition_penalty": penalty}] * 6),
        penalty_context=penalty_context.along(torch.zeros(6, 0).long()),
    )
    for row, text in enumerate(texts):
        want = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([text.tokens]), x[row].clone())
        torch.testing.assert_close(got[0].dense(V)[row], want.softmax(-1), atol=2e-6, rtol=0)


def test_ties_at_a_cut_are_kept() -> None:
    x = torch.tensor([[[1.0, 3.0, 2.0, 2.0, 0.0, 2.0, -1.0]]])
    for params in ({"top_k": 2}, {"top_p": 0.6}):
        weights = distribution_of(x, table(params))[0].dense(V)[0, 0]
        assert (weights > 0).tolist() == [False, True, True, True, False, True, False], params
    weights = distribution_of(x, table({"typical_p": 0.2}))[0].dense(V)[
        0, 0
    ]  # the three 2.0 are the most typical
    assert (weights > 0).tolist() == [False, False, True, True, False, True, False]


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


@given(st.lists(st.sampled_from(PARAMS), min_size=1, max_size=6), st.integers(0, 10_000))
def test_a_rows_bits_do_not_depend_on_its_batch(params: list[dict[str, Any]], seed: int) -> None:
    """Seeded text must not depend on the load."""
    x = logits(len(params), 3, 33, seed=seed)
    together = distribution_of(x, table(*params))[0].dense(33)
    for row, own in enumerate(params):
        alone = distribution_of(x[row : row + 1], table(own))[0].dense(33)
        assert torch.equal(together[row : row + 1], alone)


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38, 1e-20, 1e38, 1e39, 1e300])
def test_extreme_temperatures_give_finite_distributions(temperature: float) -> None:
    x = torch.tensor([[[1.0, 2.0, -math.inf, 2.0]]])
    masks = torch.tensor([[[True, True, True, False]]])
    want = [0.0, 1.0, 0.0, 0.0] if temperature < 1 else [0.5, 0.5, 0.0, 0.0]
    distribution, finite = distribution_of(x, table({"temperature": temperature}), masks)
    assert finite.all()
    assert distribution.dense(4)[0, 0].tolist() == pytest.approx(want)


@pytest.mark.parametrize("top_p", [1e-300, 1e-45, 1e-9])
def test_a_tiny_top_p_keeps_the_likeliest_token(top_p: float) -> None:
    weights = distribution_of(logits(1, 5, V), table({"top_p": top_p}))[0].dense(V)
    assert torch.equal(weights.amax(-1), torch.ones(1, 5))


def test_huge_logits_do_not_overflow() -> None:
    weights = distribution_of(torch.tensor([[[3e38, -3e38, 3e38]]]), table({"temperature": 0.1}))[0].dense(3)
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


def test_a_mask_that_allows_nothing_is_not_finite() -> None:
    _, finite = distribution_of(logits(1, 1, V), table({}), torch.zeros(1, 1, V, dtype=torch.bool))
    assert not finite.any()


def test_dense_and_one_hot_rows_combine() -> None:
    probs = torch.tensor([[[0.2, 0.3, 0.5]], [[1.0, 0.0, 0.0]]])
    distribution = Distribution(probs, torch.tensor([[0], [2]]), torch.tensor([False, True]))
    assert distribution.at(torch.tensor([[1], [2]])).tolist() == [[pytest.approx(0.3)], [1.0]]
    assert distribution.at(torch.tensor([[1], [0]]))[1].tolist() == [0.0]
    assert distribution.dense(3)[1].tolist() == [[0.0, 0.0, 1.0]]
    assert distribution.position(torch.tensor([0, 0])).dense(3).shape == (2, 1, 3)


def test_a_residual_is_p_less_q_or_p() -> None:
    p = Distribution(torch.tensor([[[0.5, 0.2, 0.3]], [[0.5, 0.2, 0.3]], [[0.5, 0.5, 0.0]]]))
    q = Distribution(torch.tensor([[[0.1, 0.6, 0.3]], [[0.1, 0.6, 0.3]], [[0.5, 0.5, 0.0]]]))
    left = p.minus(q, torch.tensor([True, False, True])).dense(3)
    assert left[0, 0].tolist() == [pytest.approx(0.4), 0.0, 0.0]
    assert torch.equal(left[1], p.dense(3)[1])
    assert torch.equal(left[2], p.dense(3)[2]), "a zero residual falls back to p"


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 40}, {}], ids=str)
def test_a_position_has_the_same_distribution_alone_and_in_a_batch(params: dict[str, Any]) -> None:
    """Bit for bit, with a vocabulary so large that reductions of one row are split over threads."""
    logits = torch.randn(3, 5, 128_256, generator=torch.Generator().manual_seed(0)) * 3
    one, all_ = (SamplingTable.of([SamplingParams(**params)] * rows, torch.device("cpu")) for rows in (1, 3))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together, _ = distribution_of(logits, all_)
        alone = [[distribution_of(logits[b : b + 1, t : t + 1], one)[0] for t in range(5)] for b in range(3)]
    finally:
        torch.set_num_threads(threads)
    assert together.probs is not None
    for b in range(3):
        for t in range(5):
            assert torch.equal(alone[b][t].probs[0, 0], together.probs[b, t])  # type: ignore[index]
