"""Compatibility of drafters, policies, acceptance rules and options, by the tables alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from foredraft import ConfigError, RequestError
from foredraft.drafters.asset import Missing
from foredraft.kinds import compatibility
from foredraft.kinds.compatibility import default_drafter, suits
from foredraft.kinds.tables import DRAFTERS, POLICIES


@pytest.mark.parametrize(
    ("given", "missing", "default"),
    [
        ("", "", "lookup"),
        ("draft", "", "draft-model"),
        ("draft", "draft-model", "retokenize"),
        ("draft", "retokenize", "draft-model"),
        ("plan", "", "layer-skip"),
        ("draft plan", "", "layer-skip"),
        ("adapter", "", "kangaroo"),
        ("plan adapter draft", "", "kangaroo"),
        ("draft_weights", "", "lookup"),
    ],
)
def test_what_the_user_gives_decides_the_default_drafter(given: str, missing: str, default: str) -> None:
    assert default_drafter("fixed", given.split(), missing.split()) == default
    assert default_drafter("auto", given.split(), missing.split()) == "auto"
    assert default_drafter("confidence") == "none", "which suits the policy"


def test_policies_decide_about_drafters_by_probabilities_and_costs() -> None:
    alone = [name for name in DRAFTERS if name != "auto"]
    fitting = {policy: [name for name in DRAFTERS if suits(name, policy)] for policy in POLICIES}
    model_free = ("none", "lookup", "suffix", "prediction", "retokenize")
    autoregressive = [name for name in alone if name not in model_free]
    assert fitting == {
        "auto": [*alone, "auto"], "fixed": alone, "heuristic": alone, "target-confidence": alone,
        "confidence": autoregressive, "adaptive-exit": autoregressive, "fallback": autoregressive,
    }  # fmt: skip


def test_options_without_an_effect_are_known_for_every_drafter() -> None:
    """Files and settings of other drafters, and for a drafter `none` all that a policy reads."""
    files = {"draft", "plan", "adapter", "draft_weights", "draft_sampling", "recent_texts", "texts_file"}
    used = {
        "none": set(), "auto": files, "lookup": set(), "prediction": set(), "suffix": {"recent_texts", "texts_file"},
        "retokenize": {"draft"}, "layer-skip": {"plan", "draft_sampling"}, "kangaroo": {"adapter", "draft_sampling"},
        "low-bit": {"plan", "draft_weights", "draft_sampling"},
    }  # fmt: skip
    for name in DRAFTERS:
        unused = files - used.get(name, {"draft", "draft_sampling"})
        policy = {"policy", "policy_options", "max_draft"} if name == "none" else set()
        assert {*compatibility.unused_options(name)} == unused | policy, name


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
def test_output_is_lossless_by_rule_and_kind(rule: str | None, drafters: list[str], lossless: bool) -> None:
    assert compatibility.is_lossless(rule, drafters) is lossless


# Drafters that are at hand, and what others lack whose asset the user gave.
SAME = "the draft model small has the tokenizer of the target big"
OTHER = "the draft model foreign has another tokenizer than the target big"
ALONE = ["lookup"], {"draft-model": Missing("needs a draft model")}
PAIR = ["lookup", "draft-model"], {"retokenize": Missing("needs another", unfit=SAME)}
FALLBACK = "policy is 'fallback', which needs draft probabilities"
FOREIGN = ["lookup", "retokenize"], {"draft-model": Missing("needs another", unfit=OTHER)}


@pytest.mark.parametrize(
    ("given", "at_hand", "message"),
    [
        ("retokenize auto sampled", PAIR, f"drafter is 'retokenize', but {SAME}; give drafter='draft-model', or leave it out"),
        ("draft-model auto sampled", ALONE, "draft-model needs a draft model"),
        ("draft-model auto sampled", (["lookup"], FOREIGN[1]), f"drafter is 'draft-model', but {OTHER}; leave it out"),
        ("none auto greedy", ALONE, "draft_sampling is 'greedy', but no model drafts; give draft, or leave it out"),
        (
            "retokenize auto greedy", FOREIGN,
            f"draft_sampling is 'greedy', but {OTHER}, so its drafts have no probabilities; leave it out",
        ),
        ("lookup fallback sampled", ALONE, f"{FALLBACK}, but no loaded drafter has them; give another one"),
        (
            "lookup fallback sampled", PAIR,
            f"{FALLBACK}, but drafter='lookup' has none; give another one, or drafter='draft-model'",
        ),
    ],
)  # fmt: skip
def test_combinations_that_do_not_fit_are_refused(given: str, at_hand: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compatibility.check_fits_assets(*given.split(), *at_hand)
    assert str(caught.value) == message


def test_drafters_are_checked_before_any_file_is_read() -> None:
    compatibility.check_named_drafter("draft-model", "fixed", ["draft"])
    compatibility.check_named_drafter("auto", "auto", [])
    with pytest.raises(ConfigError, match="which needs a draft model; give draft, its folder or hub id$"):
        compatibility.check_named_drafter("draft-model", "auto", [])
    with pytest.raises(ConfigError, match="but policy='fixed' cannot choose among drafters; give policy"):
        compatibility.check_named_drafter("auto", "fixed", ["draft"])


@pytest.mark.parametrize(
    ("drafter", "given", "message"),
    [
        ("none", {"compare": True}, "compare needs a drafter; give draft or drafter='lookup'"),
        ("none", {"rule": "bild"}, "acceptance is 'bild', which has no effect with drafter none; leave it out"),
        ("none", {"options": ["policy"]}, "policy has no effect with drafter none; leave it out"),
        ("lookup", {"options": ["max_draft", "draft"]}, "draft has no effect with drafter lookup; leave it out"),
        ("lookup", {"policy": "fallback"}, f"{FALLBACK}, but drafter lookup has none; give another policy"),
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


TRAITS = "uses_costs", "stops_by_content"
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
def test_requests_select_loaded_drafters(drafter: str, policy: str, selected: tuple[str, ...] | str) -> None:
    traits: Any = SimpleNamespace(name=policy, **{each: getattr(POLICIES[policy], each) for each in TRAITS})
    if isinstance(selected, tuple):
        assert compatibility.select_drafters(drafter, LOADED, traits) == selected
        return
    with pytest.raises(RequestError, match=f"^drafter is '{drafter}', .*{selected}$"):
        compatibility.select_drafters(drafter, LOADED, traits)
