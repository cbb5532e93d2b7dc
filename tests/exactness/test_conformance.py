"""Every drafter and every constraint, rewound to every earlier length, is as good as a fresh one.

A new drafter or constraint is one line in `DRAFTERS`, `REAL` or `CONSTRAINTS` here."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import LLM
from foredraft.decode.constraint import Constraint, masks_along
from foredraft.decode.distribution import Distribution
from foredraft.decode.drafter import AutoregressiveDrafter, ModelFreeDrafter
from foredraft.decode.drafting import DraftTools, propose
from foredraft.decode.noise import Noise
from foredraft.decode.policy import Fixed, Policy
from foredraft.decode.round_draft import Draft, RoundInputs
from foredraft.decode.sampling import SamplingTable
from foredraft.decode.sequence import Sequence, State
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.kangaroo import Kangaroo
from foredraft.drafters.layer_skip import LayerSkip, LowBit
from foredraft.drafters.lookup import Lookup
from foredraft.drafters.retokenize import Retokenize
from foredraft.kernels.compilation import library
from tests.support import coded, harness
from tests.support.harness import CPU, ForkingEngine, make_engine, request, run
from tests.support.mutation import Mutation, assert_caught, defect
from tests.support.mutations import Function, argument, around, before
from tests.support.parts import LateBan, NoRepeat, StopUnsure
from tests.support.tabular import Table

V, LENGTH, GAMMA = 5, 20, 3
TARGET, DRAFT = Table(V, 21), Table(V, 22)
PROMPT = (3, 1, 4, 1, 0)
DRAFTERS = [name for name in harness.DRAFTERS if name not in (None, "script")]  # a script knows no table
REAL = ("draft-model", "retokenize", "layer-skip", "kangaroo", "low-bit")
CONSTRAINTS: dict[str, Callable[[], Constraint]] = {
    "no repeat": lambda: NoRepeat(V),
    "late ban": lambda: LateBan(V, (1, 0)),
}


@dataclass(frozen=True)
class World:
    """What a drafter runs in: tables, or a real target of few words with what is loaded beside it."""

    load: partial[LLM] | None = None  # None for tables
    stepwise: bool = False  # a draft's steps are single, because the policy looks at each

    def __str__(self) -> str:
        loaded = ["tables"] if self.load is None else self.load.args
        return "-".join([*map(str, loaded), "stepwise" if self.stepwise else "whole"])

    def policy(self, budget: int) -> Policy:
        return StopUnsure(budget, least=0.0) if self.stepwise else Fixed(budget)

    def engine(self) -> ForkingEngine:
        if self.load is None:
            return make_engine(TARGET, DRAFT, self.policy(GAMMA), rows=2)
        return coded.fresh_engine(self.load(), self.policy(GAMMA))


TABLES = World()
WORLDS = [
    World(partial(coded.tiny, "float32", "int4", None)),
    World(partial(coded.tiny, "float32", "int8", "int4"), stepwise=True),
    World(partial(coded.tiny, "bfloat16", "int4", None), stepwise=True),
    World(partial(coded.tiny, "bfloat16", "int8", "int4")),
    World(partial(coded.tiny, "bfloat16", None, "int8")),
]
NEEDS_KERNELS = pytest.mark.skipif(library() is None, reason="no kernels")
in_every_world = pytest.mark.parametrize(
    ("world", "name"),
    [
        *((TABLES, name) for name in DRAFTERS),
        *(pytest.param(world, name, marks=NEEDS_KERNELS) for world in WORLDS for name in REAL),
    ],
    ids=str,
)


def begin(
    tokens: list[int], drafter: str, world: World = TABLES, engine: ForkingEngine | None = None
) -> tuple[ForkingEngine, Sequence]:
    """An engine that has read a prompt and is about to draft."""
    engine = engine or world.engine()
    sequence = request(tokens, drafter, seed=1, acceptance="speculative", max_new_tokens=LENGTH)
    engine.submit(sequence)
    engine._start(engine.scheduler.admit())
    while engine.scheduler.prefilling:
        engine._prefill(sequence)
    assert sequence.state is State.RUNNING
    return engine, sequence


def draft(engine: ForkingEngine, sequence: Sequence, budget: int = GAMMA, world: World = TABLES) -> Draft:
    table = SamplingTable.of([sequence.params], CPU)
    inputs = RoundInputs([sequence], [False], [budget], list(sequence.drafters), table, V, CPU)
    return propose(engine.drafters, inputs, DraftTools(world.policy(budget), Noise()))


def same(one: Draft, other: Draft) -> None:
    assert one.lengths.tolist() == other.lengths.tolist()
    assert one.tokens.tolist() == other.tokens.tolist()
    torch.testing.assert_close(one.q.dense(V), other.q.dense(V), rtol=0, atol=0)
    assert (one.resume is None) == (other.resume is None)
    if one.resume is not None and other.resume is not None:
        assert one.resume.known == other.resume.known
        torch.testing.assert_close(one.resume.hidden, other.resume.hidden, equal_nan=True)


def shorten(engine: ForkingEngine, sequence: Sequence, length: int) -> None:
    """As a ban's rollback does."""
    sequence._roll_back(length - len(sequence.prompt))
    sequence.attempts.clear()
    engine.cache.lengths[sequence.row] = length - 1
    engine.drafters[sequence.drafters[0]].rewind(sequence)


