"""The acceptance rules, pure functions from (draft, p, noise) to what is kept; and the accept step of a
round.

`speculative` (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318) keeps a drafted
token x if u q(x) < p(x); the first rejected one is replaced by a draw from norm(max(p - q, 0)). Siblings in
the token tree are tested first (recursive rejection without replacement: Jeon et al. 2024, arXiv 2402.14160;
Yang et al. 2024, arXiv 2401.06706). `block` (Sun et al. 2024, arXiv 2403.10444) judges a draft as a whole.

`coupled`: the target's token at each position is y = argmax_v(log p(v) + g(position, v)) with Gumbel noise
keyed by the position; the longest prefix where the draft equals y is kept, then y. So the text is a function
of the seed.

`bild` (Kim et al. 2023, arXiv 2302.07863) is *lossy*: a drafted token stands unless its surprise -log p(x)
exceeds a bound. At temperature 0 the surprise is that of temperature 1.

Greedy decoding and deterministic drafters are one-hot distributions, not other rules. A GPU replays the step
as a graph, because its operators take longer to launch than to run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import torch
from torch import Tensor

from foredraft.decode.distribution import Distribution
from foredraft.decode.noise import (
    ACCEPT,
    BLOCK,
    BLOCK_NEXT,
    COUPLED,
    RESIDUAL,
    ROLLBACK,
    SIBLING,
    SIBLING_COIN,
    DrawKeys,
    Noise,
    draw_from,
)
from foredraft.decode.round_draft import AcceptResult, Draft, Siblings
from foredraft.decode.sampling import PenaltyContext, SamplingTable, distribution_of
from foredraft.decode.vocab_ops import leading
from foredraft.model.memory import upload

if TYPE_CHECKING:
    from foredraft.model.runner.graphs import Graphs


def block(draft: Draft, p: Distribution, keys: DrawKeys | None, noise: Noise) -> AcceptResult:
    """Accept by block verification (Sun et al. 2024, arXiv 2403.10444).

        k_0 = 1,   k_i = min(1, k_{i-1} p(x_i) / q(x_i)),   m_i = sum_v max(k_i p(v) - q(v), 0) after x_i
        h_i = m_i / (m_i + 1 - k_i) before the end of the draft, h_i = k_i at its end

    The longest beginning x_1 ... x_i is kept whose own coin is below h_i. So at least these are kept with
    probability k_i, whatever ends the draft; `speculative` multiplies min(1, p / q) in its place. The next
    token is drawn from max(k_i p - q, 0), or from p after the whole draft.
    """
    assert keys is not None and p.probs is not None
    k = draft.tokens.shape[1]
    survival = _survival(draft.q.at(draft.tokens), p.at(draft.tokens))  # [B, K + 1]
    accepted = draft.lengths
    if k:
        missing = _missing(survival, p, draft)  # [B, K - 1]
        own = survival[:, 1:]
        ends = torch.arange(1, k + 1, device=own.device) >= draft.lengths[:, None]
        above = torch.nn.functional.pad(missing, (0, 1)).where(~ends, own)
        below = torch.nn.functional.pad(missing, (0, 1)) + (1 - own)
        kept = noise.coin(keys, BLOCK)[:, :k] * below.where(~ends, 1.0) < above  # u < h = above / below
        accepted = _longest(kept, draft.lengths)
    correction = p.position(accepted)
    if k:
        rejected = accepted < draft.lengths
        weight = survival.gather(1, accepted[:, None]).where(rejected[:, None], 1.0)
        correction = correction.scaled(weight)
        correction = correction.minus(draft.q.position(accepted.clamp_max(k - 1)), rejected)
    return AcceptResult(accepted, draw_from(correction, keys.columns(accepted), noise, BLOCK_NEXT)[:, 0])


def _survival(q: Tensor, p: Tensor) -> Tensor:
    """Return k_0 ... k_K from the probabilities of the drafted tokens [B, K] -> [B, K + 1] float64."""
    ratio = torch.where(q > 0, p.double() / q, 0.0)  # only padding has q = 0
    along = [torch.ones(len(q), dtype=torch.float64, device=q.device)]
    for column in ratio.unbind(1):
        along.append((along[-1] * column).clamp_max(1.0))
    return torch.stack(along, 1)


def _missing(survival: Tensor, p: Distribution, draft: Draft) -> Tensor:
    """Return m_1 ... m_{K-1}, [B, K - 1] float64."""
    k = draft.tokens.shape[1]
    own = survival[:, 1:k]
    # A one-hot q takes the drafted token's part away, and nothing else; alone and beside rows of dense q.
    by_token = own - own * p.at(draft.tokens)[:, 1:].double()
    if draft.q.probs is None:
        return by_token
    assert p.probs is not None
    vocabulary = p.probs.shape[2]
    wanted, given = p.dense(vocabulary)[:, 1:k], draft.q.dense(vocabulary)[:, 1:k]
    missing = p.vocab_ops.excess(wanted, given, own.to(torch.float32))
    return missing if draft.q.one_hot is None else torch.where(draft.q.one_hot[:, None], by_token, missing)


def _longest(kept: Tensor, lengths: Tensor) -> Tensor:
    """Return the length of the longest kept beginning of each row, [B]; kept [B, K]; padding never is."""
    counts = torch.arange(1, kept.shape[1] + 1, device=kept.device)
    return (counts * (kept & (counts <= lengths[:, None]))).amax(1)


@dataclass(frozen=True, slots=True)
class SurpriseLimit:
    """The surprise that rule `bild` allows a drafted token."""

    judge: Distribution  # distributions that measure how surprising a token is, at the K + 1 positions
    bound: Tensor  # [B] float32, nats of surprise that a token may have; NaN in rows of other rules
    rows: Tensor  # [B] bool, rows of this rule
    everywhere: bool  # whether all rows are

    @classmethod
    def of(
        cls,
        table: SamplingTable,
        p: Distribution,
        logits: Tensor,
        masks: Tensor | None,
        penalty_context: PenaltyContext | None,
    ) -> SurpriseLimit | None:
        """Return the limit of the rows with the lossy rule, from p of all rows; None without such rows."""
        if table.bound is None:
            return None
        judge = p if table.judge is None else distribution_of(logits, table.judge, masks, penalty_context)[0]
        return cls(judge, table.bound, ~table.bound.isnan(), table.bounded)


Rule: TypeAlias = Callable[
    [Draft, Distribution, DrawKeys | None, Noise, list[str], SurpriseLimit | None], AcceptResult
]


def speculative(draft: Draft, p: Distribution, keys: DrawKeys | None, noise: Noise) -> AcceptResult:
    """Accept by rejection sampling."""
    if p.ids is not None and p.all_one_hot:  # u q < 1 always and u q < 0 never: no coin can decide
        return AcceptResult(*p.vocab_ops.match_prefix(draft.tokens, p.ids, draft.lengths))
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
            own = keys.columns(accepted)
            correction, sibling = _take_turns(draft.siblings, accepted, token, correction, q, own, noise)
    next_token = draw_from(correction, keys and keys.columns(accepted), noise, RESIDUAL)[:, 0]
    return AcceptResult(accepted, next_token if sibling is None else sibling.where(sibling >= 0, next_token))


def _take_turns(
    siblings: Siblings,  # of the draft. None lies at the place after its last token
    places: Tensor,  # [B] drafted tokens that were accepted
    drawn: Tensor,  # [B] the token that was drafted next, and rejected; any token where all were accepted
    p: Distribution,  # the residual after it, with T = 1
    q: Distribution,  # that it was drawn from
    keys: DrawKeys,
    noise: Noise,
) -> tuple[Distribution, Tensor]:
    """Return the residual left to draw from, and the sibling that is kept [B], -1 for none.

    Sibling x_j was drawn from q_j: q without the tokens drawn before it. It is kept if u q_j(x_j) < p_j(x_j),
    where p_1 is p. Else p_{j+1} = norm(max(p_j - q_j, 0)), and the next sibling has its turn.
    """
    kept = torch.full_like(drawn, -1)
    for choice in range(siblings.most):
        x = siblings.at(places, choice)
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


def coupled(draft: Draft, p: Distribution, keys: DrawKeys | None, noise: Noise) -> AcceptResult:
    """Accept the longest prefix that the target draws itself by the same noise; q is not read."""
    y = draw_from(p, keys, noise, COUPLED)  # [B, K + 1]
    return AcceptResult(*p.vocab_ops.match_prefix(draft.tokens, y, draft.lengths))


def bild(
    draft: Draft, p: Distribution, keys: DrawKeys | None, noise: Noise, limit: SurpriseLimit
) -> AcceptResult:
    """Accept tokens up to a bound of surprise; a token that the judge rules out never stands. Lossy."""
    stands = _stands(limit.judge.at(draft.tokens), p.at(draft.tokens), limit.bound[:, None])
    accepted = leading(stands, draft.lengths)
    next_token = draw_from(p.position(accepted), keys and keys.columns(accepted), noise, ROLLBACK)[:, 0]
    return AcceptResult(accepted, next_token)


def _stands(judged: Tensor, p: Tensor, bound: Tensor) -> Tensor:
    """Return where a token stands: its surprise is within the bound, or the target is certain of it."""
    return (judged > 0) & (-judged.log() <= bound) | (p == 1)


def accept(
    draft: Draft,
    p: Distribution,
    keys: DrawKeys | None,
    noise: Noise,
    rules: list[str],  # [B], the lossless rule of each row
    limit: SurpriseLimit | None = None,
) -> AcceptResult:
    """Apply each row's own rule. At temperature 0 the lossless rules agree, and no rule reads the noise."""
    if limit is not None:
        lossy = bild(draft, p, keys, noise, limit)
        if limit.everywhere:
            return lossy
        return _either(limit.rows, lossy, accept(draft, p, keys, noise, rules))
    if p.all_one_hot:
        return speculative(draft, p, keys, noise)
    known = {"speculative": speculative, "coupled": coupled, "block": block}
    first, *others = [name for name in known if name in rules]
    verdict = known[first](draft, p, keys, noise)
    for name in others:
        rows = upload([rule == name for rule in rules], draft.tokens.device)
        verdict = _either(rows, known[name](draft, p, keys, noise), verdict)
    return verdict


