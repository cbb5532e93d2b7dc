"""A tabular language model: logits are looked up, not computed, so that its exact distribution is known.

`Tabular` is a runner over a `TokenCache`, which keeps token ids instead of keys and values. It reads its context *from
the cache*: the last two tokens, and a checksum of the whole row, so that a cache that was not rolled back, a wrong row
copy or a write where none may be gives other logits. Two levels stand for lower and upper layers: a hidden state is what
the lower one knows of its context, and an upper one that reads something else yields the poisoned distribution.

- A position never written (and the padding of a pass) holds a poison id; a context that contains it yields
  a distribution of its own, and is counted in `poisoned`.
- NaN anywhere in a row, even past every length, makes all of the row's logits NaN, as 0 x NaN does.
- A plan that leaves layers out (there are two, the levels) gives another table's logits. Without the lower one, it
  reads and writes the upper level alone; without the upper one, it reads and writes the lower level as the target does.
- A copy in few bits has logits of its own, and writes both levels of the target's cache.
- Ids that the target would never have stand where a draft wrote in place of it.
- Idle rows write to the scratch positions and return logits that no draw must ever follow.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from foredraft.decode.noise import DRAFT, DrawKeys, Noise
from foredraft.decode.params import SamplingParams
from foredraft.decode.sampling import SamplingTable, distribution_of
from foredraft.decode.step_draws import Drawn, StepLogits, next_in_draw
from foredraft.decode.vocab_ops import TORCH_VOCAB_OPS
from foredraft.model.cache import Span
from foredraft.model.runner import DraftInputs, Forward, FusedDraft, Leaves, Resume, SamplingInputs
from foredraft.model.spec import Plan

CHECKSUMS = 3
LEVELS = 3  # lower, upper, and one that is read for NaN alone
DEPTH = 1  # where the lower level ends
WIDTH = 4  # of a hidden state: the token, the one before, the checksum, whether the context is poisoned
SPIKE = 1e4  # a lead of so much leaves all other tokens nothing in float32


class TokenCache:
    device, dtype, recurrent = torch.device("cpu"), torch.float32, None

    def __init__(self, vocabulary: int, rows: int, positions: int, slack: int = 16) -> None:
        self.rows, self.positions, self.slack = rows, positions, slack
        self.scratch = positions + slack
        self.stored = positions + 2 * slack
        self.poison = vocabulary
        self.lengths = [0] * rows
        self.weights = np.array([_weight(position) for position in range(self.stored)], dtype=float)
        self.data = np.full((LEVELS, rows, self.stored), float(vocabulary))

    def copy_row(self, source: int, target: int, length: int) -> None:
        if source != target:
            self.data[:, target, :length] = self.data[:, source, :length]
        self.lengths[target] = length

    def take(self, row: int, start: int, stop: int) -> Span:
        return Span(row, start, stop, (torch.tensor(self.data[:, row, start:stop]),))

    def put_back(self, span: Span) -> None:
        self.data[:, span.row, span.start : span.stop] = span.parts[0].numpy()

    def move(self, row: int, source: int, target: int) -> None:
        self.data[:, row, target] = self.data[:, row, source]

    def wipe(self, row: int, length: int) -> None:
        self.data[:, row, length:] = self.poison

    def zero_row(self, row: int) -> None:
        self.wipe(row, 0)
        self.lengths[row] = 0


class Table:
    """Logits of every context: [checksum, token before, token, V] float32; a share `impossible` of them are -inf."""

    def __init__(
        self, vocabulary: int, seed: int, *, scale: float = 1.5, impossible: float = 0.0, step: float = 0.0
    ) -> None:
        random = np.random.default_rng(seed)
        shape = (CHECKSUMS, vocabulary + 2, vocabulary + 2, vocabulary)
        logits = random.normal(scale=scale, size=shape)
        if step:
            logits = np.round(logits / step) * step
        dead = random.random(shape) < impossible
        dead &= np.arange(vocabulary) != random.integers(vocabulary, size=shape[:-1])[..., None]
        self.vocabulary = vocabulary
        self.logits = np.where(dead, -np.inf, logits).astype(np.float32)

    def after(self, context: Seq[int]) -> list[float]:
        """Logits of the token after `context`: the definition, in plain Python."""
        before = context[-2] if len(context) > 1 else self.vocabulary + 1
        checksum = sum((token + 1) * _weight(position) for position, token in enumerate(context)) % CHECKSUMS
        return [float(x) for x in self.logits[checksum, before, context[-1]]]


def _weight(position: int) -> int:
    return position * position + 1


@dataclass(frozen=True)
class Raced(DrawKeys):
    key: Tensor  # [1, 1]
    vocab_ops = TORCH_VOCAB_OPS

    def bits(self, purpose: int) -> Tensor:
        return self.key


def _params(sampling: SamplingInputs | None, row: int) -> SamplingParams:
    if sampling is None:
        return SamplingParams(temperature=0)
    given = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return SamplingParams(
        **{name: values[row].item() for name, values in given.items() if values is not None}
    )


@dataclass(frozen=True)
class Columns:
    """The columns of a pass: their cache, its rows [B], positions [B, T], and whether they belong to a sequence."""

    cache: TokenCache
    rows: np.ndarray
    positions: np.ndarray
    real: np.ndarray

    def write(self, level: int, ids: np.ndarray) -> None:
        self.cache.data[level][self.rows[:, None], self.positions] = ids

    def states(self, level: int) -> np.ndarray:
        ids = self.cache.data[level][self.rows]  # [B, P]
        sums = np.cumsum((ids + 1) * self.cache.weights, 1)
        poisons = np.cumsum(ids == self.cache.poison, 1)
        at, positions = np.arange(len(self.rows))[:, None], self.positions
        before = np.where(positions > 0, ids[at, positions - 1], self.cache.poison + 1)
        parts = [ids[at, positions], before, sums[at, positions] % CHECKSUMS, poisons[at, positions] > 0]
        return np.stack(parts, -1).astype(float)

    def broken(self, states: np.ndarray, levels: int = LEVELS) -> np.ndarray:
        return np.isnan(self.cache.data[:levels, self.rows]).any((0, 2))[:, None] | np.isnan(states).any(-1)


def _numbers(states: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(np.nan_to_num(states).astype(int).transpose(2, 0, 1))


class Tabular:
    """A runner.

    fatal: contexts that begin with this token and are `patience` long or longer yield NaN.
    venom: whoever reads this token gets NaN, and so does every column of a pass in which its row reads it.
    drafter_nonfinite: its drafts for itself, which have the distribution of `skipping`, are NaN, and so is what they
    write where the target would write something else.
    loops: it takes all the steps of a draft in one call. coded: it is a copy in few bits of the model whose cache it
    writes to.
    """

    takes_leaves = True

    def __init__(
        self,
        table: Table,
        *,
        chunk: int = 4,
        max_queries: int = 12,
        fatal: int | None = None,
        patience: int = 6,
        venom: int | None = None,
        drafter_nonfinite: bool = False,
        loops: bool = False,
        coded: bool = False,
    ) -> None:
        self.loops, self.coded = loops, coded
        self.table, self.vocabulary = table, table.vocabulary
        self.chunk, self.max_queries, self.by_kernels = chunk, max_queries, False
        self.fatal, self.patience, self.venom = fatal, patience, venom
        self.skipping, self.drafter_nonfinite = table, drafter_nonfinite
        self.decoder = SimpleNamespace(spec=SimpleNamespace(max_positions=10_000, layers=2))
        self.poisoned = 0  # real columns whose context was poisoned
        self.passes = 0

    def reserve_positions(self, positions: int) -> None:
        pass

    def new_cache(self, rows: int, positions: int) -> TokenCache:
        return TokenCache(self.vocabulary, rows, positions)

    def forward(
        self,
        cache: TokenCache,
        tokens: Tensor,
        starts: list[int],
        *,
        first_row: int = 0,
        idle: Seq[bool] | None = None,
        counts: list[int] | None = None,
        plan: Plan | None = None,
        resume: Resume | None = None,
        aux_layers: Seq[int] = (),
        at: Tensor | None = None,
        invariant: bool = True,
        leaves: Leaves | None = None,
    ) -> Forward:
        self.passes += 1
        if leaves is not None and any(leaves):
            chain = self.forward(
                cache, tokens, starts, idle=idle, counts=counts, resume=resume, aux_layers=aux_layers
            )
            return self._tree(chain, cache, tokens, starts, aux_layers, leaves)
        batch, width = tokens.shape
        on = self._columns(cache, width, starts, idle, counts, first_row)
        if self.coded or (plan is not None and not all((*plan.attention, *plan.mlp))):
            return self._skip(on, tokens.numpy(), plan, aux_layers)
        known = np.zeros(batch, dtype=int)
        if resume is not None:
            assert resume.depth == DEPTH
            assert resume.hidden.shape == (batch, width, WIDTH)
            known = np.asarray(resume.known)
        given = np.arange(width) < known[:, None]
        hidden = self._lower(on, tokens.numpy(), ~given)
        if resume is not None:
            hidden = np.where(given[..., None], resume.hidden.numpy(), hidden)
        logits = self._upper(on, hidden)
        if at is not None:
            logits = logits[np.arange(batch), at.numpy()][:, None]
        return _forward(logits, hidden, aux_layers)

    def _tree(
        self,
        chain: Forward,
        cache: TokenCache,
        tokens: Tensor,
        starts: list[int],
        aux_layers: Seq[int],
        leaves: Leaves,
    ) -> Forward:
        """Run each leaf in its place after the chains, whence its column gets what the leaf wrote."""
        for row, own in enumerate(leaves):
            for column, place in own.items():
                at, slot = starts[row] + place, starts[row] + column
                before = cache.data[:, row, at].copy()
                one = tokens[row : row + 1, column : column + 1]
                leaf = self.forward(cache, one, [at], first_row=row, aux_layers=aux_layers)
                cache.move(row, at, slot)
                cache.data[:, row, at] = before
                chain.logits[row, column] = leaf.logits[0, 0]
                for depth, states in leaf.aux_states.items():
                    chain.aux_states[depth][row, column] = states[0, 0]
        return chain

    def _skip(self, on: Columns, tokens: np.ndarray, plan: Plan | None, aux_layers: Seq[int]) -> Forward:
        """Return the logits of the other table, from the level that runs whole; a copy runs both."""
        if plan is not None and all((plan.attention[0], plan.mlp[0])):
            states = self._lower(on, tokens, np.ones(on.real.shape, dtype=bool))
        else:
            strange = (tokens + 1.0) % self.vocabulary
            if self.venom is not None:
                strange[tokens == self.venom] = np.nan
            if self.drafter_nonfinite:
                strange[:] = np.nan
            for level in (0, 1) if self.coded else (1,):
                on.write(level, np.where(on.real, strange, on.cache.poison))
            states = on.states(1)
        token, before, checksum, _ = _numbers(states)
        logits = self.skipping.logits[checksum, before, token].copy()
        logits[~on.real] = SPIKE * np.arange(self.vocabulary, dtype=np.float32)
        logits[(on.broken(states, levels=2) | self.drafter_nonfinite) & on.real] = np.nan
        return _forward(logits, states, aux_layers)

    def prefill(
        self, cache: TokenCache, row: int, tokens: list[int], start: int, *, aux_layers: Seq[int] = ()
    ) -> Forward:
        assert start // self.chunk == (start + len(tokens) - 1) // self.chunk
        return self.forward(cache, torch.tensor([tokens]), [start], first_row=row, aux_layers=aux_layers)

    def draft(
        self, cache: TokenCache, inputs: DraftInputs, *, plan: Plan | None = None, exit: int | None = None
    ) -> FusedDraft | None:
        if not self.loops:
            return None
        lengths, sampling, allowed = inputs.lengths, inputs.sampling, inputs.allowed
        shape, aux_layers = (len(lengths), max(lengths)), () if exit is None else (exit,)
        drawn = torch.zeros(shape, dtype=torch.int64)
        finite = torch.zeros(shape, dtype=torch.bool)
        probs = None if sampling is None else torch.zeros(*shape, self.vocabulary)
        states = torch.zeros(*shape, WIDTH, dtype=torch.float64) if aux_layers else None
        further = torch.full((*shape, max(inputs.choices)), -1) if inputs.choices else None
        for row, (own, start, count) in enumerate(zip(inputs.tokens, inputs.starts, lengths, strict=True)):
            table = SamplingTable.of([_params(sampling, row)], torch.device("cpu"))
            for step in range(count):
                forward = self.forward(
                    cache, torch.tensor([own]), [start], first_row=row, plan=plan, aux_layers=aux_layers
                )
                if states is not None:
                    states[row, step] = forward.aux_states[exit][0, -1]
                at, mask = forward.logits[:, -1:], None if allowed is None or step else allowed[row]
                of_all = None if mask is None else mask[None, None]
                distribution, drawable = distribution_of(at, table, of_all)
                keys = torch.zeros(1, 1) if sampling is None else sampling.keys[row, step].view(1, 1)
                key = Raced(keys)
                token = distribution.draw(lambda weights: Noise().pick(weights, key, DRAFT))  # noqa: B023
                finite[row, step] = (drawable if mask is None else at.amax(-1).isfinite()).item()
                drawn[row, step] = token.item() if mask is None or drawable.item() else -1
                if probs is not None:
                    probs[row, step] = distribution.probs[0, 0]
                if further is not None and step < len(inputs.choices):
                    choices = inputs.choices[step]
                    by = StepLogits(at, table, None, None, key, Noise(), greedy=False)
                    others = next_in_draw(by, Drawn(distribution, token, drawable, drawable), choices)
                    further[row, step, :choices] = others[0, 0]
                start, own = start + len(own), [token.item()]
        return FusedDraft(drawn, finite, probs, states, further=further)

    def head(self, hidden: Tensor) -> Tensor:
        token, before, checksum, poisoned = (numbers[None] for numbers in _numbers(hidden.numpy()))
        assert not poisoned.any()
        return torch.from_numpy(self.table.logits[checksum, before, token])

    def lower(
        self, cache: TokenCache, tokens: Tensor, starts: list[int], idle: Seq[bool], counts: list[int]
    ) -> Tensor:
        """The lower level alone, as a drafter runs it on this model's own cache -> [B, T, WIDTH]."""
        on = self._columns(cache, tokens.shape[1], starts, idle, counts)
        return torch.from_numpy(self._lower(on, tokens.numpy(), np.ones(on.real.shape, dtype=bool)))

    def _columns(
        self,
        cache: TokenCache,
        width: int,
        starts: list[int],
        idle: Seq[bool] | None,
        counts: list[int] | None,
        first_row: int = 0,
    ) -> Columns:
        assert width <= max(self.max_queries, self.chunk)
        batch, idle = len(starts), idle or [False] * len(starts)
        assert not all(idle)
        for start, dummy in zip(starts, idle, strict=True):
            assert dummy or (start >= 0 and start + width <= cache.scratch)
        first = np.where(idle, cache.scratch, starts)[:, None]
        real = np.arange(width) < np.asarray(counts or [width] * batch)[:, None]
        rows = np.arange(first_row, first_row + batch)
        return Columns(cache, rows, first + np.arange(width), real & ~np.asarray(idle)[:, None])

    def _lower(self, on: Columns, tokens: np.ndarray, write: np.ndarray) -> np.ndarray:
        ids, level = np.where(on.real, tokens, on.cache.poison), on.cache.data[0]
        at = np.broadcast_to(on.rows[:, None], on.positions.shape)
        level[at[write], on.positions[write]] = ids[write]
        states = on.states(0)
        if self.fatal is not None:
            doomed = (level[on.rows, 0] == self.fatal)[:, None] & (on.positions + 1 >= self.patience)
            states[doomed & on.real] = np.nan
        if self.venom is not None:
            states[(ids == self.venom) & on.real] = np.nan
        return states

    def _upper(self, on: Columns, hidden: np.ndarray) -> np.ndarray:
        on.write(1, hidden[..., 0])
        states, broken = on.states(1), on.broken(hidden)
        token, before, checksum, poisoned = _numbers(states)
        bad = (poisoned > 0) | (hidden != states).any(-1)
        logits = self.table.logits[checksum, before, token].copy()
        # one token has all the mass, whatever is masked
        logits[bad | ~on.real] = SPIKE * np.arange(self.vocabulary, dtype=np.float32)
        on.write(2, np.where(broken, np.nan, hidden[..., 0]))
        broken |= np.isnan(on.cache.data[2][on.rows]).any(-1)[:, None]
        logits[broken & on.real] = np.nan
        self.poisoned += int((bad & on.real & ~broken).sum())
        return logits


def _forward(logits: np.ndarray, hidden: np.ndarray, layers: Seq[int]) -> Forward:
    states = torch.from_numpy(hidden)
    return Forward(torch.from_numpy(logits), states, {depth: states for depth in layers if depth == DEPTH})
