"""A cache with keys in blocks reads, writes, copies and wipes positions as a plain cache does."""

from __future__ import annotations

import itertools

import pytest
import torch

from foredraft.model.cache import BLOCK, KVCache
from foredraft.model.spec import ModelSpec
from tests.support.caches import dense
from tests.support.planting import Mutant, assert_caught

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


MUTANTS = [
    Mutant(
        "a key is written to the next lane",
        ((KVCache.write, "positions % BLOCK] = words", "(positions + 1) % BLOCK] = words"),),
        check_layout,
    ),
    Mutant(
        "a key is written to and read from the next lane",
        (
            (KVCache.write, "positions % BLOCK] = words", "(positions + 1) % BLOCK] = words"),
            (KVCache.read, ".flatten(4)", ".roll(-1, 3).flatten(4)"),
        ),
        check_layout,
    ),
    Mutant(
        "reading leaves out the last partial block",
        ((KVCache.read, "math.ceil(length / BLOCK)", "length // BLOCK"),),
        check_reading_and_writing,
    ),
    Mutant(
        "a copy leaves out the last partial block",
        ((KVCache._views, "views.append(keys[:, :, last, :, : stop % BLOCK])", "pass"),),
        check_copies,
    ),
    Mutant(
        "a copy takes the last partial block whole",
        ((KVCache._views, ": stop % BLOCK])", "])"),),
        check_copies,
    ),
    Mutant(
        "a copy leaves out the whole blocks",
        ((KVCache._views, "keys[:, :, first:last]", "keys[:, :, first:first]"),),
        check_copies,
    ),
    Mutant(
        "a span leaves out the first partial block",
        ((KVCache._views, "views.append(keys[:, :, first - 1, :, start % BLOCK :])", "pass"),),
        check_spans,
    ),
    Mutant(
        "a span takes the first partial block whole",
        (
            (
                KVCache._views,
                "views.append(keys[:, :, first - 1, :, start % BLOCK :])",
                "views.append(keys[:, :, first - 1])",
            ),
        ),
        check_spans,
    ),
    Mutant(
        "a span begins one position late",
        (
            (
                KVCache._views,
                "self._values[:, row, :, start:stop]",
                "self._values[:, row, :, start + 1 : stop]",
            ),
        ),
        check_spans,
    ),
    Mutant(
        "a span within a block takes the rest of the block",
        ((KVCache._views, "start % BLOCK : stop % BLOCK]", "start % BLOCK :]"),),
        check_spans,
    ),
    Mutant(
        "a span is a view, not a copy",
        ((KVCache.take, "part.clone()", "part"),),
        check_spans,
    ),
    Mutant(
        "wiping takes the first partial block whole",
        (
            (
                KVCache._views,
                "views.append(keys[:, :, first - 1, :, start % BLOCK :])",
                "views.append(keys[:, :, first - 1])",
            ),
        ),
        check_wipes,
    ),
    Mutant(
        "wiping leaves out the first partial block",
        ((KVCache._views, "views.append(keys[:, :, first - 1, :, start % BLOCK :])", "pass"),),
        check_wipes,
    ),
    Mutant(
        "wiping skips the first whole block",
        ((KVCache._views, "keys[:, :, first:last]", "keys[:, :, first + 1 : last]"),),
        check_wipes,
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