def _either(mask: Tensor, one: AcceptResult, other: AcceptResult) -> AcceptResult:
    """Return one verdict in rows of the mask [B], the other elsewhere."""
    return AcceptResult(
        torch.where(mask, one.accepted, other.accepted), torch.where(mask, one.next_token, other.next_token)
    )


MOST_BYTES: Final = 2**23  # of the largest tensor of what is captured
MOST_GRAPHS: Final = 16  # each keeps a few such tensors; together at most `graphs.KEPT_BYTES`

In = TypeVar("In")
Out = TypeVar("Out")


class GraphCache:
    """The graphs of one engine."""

    def __init__(self, graphs: Graphs | None = None) -> None:
        self.graphs = graphs  # captures functions; None runs all as they are

    @classmethod
    def on(cls, device: torch.device) -> GraphCache:
        if device.type != "cuda":
            return ONCE
        from foredraft.model.runner.graphs import CudaGraphCapturer, Graphs

        return cls(Graphs(CudaGraphCapturer(device), MOST_GRAPHS))

    def run(self, compute: Callable[[In], Out], inputs: In, largest: Tensor, noise: Noise) -> Out:
        """Return compute(inputs), by replaying a graph where that saves launches."""
        if self.graphs is None or largest.nbytes > MOST_BYTES or not noise.uses_gumbel_argmax:
            return compute(inputs)
        return self.graphs.run(compute, inputs, owner=self, key=compute)


