"""Sums over a vocabulary in the orders of CUDA's kernels: a row has the same distribution alone and in a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import SamplingParams
from foredraft.decode import vocab_ops
from foredraft.decode.policy import target_confidence
from foredraft.decode.sampling import SamplingTable, distribution_of
from foredraft.decode.scores import score
from foredraft.decode.vocab_ops import TORCH_VOCAB_OPS
from tests.rehearsal.orders import cuda_orders, running_sum, sums
from tests.support.mutation import assert_caught, defect
from tests.support.mutations import Function

CUDA = torch.device("cuda")
PARAMS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "typical_p": {"typical_p": 0.8},
    "all": {"top_k": 500, "top_p": 0.8, "min_p": 1e-4, "typical_p": 0.9},
}
VOCABULARIES = (1001, 4096, 50_257)


def logits_of(rows: int, columns: int, vocabulary: int) -> Tensor:
    return 3 * torch.randn(rows, columns, vocabulary, generator=torch.Generator().manual_seed(0))


# --- the orders themselves ---------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [4096, 50_257])
def test_the_orders_add_up_all_numbers(vocabulary: int) -> None:
    probs = logits_of(1, 3, vocabulary)[0].softmax(-1)
    for order in range(4):
        torch.testing.assert_close(sums(probs, [order] * 3), probs.sum(-1), rtol=1e-5, atol=0)
        torch.testing.assert_close(running_sum(probs, order), probs.cumsum(-1), rtol=1e-4, atol=1e-6)


# --- what is made of them ----------------------------------------------------------------------------------


def check_rows(name: str, vocabulary: int) -> None:
    """Compare the distributions, scores and confidence of rows with those of each row alone."""
    logits = logits_of(4, 5, vocabulary).to(CUDA)
    params = SamplingParams(**PARAMS[name])
    one, all_ = (SamplingTable.of([params] * rows, CUDA) for rows in (1, 4))
    with cuda_orders():
        together = distribution_of(logits, all_)[0]
        tokens = logits.argmax(-1)
        scores = score(logits, together, tokens, 3)
        sure = {by: target_confidence(logits[:, 0], tokens[:, 0], by) for by in ("probability", "entropy")}
        for row, column in ((0, 0), (1, 3), (2, 1), (3, 4), (3, 0)):
            own = logits[row : row + 1, column : column + 1].clone()
            alone = distribution_of(own, one)[0]
            at = tokens[row : row + 1, column : column + 1]
            assert_equal(alone.dense(vocabulary)[0, 0], together.dense(vocabulary)[row, column])
            assert_equal(score(own, alone, at, 3)[0, 0], scores[row, column])
            if column == 0:
                for by, values in sure.items():
                    assert_equal(target_confidence(own[:, 0], at[:, 0], by)[0], values[row])


def assert_equal(one: Tensor, other: Tensor) -> None:
    assert torch.equal(one.cpu(), other.cpu())


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("name", PARAMS)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(name: str, vocabulary: int) -> None:
    check_rows(name, vocabulary)


def test_sums_are_as_near_as_those_of_float32() -> None:
    probs = logits_of(2, 3, 50_257).softmax(-1)
    exact = probs.double().cumsum(-1)
    for found, want in (
        (vocab_ops.running(probs.to(CUDA)), exact),
        (vocab_ops.total(probs.to(CUDA)), exact[..., -1:]),
        (vocab_ops.sums(probs.to(CUDA)), exact[..., -1]),
    ):
        torch.testing.assert_close(found.cpu().double(), want, rtol=1e-6, atol=1e-7)
    entropies = (probs * -probs.log()).to(CUDA)
    assert float(vocab_ops.total(-entropies).max()) == pytest.approx(
        -float(entropies.cpu().double().sum(-1).min()), rel=1e-6
    )


def check_sums() -> None:
    for vocabulary in VOCABULARIES:
        logits = logits_of(4, 5, vocabulary).to(CUDA)
        with cuda_orders():
            probs = vocab_ops.softmax(logits)
            for of, sums in (
                (logits, (vocab_ops.softmax, vocab_ops.log_softmax)),
                (probs, (vocab_ops.running, vocab_ops.total, vocab_ops.sums)),
            ):
                for sum_ in sums:
                    together = sum_(of)
                    for row in range(4):
                        for column in range(5):
                            alone = sum_(of[row : row + 1, column : column + 1].clone())
                            assert_equal(alone[0, 0], together[row, column])


DEFECTS: dict[str, tuple[Function, Any]] = {
    "unpadded softmax": (vocab_ops._padded, lambda sound: lambda x: None),
    "float running sum": (vocab_ops.running, lambda sound: lambda x: x.cumsum(-1)),
    "float total": (vocab_ops.total, lambda sound: lambda x: x.cumsum(-1)[..., -1:]),
    "float sum": (vocab_ops.total, lambda sound: lambda x: x.sum(-1, keepdim=True)),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_an_order_that_follows_the_batch_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_sums()
    assert_caught(defect(name, *DEFECTS[name], check_sums), monkeypatch)


def check_pieces() -> None:
    weights = logits_of(8, 9, 97).softmax(-1)
    keys = torch.randint(-(2**62), 2**62, (8, 9), generator=torch.Generator().manual_seed(1))
    whole = TORCH_VOCAB_OPS.gumbel_argmax(weights, keys)
    assert_equal(TORCH_VOCAB_OPS.gumbel_argmax(weights.to(CUDA), keys.to(CUDA)), whole)


def test_a_gpu_draws_in_pieces_what_a_cpu_draws_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2 * vocab_ops.PIECE < 8 * 9
    check_pieces()

    def first(race: Callable[..., Tensor]) -> Callable[..., Tensor]:
        keys: list[Tensor] = []

        def mutated(ops: Any, weights: Tensor, given: Tensor) -> Tensor:
            if given.is_cuda:
                keys.append(given)
                given = keys[0][: len(given)]
            return race(ops, weights, given)

        return mutated

    assert_caught(defect("the keys of the first piece", vocab_ops._race, first, check_pieces), monkeypatch)
