"""Drafting: each row's draft of a round, and the one draft loop.

The loop transforms a stepper's logits, draws, keeps q and asks the policy, so that q is the law that was
drawn from and no drawn token is ever dropped. Where nobody has to look at a token before the next is drawn, a
drafter that can takes all steps in one call (`_at_once`): the same draws by the same noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from foredraft.decode.constraint import masks_along
from foredraft.decode.draft import (
    Draft,
    Drafter,
    Guesser,
    Looper,
    RoundInputs,
    Stepper,
    as_guesser,
    as_looper,
    as_stepper,
    no_draft,
)
from foredraft.decode.law import Law
from foredraft.decode.noise import COUPLED, DRAFT, Noise
from foredraft.decode.policy import Policy
from foredraft.decode.sampling import law_of
from foredraft.decode.sequence import Sequence
from foredraft.model.device import upload
from foredraft.model.runner import Stops

__all__ = ["propose"]


def propose(
    drafters: Mapping[str, Drafter],
    inputs: RoundInputs,
    policy: Policy,
    noise: Noise,
    *,
    greedy: bool = False,
) -> Draft:
    """Each row's draft by the drafter that its request names. greedy: steppers draft their argmax."""
    parts: list[tuple[list[bool], Draft]] = []
    for name in dict.fromkeys(s.drafter for s, b in zip(inputs.sequences, inputs.budgets, strict=True) if b):
        assert name is not None
        drafter = drafters[name]
        mine = [s.drafter == name and b > 0 for s, b in zip(inputs.sequences, inputs.budgets, strict=True)]
        if (stepper := as_stepper(drafter)) is not None:
            parts.append((mine, _step_through(stepper, mine, inputs, policy, noise, greedy)))
        else:
            parts.append((mine, _guess(as_guesser(drafter), mine, inputs)))
    if not parts:
        return no_draft(len(inputs.sequences), inputs.device)
    return parts[0][1] if len(parts) == 1 else _merge(parts, inputs)


def _guess(drafter: Guesser, mine: list[bool], inputs: RoundInputs) -> Draft:
    guesses: list[list[int]] = [[] for _ in mine]
    rows = [row for row, is_mine in enumerate(mine) if is_mine]
    requests = [(inputs.sequences[row], inputs.budgets[row]) for row in rows]
    for row, (sequence, budget), guess in zip(rows, requests, drafter.propose(requests), strict=True):
        legal = budget
        if sequence.constraint is not None and guess:
            _, legal = masks_along(sequence.constraint, guess[:budget], inputs.vocabulary, inputs.device)
        guesses[row] = guess[:legal]
    lengths = [len(guess) for guess in guesses]
    tokens = upload(_padded(guesses), inputs.device, torch.int64).view(len(guesses), max(lengths))
    return Draft(tokens, upload(lengths, inputs.device), Law(ids=tokens), known=lengths)


