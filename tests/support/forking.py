"""Exact enumeration: the shipped round, with a noise that takes every branch.

Each draw of `ForkingNoise` replays a recorded path as far as that goes, takes the first branch beyond it, and notes the
others with their exact probabilities. The sum over all paths is the engine's exact output distribution. Many paths run
side by side as rows of one batch; a row is known by its noise key, and a key that decides twice fails. Draws that the
engine discards, of rows that take no draft step or do not decode, take no branch.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foredraft.decode import noise as purposes
from foredraft.decode.engine import Engine
from foredraft.decode.noise import ACCEPT, BLOCK, DRAFT, SIBLING_COIN, Noise, NoiseKeys
from foredraft.decode.params import SamplingParams
from foredraft.decode.sequence import Finish, Sequence, State

SIBLING_COINS = tuple(range(SIBLING_COIN, SIBLING_COIN + 8))  # of the siblings of one place
# What each rule draws by, beside the drafter; a rule that is not named draws as `speculative` does.
DRAWN_BY = {
    "bild": (purposes.ROLLBACK,),
    "block": (BLOCK, purposes.BLOCK_NEXT),
    "speculative": (ACCEPT, purposes.RESIDUAL, *SIBLING_COINS),
}
COINS = (ACCEPT, BLOCK, *SIBLING_COINS)
PREDICTED = (1, 0, 2, 1, 1, 0) * 8  # the prediction of every request


class Path:
    """One row's choices: `prefix` is replayed, the rest is new. A `greedy` one takes only the last branch.

    `idle` are purposes of other rows' rules: nothing of this row may depend on their draws.
    """

    def __init__(self, prefix: list[int], greedy: bool = False, idle: tuple[int, ...] = ()) -> None:
        self.prefix, self.greedy, self.idle = prefix, greedy, idle
        self.taken: list[int] = []
        self.others: list[list[int]] = []
        self.chance = 1.0
        self.used: set[Any] = set()
        self.drafted: dict[int, list[int]] = {}  # key of a draft's draw -> its tokens, in order

    def draw(self, weights: list[float], key: int, purpose: int) -> int:
        """Draw a token by weights. A key of a draft may give the tokens that come next in its draw, without those before."""
        before = self.drafted.get(key, []) if purpose == DRAFT and not self.greedy else []
        assert not any(weights[token] for token in before), "noise is used twice"
        total = sum(w for w in weights if w > 0)
        options = [(token, w / total) for token, w in enumerate(weights) if w > 0]
        if not options:
            assert before or self.greedy, "nothing to choose from"
            return 0  # no token is left
        token = self.choose(options, (key, len(before)) if before else key, purpose)
        self.drafted[key] = [*before, token]
        return token

    def choose(self, options: list[tuple[int, float]], key: object, purpose: int) -> int:
        assert options, "nothing to choose from"
        if len(options) == 1:
            return options[0][0]
        if self.greedy or purpose in self.idle:
            return options[-1][0]
        assert key not in self.used, "noise is used twice"
        self.used.add(key)
        depth = len(self.taken)
        if depth < len(self.prefix):
            index = self.prefix[depth]
        else:
            index = 0
            self.others += [[*self.taken, other] for other in range(1, len(options))]
        self.taken.append(index)
        value, chance = options[index]
        self.chance *= chance
        return value


class ForkingNoise:
    uses_gumbel_argmax = False

    def __init__(self) -> None:
        self.paths: dict[int, Path] = {}
        self.lengths: list[int] = []  # of this round's drafts: a coin for padding must not matter
        self.idle: list[bool] = []  # rows whose next draws the engine discards
        self.choices: list[int] = []  # tokens of each row's draft step that count, with siblings
        self.real = Noise()

    def coin(self, keys: NoiseKeys, purpose: int) -> Coin:
        return Coin(self, keys, purpose)

    def pick(self, weights: Tensor, keys: NoiseKeys, purpose: int) -> Tensor:
        assert purpose not in COINS
        if purpose == purposes.COUPLED:  # a function of its key, and of no interest here
            return self.real.pick(weights, keys, purpose)
        drawn: list[list[int]] = []
        bits = keys.bits(purpose).tolist()
        counts = self.choices or [0] * len(self.idle)
        rows = zip(keys.base.tolist(), weights.double().tolist(), bits, self.idle, counts, strict=True)
        for base, row, own, idle, choices in rows:
            drawn.append([])
            for at, key in zip(row, own, strict=True):
                any_id, path = len(at) - 1, self.paths.get(base)
                if purpose == DRAFT and path is not None and self.choices:
                    idle = idle or len(path.drafted.get(key, [])) >= choices
                drawn[-1].append(any_id if idle else self.paths[base].draw(at, key, purpose))
        return torch.tensor(drawn, dtype=torch.int64).view(weights.shape[:2])


@dataclass
class Coin:
    """A uniform number u that is known only by comparisons `u * q < p`.

    Coins of columns that must not matter take no branch: those of padding, and after a rejection or, where a whole
    beginning is kept or not, before the longest that is.
    """

    noise: ForkingNoise
    keys: NoiseKeys
    purpose: int
    columns: slice = field(default_factory=lambda: slice(None))
    q: Tensor | None = None

    def __getitem__(self, at: tuple[slice, slice]) -> Coin:
        assert at[0] == slice(None)
        return Coin(self.noise, self.keys, self.purpose, at[1])

    def __mul__(self, q: Tensor) -> Coin:
        assert self.q is None
        return Coin(self.noise, self.keys, self.purpose, self.columns, q)

    def __lt__(self, p: Tensor) -> Tensor:
        kept: list[list[int]] = []
        bits = self.keys.bits(self.purpose)[:, self.columns]
        rows = [each.tolist() for each in (self.keys.base, self.q.double(), p.double(), bits)]
        for base, q_row, p_row, own, length in zip(*rows, self.noise.lengths, strict=True):
            kept.append([1] * len(own))
            whole = self.purpose == BLOCK
            length = 1 if self.purpose in SIBLING_COINS else length
            for column in reversed(range(length)) if whole else range(length):
                q, p_at = q_row[column], p_row[column]
                chance = float(p_at > 0) if q == 0 else min(1.0, p_at / q)
                options = [(value, c) for value, c in ((1, chance), (0, 1 - chance)) if c > 0]
                kept[-1][column] = self.noise.paths[base].choose(options, own[column], self.purpose)
                if bool(kept[-1][column]) == whole:
                    break
        return torch.tensor(kept, dtype=torch.bool).view(p.shape)


@dataclass(frozen=True)
class Case:
    """A request whose exact output distribution is wanted; alone: its paths share no prompt rows."""

    name: str
    params: SamplingParams
    prompt: tuple[int, ...] = (0,)
    drafters: tuple[str, ...] = ()
    eos: frozenset[int] = frozenset()
    constraint: Callable[[], Any] = lambda: None
    alone: bool = False


@dataclass
class Found:
    distribution: dict[tuple[Any, ...], float] = field(default_factory=lambda: defaultdict(float))
    paths: int = 0
    drafted: int = 0
    accepted: int = 0
    rejections: int = 0
    rollbacks: int = 0  # how often, at most, bans took one position back on one path


def outputs_of(make: Callable[[ForkingNoise], Engine], cases: list[Case], most: int = 500_000) -> list[Found]:
    return _enumerate(make, [[case] for case in cases], most)


def joint_outputs_of(make: Callable[[ForkingNoise], Engine], cases: list[Case], most: int = 500_000) -> Found:
    """Return the joint distribution of the outputs of cases that start together and have one acceptance rule."""
    [found] = _enumerate(make, [cases], most)
    return found


@dataclass(frozen=True)
class _Run:
    index: int
    path: Path
    sequences: list[Sequence]


def _enumerate(make: Callable[[ForkingNoise], Engine], groups: list[list[Case]], most: int) -> list[Found]:
    noise = ForkingNoise()
    engine = make(noise)
    found = [Found() for _ in groups]
    ids = itertools.count()
    todo: list[tuple[int, list[int]]] = [(index, []) for index in range(len(groups))]
    running: list[_Run] = []
    side_by_side = engine.rows.capacity + 2 if max(map(len, groups)) == 1 else 1
    while todo or running:
        while todo and len(running) < side_by_side:
            index, prefix = todo.pop()
            most -= 1
            assert most, "more paths than it may take"
            params = [case.params for case in groups[index]]
            drawn = DRAWN_BY.get(params[0].acceptance or "speculative", DRAWN_BY["speculative"])
            idle = tuple(p for others in DRAWN_BY.values() if others is not drawn for p in others)
            path = Path(prefix, greedy=all(each.greedy for each in params), idle=idle)
            donors = index if side_by_side > 1 else None  # prompts of a group of several cases differ
            running.append(_Run(index, path, [_sequence(case, next(ids), donors) for case in groups[index]]))
            for sequence in running[-1].sequences:
                noise.paths[sequence.key] = path
                engine.submit(sequence)
        engine.step()
        for run in [run for run in running if all(s.state is State.FINISHED for s in run.sequences)]:
            running.remove(run)
            todo += [(run.index, prefix) for prefix in run.path.others]
            _note(run, found[run.index])
            for sequence in run.sequences:
                del noise.paths[sequence.key]
    return found


def _sequence(case: Case, number: int, group: int | None) -> Sequence:
    own = {"eos": case.eos, "drafters": case.drafters, "prediction": PREDICTED}
    group = None if case.alone else group
    return Sequence(
        number, list(case.prompt), case.params, seed=number, constraint=case.constraint(), group=group, **own
    )


def _note(run: _Run, found: Found) -> None:
    path, outputs = run.path, [tuple(sequence.new_ids) for sequence in run.sequences]
    assert path.taken[: len(path.prefix)] == path.prefix, "a replayed path came out otherwise"
    found.distribution[outputs[0] if len(outputs) == 1 else tuple(outputs)] += path.chance
    found.paths += 1
    for sequence in run.sequences:
        assert sequence.finish in (Finish.EOS, Finish.LENGTH, Finish.CONSTRAINT), sequence.error
        found.rollbacks = max(found.rollbacks, *sequence.attempts.values(), 0)
        for turn in sequence.rounds:
            found.drafted += turn.drafted
            found.accepted += turn.accepted
            found.rejections += turn.accepted < turn.drafted
