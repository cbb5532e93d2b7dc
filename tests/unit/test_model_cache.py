"""The KV cache: layout, rollback, row copies, and which positions a forward writes."""

from __future__ import annotations

import pytest
import torch

from foredraft.model.cache import KVCache
from foredraft.model.runner import Runner
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import save_variant


@pytest.fixture(scope="module", params=["llama-gqa-tied", "gemma2", "gemma3"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(load_decoder(save_variant(tmp_path_factory.mktemp("model"), request.param)))


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(seed))


def test_a_new_cache_is_zeroed_and_has_slack(runner: Runner) -> None:
    cache = runner.new_cache(3, 700)
    assert (cache.rows, cache.positions, cache.lengths) == (3, 700, [0, 0, 0])
    assert cache.scratch == 700 + cache.slack
    assert cache.stored >= cache.scratch + cache.slack
    assert cache.stored % 1024 == 0
    assert not cache.data.any()
    one = KVCache.bytes_per_row(runner.decoder.spec, 700, torch.float32)
    assert one * 3 == cache.data.numel() * 4


def test_a_forward_does_not_change_lengths(runner: Runner) -> None:
    cache = runner.new_cache(2, 100)
    cache.lengths[1] = 5
    runner.forward(cache, tokens(2, 4), [0, 5])
    assert cache.lengths == [0, 5]


def test_a_forward_writes_only_its_own_rows_and_positions(runner: Runner) -> None:
    cache = runner.new_cache(4, 100)
    cache.data.normal_()
    before = cache.data.clone()
    runner.forward(cache, tokens(2, 3), [10, 20], first_row=1)
    assert torch.equal(cache.data[:, :, [0, 3]], before[:, :, [0, 3]])
    assert torch.equal(cache.data[:, :, 1, :, :10], before[:, :, 1, :, :10])
    assert torch.equal(cache.data[:, :, 2, :, :20], before[:, :, 2, :, :20])
    assert not torch.equal(cache.data[:, :, 1, :, 10:13], before[:, :, 1, :, 10:13])
    widest = runner.shapes.queries(3, 2)
    assert torch.equal(cache.data[:, :, 1, :, 10 + widest :], before[:, :, 1, :, 10 + widest :])


def test_a_single_row_and_a_batch_write_the_same_values(runner: Runner) -> None:
    """A single row is written through a slice, a batch through flat indices."""
    ids = tokens(3, 4)
    together, apart = runner.new_cache(3, 100), runner.new_cache(3, 100)
    runner.forward(together, ids, [0, 7, 30])
    for row, start in enumerate([0, 7, 30]):
        runner.forward(apart, ids[row : row + 1], [start], first_row=row)
        assert torch.equal(
            together.data[:, :, row, :, start : start + 4], apart.data[:, :, row, :, start : start + 4]
        )


def test_a_copied_row_gives_the_logits_of_its_source(runner: Runner) -> None:
    cache = runner.new_cache(3, 100)
    cache.data.normal_()
    ids = tokens(1, 30)
    runner.prefill(cache, 0, ids[0, :20].tolist(), 0)
    cache.copy_row(0, 2, 20)
    assert cache.lengths == [0, 0, 20]
    one = runner.forward(cache, ids[:, 20:24], [20], first_row=0).logits
    two = runner.forward(cache, ids[:, 20:24], [20], first_row=2).logits
    assert one is not None
    assert two is not None
    assert torch.equal(one, two)


def test_a_row_copy_ends_at_its_length(runner: Runner) -> None:
    cache = runner.new_cache(2, 100)
    cache.data.normal_()
    before = cache.data.clone()
    cache.copy_row(0, 1, 9)
    assert torch.equal(cache.data[:, :, 1, :, :9], before[:, :, 0, :, :9])
    assert torch.equal(cache.data[:, :, 1, :, 9:], before[:, :, 1, :, 9:])


def test_a_zeroed_row_holds_no_nan(runner: Runner) -> None:
    cache = runner.new_cache(2, 100)
    cache.data[:, :, 1] = float("nan")
    cache.lengths[1] = 50
    cache.zero_row(1)
    assert cache.lengths == [0, 0]
    got = runner.forward(cache, tokens(1, 4), [0], first_row=1).logits
    assert got is not None
    assert got.isfinite().all()


@pytest.mark.parametrize("back", [1, 3, 6])
def test_rollback_by_length_equals_never_having_drafted(runner: Runner, back: int) -> None:
    """The positions of rejected tokens are overwritten before any pass reads them."""
    ids, other = tokens(1, 60), tokens(1, 60, seed=2)
    dirty, clean = runner.new_cache(1, 100), runner.new_cache(1, 100)
    for cache in (dirty, clean):
        runner.prefill(cache, 0, ids[0, :50].tolist(), 0)
    runner.forward(dirty, ids[:, 50:57], [50])  # the draft; its last `back` columns are rejected
    runner.forward(clean, ids[:, 50 : 57 - back], [50])
    keep = 57 - back
    first = runner.forward(dirty, other[:, :4], [keep]).logits
    second = runner.forward(clean, other[:, :4], [keep]).logits
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)
    assert torch.equal(dirty.data[:, :, 0, :, : keep + 4], clean.data[:, :, 0, :, : keep + 4])
