"""Drafts that stop by how sure their drafter is: the same places in one call, step by step and in a batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.decode.distribution import Distribution
from foredraft.decode.policy import Fixed
from foredraft.decode.policy.stopping import Ends, stops_of
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Round
from foredraft.model.runner import StopThresholds
from tests.exactness import test_identity as identity
from tests.support.harness import make_engine, request, run
from tests.support.parts import Halts

SAMPLED: dict[str, Any] = {"acceptance": "coupled", "seed": 5, "temperature": 0.9}
PARAMS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "sampled": SAMPLED}


def rounds_of(drafter: str, rows: int, whim: int, **params: Any) -> list[list[Round]]:
    """Of every prompt; its tokens are those of plain decoding."""

    def several(name: str | None) -> list[Sequence]:
        return [request(p, name, max_new_tokens=16, **params) for p in identity.PROMPTS]

    def made(rows: int) -> Any:
        return make_engine(identity.TARGET, identity.DRAFT, Halts(4, whim), rows=rows)

    drafted = several(drafter)
    assert run(made(rows), drafted) == run(made(4), several(None))
    return [
        # two sums over a vocabulary may differ in their last bit
        [
            replace(turn, sure=tuple(round(sure, 5) for sure in turn.sure), drafter=None)
            for turn in sequence.rounds
        ]
        for sequence in drafted
    ]


def same_stops() -> None:
    """`looping` is stopped by a definition of its own (tabular.py), which no defect of the loop reaches."""
    for params, whim in itertools.product(PARAMS.values(), range(3)):
        alone = rounds_of("looping", 1, whim, **params)
        for drafter, rows in (("looping", 5), ("draft-model", 1), ("draft-model", 5)):
            assert rounds_of(drafter, rows, whim, **params) == alone, (drafter, rows)


def test_they_stop_at_the_same_places_however_they_are_taken() -> None:
    same_stops()


class Doubly(Fixed):
    """Stops by what it was given beforehand, and by what it sees."""

    looks = True
    ends = Ends.never(3)

    def stops(self, sequences: Seq[Sequence], budgets: Seq[int], device: torch.device) -> StopThresholds:
        return stops_of([self.ends] * len(sequences), 3, device)

    def draws(
        self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor
    ) -> Tensor | None:
        return None

    def go_on(
        self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor
    ) -> Tensor | None:
        return torch.ones(len(sequences), dtype=torch.bool)


class NoneDrawn(Doubly):
    def draws(
        self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor
    ) -> Tensor | None:
        return torch.zeros(len(sequences), dtype=torch.bool)


class OneByStops(Doubly):
    ends = replace(Ends.never(3), more=[2.0] * 3)


class OneBySight(Doubly):
    def go_on(
        self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor
    ) -> Tensor | None:
        return torch.zeros(len(sequences), dtype=torch.bool)


@pytest.mark.parametrize(("kind", "longest"), [(Doubly, 3), (NoneDrawn, 0), (OneByStops, 1), (OneBySight, 1)])
@pytest.mark.parametrize("drafter", ["draft-model", "looping"])
def test_whoever_says_stop_first_is_heard(kind: type[Doubly], longest: int, drafter: str) -> None:
    sequences = [request(prompt, drafter, max_new_tokens=16) for prompt in identity.PROMPTS]
    run(make_engine(identity.TARGET, identity.DRAFT, kind(3)), sequences)
    assert max(turn.drafted for sequence in sequences for turn in sequence.rounds) == longest


@pytest.mark.parametrize("drafter", ["draft-model", "looping", "tapping", "early-exit", "layer-skip"])
def test_both_kinds_of_stop_are_met(drafter: str) -> None:
    rounds = [turn for turns in rounds_of(drafter, 3, 1, temperature=0) for turn in turns if turn.sure]
    assert any(len(turn.sure) == turn.drafted + 1 for turn in rounds), "a place left to the target"
    assert any(len(turn.sure) == turn.drafted < 4 for turn in rounds), "no step after a token"
    assert any(turn.drafted == 0 for turn in rounds)
    assert any(turn.drafted == 4 for turn in rounds)
    assert all(turn.drafted <= len(turn.sure) <= 4 for turn in rounds)
    assert all(0 < sure <= 1 for turn in rounds for sure in turn.sure)