ONCE: Final = GraphCache()  # runs all functions as they are


@dataclass(frozen=True, slots=True)
class VerifyInputs:
    """All that the accept step of a round depends on."""

    logits: Tensor  # the target's own, [B, K + 1 + S, V] float32; the last S of the siblings
    draft: Draft  # the tokens, their lengths and q, and S siblings
    table: SamplingTable  # sampling parameters of the rows
    masks: Tensor | None  # of the constraints, [B, K + 1, V] bool
    penalties: PenaltyContext | None  # what the rows said, along the draft
    keys: DrawKeys | None  # noise keys of K + 1 positions or more; None where every row is greedy
    rules: list[str]  # [B], the lossless rule of each row
    accept: Rule  # the acceptance rules
    noise: Noise  # draws by the keys

    @property
    def transforms(self) -> bool:
        """Whether p takes more than an argmax, which is a few operators alone."""
        table = self.table
        return not table.all_greedy or table.edits_logits or self.masks is not None


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What the accept step gives: the verdict, and what it was made from."""

    p: Distribution  # the target's distributions at the K + 1 positions
    finite: Tensor  # the logits were finite, [B, K + 1 + S] bool
    limit: SurpriseLimit | None  # surprise that the lossy rule allows; None without it
    verdict: AcceptResult  # what the acceptance rules decided
    p_after: Distribution | None = None  # after a sibling, at one position; None without siblings


def decide(inputs: VerifyInputs) -> VerifyResult:
    """Make p from the target's logits, and let the acceptance rules judge the draft by it."""
    draft, table, masks, penalties = inputs.draft, inputs.table, inputs.masks, inputs.penalties
    logits = inputs.logits[:, : draft.tokens.shape[1] + 1]
    p, finite = distribution_of(logits, table, masks, penalties)
    limit = SurpriseLimit.of(table, p, logits, masks, penalties)
    keys = inputs.keys and inputs.keys.first(logits.shape[1])
    verdict = inputs.accept(draft, p, keys, inputs.noise, inputs.rules, limit)
    result = VerifyResult(p, finite, limit, verdict)
    return result if draft.siblings is None else _go_on(inputs, draft.siblings, result)


