"""One draft for a batch whose rows were drafted for by several drafters."""

from __future__ import annotations

from dataclasses import replace

import torch

from foredraft.decode.distribution import Distribution
from foredraft.decode.draft import Draft, RoundInputs
from foredraft.model.device import upload

__all__ = ["merged"]


def merged(parts: list[tuple[list[bool], Draft]], inputs: RoundInputs) -> Draft:
    """Drafts of several drafters, each speaking for its own rows, padded to the longest."""
    device, rows = inputs.device, len(inputs.sequences)
    width = max(draft.tokens.shape[1] for _, draft in parts)
    dense = [draft.q.probs for _, draft in parts if draft.q.probs is not None]
    tokens = torch.zeros(rows, width, dtype=torch.int64, device=device)
    ids = torch.zeros_like(tokens)
    lengths = torch.zeros(rows, dtype=torch.int64, device=device)
    one_hot = torch.ones(rows, dtype=torch.bool, device=device)
    drafter_nonfinite = torch.zeros(rows, dtype=torch.bool, device=device)
    stopping = [draft.sure.shape[1] for _, draft in parts if draft.sure is not None]
    sure = torch.full((rows, max(stopping)), -1.0, device=device) if stopping else None
    known = list(inputs.budgets)
    probs = torch.zeros(rows, width, inputs.vocabulary, device=device) if dense else None
    for mine, draft in parts:
        mask = upload(mine, device)
        if draft.drafter_nonfinite is not None:
            drafter_nonfinite = drafter_nonfinite | draft.drafter_nonfinite  # of its own rows alone
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
            hot = torch.zeros_like(mask) if q.one_hot is None else q.one_hot
            one_hot = hot.where(mask, one_hot)
    # one verifying pass resumes at one depth; other rows' lower layers simply run again
    resume = next((draft.resume for _, draft in parts if draft.resume is not None), None)
    if resume is not None:
        short = width + 1 - resume.hidden.shape[1]
        resume = replace(resume, hidden=torch.nn.functional.pad(resume.hidden, (0, 0, 0, short)))
    if probs is None:
        return Draft(tokens, lengths, Distribution(ids=ids), resume, drafter_nonfinite, sure, known)
    return Draft(tokens, lengths, Distribution(probs, ids, one_hot), resume, drafter_nonfinite, sure, known)
