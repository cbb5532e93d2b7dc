"""Planted defects of the sampling transforms, of the counts behind penalties and of constraints (form: `mutants`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foredraft.constraints.banned import BanList, Move
from foredraft.constraints.combined import AfterThinking, ThinkingPlace, ThinkingTokens
from foredraft.constraints.phrases import ROOT, PhraseAutomaton, PhraseState
from foredraft.constraints.token_masks import TokenMasks, TokenTable
from foredraft.decode import sampling
from foredraft.decode.sampling import PenaltyContext, SamplingTable
from foredraft.decode.scheduler import Scheduler
from foredraft.decode.sequence import Sequence, TokenCounts
from foredraft.decode.vocab_ops import TorchVocabOps, total
from foredraft.drafters.draft_model import DraftModel
from tests.exactness import round_checks as checks
from tests.exactness import test_constraints as constraints
from tests.support.mutation import Edit, Mutation, caught_by, defect
from tests.support.mutations import Function, argument, around, before, changed, instead, top_k_ties_dropped
from tests.unit import test_decode_sampling as unit


def definition() -> None:
    for params in unit.PARAMS:
        unit.test_a_distribution_is_the_definition(params)


@around
def min_p_before_temperature(probs: Function, ops: TorchVocabOps, x: Tensor, by: SamplingTable) -> Any:
    if by.min_p is not None:
        small = x - x.amax(-1, keepdim=True) < by.min_p.log()[:, None, None]
        x, by = x.masked_fill(small, -math.inf), replace(by, min_p=None)
    return probs(ops, x, by)


@around
def typical_p_before_min_p(transformed: Function, logits: Tensor, table: SamplingTable) -> Any:
    if table.min_p is None:
        return transformed(logits, table)
    probs, finite = transformed(logits, replace(table, min_p=None))
    kept = probs.where(probs >= probs.amax(-1, keepdim=True) * table.min_p[:, None, None], 0.0)
    return kept / total(kept), finite


@around
def not_normalised_after_a_cut(probs: Function, ops: TorchVocabOps, x: Tensor, by: SamplingTable) -> Any:
    cut, finite = probs(ops, x, by)
    whole, _ = probs(ops, x, replace(by, cut=None))
    return whole.where(cut > 0, 0.0), finite


@around
def top_k_after_temperature(probs: Function, ops: TorchVocabOps, x: Tensor, by: SamplingTable) -> Any:
    """No defect: dividing by the temperature changes no order."""
    if by.top_k is None:
        return probs(ops, x, by)
    scaled = (x - x.amax(-1, keepdim=True)) / by.temperature[:, None, None]
    k = by.top_k[:, None, None].expand(-1, x.shape[1], 1)
    least = scaled.sort(-1, descending=True).values.gather(-1, (k - 1).clamp(0, x.shape[-1] - 1))
    return probs(ops, x.masked_fill((k > 0) & (scaled < least), -math.inf), replace(by, top_k=None))


def dropped_from_typical(drop: Callable[[Tensor], Tensor]) -> Mutation:
    """Drop some of the tokens that typical-p kept: `drop` gets those farthest from the entropy, [B, T, V] bool."""

    @around
    def mutation(typical: Function, probs: Tensor, mass: Tensor) -> Tensor:
        distribution: Tensor = typical(probs, mass)
        surprise = -probs.log()
        entropy = total((probs * surprise).where(probs > 0, 0.0))
        distance = (surprise - entropy).abs().where(distribution > 0, -math.inf)
        kept = distribution.where(~drop(distance == distance.amax(-1, keepdim=True)), 0.0)
        return torch.where(mass < 1, kept / total(kept), distribution)

    return mutation


@around
def bias_times_temperature(edited: Function, logits: Tensor, table: SamplingTable, *rest: Any) -> Any:
    if table.bias is not None:
        values = table.bias.values * table.temperature[:, None]
        table = replace(table, bias=replace(table.bias, values=values))
    return edited(logits, table, *rest)


def penalised(formula: Callable[..., Tensor]) -> Mutation:
    """Penalise by another formula of (logits, counts, seen, repetition, presence, frequency)."""

    @around
    def mutation(edited: Function, logits: Tensor, table: SamplingTable, masks: Any, context: Any) -> Tensor:
        before: Tensor = edited(logits, replace(table, penalties=None), masks, context)
        if table.penalties is None:
            return before
        ids, counts, seen = context.token_counts(logits.shape[1])
        at = ids[:, None].expand(-1, logits.shape[1], -1)
        x = formula(before.gather(2, at), counts, seen, *table.penalties[..., None, None])
        return before.scatter(2, at, x)

    return mutation


def repeated(x: Tensor, seen: Tensor, repetition: Tensor) -> Tensor:
    return torch.where(seen, torch.where(x < 0, x * repetition, x / repetition), x)


# x: logits; n: counts; r, p, f: the penalties of repetition, presence and frequency
presence_over_the_prompt = penalised(lambda x, n, seen, r, p, f: repeated(x, seen, r) - p * seen - f * n)
presence_per_occurrence = penalised(lambda x, n, seen, r, p, f: repeated(x, seen, r) - p * n - f * n)
repetition_of_output = penalised(lambda x, n, seen, r, p, f: repeated(x, n > 0, r) - p * (n > 0) - f * n)
negatives_divided = penalised(lambda x, n, seen, r, p, f: torch.where(seen, x / r, x) - p * (n > 0) - f * n)

drafts_not_counted = around(
    lambda along, context, drafted, ahead=0: along(context, drafted if ahead else drafted[:, :0], ahead)
)


def a_column_early(found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    ids, *counted = found
    return ids, *(torch.cat([x[:, 1:], x[:, -1:]], 1) for x in counted)


@around
def earlier_counts_of_drafted_tokens_lost(token_counts: Function, context: Any, columns: int) -> Any:
    ids, counts, seen = token_counts(context, columns)
    _, drafted_only, _ = token_counts(replace(context, counts=context.counts * 0), columns)
    size = context.ids.shape[1]
    return ids, torch.cat([counts[..., :size], drafted_only[..., size:]], -1), seen


@around
def padding_counted(of: Function, cls: type, sequences: Any, device: Any) -> Any:
    context = of(cls, sequences, device)
    if context is None or context.ids is None:
        return context
    for row, sequence in enumerate(sequences):
        if sequence.token_counts is not None:
            for x in (context.ids, context.counts, context.prompted):
                x[row, len(sequence.token_counts) :] = 1
    return context


never_counted_down = around(lambda count, own, token, times: count(own, token, times) if times > 0 else None)

EDITED, TYPICAL, PROBS, COUNTS = (
    sampling._edited, sampling._typical, TorchVocabOps.probs, PenaltyContext.token_counts
)  # fmt: skip

TRANSFORMS = {
    definition: [
        ("bias after temperature", EDITED, bias_times_temperature),
        ("min-p before temperature", PROBS, min_p_before_temperature),
        ("typical-p before min-p", sampling._transformed, typical_p_before_min_p),
        ("typical-p of a distribution that is not normalised after a cut", PROBS, not_normalised_after_a_cut),
        ("the token that reaches the typical mass dropped", TYPICAL, dropped_from_typical(lambda far: far)),
    ],
    unit.test_ties_at_a_cut_are_kept: [
        ("a tie at the top-k cut dropped", PROBS, top_k_ties_dropped),
        ("a tie at typical-p dropped", TYPICAL, dropped_from_typical(lambda far: far & (far.cumsum(-1) > 1))),
    ],
    checks.penalised_drafts: [
        ("presence over the prompt too", EDITED, presence_over_the_prompt),
        ("repetition over the output alone", EDITED, repetition_of_output),
        ("penalties not rolled along the draft", PenaltyContext.along, drafts_not_counted),
    ],
    checks.late_ends: [
        ("an end barred one token too long", PenaltyContext.said, changed(lambda said: said - 1)),
        ("an end barred by the first column", PenaltyContext.said, changed(lambda x: x[:, :1].expand_as(x))),
    ],
    unit.test_what_was_said_and_drafted_counts: [
        ("presence per occurrence", EDITED, presence_per_occurrence),
        ("a negative logit divided by the repetition penalty", EDITED, negatives_divided),
        ("a drafted token counted a column early", COUNTS, changed(a_column_early)),
        ("earlier counts of a drafted token lost", COUNTS, earlier_counts_of_drafted_tokens_lost),
    ],
    unit.test_a_past_is_each_rows_own: [("padding of a context counted", PenaltyContext.of, padding_counted)],
    checks.drafts_before_bans: [("tokens taken back still counted", TokenCounts.count, never_counted_down)],
}

rolled_back_texts = partial(
    constraints.test_the_text_is_that_of_plain_decoding, "overlapping tokens", "rollback", {"temperature": 0}
)
grammar_behind_thinking = partial(
    constraints.test_thinking_and_content_have_the_distribution_of_the_definition, "begun by the prompt"
)
rewound_content = partial(
    constraints.test_a_rewound_constraint_is_that_of_the_text_that_is_left,
    "the content may begin as the marker does", 0,
)  # fmt: skip
repeating_marker = checks.in_each_case(
    constraints.test_a_rewound_constraint_is_that_of_the_text_that_is_left,
    *(("a marker that begins again within itself", seed) for seed in range(8)),
)


@around
def begun_marker_forgotten(
    thought: Function, tokens: ThinkingTokens, read: int, text: bytes
) -> ThinkingPlace | None:
    goes_on = text.startswith(tokens._closes[read:][: len(text)])
    return thought(tokens, read if goes_on else 0, text)


marker_cut_short = argument(3, lambda closes: closes[:-1])


@around
def ends_allowed(mask: Function, tokens: ThinkingTokens, place: Any) -> Any:
    found = mask(tokens, place).clone()
    found[tokens._ends] = True
    return found


@instead
def content_left_as_it_is(constraint: AfterThinking, length: int) -> None:
    del constraint.tokens[length:]
    del constraint._steps[length + 1 :]
    constraint._follow()


@instead
def without_failure_links(automaton: PhraseAutomaton, node: int, symbol: str) -> int:
    return automaton._next[node].get(symbol) or automaton._next[ROOT].get(symbol, ROOT)


@around
def complete_at_the_end_alone(
    read: Function, banned: BanList, state: PhraseState, token: int, last: bool = False
) -> Move:
    move: Move = read(banned, state, token, last)
    return move if banned.phrases.shortest[move.state.node] else move._replace(found=None)


@around
def cache_kept_past_a_rollback(rewind: Function, drafter: DraftModel, sequence: Sequence) -> None:
    before = drafter.cache.lengths[sequence.row]
    rewind(drafter, sequence)
    if sequence.attempts:
        drafter.cache.lengths[sequence.row] = max(before, drafter.cache.lengths[sequence.row])


def released_when_a_row_leaves() -> tuple[Edit, ...]:
    released: set[int] = set()

    def remember(scheduler: Scheduler, *_: Any) -> None:
        released.update(other.id for other in scheduler.rows.sequences)

    @around
    def mutate_settled(settled: Function, sequence: Sequence) -> int:
        if sequence.id in released:
            released.discard(sequence.id)
            return len(sequence.new_ids)
        return settled(sequence)

    return (Scheduler.leave, before(remember)), (Sequence.settled, mutate_settled)


@around
def masked_after_the_cuts(
    sound: Function, logits: Any, table: Any, masks: Any = None, *rest: Any, **more: Any
) -> Any:
    p, finite = sound(logits, table, None, *rest, **more)
    if masks is None or p.probs is None:
        return sound(logits, table, masks, *rest, **more)
    allowed = p.probs * masks
    p.probs[:] = allowed / allowed.sum(-1, keepdim=True).clamp_min(1e-30)
    return p, finite


CONSTRAINTS = {
    partial(constraints.check_law, "from the prompt on", "mask", ["frequency"]): [
        ("no failure links, by mask", PhraseAutomaton.step, without_failure_links)
    ],
    partial(constraints.check_law, "within a token", "mask", ["frequency"]): [
        ("a match in a token missed, by mask", PhraseAutomaton.completes, lambda _: lambda *args: False)
    ],
    partial(constraints.check_law, "within a token", "mask", ["top-p"]): [
        ("mask applied after top-p", sampling.distribution_of, masked_after_the_cuts)
    ],
    partial(constraints.check_law, "from the prompt on", "rollback", ["frequency"]): [
        ("no failure links, by rollback", PhraseAutomaton.step, without_failure_links)
    ],
    partial(constraints.check_law, "within a token", "rollback", ["frequency"]): [
        ("a match in a token missed, by rollback", BanList._move, complete_at_the_end_alone)
    ],
    rolled_back_texts: [
        ("a rollback forgets the draft's cache", DraftModel.rewind, cache_kept_past_a_rollback)
    ],
    constraints.test_what_is_settled_stays_while_the_batch_changes: [
        ("held text released on a batch change", released_when_a_row_leaves())
    ],
    partial(constraints.check_law, "an open character", "mask", ["frequency"]): [
        ("only banned text completes a character", TokenMasks._can_complete, lambda _: lambda *args: True)
    ],
    partial(constraints.check_law, "no text but the end", "mask", ["frequency"]): [
        ("tokens without text fill a budget", TokenTable.without_idle, lambda _: lambda table, mask: mask)
    ],
    grammar_behind_thinking: [
        ("the last of the closing marker counted as content", ThinkingTokens.__init__, marker_cut_short),
        ("a schema begun within thinking", AfterThinking.mask, lambda _: lambda own: own._content.mask()),
        ("a text that ends within its thinking", ThinkingTokens._made, ends_allowed),
    ],
    rewound_content: [("content not rewound", AfterThinking.rewind, content_left_as_it_is)],
    repeating_marker: [("a marker begun again is missed", ThinkingTokens._thought, begun_marker_forgotten)],
}

MUTANTS = caught_by(TRANSFORMS, CONSTRAINTS)
HARMLESS = defect("top-k after temperature", PROBS, top_k_after_temperature, definition)