def _go_on(inputs: VerifyInputs, siblings: Siblings, result: VerifyResult) -> VerifyResult:
    """Draw the token after each sibling that the rule wrote."""
    draft, table, k = inputs.draft, inputs.table, inputs.draft.tokens.shape[1]
    written = siblings.written(result.verdict)
    verdict = replace(result.verdict, sibling=written)
    rows = torch.arange(len(draft.tokens), device=draft.tokens.device)
    own = inputs.logits[rows, verdict.last_column(k)][:, None]  # [B, 1, V]
    penalties = inputs.penalties
    if penalties is not None:  # rows without a sibling may have accepted all K
        place = verdict.accepted.clamp_max(k - 1)
        tokens = draft.tokens.scatter(1, place[:, None], verdict.next_token[:, None])
        penalties = penalties.along(tokens, place + 1)
    masks = None if siblings.masks is None else siblings.masks[rows, written.clamp_min(0)][:, None]
    p, _ = distribution_of(own, table, masks, penalties)
    keys = inputs.keys and inputs.keys.columns((verdict.accepted + 1).clamp_max(k))
    drawn = draw_from(p, keys, inputs.noise, SIBLING)
    if "coupled" in inputs.rules and not p.all_one_hot:
        own = upload([rule == "coupled" for rule in inputs.rules], drawn.device)[:, None]
        drawn = draw_from(p, keys, inputs.noise, COUPLED).where(own, drawn)
    verdict = replace(verdict, after_sibling=drawn[:, 0])
    finite = torch.cat([result.finite, table.vocab_ops.argmax(inputs.logits[:, k + 1 :])[1]], 1)
    return replace(result, finite=finite, verdict=verdict, p_after=p)
