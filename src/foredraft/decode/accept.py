"""The acceptance rules: pure functions from (draft, p, noise) to what is kept.

`speculative` (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318): a drafted
token x is kept if u q(x) < p(x); the first rejected one is replaced by a draw from the residual
norm(max(p - q, 0)); if all are kept, one more is drawn from p. The kept tokens have exactly p's distribution.
Siblings of the rejected token are tested by turns before a token is drawn (recursive rejection without
replacement: Jeon et al. 2024, arXiv 2402.14160; Yang et al. 2024, arXiv 2401.06706).

`coupled`: the target's token at each position is y = argmax_v(log p(v) + g(position, v)) with Gumbel
noise keyed by the position; the longest prefix where the draft equals y is kept, then y itself. The
text is a function of the seed alone: the draft decides only how many tokens come per round. Matches
with probability at least (1 - TV) / (1 + TV) when the drafter draws with the same noise.

`bild` (Kim et al. 2023, "Speculative Decoding with Big Little Decoder", arXiv 2302.07863) is *lossy*: a
drafted token stands unless it surprises the target, -log p(x), by more than a bound; at the first that does
the draft is cut, and the target's own token follows, drawn from p. The output does not have p's distribution.
At temperature 0 the surprise is that of temperature 1, and the one token of a one-hot p always stands.

`block` judges a draft as a whole, and keeps at least as much of it: `block_verification`.

Greedy decoding and deterministic drafters are one-hot distributions, not other rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from foredraft.decode.block_verification import block
from foredraft.decode.distribution import Distribution
from foredraft.decode.noise import ACCEPT, COUPLED, RESIDUAL, ROLLBACK, SIBLING_COIN, DrawKeys, Noise
from foredraft.decode.penalty_context import PenaltyContext
from foredraft.decode.round_draft import Draft
from foredraft.decode.sampling import SamplingTable, distribution_of
from foredraft.decode.siblings import Siblings
from foredraft.decode.verdict import Verdict
from foredraft.decode.vocab_ops import leading
from foredraft.model.transfers import upload

__all__ = ["Rule", "SurpriseLimit", "Turns", "Verdict", "accept", "bild", "coupled", "speculative"]


@dataclass(frozen=True, slots=True)
class SurpriseLimit:
    """The surprise that rule `bild` allows a drafted token.

    Attributes:
        judge: Distributions that measure how surprising a token is, at the K + 1 positions.
        bound: [B] float32, nats of surprise that a token may have; NaN in rows of other rules.
        rows: [B] bool, rows of this rule.
        everywhere: Whether all rows are.
    """

    judge: Distribution
    bound: Tensor
    rows: Tensor
    everywhere: bool

    @classmethod
    def of(
        cls,
        table: SamplingTable,
        p: Distribution,
        logits: Tensor,
        masks: Tensor | None,
        penalty_context: PenaltyContext | None,
    ) -> SurpriseLimit | None:
        """Return the limit of the rows with the lossy rule; None without such rows.

        p: distributions of all rows.
        """
        if table.bound is None:
            return None
        judge = p if table.judge is None else distribution_of(logits, table.judge, masks, penalty_context)[0]
        return cls(judge, table.bound, ~table.bound.isnan(), table.bounded)


Rule: TypeAlias = Callable[
    [Draft, Distribution, DrawKeys | None, Noise, list[bool], SurpriseLimit | None, list[bool]], Verdict
]


def speculative(draft: Draft, p: Distribution, keys: DrawKeys | None, noise: Noise) -> Verdict:
    """Accept by rejection sampling.

    Args:
        draft: K tokens of each row.
        p: The target's distributions at the K + 1 positions.
        keys: Noise keys of these positions; None where p is one-hot.
        noise: Draws by the keys.
    """
    if p.ids is not None and p.all_one_hot:  # u q < 1 always and u q < 0 never: no coin can decide
        return Verdict(*p.vocab_ops.match_prefix(draft.tokens, p.ids, draft.lengths))
    x = draft.tokens  # [B, K]
    k = x.shape[1]
    accepted = draft.lengths
    if k:
        assert keys is not None
        accepted = leading(_keeps(noise.coin(keys, ACCEPT)[:, :k], draft.q.at(x), p.at(x)), draft.lengths)
    correction = p.position(accepted)
    sibling = None
    if k:
        rejected, q = accepted < draft.lengths, draft.q.position(accepted.clamp_max(k - 1))
        correction = correction.minus(q, rejected)
        if draft.siblings is not None:
            assert keys is not None
            token = x.gather(1, accepted.clamp_max(k - 1)[:, None])[:, 0]
            turns = Turns(draft.siblings, accepted, token)
            correction, sibling = turns.take(correction, q, keys.columns(accepted), noise)

    def pick(weights: Tensor) -> Tensor:
        assert keys is not None
        return noise.pick(weights, keys.columns(accepted), RESIDUAL)

    next_token = correction.draw(pick)[:, 0]
    return Verdict(accepted, next_token if sibling is None else sibling.where(sibling >= 0, next_token))


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of the siblings of rejected tokens; all [B].

    Sibling x_j was drawn from q_j: q without the tokens that were drawn before it. It is kept if
    u q_j(x_j) < p_j(x_j), where p_1 is the residual after the rejected token. Else p_{j+1} is the residual
    norm(max(p_j - q_j, 0)), and the next sibling has its turn.

    Attributes:
        siblings: Of the draft. None lies at the place after its last token.
        places: Drafted tokens that were accepted.
        token: The token that was drafted next, and rejected; any token where all were accepted.
    """

    siblings: Siblings
    places: Tensor
    token: Tensor

    def take(
        self, p: Distribution, q: Distribution, keys: DrawKeys, noise: Noise
    ) -> tuple[Distribution, Tensor]:
        """Return what is left to draw a token from, and the sibling that is kept [B], -1 where none is.

        p: the residual; q: of the drafter. Both at the place of the rejected token alone, as the keys are.
        """
        drawn, kept = self.token, torch.full_like(self.token, -1)
        for choice in range(self.siblings.most):
            x = self.siblings.at(self.places, choice)
            has_turn = (x >= 0) & (kept < 0)
            x = x.clamp_min(0)
            p, q = p.normalised(has_turn), q.without(drawn, x, has_turn)
            chance, own = (each.at(x[:, None]).where(has_turn[:, None], 0.0) for each in (q, p))
            keeps = _keeps(noise.coin(keys, SIBLING_COIN + choice), chance, own)[:, 0]
            kept = x.where(keeps & has_turn, kept)
            p = p.minus(q, has_turn & ~keeps)
            drawn = x
        return p, kept


