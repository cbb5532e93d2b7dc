"""Drafting: each row's draft of a round, and the one draft loop.

A step of the loop transforms an autoregressive drafter's logits, draws and keeps q, or is one call of the
drafter that draws the same tokens. The policy is asked, so no drawn token is dropped. All steps may be one
call where nothing has to look at a token before the next one is drawn; such a call masks its first step
alone, so under a constraint its draft counts only if masks at every step would have given it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.decode.accept import ONCE, GraphCache
from foredraft.decode.constraint import Walks, masks_along
from foredraft.decode.distribution import Distribution
from foredraft.decode.drafter import AutoregressiveDrafter, Drafter, ModelFreeDrafter
from foredraft.decode.engine_target import SILENT, Observer
from foredraft.decode.noise import DRAFT, DrawKeys, Noise
from foredraft.decode.policy import Policy
from foredraft.decode.round_draft import (
    Draft,
    RoundInputs,
    Siblings,
    choices_of,
    lengths_tensor,
    no_draft,
    pad_rows,
)
from foredraft.decode.step_draws import Drawn, StepDraws, draw, hashed, next_in_draw
from foredraft.model.memory import HOST, upload
from foredraft.model.runner import DraftInputs, Resume


@dataclass(frozen=True, slots=True)
class DraftTools:
    """The policy, the noise and the observer of all drafts of an engine."""

    policy: Policy  # may end drafts early
    noise: Noise  # draws of sampled drafts
    greedy: bool = False  # logits are drafted by their argmax, with a one-hot q, instead of sampled
    temperature: float = 1.0  # divides the logits of autoregressive drafters before all transforms
    observer: Observer = SILENT  # told when a drafter reads tokens that it missed
    replays: GraphCache = ONCE  # run what a step makes of logits, on a GPU as graphs

    def draws(self, inputs: RoundInputs) -> StepDraws:
        """Return what draws the tokens of a draft from a drafter's logits."""
        keys: DrawKeys | None = None
        if not (self.greedy or inputs.table.all_greedy):
            keys, replays = inputs.noise, self.replays if inputs.one_rule else ONCE
            if self.noise.uses_gumbel_argmax:
                keys = replays.run(hashed, inputs.noise, inputs.noise.position, self.noise)
        context = inputs.penalty_context
        return StepDraws(self.temperature, inputs.table, context, keys, self.noise, self.greedy)


def propose(drafters: Mapping[str, Drafter], inputs: RoundInputs, tools: DraftTools) -> Draft:
    """Return every row's draft, each by the drafter that the policy chose for the row."""
    parts: list[tuple[list[bool], Draft]] = []
    for name in dict.fromkeys(filter(None, inputs.drafters)):
        rows, drafter = [name == other for other in inputs.drafters], drafters[name]
        if isinstance(drafter, AutoregressiveDrafter):
            parts.append((rows, _step_draft(drafter, rows, inputs, tools)))
        elif isinstance(drafter, ModelFreeDrafter):
            parts.append((rows, _guess(drafter, rows, inputs)))
    if not parts:
        return no_draft(len(inputs.sequences), inputs.device)
    return parts[0][1] if len(parts) == 1 else Draft.combine(parts, inputs)


def _guess(drafter: ModelFreeDrafter, rows: list[bool], inputs: RoundInputs) -> Draft:
    """Return the guessed tokens, cut where a row's constraint forbids one."""
    guesses: list[list[int]] = [[] for _ in rows]
    own = [row for row, is_own in enumerate(rows) if is_own]
    requests = [(inputs.sequences[row], inputs.budgets[row]) for row in own]
    for row, (sequence, budget), guess in zip(own, requests, drafter.propose(requests), strict=True):
        legal = budget
        if sequence.constraint is not None and guess:
            legal = masks_along(sequence.constraint, guess[:budget], inputs.vocabulary, inputs.device).legal
        guesses[row] = guess[:legal]
    lengths = [len(guess) for guess in guesses]
    tokens = upload(pad_rows(guesses), inputs.device, torch.int64)
    q = Distribution(ids=tokens)
    return Draft(
        tokens, lengths_tensor(tuple(lengths), inputs.device), q, host_lengths=lengths, host_tokens=guesses
    )


def _step_draft(
    drafter: AutoregressiveDrafter, rows: list[bool], inputs: RoundInputs, tools: DraftTools
) -> Draft:
    """Draft by single steps, or by one call where that gives the same tokens."""
    budgets = [budget if is_own else 0 for budget, is_own in zip(inputs.budgets, rows, strict=True)]
    first = DraftInputs(*_catch_up(drafter, rows, inputs, tools.observer), budgets)
    by_calls = _fused_draft if inputs.device.type in HOST else _captured_draft
    draft = by_calls(drafter, first, inputs, tools)
    if draft is None:
        draft = _draft_loop(drafter, first, inputs, tools, _by_logits(drafter, first, inputs, tools))
    assert draft is not None, "a step by logits is always possible"
    return draft


