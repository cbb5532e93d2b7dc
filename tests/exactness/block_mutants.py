"""Planted defects of block verification, each with a check that must fail under it.

A table entry reads: name, seam, spoiler, check. A spoiler takes the sound function and returns the defective one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foredraft.decode import accept, block_verification, noise
from foredraft.decode.distribution import Distribution
from foredraft.decode.policy import Fixed
from foredraft.decode.round_draft import Draft
from foredraft.decode.vocab_ops import leading
from tests.exactness import test_block as tests
from tests.exactness import test_enumeration as enumeration
from tests.support.parts import StopUnsure
from tests.support.planting import defect
from tests.support.spoilers import during

Function = Callable[..., Any]

# --- checks: the tests themselves, in their quickest form ---------------------------------------------


def block_distribution() -> None:
    cases = [tests.block_case("as it is", "draft-model", new=4), tests.block_case("top-k", "script", new=4)]
    enumeration.enumerate_and_compare(cases, lambda: Fixed(3))


def block_distribution_of_ragged_drafts() -> None:
    cases = [tests.block_case("as it is", d) for d in ("draft-model", "script")]
    enumeration.enumerate_and_compare(cases, lambda: StopUnsure(2))


def block_beside_other_rules() -> None:
    tests.test_rows_of_every_rule_share_a_batch()


def rules_of_rows() -> None:
    tests.test_each_row_has_its_own_rule()


def kept_by_block() -> None:
    tests.test_it_keeps_what_the_paper_says(3)


# --- spoilers -------------------------------------------------------------------------------------------


def capped_at_the_end(_: Function) -> Function:
    def survival(q: Tensor, p: Tensor) -> Tensor:
        ratio = torch.where(q > 0, p.double() / q, 0.0)
        return torch.nn.functional.pad(ratio.cumprod(1).clamp_max(1.0), (1, 0), value=1.0)

    return survival


def capped_token_by_token(survival: Function) -> Function:
    return lambda q, p: survival(q, torch.minimum(p, q))


def survival_before_the_end(_: Function) -> Function:
    """h = k before the end of the draft, too."""
    return lambda survival, p, draft: survival[:, 1 : draft.tokens.shape[1]]


def q_of_the_position_before(missing: Function) -> Function:
    def spoilt(survival: Tensor, p: Distribution, draft: Draft) -> Tensor:
        probs = None if draft.q.probs is None else draft.q.probs.roll(1, 1)
        ids = None if draft.q.ids is None else draft.q.ids.roll(1, 1)
        q = Distribution(probs, ids, draft.q.one_hot)
        found: Tensor = missing(survival, p, Draft(draft.tokens, draft.lengths, q))
        return found

    return spoilt


def whole_p(missing: Function) -> Function:
    """The part that q gives is not taken away by k p, but by p."""
    return lambda survival, p, draft: missing(torch.ones_like(survival), p, draft)


def shortest(longest: Function) -> Function:
    return leading


def padding_counts(longest: Function) -> Function:
    return lambda kept, lengths: longest(kept, torch.full_like(lengths, kept.shape[1])).minimum(lengths)


CHECKS = (
    block_distribution,
    block_distribution_of_ragged_drafts,
    block_beside_other_rules,
    rules_of_rows,
    kept_by_block,
)
MUTANTS = (
    defect("survival capped at the end", block_verification._survival, capped_at_the_end, block_distribution),
    defect(
        "survival capped token by token", block_verification._survival, capped_token_by_token, kept_by_block
    ),
    defect(
        "kept by k before the end", block_verification._missing, survival_before_the_end, block_distribution
    ),
    defect(
        "q of the position before", block_verification._missing, q_of_the_position_before, block_distribution
    ),
    defect("p without its weight", block_verification._missing, whole_p, block_distribution),
    defect(
        "residual of p, not of k p", Distribution.scaled, lambda _: lambda p, weight: p, block_distribution
    ),
    defect("residual missing", Distribution.minus, lambda _: lambda p, q, where: p, block_distribution),
    defect("the shortest beginning kept", block_verification._longest, shortest, kept_by_block),
    defect(
        "coins of padding", block_verification._longest, padding_counts, block_distribution_of_ragged_drafts
    ),
    defect(
        "coin and next token share noise",
        block_verification.block,
        during(block_verification, "BLOCK_NEXT", noise.BLOCK),
        block_distribution,
    ),
    defect(
        "coins of another rule",
        block_verification.block,
        during(block_verification, "BLOCK", noise.ACCEPT),
        block_beside_other_rules,
    ),
    defect(
        "rows of other rules judged as a whole",
        accept._either,
        lambda either: lambda mask, one, other: either(torch.ones_like(mask), one, other),
        rules_of_rows,
    ),
)
