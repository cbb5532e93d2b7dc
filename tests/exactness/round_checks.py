"""Checks of the round for planted defects: the exactness tests in their quickest form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from foredraft.decode.policy import Fixed, TargetConfidence
from tests.exactness import test_block as block
from tests.exactness import test_chi_square as chi_square
from tests.exactness import test_conformance as conformance
from tests.exactness import test_coupled as coupled
from tests.exactness import test_identity as identity
from tests.exactness.test_enumeration import POLICIES, SEVERAL, case, enumerate_and_compare
from tests.support.forking import Case
from tests.support.parts import ArbitraryDecisions, LateBan, RandomBudgets, StopUnsure


def law(policy: str, *cases: Case, **more: Any) -> Callable[[], object]:
    return partial(enumerate_and_compare, [*cases], POLICIES[policy], **more)


sampled_drafts = law("fixed-2", case("as it is", "draft-model"))
truncated_drafts = law("fixed-2", case("top-k", "draft-model"), case("cold top-k", "script"))
confident_drafts = law("confidence", *(case("as it is", d) for d in ("draft-model", "aux-states")))
DRAFTING = "draft-model", "script"
drafts_behind_the_gate = law("target-confidence", *(case("as it is", d, new=4) for d in DRAFTING))
MIXED = "cold", "hot", "top-k", "greedy", "top-p"
mixed_rows = law("fixed-1", *(case(t, "draft-model", new=2) for t in MIXED), rows=4)
drafts_under_constraints = law(
    "fixed-2", *(case("as it is", d, c) for d in ("draft-model", "script") for c in ("no repeat", "late ban"))
)
drafts_under_a_mask = law("fixed-2", case("as it is", "draft-model", "no repeat"))
ENDING: Any = {"prompt": (0, 1), "eos": frozenset({2})}
PENALTIES = "repetition", "presence", "frequency"
penalised_drafts = law("fixed-2", *(case(t, "draft-model", **ENDING) for t in PENALTIES))
late_ends = law("fixed-2", case("late end", "draft-model", **ENDING))
drafts_before_bans = law("fixed-2", *(case(t, "script", "late ban") for t in ("frequency", "presence")))
skipping_drafts = law("fixed-2", *(case("as it is", d) for d in ("layer-skip", "early-exit", "script")))
drafts_of_mixed_drafters = law(
    "fixed-1", case("as it is", "draft-model", new=2), case("as it is", "aux-states", new=2), rows=2
)
block_drafts = law(
    "fixed-3", block.block_case("as it is", "draft-model", new=4), block.block_case("top-k", "script", new=4)
)
ragged_block_drafts = partial(
    enumerate_and_compare,
    [block.block_case("as it is", d) for d in ("draft-model", "script")],
    lambda: StopUnsure(2),
)
decisions_among_drafters = partial(
    enumerate_and_compare, [case("as it is", SEVERAL, new=4)], lambda: ArbitraryDecisions(3, 1)
)


def law_of_siblings(siblings: int, *drafters: str) -> Callable[[], object]:
    cases = [case("as it is", drafter) for drafter in drafters]
    return partial(enumerate_and_compare, cases, lambda: Fixed(2, siblings))


def ragged_drafts() -> None:
    cases = [case("as it is", d) for d in ("draft-model", "script", None)]
    for policy in (lambda: RandomBudgets(2), lambda: StopUnsure(2)):
        enumerate_and_compare(cases, policy)


def samples_of_draft_model() -> None:
    (found,) = chi_square.sample(1200, Fixed(3), chi_square.ROWS[:1])
    chi_square.assert_distributed(found, chi_square.distribution({}))


def bonus_behind_the_gate() -> None:
    """Draft with the target itself: every round but the last emits one token more than it drafted."""
    policy = TargetConfidence(2, threshold=0.0)
    engine = identity.make_engine(identity.TARGET, identity.TARGET, policy, rows=1)
    one = identity.greedy((0,), "draft-model", max_new_tokens=13)
    identity.run(engine, [one])
    assert all(turn.emitted == turn.drafted + 1 for turn in one.rounds[:-1])


def greedy_tokens(drafter: str = "draft-model", siblings: int = 0) -> None:
    sequences = [identity.greedy(p, drafter, max_new_tokens=12) for p in identity.PROMPTS[:5]]
    engine = identity.make_engine(identity.TARGET, identity.DRAFT, Fixed(3, siblings), rows=3)
    assert identity.run(engine, sequences) == [identity.reference(s.prompt, 12) for s in sequences]


auxiliary_states = partial(greedy_tokens, "aux-states")
skipping_tokens = partial(greedy_tokens, "layer-skip")
exiting_tokens = partial(greedy_tokens, "early-exit")
tokens_of_a_copy = partial(greedy_tokens, "low-bit")


def in_each_case(test: Callable[..., None], *cases: tuple[Any, ...]) -> Callable[[], None]:

    def check() -> None:
        for given in cases:
            test(*given)

    return check


broken_self_drafts = in_each_case(
    identity.test_a_target_with_nonfinite_self_drafts_continues_without_them,
    ("layer-skip", Fixed(3)),
    ("early-exit", Fixed(3)),
)
choices = in_each_case(identity.test_choices_come_in_waves, ("draft-model", 2, 7), ("draft-model", 4, 7))
several_broken_rows = in_each_case(
    identity.test_several_rows_break_and_end_in_one_round,
    ((False, True, False, True),),
    ((True, False, False, True),),
)
rewound_suffix = in_each_case(
    conformance.test_a_rewound_drafter_equals_a_fresh_one,
    (conformance.TABLES, "suffix"),
    (conformance.TABLES, "recalling"),
)


def rewound_lookup() -> None:
    conformance.test_a_rejection_at_every_place_leaves_no_trace(conformance.TABLES, "lookup")
    conformance.test_a_rewound_drafter_equals_a_fresh_one(conformance.TABLES, "lookup")


def mixed_drafters() -> None:
    sequences = [identity.greedy((1, 2), drafter) for drafter in identity.DRAFTERS]
    engine = identity.make_engine(identity.TARGET, identity.DRAFT, Fixed(3), rows=8)
    identity.run(engine, sequences)
    drafted = [sum(turn.drafted for turn in s.rounds) for s in sequences]
    assert [count > 0 for count in drafted] == [bool(s.drafters) for s in sequences]


def greedy_bans() -> None:
    for drafter in ("draft-model", "lookup"):
        run = tuple(identity.reference((0,), 12)[2:5])
        wish = identity.greedy((0,), drafter, constraint=LateBan(identity.V, run), max_new_tokens=12)
        want = identity.reference((0,), 12, constraint=LateBan(identity.V, run))
        assert identity.run(identity.make_engine(identity.TARGET, identity.DRAFT, Fixed(3)), [wish]) == [want]


def seeded_text(siblings: int = 0, requests: slice = slice(0, 12, 3)) -> None:
    wishes, plain = (coupled.requests(drafter)[requests] for drafter in ("draft-model", None))
    alone = [coupled.run(coupled.make_engine(coupled.TARGET, rows=1), [one])[0] for one in plain]
    engine = coupled.make_engine(coupled.TARGET, coupled.DRAFT, Fixed(3, siblings))
    assert coupled.run(engine, wishes) == alone
