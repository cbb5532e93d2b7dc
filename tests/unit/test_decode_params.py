"""Sampling parameters: accepted values, and errors that name the option."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest

from foredraft.decode.params import RULES, RuleName, SamplingParams
from foredraft.errors import RequestError

HUGE = 10**400  # no float holds it
WRONG: dict[str, list[Any]] = {
    "prediction": [5, [1.5], [-1], "\ud800", {"a": 1}],
    "policy": [5, ["fixed"]],
    "max_draft": [0, 1.5, True, "3"],
    "temperature": [HUGE, -0.1, math.nan, math.inf, "1", True, None],
    "top_k": [HUGE, -1, 1.5, True],
    "top_p": [HUGE, -0.1, 1.1, math.nan],
    "min_p": [-0.1, 1.1],
    "typical_p": [0, 1.01],
    "repetition_penalty": [0, -1.0, 1e-39, 101, math.inf, math.nan],
    "presence_penalty": [-2.1, 2.1, math.nan, "0"],
    "frequency_penalty": [-3, 2.5],
    "logit_bias": [{1: HUGE}, {1: 101}, {1: math.nan}, {-1: 1.0}, {"1": 1.0}, {True: 1.0}, [1, 2], {1: "x"}],
    "min_new_tokens": [-1, 1.0],
    "max_new_tokens": [-1, 2.0, None, 2**31],
    "ignore_eos": [1, None],
    "stop": ["", ["a", ""], [1], 3, {"a": 1}],
    "stop_token_ids": [5, [-1], [1.5], ["5"], [True]],
    "include_stop": ["yes"],
    "seed": [HUGE, -(2**63) - 1, 2**63, 1.0, True],
    "logprobs": [-1, True, 1.5, 1001],
    "prompt_logprobs": [-1, False],
    "acceptance": ["both", 1],
    "rollback": [HUGE, -0.1, math.nan, "1", True, 3.0],
    "allowed_token_ids": [5, [], [-1], ["5"]],
    "ban": ["", ["a", ""], ["\ud800"], 3],
    "ban_mode": ["no", None],
    "ban_ignore_case": [1],
    "ban_whole_words": ["yes"],
    "ban_prompt": [None],
    "ban_rollbacks": [-1, 1.0, True],
    "regex": [3, "\ud800"],
    "choices": [[], "", ["a", ""], ["\ud800"], 3],
    "json_schema": [3, [1], str],
    "json_object": [1],
    "grammar": [3],
    "drafter": [True, 3],
}


@pytest.mark.parametrize(
    ("option", "value"),
    [(name, value) for name in WRONG for value in WRONG[name]],
    ids=lambda each: repr(each)[:40],
)
def test_a_bad_value_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{option} is ") as caught:
        SamplingParams(**{option: value})
    assert len(str(caught.value)) < 400


def test_every_option_has_a_value_that_is_refused() -> None:
    assert set(WRONG) == set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[
            ({name: 1}, f"unknown sampling option '{name}'; ")
            for name in ("num_beams", "top_q", "max_tokens")
        ],
        ({"num_beams": 4}, "beam search is not supported"),
        ({"max_tokens": 4}, "max_new_tokens"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens is 5, but max_new_tokens is 4"),
        ({"ban": ["a"], "ban_rollbacks": 10_001}, r"^ban_rollbacks is 10001; .*from 0 to 10000$"),
        (
            {"regex": "a", "json_object": True},
            "regex cannot hold together with json_object; give one of them",
        ),
        (
            {"regex": "a", "ignore_eos": True},
            "regex needs an end of the text, but ignore_eos is on; leave out",
        ),
        ({"json_schema": "{"}, r"json_schema is not JSON \(Expecting property name .*; correct it"),
    ],
)
def test_unknown_and_contradicting_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**options)


def test_an_omitted_bound_follows_the_given_one() -> None:
    own = SamplingParams(min_new_tokens=10, max_new_tokens=400)
    assert own.replace(max_new_tokens=0).min_new_tokens == 0
    assert own.replace(min_new_tokens=500).max_new_tokens == 500
    assert own.replace(min_new_tokens=20) == SamplingParams(min_new_tokens=20, max_new_tokens=400)
    with pytest.raises(RequestError, match="min_new_tokens is 5, but max_new_tokens is 4"):
        own.replace(min_new_tokens=5, max_new_tokens=4)


def test_accepted_parameters() -> None:
    given = {7: 1}
    params = SamplingParams(stop="end", logit_bias=given, max_new_tokens=0)
    given[8] = 2
    assert params.stop == ("end",)
    assert params.logit_bias == {7: 1}
    assert SamplingParams(stop=["b", "a", "b"]).stop == ("b", "a")
    assert SamplingParams(logit_bias={}).logit_bias is None
    for again in (copy.copy(params), pickle.loads(pickle.dumps(params)), replace(params)):
        assert again == params
        assert hash(again) == hash(params)


def test_acceptance_follows_the_seed() -> None:
    assert (SamplingParams().rule, SamplingParams(seed=1).rule) == ("speculative", "coupled")
    for rule in RULES:
        assert SamplingParams(seed=1, acceptance=rule).rule == SamplingParams(acceptance=rule).rule == rule


def test_only_the_lossy_rule_has_a_bound() -> None:
    lossless: tuple[RuleName | None, ...] = (None, "speculative", "block", "coupled")
    assert [SamplingParams(acceptance=rule).bound for rule in lossless] == [None] * 4
    assert SamplingParams(acceptance="bild").bound == 5.0
    for bound in (0, math.inf):
        assert SamplingParams(acceptance="bild", rollback=bound).bound == bound
    says = r"rollback is 3\.0, which applies only to the lossy acceptance rule; give"
    for rule in lossless:
        with pytest.raises(RequestError, match=says):
            SamplingParams(acceptance=rule, rollback=3.0)


def test_greedy_rows_are_judged_at_temperature_1() -> None:
    greedy = SamplingParams(temperature=0, top_k=1, top_p=0.5, presence_penalty=1, acceptance="bild")
    assert greedy.judged == SamplingParams(temperature=1, presence_penalty=1, acceptance="bild")
    for own in (greedy.replace(temperature=0.5), greedy.replace(acceptance=None)):
        assert own.judged is own