def _step_through(
    drafter: Stepper, mine: list[bool], inputs: RoundInputs, policy: Policy, noise: Noise, greedy: bool
) -> Draft:
    """The one draft loop."""
    sequences, device = inputs.sequences, inputs.device
    budgets = [b if is_mine else 0 for b, is_mine in zip(inputs.budgets, mine, strict=True)]
    behind, starts = _catch_up(drafter, sequences, mine)
    stops = policy.stops(sequences, budgets, device)
    if (looper := as_looper(drafter)) is not None:
        at_once = _at_once(looper, behind, starts, budgets, inputs, policy, stops, noise, greedy)
        if at_once is not None:
            return at_once
    rows = range(len(sequences))
    width = max(budgets)
    coupled = [s.params.is_coupled for s in sequences]
    known = list(budgets)  # host: no draft is longer
    survival = torch.ones(len(sequences), device=device)
    sures: list[Tensor] = []  # of each step: [B, 1], -1 where the row took none
    active = list(mine)  # host: rows that still draft, as far as the host knows
    columns = torch.arange(width, device=device)
    wanted = columns < upload(budgets, device)[:, None]  # [B, K]
    nothing = torch.zeros(len(sequences), 0, dtype=torch.int64, device=device)
    drawn: list[Tensor] = []  # of each step: [B, 1],
    laws: list[Law] = []
    possible: list[Tensor] = []  # [B, 1]: there was a law to draw from, and the policy let it be drawn from,
    sound: list[Tensor] = []  # [B, 1]: and the logits were finite,
    going: list[Tensor] = []  # [B, 1]: and it goes on after this token
    walks = [_Walk(sequences[b]) if mine[b] and sequences[b].constraint is not None else None for b in rows]
    walking = any(walk is not None for walk in walks)

    counts = [len(own) for own in behind]
    padded = _padded(behind)
    tokens = upload(padded, device, torch.int64)
    for j in range(width):
        idle = [not a for a in active]
        at = None if tokens.shape[1] == 1 else upload([c - 1 for c in counts], device)
        logits = drafter.step(tokens, starts, counts, idle, at)[:, None]  # [B, 1, V]
        masks = _masks_of(walks, inputs) if walking else None
        past = inputs.past and inputs.past.along(torch.cat([nothing, *drawn], 1), ahead=j)
        q, finite = law_of(logits, inputs.table, masks, past, argmax=greedy)
        draws = policy.draws(sequences, j, q, logits) if policy.looks else None
        on = None
        if stops is not None:
            sure = inputs.table.operators.surest(logits[:, 0])
            survival = stops.survival(sure, survival)
            sures.append(sure.where(_still(wanted[:, j], going, j), -1.0)[:, None])
            draws, on = _both(draws, ~(survival < stops.keep[:, j])), survival >= stops.more[:, j]
        token = _draw(q, inputs, j, coupled, noise)  # [B, 1]
        drawn.append(token)
        laws.append(q)
        possible.append(finite if draws is None else finite & draws[:, None])
        # a mask may leave a drafter nothing; that is no fault of its logits
        sound.append(finite if masks is None else logits.amax(-1).isfinite())
        if j + 1 == width:
            break
        if policy.looks:
            on = _both(policy.go_on(sequences, j, q, logits), on)
        if on is None and draws is None and not walking:
            active = [a and b > j + 1 for a, b in zip(active, budgets, strict=True)]
        else:  # the one [B]-sized read that a draft step may cost
            on = possible[j][:, 0] if on is None else on & possible[j][:, 0]
            if walking:
                on = _advance(walks, token, on & upload(active, device) & wanted[:, j])
            going += [*possible[len(going) : j], on[:, None]]
            goes = on.tolist()
            known = [k if o or not a else min(k, j + 1) for a, o, k in zip(active, goes, known, strict=True)]
            active = [a and o and b > j + 1 for a, o, b in zip(active, goes, budgets, strict=True)]
        if not any(active):
            break
        starts = [start + count for start, count in zip(starts, counts, strict=True)]
        tokens, counts = token, [1] * len(sequences)
    for walk in walks:
        if walk is not None:
            walk.undo()
    wanted = wanted[:, : len(drawn)]
    if going:  # where nobody looked, what was drawn goes on
        going += possible[len(going) : len(drawn) - 1]
    reached = _reached(wanted, torch.cat(possible, 1), going)
    lengths = (reached & torch.cat(possible, 1)).sum(1)
    sick = (reached & ~torch.cat(sound, 1)).any(1)
    drafted = torch.cat(drawn, 1).where(columns[: len(drawn)] < lengths[:, None], 0)
    told = torch.cat(sures, 1) if sures else None
    return Draft(drafted, lengths, _joined(laws), drafter.resume(), sick, told, known)


