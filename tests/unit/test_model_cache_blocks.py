"""A cache with keys in blocks reads, writes, copies and wipes positions as a plain cache does."""

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
from foredraft.model.spec import ModelSpec
from tests.support.caches import dense
from tests.support.planting import Mutant, Spoiler, assert_caught, defect

Function = Callable[..., Any]
Place = Callable[[int, int], tuple[int, int]]  # (start, stop) -> other positions
DTYPES = (torch.float32, torch.bfloat16)
LAYERS, ROWS, HEADS, DIM = 2, 3, 2, 6
SPEC = ModelSpec.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 9,
        "hidden_size": HEADS * DIM,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": 8,
        "max_position_embeddings": 64,
    }
)
EDGES = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 700, 1023, 1024)


def pair(dtype: torch.dtype) -> tuple[KVCache, KVCache]:
    """Return a plain and a blocked cache that hold the same values everywhere."""
    plain, blocked = (
        KVCache(SPEC, ROWS, 500, device=torch.device("cpu"), dtype=dtype, blocked=blocked)
        for blocked in (False, True)
    )
    plain.memory.copy_(torch.randn(plain.memory.shape, generator=torch.Generator().manual_seed(0)))
    for layer, row in itertools.product(range(LAYERS), range(ROWS)):
        blocked.write(layer, row, 0, *plain.data[layer, :, row])
    return plain, blocked


def check_layout() -> None:
    for dtype in DTYPES:
        plain, blocked = pair(dtype)
        words = plain.data[:, 0].contiguous().view(torch.int32)  # [layers, R, H, P, W]
        keys = blocked.memory[:, 0].view(torch.int32).view(LAYERS, ROWS, HEADS, -1, words.shape[-1], BLOCK)
        for position in range(plain.stored):
            block, lane = divmod(position, BLOCK)
            assert torch.equal(keys[:, :, :, block, :, lane], words[:, :, :, position])
        assert torch.equal(blocked.memory[:, 1], plain.data[:, 1])


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
        for cache in (plain, blocked):
            cache.copy_row(0, 2, length)
        assert blocked.lengths == plain.lengths == [0, 0, length]
        assert torch.equal(dense(blocked), plain.data), length


def check_spans() -> None:
    """`put_back` restores exactly the positions of the span, and no others."""
    for dtype, (start, stop) in itertools.product(DTYPES, itertools.combinations(EDGES, 2)):
        plain, blocked = pair(dtype)
        before = plain.data.clone()
        spans = [cache.take(1, start, stop) for cache in (plain, blocked)]
        for cache, span in zip((plain, blocked), spans, strict=True):
            assert span.bytes == KVCache.bytes_of(SPEC, stop - start, dtype)
            cache.memory.zero_()
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
def test_a_blocked_cache_holds_what_a_plain_cache_holds(check: object) -> None:
    assert callable(check)
    check()


def test_a_blocked_cache_has_no_view_in_order_of_positions() -> None:
    _, blocked = pair(torch.float32)
    with pytest.raises(AssertionError):
        _ = blocked.data


def to_the_next_lane(write: Function) -> Function:
    """Move the keys of whole blocks by a lane."""

    def spoilt(cache: KVCache, layer: int, row: int, start: int, keys: Tensor, values: Tensor) -> None:
        if cache.blocked:
            keys = keys.unflatten(1, (-1, BLOCK)).roll(1, 2).flatten(1, 2)
        write(cache, layer, row, start, keys, values)

    return spoilt


def whole_blocks_read(read: Function) -> Function:
    def spoilt(cache: KVCache, *rest: Any) -> tuple[Tensor, Tensor]:
        keys, values = read(cache, *rest)
        return keys[:, :, : down(keys.shape[2])] if cache.blocked else keys, values

    return spoilt


def up(position: int) -> int:
    """Return the first boundary between blocks from a position on."""
    return math.ceil(position / BLOCK) * BLOCK


def down(position: int) -> int:
    """Return the last boundary between blocks up to a position."""
    return position // BLOCK * BLOCK


def viewed(keys: Place = lambda *span: span, values: Place = lambda *span: span) -> Spoiler:
    """View the keys and the values of a blocked cache at other positions."""

    def spoiler(views: Function) -> Function:
        def spoilt(cache: KVCache, row: int, start: int, stop: int) -> list[Tensor]:
            if not cache.blocked:
                plain: list[Tensor] = views(cache, row, start, stop)
                return plain
            _, *parts = views(cache, row, *keys(start, stop))
            return [views(cache, row, *values(start, stop))[0], *parts]

        return spoilt

    return spoiler


def within_a_block(start: int, stop: int) -> bool:
    return up(start) > down(stop)


def first_whole_block_skipped(views: Function) -> Function:
    def spoilt(cache: KVCache, *span: int) -> list[Tensor]:
        values, keys, *partial = views(cache, *span)
        return [values, keys[:, :, 1:] if cache.blocked else keys, *partial]

    return spoilt


def viewed_by_a_span(take: Function) -> Function:
    def spoilt(cache: KVCache, *place: int) -> Span:
        return replace(take(cache, *place), parts=tuple(cache._views(*place)))

    return spoilt


VIEWS = KVCache._views
FIRST_BLOCK_WHOLE = viewed(
    keys=lambda start, stop: (start if within_a_block(start, stop) else down(start), stop)
)
WITHOUT_FIRST_BLOCK = viewed(
    keys=lambda start, stop: (start if within_a_block(start, stop) else up(start), stop)
)
MUTANTS = [
    defect("a key is written to the next lane", KVCache.write, to_the_next_lane, check_layout),
    defect(
        "reading leaves out the last partial block",
        KVCache.read,
        whole_blocks_read,
        check_reading_and_writing,
    ),
    defect(
        "a copy leaves out the last partial block",
        VIEWS,
        viewed(keys=lambda start, stop: (start, down(stop))),
        check_copies,
    ),
    defect(
        "a copy takes the last partial block whole",
        VIEWS,
        viewed(keys=lambda start, stop: (start, up(stop))),
        check_copies,
    ),
    defect(
        "a copy leaves out the whole blocks",
        VIEWS,
        viewed(keys=lambda start, stop: (max(start, down(stop)), stop)),
        check_copies,
    ),
    defect("a span leaves out the first partial block", VIEWS, WITHOUT_FIRST_BLOCK, check_spans),
    defect("a span takes the first partial block whole", VIEWS, FIRST_BLOCK_WHOLE, check_spans),
    defect(
        "a span begins one position late",
        VIEWS,
        viewed(values=lambda start, stop: (start + 1, stop)),
        check_spans,
    ),
    defect(
        "a span within a block takes the rest of the block",
        VIEWS,
        viewed(keys=lambda start, stop: (start, up(stop) if within_a_block(start, stop) else stop)),
        check_spans,
    ),
    defect("a span is a view, not a copy", KVCache.take, viewed_by_a_span, check_spans),
    defect("wiping takes the first partial block whole", VIEWS, FIRST_BLOCK_WHOLE, check_wipes),
    defect("wiping leaves out the first partial block", VIEWS, WITHOUT_FIRST_BLOCK, check_wipes),
    defect("wiping skips the first whole block", VIEWS, first_whole_block_skipped, check_wipes),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
