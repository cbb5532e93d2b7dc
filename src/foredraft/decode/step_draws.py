"""The draws of draft steps: from a drafter's logits to a token of every row and its q, one step at a time or
fused.

A call of several steps masks its first step alone. So under a constraint each step is a call of its own,
unless the draft of one call turns out to be what masks at every step would have given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.decode.constraint import Walks
from foredraft.decode.distribution import Distribution
from foredraft.decode.drafter import AutoregressiveDrafter
from foredraft.decode.noise import DRAFT, DrawKeys, HashedKeys, Noise, NoiseKeys, draw_from
from foredraft.decode.round_draft import Draft, lengths_tensor, pad_rows, with_siblings
from foredraft.decode.sampling import PenaltyContext, SamplingTable, distribution_of
from foredraft.model.runner import DraftInputs


@dataclass(frozen=True, slots=True)
class StepLogits:
    """The logits of a draft step, [B, 1, V], and how a token is drawn from them."""

    logits: Tensor  # the drafter's, divided by its temperature
    table: SamplingTable  # sampling parameters of the rows
    masks: Tensor | None  # of the constraints, [B, 1, V] bool
    penalties: PenaltyContext | None  # what the rows said, along the draft
    keys: DrawKeys | None  # noise keys of the step; None where every row drafts greedily
    noise: Noise  # draws by the keys
    greedy: bool  # draw the argmax


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token of every row, drawn from q."""

    q: Distribution  # the distributions, at one position
    token: Tensor  # [B, 1] int64
    drawable: Tensor  # [B, 1] bool, the row's token counts
    sound: Tensor  # [B, 1] bool, its logits were finite


def draw(step: StepLogits) -> Drawn:
    """Transform the logits of a step, and draw one token of every row."""
    q, finite = distribution_of(step.logits, step.table, step.masks, step.penalties, argmax=step.greedy)
    # A mask may leave a drafter nothing to draw; that is no fault of its logits.
    sound = finite if step.masks is None else step.logits.amax(-1).isfinite()
    return Drawn(q, _token(q, step), finite & sound, sound)


def _token(q: Distribution, step: StepLogits) -> Tensor:
    return draw_from(q, step.keys, step.noise, DRAFT)


def next_in_draw(step: StepLogits, drawn: Drawn, count: int) -> Tensor:
    """Return the tokens that come next in the same draw, [B, 1, count] int64; -1 where none is left."""
    logits, probs, token = step.logits, drawn.q.probs, drawn.token
    if step.masks is not None:
        logits = logits.masked_fill(~step.masks, -math.inf)
    found = [token]
    for _ in range(count):
        logits = logits.scatter(2, found[-1][..., None].clamp_min(0), -math.inf)
        token = logits.argmax(-1)
        token = token.where(logits.amax(-1) > -math.inf, -1)
        if probs is not None:
            assert step.keys is not None
            probs = probs.scatter(2, found[-1][..., None].clamp_min(0), 0.0)
            picked = step.noise.pick(probs, step.keys, DRAFT).where(probs.amax(-1) > 0, -1)
            token = picked if drawn.q.one_hot is None else token.where(drawn.q.one_hot[:, None], picked)
        found.append(token)
    return torch.stack(found[1:], 2)


def hashed(keys: NoiseKeys) -> HashedKeys:
    return HashedKeys(keys.base, keys.vocab_ops, keys.bits(DRAFT))


@dataclass(frozen=True, slots=True)
class StepDraws:
    """Draws the tokens of a draft whose steps run in one call; attributes as `StepLogits`."""

    temperature: float  # divides the logits
    table: SamplingTable
    penalties: PenaltyContext | None
    keys: HashedKeys | None  # noise keys of all steps
    noise: Noise
    greedy: bool

    @property
    def dense(self) -> bool:
        return self.keys is not None

    def __call__(self, logits: Tensor, drawn: Tensor) -> Drawn:
        count = drawn.shape[1]
        penalties = self.penalties and self.penalties.along(drawn, ahead=count)
        keys = self.keys and self.keys.column(count)
        logits = logits if self.temperature == 1 else logits / self.temperature
        return draw(StepLogits(logits, self.table, None, penalties, keys, self.noise, self.greedy))