@in_every_world
def test_a_rewound_drafter_equals_a_fresh_one(world: World, name: str) -> None:
    for length in range(len(PROMPT), len(PROMPT) + LENGTH - 1):
        engine, sequence = begin(list(PROMPT), name, world)
        while len(sequence.tokens) < len(PROMPT) + LENGTH - GAMMA - 1:
            engine.round()
        draft(engine, sequence, world=world)  # its own marks, of a draft that came to nothing
        if length > len(sequence.tokens):
            break
        shorten(engine, sequence, length)
        sequence.round_count = 0
        other, fresh = begin(sequence.tokens, name, world)
        fresh.round_count = 0
        same(draft(engine, sequence, world=world), draft(other, fresh, world=world))
        engine.drafters[name].rewind(sequence)
        engine.round()
        assert len(sequence.tokens) > length
    assert length > len(PROMPT) + 10


drafts_early = argument(1, lambda inputs: replace(inputs, starts=[start - 1 for start in inputs.starts]))
states_of_the_position_before = argument(3, lambda own: {layer: x.roll(1, 0) for layer, x in own.items()})


@around
def rewound_too_little(rewind: Function, drafter: Any, sequence: Sequence) -> None:
    before = drafter.cache.lengths[sequence.row]
    rewind(drafter, sequence)
    drafter.cache.lengths[sequence.row] = min(before, drafter.cache.lengths[sequence.row] + 1)


def take_for_read(drafter: Any, row: int, tokens: list[int], closed: int) -> None:
    held = drafter._rows[row]
    shared = min(len(held), len(tokens) - 1)
    held[:shared] = tokens[:shared]


DEFECTS: dict[str, tuple[Any, Mutation]] = {
    "low-bit": (LowBit.fused_draft, drafts_early),
    "layer-skip": (LayerSkip.fused_draft, drafts_early),
    "draft-model": (DraftModel.rewind, rewound_too_little),
    "kangaroo": (Kangaroo.observe, states_of_the_position_before),
    "retokenize": (Retokenize._catch_up, before(take_for_read)),
}


