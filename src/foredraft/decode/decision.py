"""The decision of a round: from the target's logits to what is kept, as one function of tensors.

The engine calls it through `Replays`, so it reads nothing but its argument.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.decode.accept import Rule, SurpriseLimit
from foredraft.decode.distribution import Distribution
from foredraft.decode.noise import COUPLED, SIBLING, DrawKeys, Noise
from foredraft.decode.penalty_context import PenaltyContext
from foredraft.decode.round_draft import Draft
from foredraft.decode.sampling import SamplingTable, distribution_of
from foredraft.decode.siblings import Siblings
from foredraft.decode.verdict import Verdict
from foredraft.model.transfers import upload

__all__ = ["Decision", "Evidence", "decide"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that the decision of a round depends on.

    Attributes:
        logits: The target's own, [B, K + 1 + S, V] float32; the last S of the siblings.
        draft: The tokens, their lengths and q, and S siblings.
        table: Sampling parameters of the rows.
        masks: Of the constraints, [B, K + 1, V] bool.
        penalties: What the rows said, along the draft.
        keys: Noise keys of K + 1 positions or more; None where every row is greedy.
        coupled: [B], rows under the coupled acceptance rule.
        block: [B], rows whose drafts are judged as a whole.
        accept: The acceptance rules.
        noise: Draws by the keys.
    """

    logits: Tensor
    draft: Draft
    table: SamplingTable
    masks: Tensor | None
    penalties: PenaltyContext | None
    keys: DrawKeys | None
    coupled: list[bool]
    block: list[bool]
    accept: Rule
    noise: Noise

    @property
    def transforms(self) -> bool:
        """Whether p takes more than an argmax, which is a few operators alone."""
        table = self.table
        return not table.all_greedy or table.edits_logits or self.masks is not None


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict, and what it was made from.

    Attributes:
        p: The target's distributions at the K + 1 positions.
        finite: The logits were finite, [B, K + 1 + S] bool.
        limit: Surprise that the lossy rule allows; None without it.
        verdict: What the acceptance rules decided.
        p_after: The target's distributions after a sibling, at one position; None without siblings.
    """

    p: Distribution
    finite: Tensor
    limit: SurpriseLimit | None
    verdict: Verdict
    p_after: Distribution | None = None


def decide(evidence: Evidence) -> Decision:
    """Make p from the target's logits, and let the acceptance rules judge the draft by it."""
    draft, table, masks, penalties = evidence.draft, evidence.table, evidence.masks, evidence.penalties
    logits = evidence.logits[:, : draft.tokens.shape[1] + 1]
    p, finite = distribution_of(logits, table, masks, penalties)
    limit = SurpriseLimit.of(table, p, logits, masks, penalties)
    keys = evidence.keys and evidence.keys.first(logits.shape[1])
    verdict = evidence.accept(draft, p, keys, evidence.noise, evidence.coupled, limit, evidence.block)
    decision = Decision(p, finite, limit, verdict)
    return decision if draft.siblings is None else _go_on(evidence, draft.siblings, decision)


def _go_on(evidence: Evidence, siblings: Siblings, decision: Decision) -> Decision:
    """Draw the token after each sibling that the rule wrote."""
    draft, table, k = evidence.draft, evidence.table, evidence.draft.tokens.shape[1]
    written = siblings.written(decision.verdict)
    verdict = replace(decision.verdict, sibling=written)
    rows = torch.arange(len(draft.tokens), device=draft.tokens.device)
    own = evidence.logits[rows, verdict.last_column(k)][:, None]  # [B, 1, V]
    penalties = evidence.penalties
    if penalties is not None:  # rows without a sibling may have accepted all K
        place = verdict.accepted.clamp_max(k - 1)
        tokens = draft.tokens.scatter(1, place[:, None], verdict.next_token[:, None])
        penalties = penalties.along(tokens, place + 1)
    masks = None if siblings.masks is None else siblings.masks[rows, written.clamp_min(0)][:, None]
    p, _ = distribution_of(own, table, masks, penalties)
    place = (verdict.accepted + 1).clamp_max(k)

    def pick(weights: Tensor) -> Tensor:
        assert evidence.keys is not None
        keys = evidence.keys.columns(place)
        drawn = evidence.noise.pick(weights, keys, SIBLING)
        if not any(evidence.coupled):
            return drawn
        coupled = upload(evidence.coupled, weights.device)[:, None]
        return evidence.noise.pick(weights, keys, COUPLED).where(coupled, drawn)

    verdict = replace(verdict, after_sibling=p.draw(pick)[:, 0])
    finite = torch.cat([decision.finite, table.vocab_ops.argmax(evidence.logits[:, k + 1 :])[1]], 1)
    return replace(decision, finite=finite, verdict=verdict, p_after=p)
