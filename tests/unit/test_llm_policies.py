"""Requests of one batch with a policy and a longest draft of their own."""

from __future__ import annotations

from typing import Any

import pytest

import foredraft
from foredraft import SamplingParams, demo
from foredraft.decode.policy import ByRequest
from foredraft.decode.policy.auto import Auto
from foredraft.decode.policy.cost_table import CostTable
from foredraft.errors import RequestError
from foredraft.kinds.tables import POLICIES
from tests.support.loaded import engine_of
from tests.support.mutation import assert_caught, defect

OTHERS = [name for name in POLICIES if not POLICIES[name].uses_costs]  # decide by the row's own rounds alone
PROMPTS = ["def area(w, h):\n", "import os\n", "class Node:\n", "for i in range(", "x = [1, 2,", "return "]


def load(**options: Any) -> foredraft.LLM:
    options = {"policy": "fixed", "drafter": "draft-model", "max_batch": 6, "max_length": 160} | options
    return foredraft.load(draft=demo.draft_path(), **options)


@pytest.fixture(scope="module")
def llm() -> foredraft.LLM:
    return load()


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_new_tokens": 40, "ignore_eos": True} | options)


def rounds(output: foredraft.Output) -> tuple[Any, ...]:
    return output.token_ids, output.stats.rounds, output.stats.drafted_at, output.stats.accepted_at


@pytest.mark.heavy
@pytest.mark.parametrize("drafter", ["draft-model", "lookup"])
def test_rows_draft_as_they_do_alone_under_a_loaded_policy(llm: foredraft.LLM, drafter: str) -> None:
    fitting = [name for name in OTHERS if drafter == "draft-model" or not POLICIES[name].stops_by_content]
    each = [params(policy=name, drafter=drafter) for name in fitting]
    together = llm.generate(PROMPTS[: len(each)], each)
    for name, prompt, found in zip(fitting, PROMPTS, together, strict=False):
        [alone] = load(policy=name, drafter=drafter).generate([prompt], params())
        assert rounds(found) == rounds(alone), name
    assert len({str(rounds(found)[1:]) for found in together}) > 1, "all policies draft alike"


def test_answers_of_other_policies_are_not_taken(llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def everywhere(answers: Any) -> Any:
        def asked(self: ByRequest, sequences: Any, logits: Any, ask: Any) -> Any:
            made = [ask(policy) for policy in self._policies if policy.stops_by_content]
            return next((answer for answer in made if answer is not None), None)

        return asked

    def check() -> None:
        test_rows_draft_as_they_do_alone_under_a_loaded_policy(llm, "draft-model")

    assert_caught(defect("one answer for all", ByRequest._answers, everywhere, check), monkeypatch)


def test_a_request_has_its_own_longest_draft(llm: foredraft.LLM) -> None:
    lengths = [1, 2, 5, 9, None]
    outputs = llm.generate(PROMPTS[:5], [params(max_draft=length) for length in lengths])
    plain = llm.generate(PROMPTS[:5], params(drafter="none"))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert [len(output.stats.drafted_at) for output in outputs] == [1, 2, 5, 9, 5]


def test_another_length_keeps_the_settings_of_the_loaded_policy() -> None:
    llm = load(policy="target-confidence", policy_options={"threshold": 0.9, "by": "entropy"})
    policy: Any = llm._policies.of(params(max_draft=3), engine_of(llm))
    assert (policy.max_draft, policy.threshold, policy.by) == (3, 0.9, "entropy")


def test_the_longest_draft_bounds_a_policy_that_compares_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Auto, "took", lambda self, seconds: None)  # a busy machine's clock decides nothing
    auto = load(policy="auto")
    [plain] = auto.generate(PROMPTS[:1], params(drafter="none"))
    free = {"prediction": plain.token_ids, "drafter": "prediction"}  # drafts that cost nothing and are right
    policy: Any = engine_of(auto).policy
    policy.use(CostTable({1: {1: 1.0}}, {"prediction": {1: (0.0, 0.0)}}))
    outputs = auto.generate(PROMPTS[:1] * 2, [params(max_draft=2, **free), params(**free)])
    assert 0 < len(outputs[0].stats.drafted_at) <= 2 < len(outputs[1].stats.drafted_at)


def test_auto_beside_a_loaded_policy_knows_the_costs_of_this_machine(llm: foredraft.LLM) -> None:
    [output] = llm.generate(PROMPTS[:1], params(policy="auto", drafter="auto"))
    made = llm._policies._made["auto", POLICIES["auto"].max_draft]
    assert isinstance(made, Auto) and made.measured and output.stats.drafted > 0
    [again, plain] = llm.generate([PROMPTS[0]] * 2, [params(policy="auto"), params(drafter="none")])
    assert again.token_ids == plain.token_ids
    assert llm._policies._made["auto", POLICIES["auto"].max_draft] is made, "it learns from all requests"


@pytest.mark.heavy
@pytest.mark.parametrize("acceptance", ["coupled", "speculative"])
def test_seeded_texts_of_a_mixed_batch(llm: foredraft.LLM, acceptance: Any) -> None:
    each = [params(policy=name, temperature=1, seed=3, acceptance=acceptance) for name in OTHERS]
    together = llm.generate(PROMPTS[: len(OTHERS)], each)
    alone = [llm.generate([prompt], one)[0] for prompt, one in zip(PROMPTS, each, strict=False)]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policy": "fixd"}, "policy is 'fixd'; give one of .* Did you mean 'fixed'"),
        ({"policy": 3}, "policy is 3; give a name or None"),
        ({"max_draft": 0}, "max_draft is 0; give 1 token or more"),
        ({"max_draft": 10_000}, "max_draft is 10000, but drafts have .* at most here"),
        ({"policy": "auto", "max_draft": 11}, "max_draft is 11, but drafts have 10 tokens at most here"),
        ({"policy": "confidence", "drafter": "lookup"}, "drafter is 'lookup', which has no draft prob"),
        ({"policy": "fixed", "drafter": "auto"}, "cannot choose among drafters"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused(llm: foredraft.LLM, options: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        llm.generate(PROMPTS[:1], params(**options))
