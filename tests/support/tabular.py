"""A tabular language model: logits are looked up, not computed, so that its exact distribution is known.

`Tabular` has the interface of `model.runner.Runner` as the engine and the draft model use it, over a
`TokenCache` with the interface of `model.cache.KVCache`. The cache keeps token ids instead of keys and
values, and the model reads its context *from the cache*: the last two tokens, and a checksum of the whole
row. A cache that was not rolled back, a position off by one, a wrong row copy or a write where none may be
gives other logits. Two levels stand for lower and upper layers: a hidden state is what the lower one knows
of its context, and an upper one that reads something else yields the poisoned distribution.

- A position never written (and the padding of a pass) holds a poison id; a context that contains it yields
  a distribution of its own, and is counted in `poisoned`.
- NaN anywhere in a row, even past every length, makes all of the row's logits NaN, as 0 x NaN does.
- A plan that leaves layers out (there are two, the levels) gives another table's logits. Without the lower one,
  it reads and writes the upper level alone, with ids that the target would never have there; without the upper
  one, it reads and writes the lower level as the target does.
- A copy in few bits has logits of its own, and writes ids that the target would never have in both levels of the
  target's cache.
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
from foredraft.model.plan import Plan
from foredraft.model.runner import DraftInputs, Forward, FusedDraft, Leaves, Resume, SamplingInputs

CHECKSUMS = 3
LEVELS = 3  # lower, upper, and one that is read for NaN alone
DEPTH = 1  # where the lower level ends
WIDTH = 4  # of a hidden state: the token, the one before, the checksum, whether the context is poisoned
SPIKE = 1e4  # a lead of so much leaves all other tokens nothing in float32


class TokenCache:
    """Token ids at [level, row, position]."""

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
    """Logits of every context: [checksum, token before, token, V] float32.

    impossible: the share of tokens that get a logit of -inf. step: logits are multiples of it, so that
    ties happen; 0 = none do.
    """

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
    """The key of one draw, whatever its purpose."""

    key: Tensor  # [1, 1]
    vocab_ops = TORCH_VOCAB_OPS

    def bits(self, purpose: int) -> Tensor:
        return self.key


def _params(sampling_inputs: SamplingInputs | None, row: int) -> SamplingParams:
    if sampling_inputs is None:
        return SamplingParams(temperature=0)
    top_p = 1.0 if sampling_inputs.top_p is None else sampling_inputs.top_p[row].item()
    min_p = 0.0 if sampling_inputs.min_p is None else sampling_inputs.min_p[row].item()
    top_k = 0 if sampling_inputs.top_k is None else int(sampling_inputs.top_k[row])
    return SamplingParams(
        temperature=sampling_inputs.temperature[row].item(), top_k=top_k, top_p=top_p, min_p=min_p
    )


class Tabular:
    """A runner.

    fatal: contexts that begin with this token and are `patience` long or longer yield NaN.

    venom: whoever reads this token gets NaN, and so does every column of a pass in which its row reads it.
    Its drafts for itself have the distribution of `skipping`. sick: they are NaN, and so is what they write where the
    target would write something else.
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
        taps: Seq[int] = (),
        at: Tensor | None = None,
        invariant: bool = True,
        leaves: Leaves | None = None,
    ) -> Forward:
        self.passes += 1
        if leaves is not None and any(leaves):
            return self._comb(cache, tokens, starts, idle, counts, resume, taps, leaves)
        batch, width = tokens.shape
        rows = np.arange(first_row, first_row + batch)
        positions = self._positions(cache, width, starts, idle)
        real = _real(batch, width, idle, counts)
        if self.coded or (plan is not None and not all((*plan.attention, *plan.mlp))):
            return self._skip(cache, tokens.numpy(), rows, positions, real, plan, taps)
        known = np.zeros(batch, dtype=int)
        if resume is not None:
            assert resume.depth == DEPTH
            assert resume.hidden.shape == (batch, width, WIDTH)
            known = np.asarray(resume.known)
        given = np.arange(width) < known[:, None]
        hidden = self._lower(cache, tokens.numpy(), rows, positions, real, ~given)
        if resume is not None:
            hidden = np.where(given[..., None], resume.hidden.numpy(), hidden)
        logits = self._upper(cache, hidden, rows, positions, real)
        if at is not None:
            logits = logits[np.arange(batch), at.numpy()][:, None]
        states = torch.from_numpy(hidden)
        return Forward(torch.from_numpy(logits), states, {depth: states for depth in taps if depth == DEPTH})

    def _comb(
        self,
        cache: TokenCache,
        tokens: Tensor,
        starts: list[int],
        idle: Seq[bool] | None,
        counts: list[int] | None,
        resume: Resume | None,
        taps: Seq[int],
        leaves: Leaves,
    ) -> Forward:
        """Run the chains, then each leaf in its place, whence its column gets what the leaf wrote."""
        chain = self.forward(cache, tokens, starts, idle=idle, counts=counts, resume=resume, taps=taps)
        assert chain.logits is not None
        for row, own in enumerate(leaves):
            for column, place in own.items():
                at, slot = starts[row] + place, starts[row] + column
                before = cache.data[:, row, at].copy()
                leaf = self.forward(
                    cache, tokens[row : row + 1, column : column + 1], [at], first_row=row, taps=taps
                )
                cache.move(row, at, slot)
                cache.data[:, row, at] = before
                assert leaf.logits is not None
                chain.logits[row, column] = leaf.logits[0, 0]
                for depth, states in leaf.taps.items():
                    chain.taps[depth][row, column] = states[0, 0]
        return chain

    def _skip(
        self,
        cache: TokenCache,
        tokens: np.ndarray,
        rows: np.ndarray,
        positions: np.ndarray,
        real: np.ndarray,
        plan: Plan | None,
        taps: Seq[int],
    ) -> Forward:
        """Return the logits of the other table, from the level that runs whole; a copy runs both."""
        if plan is not None and all((plan.attention[0], plan.mlp[0])):
            states = self._lower(cache, tokens, rows, positions, real, np.ones(real.shape, dtype=bool))
        else:
            strange = (tokens + 1.0) % self.vocabulary
            if self.venom is not None:
                strange[tokens == self.venom] = np.nan
            if self.drafter_nonfinite:
                strange[:] = np.nan
            for level in (0, 1) if self.coded else (1,):
                cache.data[level][rows[:, None], positions] = np.where(real, strange, cache.poison)
            states = _states(cache, 1, rows, positions)
        broken = np.isnan(cache.data[:2, rows]).any((0, 2))[:, None] | np.isnan(states).any(-1)
        token, before, checksum, _ = np.nan_to_num(states).astype(int).transpose(2, 0, 1)
        logits = self.skipping.logits[checksum, before, token].copy()
        logits[~real] = SPIKE * np.arange(self.vocabulary, dtype=np.float32)
        logits[(broken | self.drafter_nonfinite) & real] = np.nan
        hidden = torch.from_numpy(states)
        return Forward(torch.from_numpy(logits), hidden, {depth: hidden for depth in taps if depth == DEPTH})

    def prefill(
        self, cache: TokenCache, row: int, tokens: list[int], start: int, *, taps: Seq[int] = ()
    ) -> Forward:
        assert start // self.chunk == (start + len(tokens) - 1) // self.chunk
        return self.forward(cache, torch.tensor([tokens]), [start], first_row=row, taps=taps)

    def draft(
        self,
        cache: TokenCache,
        inputs: DraftInputs,
        *,
        plan: Plan | None = None,
        tap: int | None = None,
    ) -> FusedDraft | None:
        """Draft by the definition, a row and a step at a time."""
        if not self.loops:
            return None
        lengths, sampling, allowed = inputs.lengths, inputs.sampling, inputs.allowed
        steps = max(lengths)
        drawn = torch.zeros(len(lengths), steps, dtype=torch.int64)
        finite = torch.zeros(len(lengths), steps, dtype=torch.bool)
        probs = None if sampling is None else torch.zeros(len(lengths), steps, self.vocabulary)
        states = None if tap is None else torch.zeros(len(lengths), steps, WIDTH, dtype=torch.float64)
        further = torch.full((len(lengths), steps, max(inputs.choices)), -1) if inputs.choices else None
        for row, (own, start, count) in enumerate(zip(inputs.tokens, inputs.starts, lengths, strict=True)):
            for step in range(count):
                taps = () if tap is None else (tap,)
                forward = self.forward(
                    cache, torch.tensor([own]), [start], first_row=row, plan=plan, taps=taps
                )
                logits = forward.logits
                assert logits is not None
                if states is not None:
                    states[row, step] = forward.taps[tap][0, -1]
                at, mask = logits[:, -1:], None if allowed is None or step else allowed[row]
                table = SamplingTable.of([_params(sampling, row)], at.device)
                distribution, drawable = distribution_of(
                    at, table, None if mask is None else mask[None, None]
                )
                key = Raced(
                    torch.zeros(1, 1) if sampling is None else sampling.keys[row : row + 1, step : step + 1]
                )
                token = distribution.draw(lambda weights: Noise().pick(weights, key, DRAFT))  # noqa: B023
                finite[row, step] = (drawable if mask is None else at.amax(-1).isfinite()).item()
                drawn[row, step] = token.item() if mask is None or drawable.item() else -1
                if probs is not None:
                    assert distribution.probs is not None
                    probs[row, step] = distribution.probs[0, 0]
                if further is not None and step < len(inputs.choices):
                    by = StepLogits(at, table, None, None, key, Noise(), greedy=False)
                    others = next_in_draw(
                        by, Drawn(distribution, token, drawable, drawable), inputs.choices[step]
                    )
                    further[row, step, : inputs.choices[step]] = others[0, 0]
                start, own = start + len(own), [token.item()]
        return FusedDraft(drawn, finite, probs, states, further=further)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of states that a prefill gave, none of them poisoned."""
        token, before, checksum, poisoned = (
            np.nan_to_num(hidden.numpy()).astype(int).transpose(2, 0, 1)[:, None]
        )
        assert not poisoned.any()
        return torch.from_numpy(self.table.logits[checksum, before, token])

    def lower(
        self, cache: TokenCache, tokens: Tensor, starts: list[int], idle: Seq[bool], counts: list[int]
    ) -> Tensor:
        """The lower level alone, as a drafter runs it on this model's own cache -> [B, T, WIDTH]."""
        batch, width = tokens.shape
        positions = self._positions(cache, width, starts, idle)
        real = _real(batch, width, idle, counts)
        everything = np.ones((batch, width), dtype=bool)
        return torch.from_numpy(
            self._lower(cache, tokens.numpy(), np.arange(batch), positions, real, everything)
        )

    def _positions(
        self, cache: TokenCache, width: int, starts: list[int], idle: Seq[bool] | None
    ) -> np.ndarray:
        assert width <= max(self.max_queries, self.chunk)
        idle = idle or [False] * len(starts)
        assert not all(idle)
        for start, dummy in zip(starts, idle, strict=True):
            assert dummy or (start >= 0 and start + width <= cache.scratch)
        first = [cache.scratch if dummy else start for start, dummy in zip(starts, idle, strict=True)]
        return np.asarray(first)[:, None] + np.arange(width)

    def _lower(
        self,
        cache: TokenCache,
        tokens: np.ndarray,
        rows: np.ndarray,
        positions: np.ndarray,
        real: np.ndarray,
        write: np.ndarray,
    ) -> np.ndarray:
        ids = np.where(real, tokens, cache.poison)
        at = np.broadcast_to(rows[:, None], positions.shape)
        cache.data[0][at[write], positions[write]] = ids[write]
        states = _states(cache, 0, rows, positions)
        if self.fatal is not None:
            doomed = (cache.data[0][rows, 0] == self.fatal)[:, None] & (positions + 1 >= self.patience)
            states[doomed & real] = np.nan
        if self.venom is not None:
            states[(ids == self.venom) & real] = np.nan
        return states

    def _upper(
        self, cache: TokenCache, hidden: np.ndarray, rows: np.ndarray, positions: np.ndarray, real: np.ndarray
    ) -> np.ndarray:
        cache.data[1][rows[:, None], positions] = hidden[..., 0]
        states = _states(cache, 1, rows, positions)
        broken = np.isnan(cache.data[:, rows]).any((0, 2))[:, None] | np.isnan(hidden).any(-1)
        token, before, checksum, poisoned = np.nan_to_num(states).astype(int).transpose(2, 0, 1)
        bad = (poisoned > 0) | (hidden != states).any(-1)
        logits = self.table.logits[checksum, before, token].copy()
        # one token has all the mass, whatever is masked
        logits[bad | ~real] = SPIKE * np.arange(self.vocabulary, dtype=np.float32)
        cache.data[2][rows[:, None], positions] = np.where(broken, np.nan, hidden[..., 0])
        broken |= np.isnan(cache.data[2][rows]).any(-1)[:, None]
        logits[broken & real] = np.nan
        self.poisoned += int((bad & real & ~broken).sum())
        return logits


def _real(batch: int, width: int, idle: Seq[bool] | None, counts: list[int] | None) -> np.ndarray:
    """[B, T]: columns that belong to a sequence."""
    real = np.arange(width) < np.asarray([width] * batch if counts is None else counts)[:, None]
    return real if idle is None else real & ~np.asarray(idle)[:, None]


def _states(cache: TokenCache, level: int, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the state of every position's context at `level`, [B, T, WIDTH]."""
    ids = cache.data[level][rows]  # [B, P]
    sums = np.cumsum((ids + 1) * cache.weights, 1)
    poisons = np.cumsum(ids == cache.poison, 1)
    at = np.arange(len(rows))[:, None]
    before = np.where(positions > 0, ids[at, positions - 1], cache.poison + 1)
    return np.stack(
        [ids[at, positions], before, sums[at, positions] % CHECKSUMS, poisons[at, positions] > 0], -1
    ).astype(float)
