"""The KV cache: its layout in blocks, row copies, and which positions a forward writes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.model.cache import BLOCK, KVCache, Span
from foredraft.model.runner import Runner
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import load_decoder
from tests.support.caches import dense
from tests.support.checkpoints import LLAMA, save_variant
from tests.support.mutation import Mutant, Mutation, assert_caught, defect
from tests.support.mutations import around

Function = Callable[..., Any]
Place = Callable[[int, int], tuple[int, int]]  # (start, stop) -> other positions
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYERS, ROWS, HEADS, DIM = 2, 3, 2, 6
HEAD_SIZES = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": DIM}
SPEC = ModelSpec.from_hf({**LLAMA, **HEAD_SIZES, "num_hidden_layers": LAYERS, "model_type": "llama"})
EDGES = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 700, 1023, 1024)


def pair(dtype: torch.dtype) -> tuple[KVCache, KVCache]:
    """Return a plain and a blocked cache that hold the same values everywhere."""
    plain, blocked = (
        KVCache(SPEC, ROWS, 500, device=torch.device("cpu"), dtype=dtype, blocked=blocked)
        for blocked in (False, True)
    )
    plain.data.copy_(torch.randn(plain.data.shape, generator=torch.Generator().manual_seed(0)))
    for layer, row in itertools.product(range(LAYERS), range(ROWS)):
        blocked.write(layer, row, 0, *plain.data[layer, :, row])
    return plain, blocked


def check_layout() -> None:
    for dtype in DTYPES:
        plain, blocked = pair(dtype)
        word = torch.int16 if dtype == torch.float16 else torch.int32
        words = plain.data[:, 0].contiguous().view(word)  # [layers, R, H, P, W]
        keys = blocked.data[:, 0].view(word).view(LAYERS, ROWS, HEADS, -1, words.shape[-1], BLOCK)
        for position in range(plain.stored):
            block, lane = divmod(position, BLOCK)
            assert torch.equal(keys[:, :, :, block, :, lane], words[:, :, :, position])
        assert torch.equal(blocked.data[:, 1], plain.data[:, 1])


def check_reading_and_writing() -> None:
    for dtype in DTYPES:
        plain, blocked = pair(dtype)
        assert torch.equal(dense(blocked), plain.data)
        for length in EDGES[1:]:
            for got, want in zip(blocked.read(1, 1, 2, length), plain.read(1, 1, 2, length), strict=True):
                assert torch.equal(got, want)
        for start, stop in itertools.combinations(EDGES, 2):
            values = torch.randn(2, HEADS, stop - start, DIM).to(dtype)
            for cache in (plain, blocked):
                cache.write(1, 2, start, *values)
            assert torch.equal(dense(blocked), plain.data), (start, stop)


def check_copies() -> None:
    for dtype, length in itertools.product(DTYPES, EDGES):
        plain, blocked = pair(dtype)
        before = plain.data.clone()
        for cache in (plain, blocked):
            cache.copy_row(0, 2, length)
        assert blocked.lengths == plain.lengths == [0, 0, length]
        assert torch.equal(dense(blocked), plain.data), length
        before[:, :, 2, :, :length] = before[:, :, 0, :, :length]
        assert torch.equal(plain.data, before), length


def check_spans() -> None:
    """`put_back` restores exactly the positions of the span, and no others."""
    for dtype, (start, stop) in itertools.product(DTYPES, itertools.combinations(EDGES, 2)):
        plain, blocked = pair(dtype)
        before = plain.data.clone()
        spans = [cache.take(1, start, stop) for cache in (plain, blocked)]
        for cache, span in zip((plain, blocked), spans, strict=True):
            assert span.bytes == KVCache.bytes_of(SPEC, stop - start, dtype)
            cache.data.zero_()
            cache.put_back(span)
        within = slice(start, stop)
        assert torch.equal(plain.data[:, :, 1, :, within], before[:, :, 1, :, within])
        plain.data[:, :, 1, :, within] = 0
        assert not plain.data.any()
        restored = dense(blocked)
        assert torch.equal(restored[:, :, 1, :, within], before[:, :, 1, :, within]), (start, stop)
        restored[:, :, 1, :, within] = 0
        assert not restored.any(), (start, stop)


def check_wipes() -> None:
    for dtype, length in itertools.product(DTYPES, EDGES):
        plain, blocked = pair(dtype)
        for cache in (plain, blocked):
            cache.wipe(1, length)
        assert not dense(blocked)[:, :, 1, :, length:].any()
        assert torch.equal(dense(blocked), plain.data), length


CHECKS = [check_layout, check_reading_and_writing, check_copies, check_spans, check_wipes]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_a_blocked_cache_holds_what_a_plain_cache_holds(check: Callable[[], None]) -> None:
    check()
    with pytest.raises(AssertionError):
        pair(torch.float32)[1].layer(0)  # it has no view in the order of positions


@around
def to_the_next_lane(
    write: Function, cache: KVCache, layer: int, row: int, start: int, keys: Tensor, values: Tensor
) -> None:
    if cache.blocked:
        keys = keys.unflatten(1, (-1, BLOCK)).roll(1, 2).flatten(1, 2)
    write(cache, layer, row, start, keys, values)


@around
def whole_blocks_read(read: Function, cache: KVCache, *rest: Any) -> tuple[Tensor, Tensor]:
    keys, values = read(cache, *rest)
    return keys[:, :, : down(keys.shape[2])] if cache.blocked else keys, values


def up(position: int) -> int:
    return math.ceil(position / BLOCK) * BLOCK


def down(position: int) -> int:
    return position // BLOCK * BLOCK


def viewed(keys: Place = lambda *span: span, values: Place = lambda *span: span) -> Mutation:
    """View the keys and the values of a blocked cache at other positions."""

    @around
    def mutation(views: Function, cache: KVCache, row: int, start: int, stop: int) -> list[Tensor]:
        if not cache.blocked:
            plain: list[Tensor] = views(cache, row, start, stop)
            return plain
        _, *parts = views(cache, row, *keys(start, stop))
        return [views(cache, row, *values(start, stop))[0], *parts]

    return mutation


def within_a_block(start: int, stop: int) -> bool:
    return up(start) > down(stop)


@around
def first_whole_block_skipped(views: Function, cache: KVCache, *span: int) -> list[Tensor]:
    values, keys, *partial = views(cache, *span)
    return [values, keys[:, :, 1:] if cache.blocked else keys, *partial]


@around
def viewed_by_a_span(take: Function, cache: KVCache, *place: int) -> Span:
    return replace(take(cache, *place), parts=tuple(cache._views(*place)))


def first(start: int, stop: int, border: int) -> tuple[int, int]:
    """Return a span that begins at a border, unless it lies within a block."""
    return start if within_a_block(start, stop) else border, stop


VIEWS, WRITE, READ, TAKE = KVCache._views, KVCache.write, KVCache.read, KVCache.take
FIRST_WHOLE = viewed(keys=lambda start, stop: first(start, stop, down(start)))
NO_FIRST = viewed(keys=lambda start, stop: first(start, stop, up(start)))
NO_LAST = viewed(keys=lambda start, stop: (start, down(stop)))
LAST_WHOLE = viewed(keys=lambda start, stop: (start, up(stop)))
NO_WHOLE = viewed(keys=lambda start, stop: (max(start, down(stop)), stop))
LATE = viewed(values=lambda start, stop: (start + 1, stop))
REST = viewed(keys=lambda start, stop: (start, up(stop) if within_a_block(start, stop) else stop))
MUTANTS = [
    defect("a key is written to the next lane", WRITE, to_the_next_lane, check_layout),
    defect("reading leaves out the last part of a block", READ, whole_blocks_read, check_reading_and_writing),
    defect("a copy leaves out the last partial block", VIEWS, NO_LAST, check_copies),
    defect("a copy takes the last partial block whole", VIEWS, LAST_WHOLE, check_copies),
    defect("a copy leaves out the whole blocks", VIEWS, NO_WHOLE, check_copies),
    defect("a span leaves out the first partial block", VIEWS, NO_FIRST, check_spans),
    defect("a span takes the first partial block whole", VIEWS, FIRST_WHOLE, check_spans),
    defect("a span begins one position late", VIEWS, LATE, check_spans),
    defect("a span within a block takes the rest of the block", VIEWS, REST, check_spans),
    defect("a span is a view, not a copy", TAKE, viewed_by_a_span, check_spans),
    defect("wiping takes the first partial block whole", VIEWS, FIRST_WHOLE, check_wipes),
    defect("wiping leaves out the first partial block", VIEWS, NO_FIRST, check_wipes),
    defect("wiping skips the first whole block", VIEWS, first_whole_block_skipped, check_wipes),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)


# --- which positions a forward writes ------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama-gqa-tied", "gemma2", "gemma3"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(load_decoder(save_variant(tmp_path_factory.mktemp("model"), request.param)))


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(1))


def test_a_new_cache_is_zeroed_and_has_slack(runner: Runner) -> None:
    cache = runner.new_cache(3, 700)
    assert (cache.rows, cache.positions, cache.lengths) == (3, 700, [0, 0, 0])
    assert cache.scratch == 700 + cache.slack
    assert cache.stored >= cache.scratch + cache.slack and cache.stored % 1024 == 0
    assert not cache.data.any()
    one = KVCache.bytes_per_row(runner.decoder.spec, 700, torch.float32)
    assert one * 3 == cache.data.numel() * 4


def test_a_forward_writes_only_its_own_rows_and_positions(runner: Runner) -> None:
    cache = runner.new_cache(4, 100)
    cache.data.normal_()
    before = cache.data.clone()
    runner.forward(cache, tokens(2, 3), [10, 20], first_row=1)
    assert cache.lengths == [0] * 4
    assert torch.equal(cache.data[:, :, [0, 3]], before[:, :, [0, 3]])
    assert torch.equal(cache.data[:, :, 1, :, :10], before[:, :, 1, :, :10])
    assert torch.equal(cache.data[:, :, 2, :, :20], before[:, :, 2, :, :20])
    assert not torch.equal(cache.data[:, :, 1, :, 10:13], before[:, :, 1, :, 10:13])
    widest = runner.shapes.queries(3, 2)
    assert torch.equal(cache.data[:, :, 1, :, 10 + widest :], before[:, :, 1, :, 10 + widest :])
