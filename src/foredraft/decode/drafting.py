"""Drafting: each row's draft of a round, and the one draft loop.

The loop transforms a stepper's logits, draws, keeps q and asks the policy, so that q is the law that was
drawn from and no drawn token is ever dropped. Where nobody has to look at a token before the next is drawn, a
drafter that can takes all steps in one call (`at_once`): the same draws by the same noise.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from foredraft.decode.at_once import at_once
from foredraft.decode.constraint import Walks, masks_along
from foredraft.decode.distribution import Distribution
from foredraft.decode.draft import (
    Draft,
    Drafter,
    Guesser,
    RoundInputs,
    Stepper,
    as_guesser,
    as_latecomer,
    as_looper,
    as_stepper,
    lengths_of,
    no_draft,
)
from foredraft.decode.merging import merged
from foredraft.decode.noise import DRAFT, Noise
from foredraft.decode.policy import Policy
from foredraft.decode.sampling import distribution_of
from foredraft.decode.sequence import Sequence
from foredraft.model.device import upload

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
    return parts[0][1] if len(parts) == 1 else merged(parts, inputs)


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
    tokens = upload(_padded(guesses), inputs.device, torch.int64)
    return Draft(tokens, lengths_of(tuple(lengths), inputs.device), Distribution(ids=tokens), known=lengths)


def _step_through(
    drafter: Stepper, mine: list[bool], inputs: RoundInputs, policy: Policy, noise: Noise, greedy: bool
) -> Draft:
    """The one draft loop."""
    sequences, device = inputs.sequences, inputs.device
    budgets = [b if is_mine else 0 for b, is_mine in zip(inputs.budgets, mine, strict=True)]
    behind, starts = _catch_up(drafter, sequences, mine)
    stops = policy.stops(sequences, budgets, device)
    if (looper := as_looper(drafter)) is not None:
        whole = at_once(looper, behind, starts, budgets, inputs, policy, stops, noise, greedy)
        if whole is not None:
            return whole
    width = max(budgets)
    known = list(budgets)  # host: no draft is longer
    survival = torch.ones(len(sequences), device=device)
    sures: list[Tensor] = []  # of each step: [B, 1], -1 where the row took none
    active = list(mine)  # host: rows that still draft, as far as the host knows
    columns = torch.arange(width, device=device)
    wanted = columns < upload(budgets, device)[:, None]  # [B, K]
    nothing = torch.zeros(len(sequences), 0, dtype=torch.int64, device=device)
    drawn: list[Tensor] = []  # of each step: [B, 1],
    laws: list[Distribution] = []
    possible: list[Tensor] = []  # [B, 1]: there was a law to draw from, and the policy let it be drawn from,
    sound: list[Tensor] = []  # [B, 1]: and the logits were finite,
    going: list[Tensor] = []  # [B, 1]: and it goes on after this token
    constraints = [s.constraint if is_mine else None for s, is_mine in zip(sequences, mine, strict=True)]
    constrained = any(constraint is not None for constraint in constraints)
    walks = Walks(constraints, inputs.vocabulary, device) if constrained else None

    counts = [len(own) for own in behind]
    padded = _padded(behind)
    tokens = upload(padded, device, torch.int64)
    for j in range(width):
        idle = [not a for a in active]
        at = None if tokens.shape[1] == 1 else upload([c - 1 for c in counts], device)
        logits = drafter.step(tokens, starts, counts, idle, at)[:, None]  # [B, 1, V]
        masks = None if walks is None else walks.masks()
        penalty_context = inputs.penalty_context and inputs.penalty_context.along(
            torch.cat([nothing, *drawn], 1), ahead=j
        )
        q, finite = distribution_of(logits, inputs.table, masks, penalty_context, argmax=greedy)
        draws = policy.draws(sequences, j, q, logits) if policy.looks else None
        on = None
        if stops is not None:
            sure = inputs.table.vocab_ops.max_prob(logits[:, 0])
            survival = stops.survival(sure, survival)
            sures.append(sure.where(_still(wanted[:, j], going, j), -1.0)[:, None])
            draws, on = _both(draws, ~(survival < stops.keep[:, j])), survival >= stops.more[:, j]
        token = _draw(q, inputs, j, noise)  # [B, 1]
        drawn.append(token)
        laws.append(q)
        possible.append(finite if draws is None else finite & draws[:, None])
        # a mask may leave a drafter nothing; that is no fault of its logits
        sound.append(finite if masks is None else logits.amax(-1).isfinite())
        if j + 1 == width:
            break
        if policy.looks:
            on = _both(policy.go_on(sequences, j, q, logits), on)
        if on is None and draws is None and walks is None:
            active = [a and b > j + 1 for a, b in zip(active, budgets, strict=True)]
        else:  # the one [B]-sized read that a draft step may cost
            on = possible[j][:, 0] if on is None else on & possible[j][:, 0]
            if walks is not None:
                on = walks.advance(token, on & upload(active, device) & wanted[:, j])
            going += [*possible[len(going) : j], on[:, None]]
            goes = on.tolist()
            known = [k if o or not a else min(k, j + 1) for a, o, k in zip(active, goes, known, strict=True)]
            active = [a and o and b > j + 1 for a, o, b in zip(active, goes, budgets, strict=True)]
        if not any(active):
            break
        starts = [start + count for start, count in zip(starts, counts, strict=True)]
        tokens, counts = token, [1] * len(sequences)
    if walks is not None:
        walks.undo()
    wanted = wanted[:, : len(drawn)]
    if going:  # where nobody looked, what was drawn goes on
        going += possible[len(going) : len(drawn) - 1]
    reached = _reached(wanted, torch.cat(possible, 1), going)
    lengths = (reached & torch.cat(possible, 1)).sum(1)
    drafter_nonfinite = (reached & ~torch.cat(sound, 1)).any(1)
    drafted = torch.cat(drawn, 1).where(columns[: len(drawn)] < lengths[:, None], 0)
    told = torch.cat(sures, 1) if sures else None
    return Draft(drafted, lengths, Distribution.along(laws), drafter.resume(), drafter_nonfinite, told, known)


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


def _catch_up(
    drafter: Stepper, sequences: list[Sequence], mine: list[bool]
) -> tuple[list[list[int]], list[int]]:
    """What each row has to read first, and from which position on: the tokens past the drafter's length, the
    pending one included."""
    late = as_latecomer(drafter)
    behind: list[list[int]] = []
    starts: list[int] = []
    for sequence, is_mine in zip(sequences, mine, strict=True):
        start = drafter.length(sequence) if is_mine else 0
        if is_mine and len(sequence.tokens) - start > 2:  # after plain steps; 2 is full acceptance
            drafter.read(sequence, start, len(sequence.tokens) - 1)
            start = len(sequence.tokens) - 1
        behind.append(sequence.tokens[start:] if is_mine else [0])
        starts.append(start - late.began(sequence) if late is not None and is_mine else start)
    return behind, starts


def _padded(rows: list[list[int]]) -> list[list[int]]:
    """All as long as the longest."""
    width = max(map(len, rows))
    return [row + [0] * (width - len(row)) for row in rows]


def _draw(q: Distribution, inputs: RoundInputs, column: int, noise: Noise) -> Tensor:
    """[B, 1]"""
    return q.draw(lambda weights: noise.pick(weights, inputs.noise.column(column), DRAFT))
