"""Compatibility: which drafters, policies, acceptance rules and options fit together; nothing else decides
this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from foredraft.drafters.asset import Missing
from foredraft.errors import ConfigError, Option, RequestError, did_you_mean
from foredraft.kinds.tables import DRAFTERS, POLICIES, RULES


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
    return PolicyTraits.named(policy).suits(has_probs=kind.autoregressive, chooses=kind.chooses)


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


def default_drafter(policy: str, given: Collection[str] = (), missing: Collection[str] = ()) -> str:
    """Return the drafter for requests that do not give one, where `load` is not given one either.

    It is "auto", every drafter at hand, under a policy that can choose. Other policies decide about one
    drafter: the one whose asset the user gives, by the table's last option where there are several, or else
    the first one of the table that needs nothing.

    Args:
        policy: Name of the policy.
        given: Options of `load` that the user gives.
        missing: Drafters that are not at hand, as far as that is known.
    """
    choosing = next((name for name, kind in DRAFTERS.items() if kind.chooses and suits(name, policy)), None)
    if choosing is not None:
        return choosing
    by_option: dict[str, str] = {}
    for name, kind in DRAFTERS.items():
        if kind.given_by is not None and kind.given_by in given and name not in missing:
            by_option.setdefault(kind.given_by, name)
    if by_option:
        return [*by_option.values()][-1]
    simple = (
        name
        for name, kind in DRAFTERS.items()
        if kind.asset is not None and not kind.options and not kind.by_request and suits(name, policy)
    )
    return next(simple, "none")


def asset_options() -> tuple[str, ...]:
    """Return the options of `load` that give assets or change them."""
    return tuple(dict.fromkeys(option for kind in DRAFTERS.values() for option in kind.options))


def missing_part(drafter: str, name: str | None = None) -> ConfigError:
    """Return the error of a drafter that is not at hand: what it lacks.

    Args:
        drafter: The drafter.
        name: What the message calls it; by default its own name.
    """
    asset = DRAFTERS[drafter].asset
    assert asset is not None, "other names lack nothing"
    return asset().missing.error(name or drafter)


def unused_options(drafter: str) -> tuple[str, ...]:
    """Return the options of `load` that have no effect where `drafter` is the only one that drafts."""
    kind = DRAFTERS[drafter]
    if kind.chooses:
        return ()
    options = dict.fromkeys(asset_options(), False) | dict.fromkeys(kind.options, True)
    drafts = kind.asset is not None
    options |= {
        "draft_sampling": kind.autoregressive, "policy": drafts, "policy_options": drafts,
        "max_draft": drafts,
    }  # fmt: skip
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


def check_named_drafter(drafter: str, policy: str, given: Collection[str]) -> None:
    """Raise ConfigError where a drafter lacks what only the user can give, or a policy that can choose.

    Args:
        drafter: The drafter that the user names.
        policy: Name of the policy.
        given: Options of `load` that the user gives.
    """
    kind = DRAFTERS[drafter]
    required = None if kind.asset is None or kind.given_by in given else kind.asset().required
    if required is not None:
        raise ConfigError(required.problem, option="drafter", value=drafter, remedy=required.remedy)
    if kind.chooses and not suits(drafter, policy):
        raise ConfigError(
            _cannot_choose(policy),
            option="drafter",
            value=drafter,
            remedy=("give ", Option("policy", "auto")),
        )


def check_fits_assets(
    drafter: str, policy: str, draft_sampling: str, found: Collection[str], missing: Mapping[str, Missing]
) -> None:
    """Raise ConfigError where the default drafter, policy or draft sampling does not fit what is at hand.

    Args:
        drafter: The default drafter.
        policy: Name of the policy.
        draft_sampling: As `load` takes it.
        found: Drafters whose assets were found.
        missing: The other drafters, and what they lack.
    """
    if drafter in missing:
        _refuse_drafter(drafter, found, missing[drafter])
    autoregressive = [name for name in found if DRAFTERS[name].autoregressive]
    if draft_sampling != "sampled" and not autoregressive:
        _refuse_draft_sampling(draft_sampling, missing)
    if POLICIES[policy].stops_by_content:
        _check_probabilities(drafter, policy, found)


def _refuse_drafter(drafter: str, found: Collection[str], missing: Missing) -> None:
    if missing.unfit is None:
        raise missing.error(drafter)
    option = DRAFTERS[drafter].given_by
    fitting = next((name for name in found if DRAFTERS[name].given_by == option), None)
    other = () if fitting is None else ("give ", Option("drafter", fitting), ", or ")
    raise ConfigError(
        f"but {missing.unfit}", option="drafter", value=drafter, remedy=(*other, "leave it out")
    )


def _refuse_draft_sampling(draft_sampling: str, missing: Mapping[str, Missing]) -> None:
    reasons = (each.unfit for name, each in missing.items() if DRAFTERS[name].autoregressive)
    unfit = next(filter(None, reasons), None)
    if unfit is None:
        raise ConfigError(
            "but no model drafts", option="draft_sampling", value=draft_sampling,
            remedy=("give ", Option("draft"), ", or leave it out"),
        )  # fmt: skip
    raise ConfigError(
        f"but {unfit}, so its drafts have no probabilities",
        option="draft_sampling", value=draft_sampling, remedy="leave it out",
    )  # fmt: skip


def _check_probabilities(drafter: str, policy: str, found: Collection[str]) -> None:
    """Raise ConfigError where a policy that reads draft probabilities gets none, at all or by default."""
    fitting = [name for name in found if suits(name, policy)]
    if not fitting:
        raise ConfigError(
            "which needs draft probabilities, but no loaded drafter has them", option="policy", value=policy,
            remedy="give another one",
        )  # fmt: skip
    if drafter in found and drafter not in fitting:
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
