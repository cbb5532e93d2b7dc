"""What drafts would have met along a text: chains, siblings and trees counted by hand."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.tree_replay import MISSED, SIZES, Met, _followed, _kept, _met
from benchmarks.trees import block_chain, chosen_comb, comb, gains, lengths_along, line

CHOICES = [[5, 6, 7, 8], [1, 2, 3, 4], [9, 8, 7, 6]]
VALUES = [[0.5, 0.3, 0.1, 0.05], [0.6, 0.2, 0.15, 0.05], [0.4, 0.3, 0.2, 0.1]]


def test_a_chain_ends_at_the_first_wrong_token_and_its_sibling_may_be_right() -> None:
    met = _met(CHOICES, VALUES, [5, 3, 9])
    assert (met.hits, met.siblings) == (1, (0.0, 0.0, 1.0, 1.0))
    # the right sibling has 0.5 * 0.15; along a chain of two 0.3, 0.1 and 0.5 * 0.2 are likelier, of three also
    # 0.5 * 0.6 * 0.3
    assert met.order == (MISSED, MISSED, 3, 4)
    assert [comb(met, n, 2, n) for n in (1, 2, 3)] == [1, 2, 2]
    assert [comb(met, 3, m, 3) for m in range(4)] == [1, 1, 2, 2]
    assert comb(met, 3, 2, 1) == 1, "only the first place has siblings"
    assert [chosen_comb(met, 2, m) for m in (3, 4)] == [1, 2]
    assert _met(CHOICES, VALUES, [5, 1, 9]) == Met(3, (0.0,) * 4, (MISSED,) * 4)
    assert not any(_met(CHOICES, VALUES, [4, 1, 9]).siblings)


def test_a_tree_holds_the_likeliest_nodes() -> None:
    nodes = {(5,): 0.5, (6,): 0.3, (5, 1): 0.3, (5, 3): 0.075, (6, 2): 0.09, (6, 4): 0.08}
    pool = [(path, math.log(value)) for path, value in nodes.items()]
    assert _followed(pool, [5, 3], 2) == tuple(2 if size > 5 else 1 for size in SIZES)
    assert _followed(pool, [6, 2], 2) == tuple(2 if size > 3 else 1 for size in SIZES)
    assert set(_followed(pool, [8, 2], 2)) == {0}


def test_rounds_walk_along_a_text() -> None:
    hits = [2, 0, 0, 1, 9, 0]
    text = [Met(n, (0.0,) * 4) for n in hits]
    assert lengths_along([text], lambda met: min(met.hits, 2), walked=True) == (3 + 2 + 1) / 3
    assert lengths_along([text], lambda met: min(met.hits, 2), walked=False) == 1 + (2 + 1 + 2) / 6


def test_rows_cost_what_lies_on_the_line() -> None:
    costs = {1: 1.0, 3: 1.2, 5: 2.0}
    assert [line(costs, n) for n in (1, 2, 4, 7)] == pytest.approx([1.0, 1.1, 1.6, 2.8])
    texts = [[Met(0, (0.0, 1.0, 1.0, 1.0), (0,) * 9)] * 10]
    found = gains(texts, 0.1, 0.1, {1: 1.0, 64: 1.0}, walked=False)
    assert found["comb"]["tokens"] == 2
    assert found["comb"]["gain"] == pytest.approx(2)


def test_two_rules_keep_what_their_ratios_say() -> None:
    """p / q of the drafted tokens: 2, 1/2, 1/2."""
    p = torch.tensor([[0.8, 0.2], [0.3, 0.7], [0.25, 0.75], [0.5, 0.5]])
    q = torch.tensor([[0.4, 0.6], [0.6, 0.4], [0.5, 0.5]])
    found = _kept(torch.tensor([0, 0, 0]), p, q)
    assert found.speculative == pytest.approx((0, 1, 1.5, 1.75))
    assert found.block == pytest.approx((0, 1, 1.5, 1.75)), "the cap holds at each place"
    found = _kept(torch.tensor([0, 0]), p[[1, 0]], q[[1, 0]])  # 1/2, then 2
    assert found.speculative == pytest.approx((0, 0.5, 1.0))
    assert found.block == pytest.approx((0, 0.5, 1.5))
    kept = {"speculative": {1: 1.5, 2: 2.0}, "block": {1: 1.5, 2: 2.5}}
    assert block_chain(kept, 0.5, 0.5, {1: 1.0, 64: 1.0})["gain"] == pytest.approx(1.25)
