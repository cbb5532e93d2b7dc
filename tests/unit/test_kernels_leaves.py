"""Leaves of a pass by the C kernels: a leaf's row has the bits of plain decoding, and no other column sees a leaf."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import kernels
from foredraft.model.decoder import Decoder
from foredraft.model.runner import Resume, Runner
from foredraft.model.weights import load_decoder
from tests.support.caches import held
from tests.support.checkpoints import save_variant
from tests.support.compiling import plant

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")

FAMILIES = ("llama", "mistral", "gemma2", "gemma4", "phi3", "gpt_neox", "opt-sums-normed")
DTYPES = (torch.float32, torch.bfloat16)
WIDTH = 6  # columns of a chain
# where the first column of each row lies: around an aligned run, a block of keys, a step of the softmax, and a window of 24
STARTS = (1, 14, 29, 125)


@functools.cache
def decoder(family: str, dtype: torch.dtype) -> Decoder:
    more: dict[str, Any] = {"sliding_window": 24} if family in ("mistral", "gemma2") else {}
    with tempfile.TemporaryDirectory() as temporary:
        return load_decoder(save_variant(Path(temporary), family, **more), dtype=dtype, native=True)


def dice() -> torch.Generator:
    return torch.Generator().manual_seed(0)


TEXT = torch.randint(3, 97, (4, 140), generator=dice())
OTHERS = torch.randint(3, 97, (4, WIDTH), generator=dice())


def prefilled(runner: Runner) -> Any:
    """Return a cache whose rows hold the beginnings of the texts, and garbage behind them."""
    cache = runner.new_cache(4, 192)
    for row in range(4):
        runner.forward(cache, TEXT[row : row + 1, :64], [0], first_row=row)
        runner.forward(cache, TEXT[row : row + 1, 64:126], [64], first_row=row)
        runner.forward(cache, OTHERS[row : row + 1], [STARTS[row]], first_row=row)
    return cache


def chains() -> Tensor:
    return torch.stack([text[start : start + WIDTH] for text, start in zip(TEXT, STARTS, strict=True)])


# of each row: column -> the column whose place it shares; two in one place, one behind the chain, one in a second step
LEAVES = [{6: 1, 7: 2, 8: 1, 9: 5}, {}, {6: 3, 7: 6}, {6: 1, 7: 4}]
COUNTS = [WIDTH, WIDTH - 2, WIDTH, WIDTH]
SECOND = torch.randint(3, 97, (4, 4), generator=torch.Generator().manual_seed(7))  # the tokens of the leaves


def combs(runner: Runner, **more: Any) -> tuple[Any, Tensor, Tensor]:
    """Run one pass of chains and leaves; return the cache, the logits and the tapped states."""
    cache = prefilled(runner)
    tokens = torch.cat([chains(), SECOND], 1)
    forward = runner.forward(cache, tokens, list(STARTS), counts=COUNTS, leaves=LEAVES, taps=(1,), **more)
    assert forward.logits is not None
    return cache, forward.logits, forward.taps[1]


def written(row: int, column: int) -> Tensor:
    """The text up to the leaf in `column`, [1, T]."""
    place = LEAVES[row][column]
    return torch.cat([TEXT[row, : STARTS[row] + place], SECOND[row, column - WIDTH : column - WIDTH + 1]])[
        None
    ]


def decoded(runner: Runner, tokens: Tensor) -> tuple[Any, Tensor, Tensor]:
    """Return the cache of plain decoding, and the logits and the tapped states after the last token."""
    cache, split = runner.new_cache(1, 192), max(0, tokens.shape[1] - 12)
    for start in range(0, split, 64):
        runner.forward(cache, tokens[:, start : min(start + 64, split)], [start])
    for at in range(split, tokens.shape[1]):
        forward = runner.forward(cache, tokens[:, at : at + 1], [at], taps=(1,))
    assert forward.logits is not None
    return cache, forward.logits[0, 0], forward.taps[1][0, 0]


def differing(runner: Runner, **more: Any) -> list[str]:
    """Return what differs from passes without leaves and from plain decoding."""
    found = []
    cache, logits, states = combs(runner, **more)
    alone = prefilled(runner)
    want = runner.forward(alone, chains(), list(STARTS), counts=COUNTS).logits
    assert want is not None
    for row, count in enumerate(COUNTS):
        length = STARTS[row] + count
        if not torch.equal(logits[row, :count], want[row, :count]):
            found.append(f"the chain of row {row}")
        if not torch.equal(held(cache, row, length), held(alone, row, length)):
            found.append(f"the cache of the chain of row {row}")
    for row, leaves in enumerate(LEAVES):
        for column, place in leaves.items():
            plain, after, entering = decoded(runner, written(row, column))
            if not torch.equal(logits[row, column], after):
                found.append(f"leaf {column} of row {row}")
            if not torch.equal(states[row, column], entering):
                found.append(f"states of leaf {column} of row {row}")
            position = STARTS[row] + place
            mark = cache.take(row, position, position + 1)
            cache.move(row, STARTS[row] + column, position)
            if not torch.equal(held(cache, row, position + 1), held(plain, 0, position + 1)):
                found.append(f"the moved keys and values of leaf {column} of row {row}")
            cache.put_back(mark)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_leaves_have_the_bits_of_plain_decoding(family: str, dtype: torch.dtype) -> None:
    assert not differing(Runner(decoder(family, dtype)))


def test_a_resumed_pass_computes_its_leaves() -> None:
    """The chain's states are known, so that only the leaves go through the first layer."""
    runner = Runner(decoder("llama", torch.float32))
    cache = prefilled(runner)
    tokens, starts = torch.cat([chains(), SECOND], 1), list(STARTS)
    for known in ([WIDTH, WIDTH - 2, WIDTH, WIDTH], [3, 0, 6, 1]):
        states = runner.forward(cache, chains(), starts, taps=(1,)).taps[1]
        resume = Resume(1, states, known).fit(tokens.shape[1])
        resumed = runner.forward(cache, tokens, starts, counts=COUNTS, leaves=LEAVES, resume=resume).logits
        _, whole, _ = combs(runner)
        assert resumed is not None
        for row, (count, leaves) in enumerate(zip(COUNTS, LEAVES, strict=True)):
            asked = [*range(count), *leaves]
            assert torch.equal(resumed[row, asked], whole[row, asked])


