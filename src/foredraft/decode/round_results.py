"""Round results: everything the host learns from a round, fetched in one device synchronisation."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.decode.accept import VerifyInputs, VerifyResult
from foredraft.decode.policy import Signal, target_confidence
from foredraft.decode.round_draft import Draft
from foredraft.decode.scores import Integers, Score, score, scores_in
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Round, RoundTrace
from foredraft.model.memory import download, upload


@dataclass(frozen=True, slots=True)
class RowResult:
    accepted: int  # drafted tokens that are kept
    next_token: int  # the correction, the bonus or a plain step's token
    drafted: int  # length of the draft
    target_nonfinite: bool  # the target's logits of a real column were not finite
    drafter_nonfinite: bool  # the drafter's logits were not finite
    tokens: list[int]  # [K] drafted tokens, padded
    scores: list[Score]  # of the accepted tokens and the next one, where the request asks for them
    # if traced: probabilities of the K tokens by the target's distributions, which judged the draft, those by
    # the drafter's, and that of the next token
    chances: list[float]
    target_confidence: float | None = None  # in the next token; None unless the policy wants it
    undrawn: int = 0  # draft steps that proposed no token
    dead_end: bool = False  # the constraint allows no token after the accepted ones: `next_token` is none
    legal: list[int] | None = None  # [K + 1] tokens that the constraint allowed, if there is one and traced
    sibling: int | None = None  # the sibling of the draft that `next_token` is; None where it is none
    after_sibling: int = -1  # the token after it

    @property
    def new_tokens(self) -> list[int]:
        accepted = self.tokens[: self.accepted]
        return accepted if self.dead_end else [*accepted, self.next_token]

    def trace(self, sequence: Sequence, outcome: Round, length: int, budget: int) -> RoundTrace:
        """Return the trace of the round; length: tokens of the sequence when it began."""
        count = 0 if self.target_nonfinite else outcome.drafted  # past the end of the text nothing was judged
        return RoundTrace(
            start=length - len(sequence.prompt),
            drafter=outcome.drafter,
            budget=budget,
            draft=self.tokens[: outcome.drafted],
            p=self.chances[:count],
            q=self.chances[len(self.tokens) : len(self.tokens) + count],
            accepted=outcome.accepted,
            next_token=self.next_token,
            next_p=0.0 if self.target_nonfinite else self.chances[-1],
            emitted=outcome.emitted,
            discarded=self.target_nonfinite,
            rollback=sequence.params.bound,
            legal=None if self.legal is None else self.legal[: count + 1],
            after_sibling=self.after_sibling if outcome.sibling else None,
        )


def fetch_results(
    sequences: Seq[Sequence],
    draft: Draft,
    given: VerifyInputs,  # what the accept step read
    found: VerifyResult,  # and what it gave
    dead_ends: Seq[int | None],
    signal: Signal | None = None,
) -> list[RowResult]:
    """Read the device once and return every row's result."""
    rows = [row for row, s in enumerate(sequences) if s.params.logprobs is not None]
    top = max((sequences[row].params.logprobs or 0 for row in rows), default=0)
    wanted = _wanted(draft, given, found, signal)
    if rows:
        wanted["scores"] = _scores(draft, given.logits, found, rows, top)
    if any(s.traced for s in sequences):
        accepted = found.verdict.accepted[:, None]
        judge = found.p if found.limit is None else found.limit.judge
        pair = [judge.at(draft.tokens), draft.q.at(draft.tokens)]
        wanted["chances"] = torch.cat([*pair, found.p.at(_new(draft, found)).gather(1, accepted)], 1)
        if given.masks is not None:
            wanted["legal"] = given.masks.sum(-1)
    fetched = dict(zip(wanted, download(list(wanted.values())), strict=True))
    scores = dict(zip(rows, fetched.pop("scores").numpy(), strict=True)) if rows else {}
    columns = {name: tensor.tolist() for name, tensor in fetched.items()}
    return [
        _row_result(
            {name: column[row] for name, column in columns.items()}, sequence, scores.get(row), top, dead_end
        )
        for row, (sequence, dead_end) in enumerate(zip(sequences, dead_ends, strict=True))
    ]


def _wanted(
    draft: Draft, given: VerifyInputs, found: VerifyResult, signal: Signal | None
) -> dict[str, Tensor]:
    """Return the tensors of every round to fetch, by name, in the order of travel."""
    verdict = found.verdict
    wanted = {
        "accepted": verdict.accepted, "next_token": verdict.next_token, "drafted": draft.lengths,
        "tokens": draft.tokens, "finite": found.finite, "drafter_nonfinite": draft.nonfinite,
        "undrawn": draft.undrawn, "sibling": verdict.sibling, "after_sibling": verdict.after_sibling,
    }  # fmt: skip
    if signal is not None:
        every = torch.arange(len(draft.tokens), device=given.logits.device)
        own = given.logits[every, verdict.last_column(draft.tokens.shape[1])]  # [B, V]
        wanted["target_confidence"] = target_confidence(own, verdict.last_token, signal)
    return {name: tensor for name, tensor in wanted.items() if tensor is not None}


def _new(draft: Draft, found: VerifyResult) -> Tensor:
    """Return the decided tokens in their columns [B, K + 1]; nothing reads past them."""
    accepted, next_token = found.verdict.accepted[:, None], found.verdict.next_token[:, None]
    return torch.nn.functional.pad(draft.tokens, (0, 1)).scatter(1, accepted, next_token)


def _scores(draft: Draft, logits: Tensor, found: VerifyResult, rows: list[int], top: int) -> Tensor:
    index, k = upload(rows, logits.device), draft.tokens.shape[1]
    scores = score(logits[index, : k + 1], found.p.rows(index), _new(draft, found)[index], top)
    if found.p_after is None:
        return scores
    own = logits[index, found.verdict.last_column(k)[index]][:, None]
    after = score(own, found.p_after.rows(index), found.verdict.last_token[index][:, None], top)
    return torch.cat([scores, after], 1)


def _row_result(
    values: dict[str, Any], sequence: Sequence, figures: Integers | None, top: int, dead_end: int | None
) -> RowResult:
    """Return one row's result; values: what was fetched for the row, by name."""
    accepted, drafted, tokens = values["accepted"], values["drafted"], values["tokens"]
    scores: list[Score] = []
    sibling = values["sibling"] if values.get("sibling", -1) >= 0 else None
    if figures is not None:
        new = [*tokens[:accepted], values["next_token"]]
        if sibling is not None:
            new.append(values["after_sibling"])
            figures = np.concatenate([figures[: accepted + 1], figures[-1:]])
        scores = scores_in(figures, new, top, sequence.params.logprobs or 0)
    return RowResult(
        accepted=accepted,
        next_token=values["next_token"],
        drafted=drafted,
        target_nonfinite=not all(values["finite"][: drafted + 1] + values["finite"][len(tokens) + 1 :]),
        drafter_nonfinite=bool(values.get("drafter_nonfinite", False)),
        tokens=tokens,
        scores=scores,
        chances=values["chances"] if sequence.traced else [],
        target_confidence=values.get("target_confidence"),
        undrawn=values.get("undrawn", 0),
        dead_end=dead_end == accepted,
        sibling=sibling,
        after_sibling=values.get("after_sibling", -1),
        legal=values.get("legal") if sequence.traced and sequence.constraint is not None else None,
    )