# Takes the next step of a draft; None: single calls of the drafter cannot give it.
_Take: TypeAlias = Callable[["_Steps"], Drawn | None]


def _draft_loop(
    drafter: AutoregressiveDrafter, first: DraftInputs, inputs: RoundInputs, tools: DraftTools, take: _Take
) -> Draft | None:
    """The one draft loop: take a step, ask the policy; None where the steps cannot be taken so."""
    sequences, policy, budgets = inputs.sequences, tools.policy, first.lengths
    steps = _Steps(first, _walks(budgets, inputs), inputs.device)
    choices = choices_of(budgets, inputs.siblings)
    for j in range(max(budgets)):
        found = take(steps)
        if found is None:
            break
        drawable, logits = found.drawable, found.logits
        may_draw = None if logits is None else policy.may_draw(sequences, j, found.q, logits)
        if may_draw is not None:
            drawable = drawable & may_draw[:, None]
        steps.add(found.token, found.q, drawable, found.sound)
        if found.further is not None:
            steps.further.append(F.pad(found.further, (0, choices[0] - choices[j]), value=-1))
        if j + 1 == max(budgets):
            break
        go_on = None if logits is None else policy.go_on(sequences, j, found.q, logits)
        steps.advance(go_on, vetoed=may_draw is not None)
        if all(steps.stopped):
            break
    if steps.walks is not None:
        steps.walks.undo()
    if found is None:
        return None
    draft = steps.draft(drafter.resume(), counts_undrawn=policy.stops_by_content)
    return _with_siblings(draft, torch.cat(steps.further, 1) if choices else None, budgets, inputs.siblings)


def _by_logits(
    drafter: AutoregressiveDrafter, first: DraftInputs, inputs: RoundInputs, tools: DraftTools
) -> _Take:
    """Return steps that transform the drafter's logits and draw."""
    device, choices = inputs.device, choices_of(first.lengths, inputs.siblings)
    draws = tools.draws(inputs)
    replays = tools.replays if draws.dense else ONCE
    drafter.expect(list(first.lengths))

    def take(steps: _Steps) -> Drawn:
        tokens = upload(pad_rows(first.tokens), device, torch.int64) if steps.last is None else steps.last
        at = None if tokens.shape[1] == 1 else upload([count - 1 for count in steps.counts], device)
        logits = drafter.step(tokens, steps.starts, steps.counts, steps.stopped, at)[:, None]  # [B, 1, V]
        step = draws.step(logits, steps.drawn, None if steps.walks is None else steps.walks.masks())
        found, j = replays.run(draw, step, step.logits, tools.noise), steps.count
        further = next_in_draw(step, found, choices[j]) if j < len(choices) else None
        return replace(found, further=further, logits=step.logits if tools.policy.stops_by_content else None)

    return take


def _fused_steps(drafter: AutoregressiveDrafter, first: DraftInputs) -> _Take:
    """Return steps that are calls of the drafter, for drafts whose every step is masked."""

    def take(steps: _Steps) -> Drawn | None:
        j, lengths = steps.count, [int(not stopped) for stopped in steps.stopped]
        tokens = first.tokens if steps.last is None else steps.last.tolist()
        sampling = None if first.sampling is None else first.sampling.step(j)
        allowed, choices = None if steps.walks is None else steps.walks.allowed(), first.choices[j : j + 1]
        fused = drafter.fused_draft(
            DraftInputs(tokens, steps.starts, lengths, sampling, allowed, choices=choices)
        )
        if fused is None:
            return None
        drawable, ids = fused.finite & (fused.tokens >= 0), fused.tokens.clamp_min(0)
        q = Distribution(ids=ids) if fused.probs is None else Distribution(fused.probs)
        return Drawn(q, ids, drawable, fused.finite, fused.further)

    return take


def _fused_draft(
    drafter: AutoregressiveDrafter, first: DraftInputs, inputs: RoundInputs, tools: DraftTools
) -> Draft | None:
    """Return the draft by calls of the drafter that draw; None where its steps have to give logits."""
    table = inputs.table
    if tools.policy.stops_by_content or inputs.penalty_context is not None or table.edits_logits:
        return None
    sampling = None
    if not (tools.greedy or table.all_greedy):
        if not tools.noise.uses_gumbel_argmax:
            return None
        sampling = table.sampling_inputs(inputs.noise.bits(DRAFT)[:, : max(first.lengths)])
        if sampling is None:
            return None
        if tools.temperature != 1:
            sampling = replace(sampling, temperature=sampling.temperature * tools.temperature)
    own = replace(first, sampling=sampling, choices=choices_of(first.lengths, inputs.siblings))
    walks = _walks(first.lengths, inputs)
    draft = _in_one_call(drafter, own, walks, inputs.siblings)
    if draft is None and walks is not None:
        draft = _draft_loop(drafter, own, inputs, tools, _fused_steps(drafter, own))
    return draft


