"""Compatibility of drafters, policies, acceptance rules and options, by the tables alone."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft import ConfigError, RequestError
from foredraft.kinds import DRAFTERS, POLICIES, RULES, compatibility, default_drafter, suits
from foredraft.kinds.compatibility import ModelsGiven, PolicyTraits

ALONE = ModelsGiven("big")
PAIR = ModelsGiven("big", "small")
FOREIGN = ModelsGiven("big", "foreign", other_tokenizer=True)


@pytest.mark.parametrize(
    ("given", "names", "default"),
    [
        (ALONE, "none lookup prediction auto", "lookup"),
        (PAIR, "none lookup prediction draft-model auto", "draft-model"),
        (FOREIGN, "none lookup prediction retokenize auto", "retokenize"),
        (ModelsGiven("big", plan=True), "none lookup prediction layer-skip auto", "layer-skip"),
        (
            ModelsGiven("big", "small", plan=True),
            "none lookup prediction draft-model layer-skip auto",
            "layer-skip",
        ),
        (ModelsGiven("big", adapter=True), "none lookup prediction kangaroo auto", "kangaroo"),
        (
            ModelsGiven("big", plan=True, adapter=True),
            "none lookup prediction layer-skip kangaroo auto",
            "kangaroo",
        ),
        (ModelsGiven("big", copy=True), "none lookup prediction low-bit auto", "lookup"),
    ],
    ids=str,
)
def test_the_models_decide_the_available_and_the_default_drafters(
    given: ModelsGiven, names: str, default: str
) -> None:
    assert " ".join(compatibility.available_drafters(given)) == names
    models = given.draft is not None, given.other_tokenizer
    parts = {"plan_given": given.plan, "adapter_given": given.adapter}
    assert default_drafter("fixed", *models, **parts) == default
    assert default_drafter("auto", *models, **parts) == "auto"


def test_policies_decide_about_drafters_by_probabilities_and_costs() -> None:
    fitting = {policy: [name for name in DRAFTERS if suits(name, policy)] for policy in POLICIES}
    alone = ["none", "lookup", "prediction", "draft-model", "retokenize", "layer-skip", "kangaroo", "low-bit"]
    steppers = ["draft-model", "layer-skip", "kangaroo", "low-bit"]
    assert fitting == {
        "auto": [*alone, "auto"], "fixed": alone, "heuristic": alone, "target-confidence": alone,
        "confidence": steppers, "adaptive-exit": steppers, "fallback": steppers,
    }  # fmt: skip


def test_options_without_an_effect_are_known_for_every_drafter() -> None:
    policy, copy = ("policy", "policy_options", "max_draft"), "draft_weights"
    assert {name: compatibility.unused_options(name) for name in DRAFTERS} == {
        "none": ("draft", "draft_sampling", "plan", "adapter", copy, *policy),
        "lookup": ("draft", "draft_sampling", "plan", "adapter", copy),
        "prediction": ("draft", "draft_sampling", "plan", "adapter", copy),
        "draft-model": ("plan", "adapter", copy),
        "retokenize": ("draft_sampling", "plan", "adapter", copy),
        "layer-skip": ("draft", "adapter", copy),
        "kangaroo": ("draft", "plan", copy),
        "low-bit": ("draft", "adapter"),
        "auto": (),
    }


def test_a_lossy_rule_needs_a_drafter() -> None:
    fitting = {rule: [name for name in DRAFTERS if compatibility.rule_suits(rule, name)] for rule in RULES}
    others = [name for name in DRAFTERS if name != "none"]
    assert fitting == {"speculative": list(DRAFTERS), "coupled": list(DRAFTERS), "bild": others}


@pytest.mark.parametrize(
    ("rule", "drafters", "lossless"),
    [
        (None, ["lookup", "draft-model"], True),
        ("coupled", ["lookup"], True),
        ("bild", ["lookup"], False),
        ("bild", [], True),
        (None, ["of-a-test"], True),
    ],
)
def test_output_is_lossless_by_rule_and_drafters(
    rule: str | None, drafters: list[str], lossless: bool
) -> None:
    assert compatibility.is_lossless(rule, drafters) is lossless


@pytest.mark.parametrize(
    ("drafter", "policy", "sampling", "given", "message"),
    [
        (
            "retokenize", "auto", "sampled", PAIR,
            "drafter is 'retokenize', but the draft model small has the tokenizer of the target big;"
            " give drafter='draft-model', or leave it out",
        ),
        (
            "none", "auto", "greedy", ALONE,
            "draft_sampling is 'greedy', but no model drafts; give draft, or leave it out",
        ),
        (
            "retokenize", "auto", "greedy", FOREIGN,
            "draft_sampling is 'greedy', but the draft model foreign has another tokenizer than the target big,"
            " so its drafts have no probabilities; leave it out",
        ),
        (
            "lookup", "fallback", "sampled", ALONE,
            "policy is 'fallback', which needs draft probabilities, but no loaded drafter has them;"
            " give another one",
        ),
        (
            "lookup", "fallback", "sampled", PAIR,
            "policy is 'fallback', which needs draft probabilities, but drafter='lookup' has none;"
            " give another one, or drafter='draft-model'",
        ),
    ],
)  # fmt: skip
def test_combinations_that_do_not_fit_are_refused(
    drafter: str, policy: str, sampling: str, given: ModelsGiven, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        compatibility.check_fits_models(drafter, policy, sampling, given)
    assert str(caught.value) == message


def test_drafters_are_checked_before_any_file_is_read() -> None:
    compatibility.check_named_drafter("draft-model", "fixed", draft_given=True)
    compatibility.check_named_drafter("auto", "auto", draft_given=False)
    with pytest.raises(ConfigError, match="which needs a draft model; give draft, its folder or hub id$"):
        compatibility.check_named_drafter("draft-model", "auto", draft_given=False)
    with pytest.raises(
        ConfigError, match="'auto', but policy='fixed' cannot choose among drafters; give policy"
    ):
        compatibility.check_named_drafter("auto", "fixed", draft_given=True)


@pytest.mark.parametrize(
    ("drafter", "given", "message"),
    [
        ("none", {"compare": True}, "compare needs a drafter; give draft or drafter='lookup'"),
        ("none", {"rule": "bild"}, "acceptance is 'bild', which has no effect with drafter none; leave it out"),
        ("none", {"options": ["policy"]}, "policy has no effect with drafter none; leave it out"),
        ("lookup", {"options": ["max_draft", "draft"]}, "draft has no effect with drafter lookup; leave it out"),
        (
            "lookup", {"policy": "confidence"},
            "policy is 'confidence', which needs draft probabilities, but drafter lookup has none; give another policy",
        ),
    ],
)  # fmt: skip
def test_options_without_effect_are_refused(drafter: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compatibility.check_effects(drafter, **given)
    assert str(caught.value) == message


def test_options_with_an_effect_are_accepted() -> None:
    compatibility.check_effects(
        "draft-model", compare=True, options=["draft", "max_draft"], policy="confidence", rule="bild"
    )
    compatibility.check_effects("auto", policy="fixed")  # `check_named_drafter` refuses it
    compatibility.check_effects("none", rule="coupled")


LOADED = {"lookup": False, "draft-model": True}


@pytest.mark.parametrize(
    ("drafter", "policy", "selected"),
    [
        ("none", "confidence", ()),
        ("lookup", "fixed", ("lookup",)),
        ("draft-model", "confidence", ("draft-model",)),
        ("auto", "auto", ("lookup", "draft-model")),
        ("auto", "fixed", "load with policy='auto', or give one of none, lookup, draft-model"),
        ("lookup", "confidence", "give one of none, draft-model, or load with another policy"),
        ("retokenize", "auto", "which is not loaded; give one of none, auto, lookup, draft-model"),
    ],
)
def test_a_request_selects_drafters_that_are_loaded(
    drafter: str, policy: str, selected: tuple[str, ...] | str
) -> None:
    traits = PolicyTraits.named(policy)
    if isinstance(selected, tuple):
        assert compatibility.select_drafters(drafter, LOADED, traits) == selected
        return
    with pytest.raises(RequestError, match=f"^drafter is '{drafter}', .*{selected}$"):
        compatibility.select_drafters(drafter, LOADED, traits)
