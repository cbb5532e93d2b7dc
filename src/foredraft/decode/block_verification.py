"""The acceptance rule `block`: a draft is judged as a whole, not token by token.

Block verification (Sun et al. 2024, "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444).
A beginning x_1 ... x_i of the draft deserves to survive with probability

    k_0 = 1,   k_i = min(1, k_{i-1} p(x_i) / q(x_i)),

where `speculative` multiplies min(1, p / q). So tokens that q underrates make up for later ones that it
overrates, and no draft keeps fewer tokens in expectation. Where a longer beginning is kept, so is this one:
that makes up all of k_i but

    m_i = sum_v max(k_i p(v) - q(v), 0), by the distributions after x_i.

The longest beginning is kept whose own coin u is below h_i:

    h_i = m_i / (m_i + 1 - k_i) before the end of the draft, h_i = k_i at its end.

The next token is drawn from max(k_i p - q, 0), or from p after the whole draft. Given x_1 ... x_i, at least
these are kept with probability k_i, whatever the length of the draft. So a policy may end it by what was
drawn so far, as under `speculative`. With one token, or a one-hot q, both rules keep equally many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.decode.distribution import Distribution
from foredraft.decode.noise import BLOCK, BLOCK_NEXT, DrawKeys, Noise
from foredraft.decode.round_draft import Draft
from foredraft.decode.verdict import Verdict

__all__ = ["block"]


def block(draft: Draft, p: Distribution, keys: DrawKeys | None, noise: Noise) -> Verdict:
    """Accept by block verification.

    Args:
        draft: K tokens of each row.
        p: The target's distributions at the K + 1 positions, dense in some row.
        keys: Noise keys of these positions.
        noise: Draws by the keys.
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
        kept = _keeps(noise.coin(keys, BLOCK)[:, :k], below.where(~ends, 1.0), above)
        accepted = _longest(kept, draft.lengths)
    correction = p.position(accepted)
    if k:
        rejected = accepted < draft.lengths
        weight = survival.gather(1, accepted[:, None]).where(rejected[:, None], 1.0)
        correction = correction.scaled(weight)
        correction = correction.minus(draft.q.position(accepted.clamp_max(k - 1)), rejected)

    def pick(weights: Tensor) -> Tensor:
        return noise.pick(weights, keys.columns(accepted), BLOCK_NEXT)

    return Verdict(accepted, correction.draw(pick)[:, 0])


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


def _keeps(u: Tensor, below: Tensor, above: Tensor) -> Tensor:
    """Return where a coin u is below h = above / below."""
    return u * below < above


def _longest(kept: Tensor, lengths: Tensor) -> Tensor:
    """Return the length of the longest kept beginning of each row, [B]; kept [B, K]; padding never is."""
    counts = torch.arange(1, kept.shape[1] + 1, device=kept.device)
    return (counts * (kept & (counts <= lengths[:, None]))).amax(1)