def _in_one_call(
    drafter: AutoregressiveDrafter, inputs: DraftInputs, walks: Walks | None, siblings: Seq[int]
) -> Draft | None:
    """Return the draft by one call; None also where a mask of a later step would change a draw."""
    budgets, samples = inputs.lengths, inputs.sampling is not None
    if walks is not None:
        masks = [] if walks.narrow else walks.allowed()
        if walks.narrow or (samples and any(mask is not None for mask in masks)):
            return None
        inputs = replace(inputs, allowed=masks)
    fused = drafter.fused_draft(inputs)
    if fused is None:
        return None
    lengths, nonfinite = list[int](), list[bool]()
    rows = zip(fused.tokens.tolist(), fused.finite.tolist(), budgets, strict=True)
    for row, (ids, finite, budget) in enumerate(rows):
        length, goes_on = 0, True
        while goes_on and length < budget and finite[length] and ids[length] >= 0:
            mask = None if walks is None else walks.mask(row)
            if walks is not None and mask is not None and (samples or not bool(mask[ids[length]])):
                walks.undo()
                drafter.resume()  # of a draft that is taken back
                return None
            length += 1
            goes_on = walks is None or length == budget or walks.goes_on(row, ids[length - 1])
        lengths.append(length)
        nonfinite.append(goes_on and length < budget and not finite[length])
    if walks is not None:
        walks.undo()
    tokens = fused.tokens[:, : max(lengths)]
    if lengths != budgets:
        beyond = torch.arange(tokens.shape[1]) >= torch.tensor(lengths)[:, None]
        tokens = tokens.masked_fill(beyond, 0)
    q = Distribution(ids=tokens) if fused.probs is None else Distribution(fused.probs[:, : tokens.shape[1]])
    faults = torch.tensor(nonfinite) if any(nonfinite) else None
    on_device, resume = lengths_tensor(tuple(lengths), tokens.device), drafter.resume()
    draft = Draft(tokens, on_device, q, resume and resume.fit(tokens.shape[1] + 1), faults, lengths)
    return _with_siblings(draft, fused.further, budgets, siblings)


def _with_siblings(draft: Draft, further: Tensor | None, budgets: Seq[int], siblings: Seq[int]) -> Draft:
    """Return the draft with siblings out of its further choices; arguments as `Siblings.of`."""
    if further is None:
        return draft
    return replace(draft, siblings=Siblings.of(further, draft.lengths, budgets, siblings))


def _captured_draft(
    drafter: AutoregressiveDrafter, first: DraftInputs, inputs: RoundInputs, tools: DraftTools
) -> Draft | None:
    """Return the draft of the loop by one call, which the host does not read; None where that cannot be."""
    constrained = _walks(first.lengths, inputs) is not None
    if tools.policy.stops_by_content or not tools.noise.uses_gumbel_argmax or constrained:
        return None
    fused = drafter.fused_draft(replace(first, draws=tools.draws(inputs)))
    if fused is None:
        return None
    assert fused.drawn is not None
    lengths = fused.finite.cumprod(1).sum(1)  # a row ends at its first logits that are not finite
    columns = torch.arange(fused.tokens.shape[1], device=inputs.device)
    tokens = fused.tokens * (columns < lengths[:, None])
    faults = lengths < lengths_tensor(tuple(first.lengths), inputs.device)
    q = Distribution.along([each.q for each in fused.drawn])
    resume = drafter.resume()
    resume = resume and resume.fit(tokens.shape[1] + 1)
    return Draft(tokens, lengths, q, resume, faults, list(first.lengths))


def _catch_up(
    drafter: AutoregressiveDrafter, rows: list[bool], inputs: RoundInputs, observer: Observer
) -> tuple[list[list[int]], list[int]]:
    """Have the drafter read what it missed; return what each row's first step reads, and from where."""
    first_inputs: list[list[int]] = []
    starts: list[int] = []
    for sequence, is_own in zip(inputs.sequences, rows, strict=True):
        if not is_own:
            first_inputs.append([0])
            starts.append(0)
            continue
        start, last = drafter.length(sequence), len(sequence.tokens) - 1
        assert start <= last, f"{drafter.name} claims to have read {start} tokens, the pending one among them"
        if last - start > 1:  # the row took plain steps, or the text is new to the drafter
            with observer.drafter_reads(sequence, start, last):
                drafter.read(sequence, start, last)
            start = last
        first_inputs.append(sequence.tokens[start:])
        starts.append(start - drafter.context_start(sequence))
    return first_inputs, starts


