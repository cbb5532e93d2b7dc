"""Which drafters, policies, acceptance rules and options fit together; nothing else decides this."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from foredraft.drafters.asset import Missing
from foredraft.errors import ConfigError, Option, RequestError, Text, did_you_mean
from foredraft.kinds.tables import DRAFTERS, POLICIES, RULES, PolicyKind

if TYPE_CHECKING:
    from foredraft.decode.policy import Policy


def decides(policy: PolicyKind | Policy, *, has_probs: bool, chooses: bool = False) -> bool:
    """Return whether a policy can decide about a drafter, or where it `chooses`, about several."""
    return (has_probs or not policy.stops_by_content) and (policy.uses_costs or not chooses)


def suits(drafter: str, policy: str) -> bool:
    """Return whether a policy can decide about a drafter, both by name."""
    kind = DRAFTERS[drafter]
    return decides(POLICIES[policy], has_probs=kind.autoregressive, chooses=kind.chooses)


def is_lossless(rule: str | None, drafters: Iterable[str]) -> bool:
    """Return whether the output has the target's distribution under a rule; None is the default one."""
    names = tuple(drafters)
    lossless = all(DRAFTERS[name].lossless for name in names if name in DRAFTERS)
    return not names or (lossless and (rule is None or RULES[rule].lossless))


def default_drafter(policy: str, given: Collection[str] = (), missing: Collection[str] = ()) -> str:
    """Return the drafter for requests that do not give one, where `load` is not given one either.

    It is "auto", every drafter at hand, under a policy that can choose. Other policies decide about one
    drafter: the one whose asset the user gives, by the table's last option where there are several, or else
    the first one of the table that needs nothing. `given` are options of `load`; `missing` are drafters that
    are not at hand, as far as that is known.
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
    """Return the error of a drafter that is not at hand, which the message may call by another name."""
    asset = DRAFTERS[drafter].asset
    assert asset is not None, "other names lack nothing"
    return asset().missing.error(name or drafter)


def unused_options(drafter: str) -> tuple[str, ...]:
    """Return the options of `load` that have no effect where `drafter` is the only one that drafts."""
    kind = DRAFTERS[drafter]
    if kind.chooses:
        return ()
    drafts = kind.asset is not None
    options = dict.fromkeys(asset_options(), False) | dict.fromkeys(kind.options, True)
    options |= {"draft_sampling": kind.autoregressive}
    options |= dict.fromkeys(("policy", "policy_options", "max_draft"), drafts)
    return tuple(name for name, used in options.items() if not used)


def check_effects(
    drafter: str,
    *,
    compare: bool = False,  # the speed is compared with plain decoding's
    options: Iterable[str] = (),  # of `load`, those that the user gives
    policy: str | None = None,  # None for the default one
    rule: str | None = None,  # None for the default one
) -> None:
    """Raise ConfigError where a given option has no effect with the drafter of all requests."""
    no_effect = f"has no effect with drafter {drafter}"
    if compare and drafter == "none":
        remedy = ("give ", Option("draft"), " or ", Option("drafter", "lookup"))
        raise ConfigError("needs a drafter", option="compare", remedy=remedy)
    given = set(options)
    for option in unused_options(drafter):
        if option in given:
            raise ConfigError(no_effect, option=option, remedy="leave it out")
    if policy is not None and not DRAFTERS[drafter].chooses and not suits(drafter, policy):
        problem = f"which needs draft probabilities, but drafter {drafter} has none"
        raise ConfigError(problem, option="policy", value=policy, remedy="give another policy")
    if rule is not None and drafter == "none" and not RULES[rule].lossless:  # it needs drafts
        raise ConfigError(f"which {no_effect}", option="acceptance", value=rule, remedy="leave it out")


def check_named_drafter(drafter: str, policy: str, given: Collection[str]) -> None:
    """Raise ConfigError where a drafter lacks what only the user can give, or a policy that can choose."""
    kind = DRAFTERS[drafter]
    required = None if kind.asset is None or kind.given_by in given else kind.asset().required
    if required is not None:
        raise ConfigError(required.problem, option="drafter", value=drafter, remedy=required.remedy)
    if kind.chooses and not suits(drafter, policy):
        remedy = ("give ", Option("policy", "auto"))
        raise ConfigError(_cannot_choose(policy), option="drafter", value=drafter, remedy=remedy)


def check_fits_assets(
    drafter: str, policy: str, draft_sampling: str, found: Collection[str], missing: Mapping[str, Missing]
) -> None:
    """Raise ConfigError where the default drafter, policy or draft sampling does not fit the assets found."""
    if drafter in missing:
        lacks = missing[drafter]
        if lacks.unfit is None:
            raise lacks.error(drafter)
        option = DRAFTERS[drafter].given_by
        fitting = next((name for name in found if DRAFTERS[name].given_by == option), None)
        other = () if fitting is None else ("give ", Option("drafter", fitting), ", or ")
        raise ConfigError(
            f"but {lacks.unfit}", option="drafter", value=drafter, remedy=(*other, "leave it out")
        )
    if draft_sampling != "sampled" and not any(DRAFTERS[name].autoregressive for name in found):
        reasons = (each.unfit for name, each in missing.items() if DRAFTERS[name].autoregressive)
        unfit = next(filter(None, reasons), None)
        problem = "no model drafts" if unfit is None else f"{unfit}, so its drafts have no probabilities"
        or_give = ("give ", Option("draft"), ", or ") if unfit is None else ()
        raise ConfigError(
            f"but {problem}", option="draft_sampling", value=draft_sampling, remedy=(*or_give, "leave it out")
        )
    if POLICIES[policy].stops_by_content:  # it reads draft probabilities
        fits = [name for name in found if suits(name, policy)]
        if not fits:
            problem = "which needs draft probabilities, but no loaded drafter has them"
            raise ConfigError(problem, option="policy", value=policy, remedy="give another one")
        if drafter in found and drafter not in fits:
            raise ConfigError(
                ("which needs draft probabilities, but ", Option("drafter", drafter), " has none"),
                option="policy", value=policy, remedy=("give another one, or ", Option("drafter", fits[0])),
            )  # fmt: skip


def select_drafters(drafter: str, has_probs: Mapping[str, bool], policy: Policy) -> tuple[str, ...]:
    """Return the drafters of a request; raise RequestError where the policy can decide about none.

    `has_probs` tells of each loaded drafter whether its tokens have probabilities.
    """
    if drafter == "none":
        return ()
    can_choose = decides(policy, has_probs=True, chooses=True)
    if drafter == "auto" and can_choose:
        return tuple(has_probs)
    fitting = [name for name, probs in has_probs.items() if decides(policy, has_probs=probs)]
    names = ["none", *(["auto"] if can_choose else []), *fitting]
    give = f"give one of {', '.join(names)}"
    if drafter in fitting:
        return (drafter,)
    problem: Text = _cannot_choose(policy.name)
    remedy: Text = "load with ", Option("policy", "auto"), f", or {give}"
    if drafter != "auto" and drafter not in has_probs:
        problem, remedy = "which is not loaded", give + did_you_mean(drafter, names)
    elif drafter != "auto":
        problem = "which has no draft probabilities, but ", Option("policy", policy.name), " needs them"
        remedy = f"{give}, or load with another ", Option("policy")
    raise RequestError(problem, option="drafter", value=drafter, remedy=remedy)


def _cannot_choose(policy: str) -> tuple[str | Option, ...]:
    return "but ", Option("policy", policy), " cannot choose among drafters"
