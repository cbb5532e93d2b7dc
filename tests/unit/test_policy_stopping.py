"""Where drafts end by how sure their drafter is, on paper, and the ledger over several requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foredraft.decode.policy import CostTable
from foredraft.decode.policy.ledger import READING, SHARE, Account, Ledger
from foredraft.decode.policy.reliability import EDGES, Reliability
from foredraft.decode.policy.stopping import Ends, ends, stops_of
from foredraft.decode.policy.survival import Record, Track
from foredraft.decode.stats import Round
from foredraft.model.runner import StopThresholds

CPU = torch.device("cpu")
TABLE = CostTable({1: {1: 1.0, 11: 2.0}}, {"small": {1: (0.3, 0.2)}}, {"small": 0.01})


def test_the_curve_learns_bin_by_bin_what_the_target_looked_at() -> None:
    curve = Reliability(0.95)
    before = curve.chances()
    for _ in range(40):
        curve.learn((0.999, 0.5, 0.2), drafted=3, accepted=1)  # the third token nobody looked at
    after = curve.chances()
    assert after[-1] > 0.97
    assert after[3] < 0.1
    assert [i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]] == [
        3,
        len(EDGES),
    ]
    curve.learn((0.3, 0.7), drafted=1, accepted=1)  # a place left to the target
    assert curve.tried[5] == curve.tried[4] == 0
    assert curve.tried[2] == 1, "an edge is the beginning of the bin above it"


def test_a_request_begins_with_what_others_know() -> None:
    shared = Reliability(0.99)
    for _ in range(50):
        shared.learn((0.5,), 1, 0)
    own = Reliability(0.95, shared)
    assert own.chances() == shared.chances()
    for _ in range(10):
        own.learn((0.5,), 1, 1)
    assert own.chances()[3] > 0.6 > 0.1 > shared.chances()[3]


def record_of(*rounds: Round) -> Record:
    record = Record(4)
    for turn in rounds * 60:
        record.learn(turn, paced=True)
    return record


def test_thresholds_are_the_equations() -> None:
    """Where tokens are kept as often at every position, f is 1."""
    record = record_of(Round(4, 4, 5, (0.9,) * 4))
    rates, rate = record.track.rates(4), 1.7
    assert rates == pytest.approx([record.track.alpha] * 4, rel=0.02)
    found = ends(TABLE, "small", 1, 1, rate, record, 4)
    assert found.keep == pytest.approx([rate * 0.1] * 4, rel=0.07)
    assert found.more == pytest.approx([rate * (0.2 + 0.1) / rates[0]] * 3 + [0.0], rel=0.07)
    shared = ends(TABLE, "small", 1, 2, rate, record, 4)
    assert shared.more[0] == pytest.approx(rate * (0.1 + 0.1) / rates[0], rel=0.07), "two rows share a step"


def test_a_position_that_is_never_right_ends_the_draft_before_it() -> None:
    record = record_of(Round(2, 1, 2, (0.9, 0.9)))
    found = ends(TABLE, "small", 1, 1, 1.5, record, 4)
    assert found.more[0] > 1
    assert record.pace.mean() == pytest.approx((2, 2, 2))


def test_what_nobody_drafts_is_forgotten_slowly() -> None:
    track = Track(3, 0.9)
    for _ in range(40):
        track.learn(2, 1)
    for _ in range(8):
        track.learn(1, 1)
    assert track.rates(2)[1] < 0.3


def test_rows_that_do_not_draft_never_stop() -> None:
    bins = len(EDGES) + 1
    stops = stops_of([None, Ends([0.5] * bins, [0.3], [0.7])], 2, CPU)
    assert stops.keep.tolist() == [[0, 0], [pytest.approx(0.3), 0]]
    assert stops.more.tolist() == [[0, 0], [pytest.approx(0.7), 0]]
    ones = stops.survival(torch.tensor([0.4, 0.4]), torch.ones(2))
    assert ones.tolist() == [1.0, 0.5]
    assert stops.survival(torch.tensor([0.4, float("nan")]), ones).isnan().tolist() == [False, True]


def test_what_requests_gained_pays_for_reading_and_is_bounded() -> None:
    ledger, plain = Ledger(), 1.0
    first = Account()
    assert ledger.may_read(first, 3.9, 100.0, plain), "once on credit"
    assert not ledger.may_read(first, READING[0] + 0.1, 100.0, plain)
    assert not ledger.may_read(first, 3.9, 50.0, plain), "so much of a short request is too much"
    ledger.settle(TABLE, [(first, None, Round(0, 0, 1))], first=3.9)
    assert (first.read, first.lost) == (3.9, 0.0)
    assert not ledger.may_read(Account(), 3.9, 100.0, plain), "it was spent"
    for _ in range(10):
        ledger.settle(TABLE, [(Account(), "small", Round(4, 4, 5, (0.9,) * 4))])
    assert ledger.may_read(Account(), 3.9, 100.0, plain), "others gained"
    assert not ledger.may_read(Account(), READING[0] + 0.1, 100.0, plain), "however much they did"
    assert ledger.may_read(Account(), SHARE * 1000.0, 1000.0, plain), "its own share of a long one"


def test_a_round_is_paid_by_the_steps_that_were_taken() -> None:
    ledger, account = Ledger(), Account()
    second = Round(1, 1, 2, (0.9, 0.1))  # a second step, and no token of it
    ledger.settle(TABLE, [(account, "small", second)])
    assert account.spent == pytest.approx(0.5 + 1.1)
    assert account.lost == pytest.approx(0.5 + 1.1 - 2)


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("edges", torch.zeros(3)),
        ("chances", torch.ones(1, 2)),
        ("keep", torch.zeros(2, 3)),
        ("more", torch.zeros(4, 2).T),
        ("more", torch.zeros(2, 4, dtype=torch.float64)),
    ],
)
def test_what_a_kernel_would_misread_is_not_made(part: str, wrong: torch.Tensor) -> None:
    right = StopThresholds(torch.zeros(1), torch.ones(2, 2), torch.zeros(2, 4), torch.zeros(2, 4))
    with pytest.raises(AssertionError):
        replace(right, **{part: wrong})
