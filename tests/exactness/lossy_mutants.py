"""Planted defects of the lossy rule and of what names it, each with a check that must fail under it."""

from __future__ import annotations

from foredraft.decode import accept, drafting, params, sampling, vocab_ops
from foredraft.decode.policy import Fallback
from tests.exactness import test_enumeration as enumeration
from tests.exactness import test_lossy as lossy
from tests.support.planting import Mutant
from tests.unit import test_decode_accept as accept_unit

# --- checks: the tests themselves, in their quickest form ---------------------------------------------


def lossy_law() -> None:
    lossy.assert_defined([lossy.case("as it is", 1.1), lossy.case("top-k", 2.5)], 2)


def lossy_greedy_law() -> None:
    lossy.assert_defined([lossy.case("greedy", bound, prompt=(1, 1)) for bound in (0.4, 2.5)], 2)


def rules_side_by_side() -> None:
    lossy.test_rows_of_every_rule_share_a_batch()


def fallback_law() -> None:
    lossy.assert_defined([lossy.case("cold", 1.1), lossy.case("greedy", 2.5, prompt=(1,))], 3, threshold=0.55)


def strict_fallback_law() -> None:
    cases = [enumeration.case("as it is", "draft-model")]
    enumeration.enumerate_and_compare(cases, lambda: Fallback(2, threshold=0.55))


def by_hand() -> None:
    accept_unit.test_a_drafted_token_stands_up_to_the_bound()


def greedy_by_hand() -> None:
    accept_unit.test_greedy_rows_are_judged_by_another_law_than_they_are_drawn_from()


# --- the defects ------------------------------------------------------------------------------------

STANDS = "(chance > 0) & (-chance.log() <= rollback.bound[:, None])"

MUTANTS = [
    Mutant(
        "the bound the wrong way round", ((accept.bild, "log() <= rollback", "log() >= rollback"),), lossy_law
    ),
    Mutant(
        "the bound the wrong way round, by hand",
        ((accept.bild, "log() <= rollback", "log() >= rollback"),),
        by_hand,
    ),
    Mutant(
        "what is exactly as surprising as the bound is cut",
        ((accept.bild, "log() <= rollback", "log() < rollback"),),
        by_hand,
    ),
    Mutant(
        "what the target is one_hot of is cut",
        ((accept.bild, "stands | (p.at(draft.tokens) == 1)", "stands"),),
        greedy_by_hand,
    ),
    Mutant(
        "the draft's own law consulted",
        (
            (
                accept.bild,
                STANDS,
                "(chance > 0) & (-(chance / draft.q.at(draft.tokens)).log() <= rollback.bound[:, None])",
            ),
        ),
        lossy_law,
    ),
    Mutant(
        "the token that is cut is kept",
        (
            (
                accept.bild,
                "leading(stands | (p.at(draft.tokens) == 1), draft.lengths)",
                "(leading(stands, draft.lengths) + 1).minimum(draft.lengths)",
            ),
        ),
        lossy_law,
    ),
    Mutant(
        "the token after a cut drawn from a residual",
        (
            (
                accept.bild,
                "p.position(accepted).draw(pick)",
                "(p.position(accepted) if not draft.tokens.shape[1] else p.position(accepted).minus("
                "draft.q.position(accepted.clamp_max(draft.tokens.shape[1] - 1)), accepted < draft.lengths)).draw(pick)",
            ),
        ),
        lossy_law,
    ),
    Mutant(
        "the token after a cut drawn from the draft's place before it",
        ((accept.bild, "p.position(accepted)", "p.position((accepted - 1).clamp_min(0))"),),
        lossy_law,
    ),
    Mutant("tokens after a cut stand", ((vocab_ops.leading, ".cumprod(1).sum(1)", ".sum(1)"),), lossy_law),
    Mutant(
        "padding stands",
        ((vocab_ops.leading, "torch.minimum(keep.cumprod(1).sum(1), lengths)", "keep.cumprod(1).sum(1)"),),
        by_hand,
    ),
    Mutant(
        "what the target rules out stands under an endless bound",
        ((accept.bild, "(chance > 0) & ", ""),),
        by_hand,
    ),
    Mutant(
        "judged by certainty at temperature 0",
        ((params.SamplingParams.judged.fget, "or not self.greedy", "or True"),),
        lossy_greedy_law,
    ),
    Mutant(
        "judged before the transforms",
        (
            (
                accept.Rollback.of.__func__,
                "p if table.judge is None",
                "Distribution(logits.softmax(-1)) if table.judge is None",
            ),
        ),
        lossy_law,
    ),
    Mutant(
        "rows of other rules judged, too",
        ((accept.accept, "if rollback.everywhere:", "if True:"),),
        rules_side_by_side,
    ),
    Mutant(
        "every row by one bound",
        (
            (
                accept.Rollback.of.__func__,
                "cls(judge, table.bound,",
                "cls(judge, table.bound.nan_to_num().amax().expand_as(table.bound),",
            ),
        ),
        rules_side_by_side,
    ),
    Mutant(
        "a token drafted where the drafter is unsure",
        ((drafting._step_through, "finite & draws[:, None]", "finite"),),
        fallback_law,
    ),
    Mutant(
        "unsure by the law after the transforms",
        (
            (
                drafting._step_through,
                "policy.draws(sequences, j, q, logits)",
                "policy.draws(sequences, j, q, q.dense(3).log())",
            ),
        ),
        fallback_law,
    ),
    Mutant(
        "handed over by what was drawn",
        ((drafting._step_through, "finite & draws[:, None]", "finite & (draws[:, None] | (token == 0))"),),
        strict_fallback_law,
    ),
    Mutant(
        "no row is of the lossy rule",
        ((sampling.SamplingTable.of.__func__, "if all(bound is None for bound in bounds)", "if True"),),
        lossy_law,
    ),
]

CHECKS = list(dict.fromkeys(mutant.check for mutant in MUTANTS))
