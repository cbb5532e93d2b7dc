"""Compatibility: which drafters, policies, acceptance rules and options fit together.

Contract: nothing else in the package decides this. The command line asks with the options that the user
gives, `load` by names and then by the checkpoints that it found, all before weights are read. A request asks
by the drafters and the policy that its engine has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from foredraft.errors import ConfigError, Option, RequestError, did_you_mean
from foredraft.kinds.offered_copy import DEFAULT_COPY, OFFER
from foredraft.kinds.tables import DRAFTERS, POLICIES, RULES, DrafterKind

__all__ = [
    "ModelsGiven",
    "PolicyTraits",
    "available_drafters",
    "check_effects",
    "check_fits_models",
    "check_named_drafter",
    "default_drafter",
    "is_lossless",
    "missing_part",
    "rule_suits",
    "select_drafters",
    "suits",
    "unused_options",
]


@dataclass(frozen=True, slots=True)
class ModelsGiven:
    """The models and files that drafters can be built from.

    Attributes:
        target: The target's folder or GGUF file, as error messages name it.
        draft: The draft model's, likewise; None without one.
        other_tokenizer: The draft model has another tokenizer than the target.
        plan: There is a plan of sub-layers to skip.
        adapter: There is a trained adapter.
        copy: There is a copy of the target's weights in few bits.
    """

    target: str
    draft: str | None = None
    other_tokenizer: bool = False
    plan: bool = False
    adapter: bool = False
    copy: bool = False


@dataclass(frozen=True, slots=True)
class PolicyTraits:
    """The traits of a policy that compatibility depends on; the fields are those of `PolicyKind`."""

    name: str
    uses_costs: bool
    stops_by_content: bool

    @classmethod
    def named(cls, policy: str) -> PolicyTraits:
        """Return the traits of a policy in the table."""
        kind = POLICIES[policy]
        return cls(policy, kind.uses_costs, kind.stops_by_content)

    def suits(self, *, has_probs: bool, chooses: bool = False) -> bool:
        """Return whether the policy can decide about a drafter.

        Args:
            has_probs: The drafter's tokens have probabilities.
            chooses: The drafter stands for several, among which the policy chooses.
        """
        return (has_probs or not self.stops_by_content) and (self.uses_costs or not chooses)


def suits(drafter: str, policy: str) -> bool:
    """Return whether a policy can decide about a drafter, both by name."""
    kind = DRAFTERS[drafter]
    return PolicyTraits.named(policy).suits(has_probs=kind.stepper, chooses=kind.chooses)


def rule_suits(rule: str, drafter: str) -> bool:
    """Return whether an acceptance rule has an effect: a lossy one needs drafts."""
    return RULES[rule].lossless or drafter != "none"


def is_lossless(rule: str | None, drafters: Iterable[str]) -> bool:
    """Return whether the output has the target's distribution under a rule, None for the default one.

    Without drafters it always has. Drafters that are not in the table count as lossless.
    """
    names = tuple(drafters)
    lossless = all(DRAFTERS[name].lossless for name in names if name in DRAFTERS)
    return not names or (lossless and (rule is None or RULES[rule].lossless))


def default_drafter(
    policy: str,
    draft_given: bool,
    other_tokenizer: bool = False,
    *,
    plan_given: bool = False,
    adapter_given: bool = False,
) -> str:
    """Return the drafter for requests that do not give one, where `load` is not given one either.

    It is "auto", every drafter at hand, under a policy that can choose. Other policies decide about one
    drafter.

    Args:
        policy: Name of the policy.
        draft_given: There is a draft model.
        other_tokenizer: It has another tokenizer than the target.
        plan_given: The user gives a plan.
        adapter_given: The user gives an adapter.
    """
    if suits("auto", policy):
        return "auto"
    if adapter_given:
        return "kangaroo"
    if plan_given:
        return "layer-skip"
    if not draft_given:
        return "lookup" if suits("lookup", policy) else "none"
    return "retokenize" if other_tokenizer else "draft-model"


def available_drafters(given: ModelsGiven) -> dict[str, DrafterKind]:
    """Return the drafters that can be built. All are loaded, since a request may name any of them."""
    return {
        name: kind
        for name, kind in DRAFTERS.items()
        if (not kind.needs_draft or (given.draft is not None and kind.retokenizes == given.other_tokenizer))
        and (not kind.needs_plan or given.plan)
        and (not kind.needs_adapter or given.adapter)
        and (not kind.needs_copy or given.copy)
    }


def missing_part(drafter: str, name: str | None = None) -> ConfigError:
    """Return the error of a drafter that is not among `available_drafters`: the part that it lacks.

    Args:
        drafter: The drafter.
        name: What the message calls it; by default its own name.
    """
    kind, shown = DRAFTERS[drafter], name or drafter
    if kind.needs_plan:
        return ConfigError(
            f"{shown} has no plan for this model",
            remedy=("make one with `foredraft tune`, or give ", Option("plan")),
        )
    if kind.needs_adapter:
        return ConfigError(
            f"{shown} has no adapter for this model",
            remedy=("train one with `foredraft train adapter`, or give ", Option("adapter")),
        )
    if kind.needs_copy:
        return ConfigError(
            f"{shown} has no copy of this model: {OFFER}",
            remedy=("give ", Option("draft_weights", DEFAULT_COPY)),
        )
    tokenizer = "another" if kind.retokenizes else "the target's"
    return ConfigError(
        f"{shown} needs a draft model with {tokenizer} tokenizer", remedy=("give ", Option("draft"))
    )


def unused_options(drafter: str) -> tuple[str, ...]:
    """Return the options of `load` that have no effect where `drafter` is the only one that drafts."""
    kind = DRAFTERS[drafter]
    if kind.chooses:
        return ()
    options = {
        "draft": kind.needs_draft,
        "draft_sampling": kind.stepper,
        "plan": kind.needs_plan or kind.needs_copy,
        "adapter": kind.needs_adapter,
        "draft_weights": kind.needs_copy,
        "policy": kind.make is not None,
        "policy_options": kind.make is not None,
        "max_draft": kind.make is not None,
    }
    return tuple(name for name, used in options.items() if not used)


def check_effects(
    drafter: str,
    *,
    compare: bool = False,
    options: Iterable[str] = (),
    policy: str | None = None,
    rule: str | None = None,
) -> None:
    """Raise ConfigError where a given option has no effect with the drafter, or the policy cannot follow it.

    Args:
        drafter: The drafter of all requests.
        compare: The speed is compared with plain decoding's.
        options: Names of the options of `load` that the user gives.
        policy: The policy that the user gives; None for the default one.
        rule: The acceptance rule that the user gives; None for the default one.
    """
    no_effect = f"has no effect with drafter {drafter}"
    if compare and drafter == "none":
        raise ConfigError(
            "needs a drafter", option="compare",
            remedy=("give ", Option("draft"), " or ", Option("drafter", "lookup")),
        )  # fmt: skip
    given = set(options)
    for option in unused_options(drafter):
        if option in given:
            raise ConfigError(no_effect, option=option, remedy="leave it out")
    if policy is not None and not DRAFTERS[drafter].chooses and not suits(drafter, policy):
        raise ConfigError(
            f"which needs draft probabilities, but drafter {drafter} has none",
            option="policy", value=policy, remedy="give another policy",
        )  # fmt: skip
    if rule is not None and not rule_suits(rule, drafter):
        raise ConfigError(f"which {no_effect}", option="acceptance", value=rule, remedy="leave it out")


def check_named_drafter(drafter: str, policy: str, *, draft_given: bool) -> None:
    """Raise ConfigError where a drafter lacks its draft model or a policy that can choose."""
    kind = DRAFTERS[drafter]
    if kind.needs_draft and not draft_given:
        raise ConfigError(
            "which needs a draft model", option="drafter", value=drafter,
            remedy=("give ", Option("draft"), ", its folder or hub id"),
        )  # fmt: skip
    if kind.chooses and not suits(drafter, policy):
        raise ConfigError(
            _cannot_choose(policy),
            option="drafter",
            value=drafter,
            remedy=("give ", Option("policy", "auto")),
        )


def check_fits_models(drafter: str, policy: str, draft_sampling: str, given: ModelsGiven) -> None:
    """Raise ConfigError where the default drafter, policy or draft sampling does not fit the models."""
    available = available_drafters(given)
    if drafter not in available:
        fitting = next(name for name, kind in available.items() if kind.needs_draft)
        has = "the tokenizer of" if DRAFTERS[drafter].retokenizes else "another tokenizer than"
        raise ConfigError(
            f"but the draft model {given.draft} has {has} the target {given.target}",
            option="drafter", value=drafter,
            remedy=("give ", Option("drafter", fitting), ", or leave it out"),
        )  # fmt: skip
    if draft_sampling != "sampled" and not any(kind.stepper for kind in available.values()):
        _refuse_draft_sampling(draft_sampling, given)
    if POLICIES[policy].stops_by_content:
        _check_probabilities(drafter, policy, available)


def _refuse_draft_sampling(draft_sampling: str, given: ModelsGiven) -> None:
    if given.draft is None:
        raise ConfigError(
            "but no model drafts", option="draft_sampling", value=draft_sampling,
            remedy=("give ", Option("draft"), ", or leave it out"),
        )  # fmt: skip
    raise ConfigError(
        f"but the draft model {given.draft} has another tokenizer than the target {given.target}, so its"
        " drafts have no probabilities",
        option="draft_sampling", value=draft_sampling, remedy="leave it out",
    )  # fmt: skip


def _check_probabilities(drafter: str, policy: str, available: Mapping[str, DrafterKind]) -> None:
    """Raise ConfigError where a policy that reads draft probabilities gets none, at all or by default."""
    fitting = [name for name in available if suits(name, policy)]
    if not fitting:
        raise ConfigError(
            "which needs draft probabilities, but no loaded drafter has them", option="policy", value=policy,
            remedy="give another one",
        )  # fmt: skip
    if available[drafter].make is not None and drafter not in fitting:
        raise ConfigError(
            ("which needs draft probabilities, but ", Option("drafter", drafter), " has none"),
            option="policy", value=policy,
            remedy=("give another one, or ", Option("drafter", fitting[0])),
        )  # fmt: skip


def select_drafters(drafter: str, has_probs: Mapping[str, bool], policy: PolicyTraits) -> tuple[str, ...]:
    """Return the drafters of a request; the policy chooses among several.

    Args:
        drafter: The drafter that the request names, or the default one.
        has_probs: Loaded drafter -> whether its tokens have probabilities.
        policy: The loaded policy.

    Raises:
        RequestError: The drafter is not loaded, or the policy cannot decide about it.
    """
    if drafter == "none":
        return ()
    can_choose = policy.suits(has_probs=True, chooses=True)
    if drafter == "auto" and can_choose:
        return tuple(has_probs)
    fitting = [name for name, probs in has_probs.items() if policy.suits(has_probs=probs)]
    names = ["none", *(["auto"] if can_choose else []), *fitting]
    remedy = f"give one of {', '.join(names)}"
    if drafter == "auto":
        raise RequestError(
            _cannot_choose(policy.name), option="drafter", value=drafter,
            remedy=("load with ", Option("policy", "auto"), f", or {remedy}"),
        )  # fmt: skip
    if drafter not in has_probs:
        raise RequestError(
            "which is not loaded", option="drafter", value=drafter,
            remedy=remedy + did_you_mean(drafter, names),
        )  # fmt: skip
    if drafter not in fitting:
        raise RequestError(
            ("which has no draft probabilities, but ", Option("policy", policy.name), " needs them"),
            option="drafter", value=drafter,
            remedy=(f"{remedy}, or load with another ", Option("policy")),
        )  # fmt: skip
    return (drafter,)


def _cannot_choose(policy: str) -> tuple[str | Option, ...]:
    return "but ", Option("policy", policy), " cannot choose among drafters"