def _both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Where both say yes, as one that says nothing does."""
    return other if one is None else one if other is None else one & other


def _still(wanted: Tensor, going: list[Tensor], steps: int) -> Tensor:
    """[B] bool: rows that came as far as this step, after so many."""
    return wanted & torch.cat(going, 1).all(1) if steps else wanted


def _reached(wanted: Tensor, possible: Tensor, going: list[Tensor]) -> Tensor:
    """[B, K]: the positions that each row's draft came to: wanted, and everything before was drawn and went
    on."""
    passed = possible[:, :-1]
    if going:
        passed = passed & torch.cat(going, 1)[:, : passed.shape[1]]
    before = torch.nn.functional.pad(passed, (1, 0), value=True)
    return wanted & before.cumprod(1).bool()


def _at_once(
    drafter: Looper,
    behind: list[list[int]],
    starts: list[int],
    most: list[int],
    inputs: RoundInputs,
    policy: Policy,
    stops: Stops | None,
    noise: Noise,
    greedy: bool,
) -> Draft | None:
    """The loop in one call of the drafter's, where nobody has to look at a token before the next is drawn."""
    table = inputs.table
    if policy.looks or inputs.past is not None or not table.plain:
        return None
    if any(s.constraint is not None for s, count in zip(inputs.sequences, most, strict=True) if count):
        return None
    drawing = None
    if not (greedy or table.all_greedy):
        if not noise.raced:
            return None
        drawing = table.drawing(_draft_keys(inputs)[:, : max(most)])
        if drawing is None:
            return None
    drafted = drafter.draft(behind, starts, most, drawing, stops)
    if drafted is None:
        return None
    finite, counts = drafted.finite.tolist(), drafted.counts
    lengths = [[*own[:count], False].index(False) for own, count in zip(finite, counts, strict=True)]
    sick, width = None, max(lengths)
    tokens = drafted.tokens[:, :width]
    if lengths != counts:
        columns = torch.arange(width)
        tokens = tokens.where(columns < upload(lengths, inputs.device)[:, None], 0)
        sick = upload([length < count for length, count in zip(lengths, counts, strict=True)], inputs.device)
    q = Law(ids=tokens) if drafted.probs is None else Law(drafted.probs[:, :width])
    return Draft(tokens, upload(lengths, inputs.device), q, drafter.resume(), sick, drafted.sure, lengths)


def _draft_keys(inputs: RoundInputs) -> Tensor:
    """[B, K + 1]: what each row draws its draft by. Coupled rows share the position's noise with the target;
    the others use their own."""
    coupled = [s.params.is_coupled for s in inputs.sequences]
    if all(coupled):
        return inputs.noise.bits(COUPLED)
    own = inputs.noise.bits(DRAFT)
    if not any(coupled):
        return own
    return torch.where(upload(coupled, own.device)[:, None], inputs.noise.bits(COUPLED), own)


def _catch_up(
    drafter: Stepper, sequences: list[Sequence], mine: list[bool]
) -> tuple[list[list[int]], list[int]]:
    """What each row has to read first, and from which position on: the tokens past the drafter's length, the
    pending one included."""
    behind: list[list[int]] = []
    starts: list[int] = []
    for sequence, is_mine in zip(sequences, mine, strict=True):
        start = drafter.length(sequence) if is_mine else 0
        if is_mine and len(sequence.tokens) - start > 2:  # after plain steps; 2 is full acceptance
            drafter.read(sequence, start, len(sequence.tokens) - 1)
            start = len(sequence.tokens) - 1
        behind.append(sequence.tokens[start:] if is_mine else [0])
        starts.append(start)
    return behind, starts


def _padded(rows: list[list[int]]) -> list[list[int]]:
    """All as long as the longest."""
    width = max(map(len, rows))
    return [row + [0] * (width - len(row)) for row in rows]


def _draw(q: Law, inputs: RoundInputs, column: int, coupled: list[bool], noise: Noise) -> Tensor:
    """[B, 1]. Coupled rows share the position's noise with the target; the others use their own."""

    def pick(weights: Tensor) -> Tensor:
        keys = inputs.noise.column(column)
        if all(coupled):
            return noise.pick(weights, keys, COUPLED)
        own = noise.pick(weights, keys, DRAFT)
        if not any(coupled):
            return own
        shared = upload(coupled, weights.device)[:, None]
        return torch.where(shared, noise.pick(weights, keys, COUPLED), own)

    return q.draw(pick)


def _joined(laws: list[Law]) -> Law:
    """Laws of successive positions, of one representation -> one law."""
    first = laws[0]
    probs = (
        None if first.probs is None else torch.cat([law.probs for law in laws if law.probs is not None], 1)
    )
    ids = None if first.ids is None else torch.cat([law.ids for law in laws if law.ids is not None], 1)
    return Law(probs, ids, first.certain)


