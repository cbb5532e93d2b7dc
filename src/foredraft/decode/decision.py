"""The decision of a round: from the target's logits to what is kept, as one function of tensors.

The engine calls it through `Replays`, so it reads nothing but its argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foredraft.decode.accept import Rule, SurpriseLimit
from foredraft.decode.distribution import Distribution
from foredraft.decode.noise import DrawKeys, Noise
from foredraft.decode.penalty_context import PenaltyContext
from foredraft.decode.round_draft import Draft
from foredraft.decode.sampling import SamplingTable, distribution_of
from foredraft.decode.verdict import Verdict

__all__ = ["Decision", "Evidence", "decide"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that the decision of a round depends on.

    Attributes:
        logits: The target's own, [B, K + 1, V] float32.
        draft: The tokens, their lengths and q.
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
        finite: The logits were finite, [B, K + 1] bool.
        limit: Surprise that the lossy rule allows; None without it.
        verdict: What the acceptance rules decided.
    """

    p: Distribution
    finite: Tensor
    limit: SurpriseLimit | None
    verdict: Verdict


def decide(evidence: Evidence) -> Decision:
    """Make p from the target's logits, and let the acceptance rules judge the draft by it."""
    logits, table, masks, penalties = evidence.logits, evidence.table, evidence.masks, evidence.penalties
    p, finite = distribution_of(logits, table, masks, penalties)
    limit = SurpriseLimit.of(table, p, logits, masks, penalties)
    keys = evidence.keys and evidence.keys.first(logits.shape[1])
    verdict = evidence.accept(
        evidence.draft, p, keys, evidence.noise, evidence.coupled, limit, evidence.block
    )
    return Decision(p, finite, limit, verdict)