def _walks(budgets: Seq[int], inputs: RoundInputs) -> Walks | None:
    """Return the constraints of the drafting rows, to be walked along their drafts; None without any."""
    constraints = [s.constraint if n else None for s, n in zip(inputs.sequences, budgets, strict=True)]
    if all(constraint is None for constraint in constraints):
        return None
    return Walks(constraints, inputs.vocabulary, inputs.device)


class _Steps:
    """The steps of one draft so far: tensors [B, 1] of each step, and the rows that take the next one."""

    def __init__(self, first: DraftInputs, walks: Walks | None, device: torch.device) -> None:
        self.walks, self._device = walks, device
        self._budgets = first.lengths  # [B]
        self.starts, self.counts = list(first.starts), [len(own) for own in first.tokens]  # [B] of the next
        self.stopped = [budget == 0 for budget in self._budgets]  # [B] as far as the host knows
        self.host_lengths = list(self._budgets)  # [B] upper bounds of the drafts' lengths
        self.further: list[Tensor] = []  # next in the draw, for siblings, [B, 1, M] each
        self._tokens: list[Tensor] = []
        self._q: list[Distribution] = []
        self._drawable: list[Tensor] = []  # logits are finite, and the policy let it be drawn
        self._finite: list[Tensor] = []
        self._goes_on: list[Tensor] = []  # drawn, and the draft continues after the token
        columns = torch.arange(max(self._budgets), device=device)
        self._wanted = columns < upload(self._budgets, device)[:, None]  # [B, K]
        self._nothing = torch.zeros(len(self._budgets), 0, dtype=torch.int64, device=device)

    @property
    def count(self) -> int:
        return len(self._tokens)

    @property
    def last(self) -> Tensor | None:
        """Return the tokens drawn last, [B, 1] int64."""
        return self._tokens[-1] if self._tokens else None

    @property
    def drawn(self) -> Tensor:
        """Return the tokens drawn so far, [B, j] int64."""
        return torch.cat([self._nothing, *self._tokens], 1)

    def add(self, token: Tensor, q: Distribution, drawable: Tensor, finite: Tensor) -> None:
        """Add a step; all [B, 1]."""
        self._tokens.append(token)
        self._q.append(q)
        self._drawable.append(drawable)
        self._finite.append(finite)

    def advance(self, go_on: Tensor | None, *, vetoed: bool) -> None:
        """Find the rows that take another step; the host reads [B] numbers where a draft may end early."""
        done, drawable = self.count, self._drawable[-1]
        pairs = zip(self._budgets, self.stopped, strict=True)
        more = [budget > done and not stopped for budget, stopped in pairs]
        if go_on is None and self.walks is None and not vetoed:
            self._goes_on.append(drawable)
        else:
            on = drawable[:, 0] if go_on is None else go_on & drawable[:, 0]
            if self.walks is None:
                continued = on.tolist()
            else:
                continued = self.walks.advance(self._tokens[-1], on & upload(more, self._device))
                on = upload(continued, self._device)
            self._goes_on.append(on[:, None])
            self.host_lengths = [
                length if on or stopped else min(length, done)
                for length, on, stopped in zip(self.host_lengths, continued, self.stopped, strict=True)
            ]
            more = [goes_on and on for goes_on, on in zip(more, continued, strict=True)]
        self.stopped = [not goes_on for goes_on in more]
        self.starts = [start + count for start, count in zip(self.starts, self.counts, strict=True)]
        self.counts = [1] * len(self.counts)

    def draft(self, resume: Resume | None, *, counts_undrawn: bool) -> Draft:
        """Return the draft: each row's tokens up to where it ended."""
        count = self.count
        before = F.pad(torch.cat(self._goes_on[: count - 1], 1), (1, 0), value=True) if count > 1 else None
        reached = self._wanted[:, :count]
        if before is not None:
            reached = reached & before.cumprod(1).bool()
        lengths = (reached & torch.cat(self._drawable, 1)).sum(1)
        nonfinite = (reached & ~torch.cat(self._finite, 1)).any(1)
        columns = torch.arange(count, device=self._device)
        tokens = torch.cat(self._tokens, 1).where(columns < lengths[:, None], 0)
        undrawn = reached.sum(1) - lengths if counts_undrawn else None
        q = Distribution.along(self._q)
        resume = resume and resume.fit(count + 1)
        return Draft(tokens, lengths, q, resume, nonfinite, self.host_lengths, undrawn)
