"""Planted defects of the sampling transforms and of what they count."""

from __future__ import annotations

from foredraft.decode import penalty_context, sampling, sequence
from foredraft.decode.engine import Engine
from foredraft.decode.policy import Fixed
from foredraft.decode.vocab_ops import TorchVocabOps
from tests.exactness import test_enumeration as enumeration
from tests.support.planting import Mutant
from tests.unit import test_decode_sampling as unit


def definition() -> None:
    for params in unit.PARAMS:
        unit.test_a_law_is_the_definition(params)


def definition_with_a_past() -> None:
    unit.test_what_was_said_and_drafted_counts()


def ties() -> None:
    unit.test_ties_at_a_cut_are_kept()


def bits() -> None:
    unit.test_a_past_is_each_rows_own()


def pairs() -> None:
    enumeration.test_every_pair_of_transforms("draft-model")


def bans() -> None:
    cases = [enumeration.case(t, "script", "late ban") for t in ("frequency", "presence")]
    enumeration.enumerate_and_compare(cases, lambda: Fixed(2))


EDITED, TYPICAL = sampling._edited, sampling._typical
LEAST = "least = least.maximum(probs.amax(-1) * by.min_p[:, None])"
UNSCALED = "((x - top[..., None]).softmax(-1))"
EARLY = f"own = {UNSCALED}\n        probs = probs.where(own >= own.amax(-1, keepdim=True) * by.min_p[:, None, None], 0.0)"

MUTANTS = [
    Mutant(
        "bias after temperature",
        ((EDITED, "over(table.bias))", "over(table.bias * table.temperature[:, None]))"),),
        definition,
    ),
    Mutant("min-p before temperature", ((TorchVocabOps.probs, LEAST, EARLY),), definition),
    Mutant(
        "typical-p before min-p",
        (
            (
                TorchVocabOps.probs,
                "if by.min_p is not None:",
                "from foredraft.decode.sampling import _typical\n"
                "    if by.typical_p is not None:\n        probs = _typical(probs, by.typical_p[:, None, None])\n"
                "    if by.min_p is not None:",
            ),
        ),
        definition,
    ),
    Mutant(
        "typical-p of a law that is not normalised after a cut",
        ((TorchVocabOps.probs, "kept / total(kept), kept)", "kept, kept)"),),
        definition,
    ),
    Mutant(
        "the token that reaches the typical mass dropped",
        ((TYPICAL, "distance <= ordered", "distance < ordered"),),
        definition,
    ),
    Mutant(
        "a tie at the top-k cut dropped",
        (
            (
                TorchVocabOps.probs,
                "(x < largest.gather(-1, k - 1))",
                "(x.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1) >= k)",
            ),
        ),
        ties,
    ),
    Mutant(
        "a tie at the typical cut dropped",
        (
            (TYPICAL, "distance <= ordered.gather(-1, last)", "at.argsort(-1) <= last"),
        ),
        ties,
    ),
    Mutant("presence over the prompt too", ((EDITED, "presence * (counts > 0)", "presence * seen"),), pairs),
    Mutant(
        "repetition over the output alone", ((EDITED, "torch.where(seen,", "torch.where(counts > 0,"),), pairs
    ),
    Mutant(
        "presence as often as said",
        ((EDITED, "presence * (counts > 0)", "presence * counts"),),
        definition_with_a_past,
    ),
    Mutant(
        "a negative logit divided by the repetition penalty",
        ((EDITED, "x < 0, x * repetition, x / repetition", "x < 0, x / repetition, x / repetition"),),
        definition_with_a_past,
    ),
    Mutant(
        "penalties not rolled along the draft",
        ((Engine.round, "inputs.penalty_context.along(draft.tokens)", "inputs.penalty_context.along(draft.tokens[:, :0])"),),
        pairs,
    ),
    Mutant(
        "a drafted token counted a column early",
        ((penalty_context.PenaltyContext.token_counts, "(0, 0, 1, 0)", "(0, 0, 0, 1)"),),
        definition_with_a_past,
    ),
    Mutant(
        "what was said of a drafted token forgotten",
        ((penalty_context.PenaltyContext.token_counts, "torch.cat([self.counts, (known * self.counts[:, None]).amax(-1)], 1)",
          "torch.cat([self.counts, torch.zeros(drafted.shape)], 1)"),),
        definition_with_a_past,
    ),
    Mutant(
        "padding of a shorter penalty_context counted",
        ((penalty_context.PenaltyContext.of.__func__, "= values, values[0]", "= values, 1"),),
        bits,
    ),
    Mutant(
        "tokens that a ban took back still counted",
        ((sequence.Sequence._roll_back, "self.token_counts.count(self.tokens[position], -1)", "pass"),),
        bans,
    ),
    Mutant(
        "an end barred one token too long",
        ((EDITED, "penalty_context.said(columns) < table.least", "penalty_context.said(columns) <= table.least"),),
        pairs,
    ),
    Mutant(
        "an end barred by the round's first column",
        ((EDITED, "penalty_context.said(columns) < table.least", "penalty_context.said(columns)[:, :1] < table.least"),),
        pairs,
    ),
]  # fmt: skip
CHECKS = list(dict.fromkeys(mutant.check for mutant in MUTANTS))
# What is no defect: the order of top-k and temperature changes nothing.
HARMLESS = Mutant(
    "top-k after temperature",
    (
        (
            TorchVocabOps.probs,
            "cut = (by.top_k > 0)[:, None, None] & (x < largest.gather(-1, k - 1))",
            "scaled = (x - largest[..., :1]) / by.temperature[:, None, None]\n"
            "        cut = (by.top_k > 0)[:, None, None] & (scaled < scaled.topk(most).values.gather(-1, k - 1))",
        ),
    ),
    definition,
)