@NEEDS_KERNELS
@pytest.mark.parametrize("name", DEFECTS)
@pytest.mark.parametrize("world", WORLDS[::3], ids=str)
def test_wrong_states_are_caught(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        test_a_rewound_drafter_equals_a_fresh_one(world, name)
        test_a_rejection_at_every_place_leaves_no_trace(world, name)

    assert_caught(defect(name, *DEFECTS[name], check), monkeypatch)


@in_every_world
def test_a_rejection_at_every_place_leaves_no_trace(world: World, name: str) -> None:
    """Any number of the draft's tokens is kept, then another one comes: as if the text had begun there."""
    for kept in range(GAMMA + 1):
        for correction in range(V):
            engine, sequence = begin([*PROMPT, 0, 3, 1, 4], name, world)
            first = draft(engine, sequence, world=world)
            drafter = engine.drafters[name]
            taken = first.tokens[0, : min(kept, int(first.lengths))].tolist()
            base = len(sequence.tokens) - 1
            row = torch.tensor([[sequence.tokens[-1], *first.tokens[0].tolist()]])
            with torch.inference_mode():
                forward = engine.target.forward(
                    engine.cache, row, [base], resume=first.resume, aux_layers=drafter.aux_layers
                )
            sequence.tokens += [*taken, correction]
            engine.cache.lengths[sequence.row] = len(sequence.tokens) - 1
            states = {depth: forward.aux_states[depth][0, : len(taken) + 1] for depth in drafter.aux_layers}
            if states:
                drafter.observe(sequence, base, states)
            drafter.rewind(sequence)
            other, fresh = begin(sequence.tokens, name, world)
            same(draft(engine, sequence, world=world), draft(other, fresh, world=world))


@in_every_world
def test_a_drafter_catches_up_after_plain_steps(world: World, name: str) -> None:
    for absent in (1, 2, 3, 7):
        engine, sequence = begin(list(PROMPT), name, world)
        engine.round()
        for _ in range(absent):
            engine.policy = Fixed(0)
            engine.round()
        sequence.round_count = 0
        other, fresh = begin(sequence.tokens, name, world)
        same(draft(engine, sequence, world=world), draft(other, fresh, world=world))


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_is_of_one_kind_and_keeps_to_its_budget(name: str) -> None:
    """Over a text that repeats. A model-free drafter is asked itself: the draft loop cuts what it proposes."""
    proposed = 0
    for budget in range(1, 2 * GAMMA):
        engine, sequence = begin([*PROMPT] * 3, name)
        drafter = engine.drafters[name]
        assert isinstance(drafter, AutoregressiveDrafter) != isinstance(drafter, ModelFreeDrafter)
        assert drafter.name == name
        if isinstance(drafter, ModelFreeDrafter):
            [guess] = drafter.propose([(sequence, budget)])
        else:
            guess = draft(engine, sequence, budget).tokens[0].tolist()
        assert len(guess) <= budget
        proposed += len(guess)
    assert proposed > GAMMA, "a drafter that proposes nothing keeps to any budget"


@pytest.mark.parametrize("kind", [Lookup, Retokenize])
def test_excess_is_caught(kind: type[ModelFreeDrafter], monkeypatch: pytest.MonkeyPatch) -> None:
    more = argument(1, lambda requests: [(sequence, budget + 1) for sequence, budget in requests])
    check = partial(test_a_drafter_is_of_one_kind_and_keeps_to_its_budget, kind.name)
    assert_caught(defect("over budget", kind.propose, more, check), monkeypatch)


def replay(make: Callable[[], Constraint], tokens: list[int]) -> tuple[Constraint, list[int]]:
    """Return a fresh constraint that read `tokens` and rolled back, and the tokens that were left."""
    constraint, said = make(), []
    for token in tokens:
        mask = constraint.mask()
        if mask is not None and not mask[token]:
            token = int(mask.int().argmax())
        said.append(token)
        kept = constraint.advance(token)
        if kept < len(said):
            constraint.roll_back(kept)
            del said[kept:]
    return constraint, said


def state_of(constraint: Constraint) -> tuple[Any, ...]:
    mask = constraint.mask()
    told = []
    for token in range(V):
        told.append(constraint.advance(token))
        constraint.rewind(constraint.length - 1)
    return constraint.length, None if mask is None else mask.tolist(), told


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_rewound_constraint_equals_a_fresh_one(name: str) -> None:
    make = CONSTRAINTS[name]
    tokens = [1, 2, 1, 0, 3, 4, 4, 1, 1, 0, 2, 1, 0, 1]
    for length in range(len(tokens)):
        constraint, said = replay(make, tokens)
        if length > len(said):
            break
        bars = dict(getattr(constraint, "barred", {}))
        constraint.rewind(length)
        fresh, _ = replay(make, [])
        if hasattr(fresh, "barred"):
            fresh.barred = bars  # what was barred stays barred
        for token in said[:length]:
            fresh.advance(token)
        assert state_of(constraint) == state_of(fresh)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_masks_along_a_draft_leave_no_trace(name: str) -> None:
    constraint, _ = replay(CONSTRAINTS[name], [3, 2, 4])
    before = state_of(constraint)
    for drafted in ([], [1], [1, 0, 2], [2, 2], [0, 1, 0, 1, 0]):
        masks, legal, *_ = masks_along(constraint, drafted, V, CPU)
        assert masks.shape == (len(drafted) + 1, V)
        assert 0 <= legal <= len(drafted)
        assert masks.any(-1).all()
        for place in range(legal + 1):
            other, _ = replay(CONSTRAINTS[name], [3, 2, 4, *drafted[:place]])
            mask = other.mask()
            assert masks[place].tolist() == ([True] * V if mask is None else mask.tolist())
        assert state_of(constraint) == before


@dataclass(frozen=True)
class Hushed(StopUnsure):
    """Stops drafting at some positions only; at the others the answer is None, or, `aloud`, True for all rows."""

    silent: tuple[int, ...] = ()
    aloud: bool = False

    def go_on(
        self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor
    ) -> Tensor | None:  # type: ignore[override]
        if position not in self.silent:
            return super().go_on(sequences, position, q, logits)
        return torch.ones(len(sequences), dtype=torch.bool) if self.aloud else None


@pytest.mark.parametrize("silent", [(1,), (2,), (0, 2), (1, 2), (2, 3)])
def test_the_answer_none_continues_the_draft(silent: tuple[int, ...]) -> None:
    found = []
    for aloud in (False, True):
        engine = make_engine(TARGET, DRAFT, Hushed(5, 0.35, "hushed", silent, aloud), rows=3)
        several = [
            request([*PROMPT, n], "draft-model", seed=n, acceptance="speculative", max_new_tokens=60)
            for n in range(3)
        ]
        run(engine, several)
        found.append([(sequence.tokens, sequence.rounds) for sequence in several])
    assert found[0] == found[1]
    assert len({turn.drafted for _, turns in found[0] for turn in turns}) > 2