def _keeps(u: Tensor, q: Tensor, p: Tensor) -> Tensor:
    """Return where a coin u keeps a drafted token x: u q(x) < p(x)."""
    return u * q < p


def coupled(draft: Draft, p: Distribution, keys: DrawKeys | None, noise: Noise) -> Verdict:
    """Accept the longest prefix that the target draws itself by the same noise; q is not read."""

    def pick(weights: Tensor) -> Tensor:
        assert keys is not None
        return noise.pick(weights, keys, COUPLED)

    y = p.draw(pick)  # [B, K + 1]
    return Verdict(*p.vocab_ops.match_prefix(draft.tokens, y, draft.lengths))


def bild(draft: Draft, p: Distribution, keys: DrawKeys | None, noise: Noise, limit: SurpriseLimit) -> Verdict:
    """Accept tokens up to a bound of surprise; a token that the judge rules out never stands. Lossy."""
    stands = _stands(limit.judge.at(draft.tokens), p.at(draft.tokens), limit.bound[:, None])
    accepted = leading(stands, draft.lengths)

    def pick(weights: Tensor) -> Tensor:
        assert keys is not None
        return noise.pick(weights, keys.columns(accepted), ROLLBACK)

    return Verdict(accepted, p.position(accepted).draw(pick)[:, 0])


def _stands(judged: Tensor, p: Tensor, bound: Tensor) -> Tensor:
    """Return where a token stands: its surprise is within the bound, or the target is certain of it."""
    return (judged > 0) & (-judged.log() <= bound) | (p == 1)


def accept(
    draft: Draft,
    p: Distribution,
    keys: DrawKeys | None,
    noise: Noise,
    is_coupled: list[bool],
    limit: SurpriseLimit | None = None,
    is_block: list[bool] | None = None,
) -> Verdict:
    """Apply each row's own rule. At temperature 0 the lossless rules agree, and no rule reads the noise."""
    if limit is not None:
        lossy = bild(draft, p, keys, noise, limit)
        if limit.everywhere:
            return lossy
        return _either(limit.rows, lossy, accept(draft, p, keys, noise, is_coupled, None, is_block))
    is_block = is_block or [False] * len(is_coupled)
    if p.all_one_hot or not (any(is_coupled) or any(is_block)):
        return speculative(draft, p, keys, noise)
    others = [not (one or other) for one, other in zip(is_coupled, is_block, strict=True)]
    rules = ((others, speculative), (is_coupled, coupled), (is_block, block))
    (_, rule), *more = [(rows, rule) for rows, rule in rules if any(rows)]
    verdict = rule(draft, p, keys, noise)
    for rows, rule in more:
        verdict = _either(upload(rows, draft.tokens.device), rule(draft, p, keys, noise), verdict)
    return verdict


def _either(mask: Tensor, one: Verdict, other: Verdict) -> Verdict:
    """Return one verdict in rows of the mask [B], the other elsewhere."""
    return Verdict(
        torch.where(mask, one.accepted, other.accepted), torch.where(mask, one.next_token, other.next_token)
    )
