"""Planted defects of what a policy is asked and told."""

from __future__ import annotations

from foredraft.decode import choices, drafting, round_results
from foredraft.decode.engine import Engine
from tests.exactness import test_policies as policies
from tests.exactness import test_stops as stops
from tests.support.planting import Mutant

STEPS = drafting._step_through
LEARN = "self.policy.learn(sequence, outcome, reading.sure)"
CHECKS = [policies.each_row_its_own]


def _defect(name: str, function: object, old: str, new: str) -> Mutant:
    return Mutant(name, ((function, old, new),), policies.each_row_its_own)


MUTANTS = [
    _defect(
        "the target's certainty of a round's first position",
        round_results.read,
        "device=logits.device), verdict.accepted]",
        "device=logits.device), verdict.accepted * 0]",
    ),
    _defect(
        "the target's certainty of another token",
        round_results.read,
        "certainty(last, verdict.next_token",
        "certainty(last, verdict.next_token.roll(1)",
    ),
    _defect("the target's certainty sharpened", round_results.read, "certainty(last,", "certainty(last * 2,"),
    _defect(
        "the target's certainty of another row", round_results.read, "sure=sure[row]", "sure=sure[-1 - row]"
    ),
    _defect("what a neighbour was told", Engine._commit, LEARN, LEARN.replace("reading", "readings[0]")),
    _defect(
        "nothing told of plain steps",
        Engine._commit,
        f"if inputs.weighed:\n{' ' * 12}{LEARN}",
        f"if inputs.weighed and budget:\n{' ' * 12}{LEARN}",
    ),
    _defect(
        "one state for all",
        Engine.submit,
        "= self.policy.start()",
        "= self.__dict__.setdefault('state', self.policy.start())",
    ),
    _defect(
        "nothing said of those whose prompts are read",
        choices.choose,
        "for s, i in zip(sequences, idle, strict=True)\n",
        "for s, i in zip(sequences, idle, strict=True) if not i\n",
    ),
    _defect(
        "a budget for the row of another",
        choices.choose,
        "budgets[row.sequence.row] =",
        "budgets[[s.id for s in running].index(row.sequence.id)] =",
    ),
    _defect(
        "a stop asked of sharpened logits",
        STEPS,
        "policy.go_on(sequences, j, q, logits)",
        "policy.go_on(sequences, j, q, logits * 3)",
    ),
    _defect(
        "a draw asked of sharpened logits",
        STEPS,
        "policy.draws(sequences, j, q, logits)",
        "policy.draws(sequences, j, q, logits * 3)",
    ),
    _defect(
        "a draw asked of another row's logits",
        STEPS,
        "policy.draws(sequences, j, q, logits)",
        "policy.draws(sequences, j, q, logits.roll(1, 0))",
    ),
    _defect(
        "a stop asked of other sequences",
        STEPS,
        "policy.go_on(sequences, j, q, logits)",
        "policy.go_on(sequences[::-1], j, q, logits)",
    ),
    _defect(
        "a draw asked of q before the transforms",
        STEPS,
        "policy.draws(sequences, j, q, logits)",
        "policy.draws(sequences, j, Distribution(logits.softmax(-1)), logits)",
    ),
    _defect(
        "a stop that ends another row's draft",
        STEPS,
        "on = _both(policy.go_on(sequences, j, q, logits), on)",
        "on = _both(policy.go_on(sequences, j, q, logits).roll(1), on)",
    ),
    _defect(
        "a place left in another row's draft",
        STEPS,
        "finite & draws[:, None]",
        "finite & draws.roll(1)[:, None]",
    ),
    _defect("nobody asked before a draw", STEPS, "if policy.looks else None", "if j else None"),
    Mutant(
        "ends by sharpened logits",
        ((STEPS, "vocab_ops.max_prob(logits[:, 0])", "vocab_ops.max_prob(logits[:, 0] * 3)"),),
        stops.same_stops,
    ),
]