@dataclass(frozen=True, slots=True)
class FusedDrafting:
    """A round's draft by a drafter's fused calls, or None where the loop has to step the drafter."""

    drafter: AutoregressiveDrafter  # the drafter
    inputs: DraftInputs  # what each row reads first, and drafts at most; no token is masked
    walks: Walks | None  # constraints along the drafts; None without any
    siblings: Seq[int] = ()  # [B] leaves of each row's token tree, at most

    def all_steps(self) -> Draft | None:
        """Return the draft by one call; None also where a mask of a later step would change a draw."""
        walks, inputs = self.walks, self.inputs
        budgets, samples = inputs.lengths, inputs.sampling is not None
        if walks is not None:
            if walks.narrow:
                return None
            masks = walks.allowed()
            if samples and any(mask is not None for mask in masks):
                return None
            inputs = replace(inputs, allowed=masks)
        fused = self.drafter.fused_draft(inputs)
        if fused is None:
            return None
        lengths, nonfinite = list[int](), list[bool]()
        for row, (tokens, finite, budget) in enumerate(
            zip(fused.tokens.tolist(), fused.finite.tolist(), budgets, strict=True)
        ):
            length, goes_on = 0, True
            while goes_on and length < budget and finite[length] and tokens[length] >= 0:
                mask = None if walks is None else walks.mask(row)
                if mask is not None and (samples or not bool(mask[tokens[length]])):
                    assert walks is not None
                    walks.undo()
                    self.drafter.resume()  # of a draft that is taken back
                    return None
                length += 1
                goes_on = walks is None or length == budget or walks.goes_on(row, tokens[length - 1])
            lengths.append(length)
            nonfinite.append(goes_on and length < budget and not finite[length])
        if walks is not None:
            walks.undo()
        tokens = fused.tokens[:, : max(lengths)]
        if lengths != budgets:
            beyond = torch.arange(tokens.shape[1]) >= torch.tensor(lengths)[:, None]
            tokens = tokens.masked_fill(beyond, 0)
        return self._draft(tokens, fused.probs, lengths, nonfinite, fused.further)

    def single_steps(self) -> Draft | None:
        walks, inputs, budgets = self.walks, self.inputs, self.inputs.lengths
        if walks is None:
            return None
        drafts: list[list[int]] = [[] for _ in budgets]
        nonfinite = [False] * len(budgets)
        columns: list[Tensor] = []
        further: list[Tensor] = []
        going = [budget > 0 for budget in budgets]
        tokens, starts = inputs.tokens, inputs.starts
        for j in range(max(budgets)):
            sampling = None if inputs.sampling is None else inputs.sampling.step(j)
            step = DraftInputs(
                tokens, starts, list(map(int, going)), sampling, walks.allowed(),
                choices=inputs.choices[j : j + 1],
            )  # fmt: skip
            fused = self.drafter.fused_draft(step)
            if fused is None:
                walks.undo()
                return None
            if fused.probs is not None:
                columns.append(fused.probs)
            if fused.further is not None:
                missing = inputs.choices[0] - inputs.choices[j]
                further.append(F.pad(fused.further, (0, missing), value=-1))
            found = fused.tokens[:, 0].tolist()
            for row, (token, finite) in enumerate(zip(found, fused.finite[:, 0].tolist(), strict=True)):
                if going[row]:
                    nonfinite[row] = not finite
                    drawn = finite and token >= 0
                    drafts[row] += [token] * drawn
                    going[row] = drawn and j + 1 < budgets[row] and walks.goes_on(row, token)
            if not any(going):
                break
            starts = [start + len(own) for start, own in zip(starts, tokens, strict=True)]
            tokens = [[token] for token in found]
        walks.undo()
        drafted = torch.tensor(pad_rows(drafts), dtype=torch.int64)
        probs, others = (torch.cat(each, 1) if each else None for each in (columns, further))
        return self._draft(drafted, probs, list(map(len, drafts)), nonfinite, others)

    def _draft(
        self,
        tokens: Tensor,
        probs: Tensor | None,
        lengths: list[int],
        nonfinite: list[bool],
        further: Tensor | None,
    ) -> Draft:
        q = Distribution(ids=tokens) if probs is None else Distribution(probs[:, : tokens.shape[1]])
        faults = torch.tensor(nonfinite) if any(nonfinite) else None
        on_device = lengths_tensor(tuple(lengths), tokens.device)
        resume = self.drafter.resume()
        draft = Draft(tokens, on_device, q, resume and resume.fit(tokens.shape[1] + 1), faults, lengths)
        if further is None:
            return draft
        return with_siblings(draft, further, self.inputs.lengths, self.siblings)
