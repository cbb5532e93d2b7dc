"""Tree attention of the C kernels: a leaf's row has the bits of plain decoding, and no other column sees a leaf."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import kernels
from foredraft.model.runner import Resume, Runner
from tests.support.caches import held
from tests.support.compiling import Defects
from tests.unit.test_kernels_passes import decoders

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")

FAMILIES = ("llama", "mistral", "gemma2", "gemma4", "phi3", "gpt_neox", "opt-sums-normed")
DTYPES = (torch.float32, torch.bfloat16)
WIDTH = 6  # columns of a chain
# where the first column of each row lies: around an aligned run, a block of keys, a step of the softmax, and a window of 24
STARTS = (1, 14, 29, 125)


TEXT = torch.randint(3, 97, (4, 140), generator=torch.Generator().manual_seed(0))
OTHERS = torch.randint(3, 97, (4, WIDTH), generator=torch.Generator().manual_seed(0))


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


def trees(runner: Runner, **more: Any) -> tuple[Any, Tensor, Tensor]:
    """Run one pass of token trees; return the cache, the logits and the auxiliary states."""
    cache = prefilled(runner)
    tokens = torch.cat([chains(), SECOND], 1)
    out = runner.forward(cache, tokens, list(STARTS), counts=COUNTS, leaves=LEAVES, aux_layers=(1,), **more)
    assert out.logits is not None
    return cache, out.logits, out.aux_states[1]


def written(row: int, column: int) -> Tensor:
    """The text up to the leaf in `column`, [1, T]."""
    before = TEXT[row, : STARTS[row] + LEAVES[row][column]]
    return torch.cat([before, SECOND[row, column - WIDTH : column - WIDTH + 1]])[None]


def decoded(runner: Runner, tokens: Tensor) -> tuple[Any, Tensor, Tensor]:
    """Return the cache of plain decoding, and the logits and the auxiliary states after the last token."""
    cache, split = runner.new_cache(1, 192), max(0, tokens.shape[1] - 12)
    for start in range(0, split, 64):
        runner.forward(cache, tokens[:, start : min(start + 64, split)], [start])
    for at in range(split, tokens.shape[1]):
        forward = runner.forward(cache, tokens[:, at : at + 1], [at], aux_layers=(1,))
    assert forward.logits is not None
    return cache, forward.logits[0, 0], forward.aux_states[1][0, 0]


def differing(runner: Runner, **more: Any) -> list[str]:
    found = []
    cache, logits, states = trees(runner, **more)
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
    assert not differing(Runner(decoders(family, dtype)[0]))


def test_a_resumed_pass_computes_its_leaves() -> None:
    """The chain's states are known, so that only the leaves go through the first layer."""
    runner = Runner(decoders("llama", torch.float32)[0])
    cache, (_, whole, _) = prefilled(runner), trees(runner)
    tokens, starts = torch.cat([chains(), SECOND], 1), list(STARTS)
    for known in ([WIDTH, WIDTH - 2, WIDTH, WIDTH], [3, 0, 6, 1]):
        states = runner.forward(cache, chains(), starts, aux_layers=(1,)).aux_states[1]
        resume = Resume(1, states, known).fit(tokens.shape[1])
        resumed = runner.forward(cache, tokens, starts, counts=COUNTS, leaves=LEAVES, resume=resume).logits

        assert resumed is not None
        for row, (count, leaves) in enumerate(zip(COUNTS, LEAVES, strict=True)):
            asked = [*range(count), *leaves]
            assert torch.equal(resumed[row, asked], whole[row, asked])


DEFECTS = {
    "a leaf's key lies where the chain's does": ("p->slot ? p->slot[group] - p->start[group] : 0", "0"),
    "a leaf has the position of its column": (
        "const E *keys = (const E *)p->rotary[l->rope] + position * 2",
        "const E *keys = (const E *)p->rotary[l->rope] + (position + behind(p, run->group)) * 2",
    ),
    "a leaf reads the chain's key": (
        "scores[r * KEYS + count - 1] = own[r * KEYS + slot % BLOCK]",
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


PLANTED = Defects(DEFECTS.values())


@pytest.mark.heavy
@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = "llama" if "early" in name else "mistral"
    check = partial(test_leaves_have_the_bits_of_plain_decoding, family, torch.float32)
    PLANTED.assert_caught(check, DEFECTS[name], monkeypatch)


def test_operators_refuse_leaves() -> None:
    runner = Runner(decoders("llama", torch.float32)[1])
    assert not runner.takes_leaves
    with pytest.raises(ValueError, match="no leaves"):
        trees(runner)
