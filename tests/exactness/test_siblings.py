"""Siblings of drafted tokens: what the tests of texts and laws under every policy, theirs among them, do not show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
from foredraft.decode.constraint import Constraint
from foredraft.decode.policy import Confidence, Fixed, Policy
from foredraft.decode.policy.auto import Auto
from foredraft.decode.sequence import Finish, Sequence, TokenOrigin
from tests.exactness import matrix as bits
from tests.exactness import test_coupled as coupled
from tests.exactness import test_enumeration as enumeration
from tests.exactness import test_identity as identity
from tests.support.coded import save_pair
from tests.support.harness import make_engine, request, run
from tests.support.parts import LateBan, NoRepeat, RandomBudgets, StopUnsure
from tests.support.simulation import flat
from tests.support.tabular import Table, Tabular

V, STEPPERS = identity.V, identity.STEPPERS


def written(sequences: list[Sequence]) -> int:
    return sum(turn.sibling for sequence in sequences for turn in sequence.rounds)


def test_a_policy_that_compares_costs_takes_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows cost next to nothing; and texts that may have none say what they would."""
    monkeypatch.setattr(Auto, "took", lambda policy, seconds: None)  # a slow moment would correct the costs
    engine = make_engine(identity.TARGET, identity.DRAFT, Auto(4, flat(0.1, drafters=STEPPERS)), rows=8)
    sequences = [identity.greedy(prompt, "draft-model") for prompt in identity.PROMPTS * 4]
    assert run(engine, sequences) == [identity.reference(s.prompt) for s in sequences]
    assert written(sequences)
    sampled = [coupled.requests("draft-model"), coupled.requests(None)]
    engine = make_engine(coupled.TARGET, coupled.DRAFT, Auto(4, flat(0.1, drafters=STEPPERS)), rows=5)
    assert run(engine, sampled[0]) == run(make_engine(coupled.TARGET, rows=1), sampled[1])


def test_a_round_with_a_sibling_emits_one_token_more() -> None:
    sequences = [identity.greedy(prompt, "draft-model") for prompt in identity.PROMPTS]
    run(make_engine(identity.TARGET, identity.DRAFT, Fixed(3, siblings=4)), sequences)
    for sequence in sequences:
        at = 0
        for turn in sequence.rounds:
            if turn.sibling:
                assert turn.emitted == turn.accepted + 2 or sequence.finish is Finish.LENGTH
                origins = sequence.origins[at + turn.accepted : at + turn.emitted]
                assert origins == [TokenOrigin.DRAFTER, TokenOrigin.BONUS][: len(origins)]
            else:
                assert turn.emitted <= turn.accepted + 1
            at += turn.emitted


@pytest.mark.parametrize("place", range(9))
def test_the_text_may_end_with_a_sibling_or_after_it(place: int) -> None:
    for prompt in identity.PROMPTS[::2]:
        whole = identity.reference(prompt)
        want = whole[: whole.index(whole[place]) + 1]
        ended = [identity.greedy(prompt, drafter, eos=frozenset({whole[place]})) for drafter in STEPPERS]
        cut = [identity.greedy(prompt, drafter, max_new_tokens=place + 1) for drafter in STEPPERS]
        for sequences, text in ((ended, want), (cut, whole[: place + 1])):
            engine = make_engine(identity.TARGET, identity.DRAFT, Fixed(2, siblings=6), rows=8)
            assert run(engine, sequences) == [text] * len(sequences)
            assert all(sum(turn.emitted for turn in s.rounds) == len(text) for s in sequences)


def test_scores_are_those_of_plain_decoding() -> None:
    """Of greedy and of coupled rows, with alternatives; a token after a sibling has those of the sibling's row."""

    def wishes(drafter: str | None) -> list[Sequence]:
        several = [{"temperature": 0}, {"seed": 3, "acceptance": "coupled", "top_p": 0.9, "temperature": 0.8}]
        return [
            request(prompt, drafter, logprobs=2, max_new_tokens=12, **more)
            for prompt in identity.PROMPTS
            for more in several
        ]

    plain, trees = wishes(None), wishes("draft-model")
    run(make_engine(identity.TARGET, rows=1), plain)
    run(make_engine(identity.TARGET, identity.DRAFT, Fixed(3, siblings=4), rows=5), trees)
    assert written(trees)
    assert [s.scores for s in trees] == [s.scores for s in plain]


