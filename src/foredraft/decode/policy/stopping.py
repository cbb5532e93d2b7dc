"""Where a draft ends by how sure its drafter is: pure functions of costs and of what is known of the drafter.

A place j of a draft survives with s_j = product over i <= j of f_i P(kept | how sure the drafter is at i):
the reliability curve gives P, whatever the position, and f_i = r_i / alpha how much better than on average
tokens are kept at the i-th position. With a round that gives `rate` tokens per ms on average,

    token j is worth its column         iff  s_j > rate dv_j
    one more step and its column pay    iff  s_j r_{j+1} > rate (c + dv_{j+1})

dv and c: ms of a column of the verifying pass, and of a further step. The first is decided before the token
is drawn, when its step is paid already.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from foredraft.decode.policy.costs import CostTable
from foredraft.decode.policy.reliability import EDGES
from foredraft.decode.policy.survival import Record
from foredraft.model.device import upload
from foredraft.model.runner import StopThresholds

__all__ = ["Ends", "ends", "stops_of"]

FACTOR = 1.2  # the largest f: what is better than on average at a position is mostly chance
TINY = 1e-9  # and the least product of them


@dataclass(frozen=True, slots=True)
class Ends:
    """Of one row: the chance of every bin, and the least survival at each place at which a token is drawn and
    another step taken, as `Stops` has them."""

    chances: list[float]
    keep: list[float]
    more: list[float]

    @classmethod
    def never(cls, most: int) -> Ends:
        return cls([1.0] * (len(EDGES) + 1), [0.0] * most, [0.0] * most)


def ends(
    table: CostTable, drafter: str, batch: int, sharing: int, rate: float, record: Record, most: int
) -> Ends:
    """Of a row that drafts `most` tokens at most, in a batch that gives `rate` tokens per ms; sharing: rows
    that share the drafter's steps."""
    rates, alpha = record.track.rates(most), record.track.alpha
    columns, step = table.columns(batch, most), table.step(drafter, batch) / sharing
    keep, more, factors = [], [], 1.0
    for j in range(most):
        factors = max(factors * min(rates[j] / alpha, FACTOR), TINY)
        keep.append(rate * columns[j] / factors)
        if j + 1 < most:
            more.append(rate * (step + columns[j + 1]) / (factors * rates[j + 1]))
    return Ends(record.reliability.chances(), keep, [*more, 0.0])


def stops_of(rows: Seq[Ends | None], most: int, device: torch.device) -> StopThresholds:
    """Of a batch, whose longest draft has `most` tokens in this round; None: a row that does not draft."""
    nothing, bins = Ends.never(most), len(EDGES) + 1
    several = [nothing if row is None else row for row in rows]
    padded = [[*row.chances, *_cut(row.keep, most), *_cut(row.more, most)] for row in several]
    numbers = upload(padded, device, torch.float32)
    parts = numbers[:, :bins], numbers[:, bins : bins + most], numbers[:, bins + most :]
    return StopThresholds(_edges(device), *(x.contiguous() for x in parts))


@cache
def _edges(device: torch.device) -> Tensor:
    return upload(EDGES, device, torch.float32)


def _cut(values: list[float], most: int) -> list[float]:
    """So many, whose last are 0 where there are too few."""
    return values[:most] + [0.0] * (most - len(values))