DEFECTS = {
    "a leaf's key lies where the chain's does": (
        "p->slot ? p->slot[group] - p->start[group] : 0",
        "0",
    ),
    "a leaf has the position of its column": (
        "const E *keys = (const E *)p->rotary[l->rope] + position * 2",
        "const E *keys = (const E *)p->rotary[l->rope] + (position + behind(p, run->group)) * 2",
    ),
    "a leaf reads the chain's key": (
        "scores[(from + r) * KEYS + count - 1] = own[r * KEYS + slot % BLOCK]",
        "own[0] = 0",
    ),
    "a leaf reads its key twice": (
        "if (leaf) NAME(score_leaf)(rows, q, words, count, scores);",
        "if (leaf) NAME(score_leaf)(rows, q, words, count - 1, scores);",
    ),
    "a leaf reads the chain's value": (
        "rows->values + (rows->last + rows->behind) * dim, 1",
        "rows->values + rows->last * dim, 1",
    ),
    "a leaf's key is read in a step too early": (
        "rows->behind && from + count > rows->last",
        "rows->behind && from == rows->from",
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_found(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sound = decoder("mistral" if "early" not in name else "llama", torch.float32)
    plant(monkeypatch, tmp_path, *DEFECTS[name])
    assert differing(Runner(sound))


def test_operators_refuse_leaves() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        runner = Runner(load_decoder(save_variant(Path(temporary), "llama"), native=False))
    assert not runner.takes_leaves
    with pytest.raises(ValueError, match="no leaves"):
        combs(runner)