def test_the_lossy_rule_drafts_chains() -> None:
    rule: Any = {"acceptance": "bild", "rollback": 0.7}
    sequences = [request((0,), drafter, seed=3, max_new_tokens=12, **rule) for drafter in STEPPERS]
    run(make_engine(identity.TARGET, identity.DRAFT, Fixed(2, siblings=3)), sequences)
    assert not any(turn.siblings for sequence in sequences for turn in sequence.rounds)


@pytest.mark.parametrize("policy", [StopUnsure(3, least=0.98), Confidence(3, 0.98), RandomBudgets(3)])
@pytest.mark.parametrize("rows", [1, 24])
def test_the_law_of_drafts_that_end_early(policy: Policy, rows: int) -> None:
    """No sibling lies beyond the end of a draft, though other drafts of the batch go on."""
    several = replace(policy)  # type: ignore[type-var]
    object.__setattr__(several, "siblings", 2)  # some policies are frozen
    cases = [enumeration.case("as it is", d) for d in ("draft-model", "aux-states")]
    enumeration.enumerate_and_compare(cases, lambda: several, rows=rows)


class DeadAfter(NoRepeat):
    """No token may follow some token, and none follows itself."""

    def __init__(self, token: int) -> None:
        super().__init__(V)
        self.token = token

    def mask(self) -> torch.Tensor | None:
        mask = super().mask()
        return mask if mask is None or self.tokens[-1] != self.token else torch.zeros_like(mask)


@pytest.mark.parametrize("token", range(V))
def test_constrained_texts_are_those_of_plain_decoding(token: int) -> None:

    def requests(drafter: str | None) -> list[Sequence]:
        kinds: list[Callable[[], Constraint]] = [
            lambda: NoRepeat(V), lambda: DeadAfter(token), lambda: LateBan(V, (token, (token + 1) % V)),
        ]  # fmt: skip
        rules: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 3, "acceptance": "coupled"}]
        return [
            request(prompt, drafter, constraint=kind(), max_new_tokens=16, **rule)
            for prompt in identity.PROMPTS[::2]
            for rule in rules
            for kind in kinds
        ]

    plain, trees = requests(None), requests("draft-model")
    run(make_engine(identity.TARGET, rows=8), plain)
    run(make_engine(identity.TARGET, identity.DRAFT, Fixed(3, siblings=4), rows=8), trees)
    assert [(s.new_ids, s.finish) for s in trees] == [(s.new_ids, s.finish) for s in plain]
    assert written(trees)


def test_a_sibling_that_makes_the_target_fail_harms_no_text() -> None:
    """The target gives NaN to whatever follows token 4, which is often a sibling, and no text has it."""
    table = Table(V, 41)
    table.logits[..., 4] = -50.0
    prompts = [prompt for prompt in identity.PROMPTS if 4 not in prompt]
    sequences = [identity.greedy(prompt, "draft-model") for prompt in prompts]
    model = Tabular(table, venom=4)
    engine = make_engine(model, Table(V, 42), Fixed(2, siblings=6))
    assert run(engine, sequences) == [identity.reference(s.prompt, target=table) for s in sequences]
    assert written(sequences)


def test_operators_take_no_siblings(tmp_path: Path) -> None:
    target, draft = save_pair(tmp_path, "llama")
    options: dict[str, Any] = {"draft": draft, "dtype": "float32", "device": "cpu", "kernels": False}
    with pytest.raises(foredraft.ConfigError, match="siblings"):
        foredraft.load(target, policy="fixed", policy_options={"siblings": 2}, **options)
    llm = foredraft.load(target, policy="fixed", **options)
    llm.loaded.engine.policy = Fixed(3, siblings=2)
    bits.assert_same(llm, ["draft-model"], bits.plain_ids(llm, bits.PROMPTS[4:5]), bits.PROMPTS[4:5])