def _merge(parts: list[tuple[list[bool], Draft]], inputs: RoundInputs) -> Draft:
    """Drafts of several drafters, each speaking for its own rows, padded to the longest."""
    device, rows = inputs.device, len(inputs.sequences)
    width = max(draft.tokens.shape[1] for _, draft in parts)
    dense = [draft.q.probs for _, draft in parts if draft.q.probs is not None]
    tokens = torch.zeros(rows, width, dtype=torch.int64, device=device)
    ids = torch.zeros_like(tokens)
    lengths = torch.zeros(rows, dtype=torch.int64, device=device)
    certain = torch.ones(rows, dtype=torch.bool, device=device)
    sick = torch.zeros(rows, dtype=torch.bool, device=device)
    stopping = [draft.sure.shape[1] for _, draft in parts if draft.sure is not None]
    sure = torch.full((rows, max(stopping)), -1.0, device=device) if stopping else None
    known = list(inputs.budgets)
    probs = torch.zeros(rows, width, inputs.vocabulary, device=device) if dense else None
    for mine, draft in parts:
        mask = upload(mine, device)
        if draft.sick is not None:
            sick = sick | draft.sick  # of its own rows alone
        if draft.known is not None:
            known = [own if is_mine else k for own, is_mine, k in zip(draft.known, mine, known, strict=True)]
        if draft.sure is not None:
            assert sure is not None
            k = draft.sure.shape[1]
            sure[:, :k] = draft.sure.where(mask[:, None], sure[:, :k])
        k = draft.tokens.shape[1]
        tokens[:, :k] = draft.tokens.where(mask[:, None], tokens[:, :k])
        lengths = draft.lengths.where(mask, lengths)
        q = draft.q
        if q.ids is not None:
            ids[:, :k] = q.ids.where(mask[:, None], ids[:, :k])
        if q.probs is not None:
            assert probs is not None
            probs[:, :k] = q.probs.where(mask[:, None, None], probs[:, :k])
            hot = torch.zeros_like(mask) if q.certain is None else q.certain
            certain = hot.where(mask, certain)
    # one verifying pass resumes at one depth; other rows' lower layers simply run again
    resume = next((draft.resume for _, draft in parts if draft.resume is not None), None)
    if resume is not None:
        short = width + 1 - resume.hidden.shape[1]
        resume = replace(resume, hidden=torch.nn.functional.pad(resume.hidden, (0, 0, 0, short)))
    if probs is None:
        return Draft(tokens, lengths, Law(ids=ids), resume, sick, sure, known)
    return Draft(tokens, lengths, Law(probs, ids, certain), resume, sick, sure, known)


class _Walk:
    """A constraint, advanced tentatively along a draft."""

    def __init__(self, sequence: Sequence) -> None:
        assert sequence.constraint is not None
        self.constraint = sequence.constraint
        self.base = self.constraint.length

    def advance(self, token: int) -> bool:
        """False where the token would be taken back: drafting past it is pointless."""
        expected = self.constraint.length + 1
        return self.constraint.advance(token) >= expected

    def undo(self) -> None:
        self.constraint.rewind(self.base)


def _masks_of(walks: list[_Walk | None], inputs: RoundInputs) -> Tensor:
    """[B, 1, V] bool at the walks' present states."""
    everything = torch.ones(inputs.vocabulary, dtype=torch.bool, device=inputs.device)
    found = [None if walk is None else walk.constraint.mask() for walk in walks]
    return torch.stack([everything if m is None else upload(m, inputs.device) for m in found])[:, None]


def _advance(walks: list[_Walk | None], token: Tensor, alive: Tensor) -> Tensor:
    """Constraints read the tokens just drawn; rows whose token would be taken back stop -> [B] bool."""
    read = torch.stack([token[:, 0], alive.long()], 1).tolist()
    on = [bool(a) and (walk is None or walk.advance(t)) for walk, (t, a) in zip(walks, read, strict=True)]
    return upload(on, alive.device)
