"""The policy that the user asks for, with its settings and its longest draft."""

from __future__ import annotations

from collections.abc import Mapping

from foredraft.decode.params import is_number
from foredraft.decode.policy import Policy
from foredraft.errors import ConfigError, Option, did_you_mean
from foredraft.kinds.tables import POLICIES, PolicyOption
from foredraft.model.runner import Runner

__all__ = ["check_settings", "longest_draft", "make_policy"]


def check_settings(policy: str, given: object) -> dict[str, float | str]:
    """Return `policy_options` as the policy takes them; numbers may come as text.

    Raises:
        ConfigError: They are no table, or the policy does not take a name or a value.
    """
    known = POLICIES[policy].settings
    if not isinstance(given, Mapping):
        raise _not_a_table(policy, given)
    settings: dict[str, float | str] = {}
    for name, value in given.items():
        if name not in known:
            remedy = f"give {', '.join(known)}{did_you_mean(name, known)}" if known else "leave it out"
            raise ConfigError(
                (f"names {name!r}, which ", Option("policy", policy), " does not have"),
                option="policy_options", remedy=remedy,
            )  # fmt: skip
        settings[name] = _read(name, value, known[name])
    return settings


def _not_a_table(policy: str, given: object) -> ConfigError:
    example = {name: setting.default for name, setting in POLICIES[policy].settings.items()}
    if example:
        return ConfigError(option="policy_options", value=given, remedy=f"give a table, such as {example}")
    return ConfigError(
        ("but ", Option("policy", policy), " has none"),
        option="policy_options",
        value=given,
        remedy="leave it out",
    )


def _read(name: str, value: object, setting: PolicyOption) -> float | str:
    """Return one setting as a number or as one of its words."""
    wrong = ConfigError(f"has {name} {value!r}", option="policy_options", remedy=f"give {setting.allowed}")
    if not isinstance(value, str) and (setting.words or not is_number(value)):
        raise wrong
    if setting.words:
        if value not in setting.words:
            raise wrong
        return str(value)
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise wrong from None
    if not setting.least <= number <= setting.most or (setting.whole and number % 1):
        raise wrong
    return int(number) if setting.whole else number


def make_policy(
    policy: str,
    settings: Mapping[str, float | str],
    max_draft: int | None,
    target: Runner,
    planned: int | None = None,
    longest: int = 0,
) -> Policy:
    """Build a policy.

    Args:
        policy: Its name.
        settings: Its settings, checked.
        max_draft: Longest draft that the user asks for, in tokens; None takes `planned` or the policy's own.
        target: Its verifying pass bounds the draft.
        planned: Draft length that the default drafter was made for. A policy that compares costs does not use
            it.
        longest: Draft length that may pay with a loaded drafter. Only a policy that compares costs uses it.

    Raises:
        ConfigError: No verifying pass takes `max_draft`, or siblings.
    """
    if settings.get("siblings") and not target.takes_leaves:
        raise ConfigError(
            "has siblings, which only passes of the C kernels take", option="policy_options",
            remedy="leave them out",
        )  # fmt: skip
    kind = POLICIES[policy]
    own = max(kind.max_draft, longest) if kind.uses_costs else planned or kind.max_draft
    return kind.make(longest_draft(max_draft, own, target), **settings)


def longest_draft(max_draft: int | None, own: int, target: Runner) -> int:
    """Return the longest draft in tokens: `max_draft`, or `own` as far as a verifying pass takes it.

    Raises:
        ConfigError: No verifying pass takes `max_draft`.
    """
    most = target.max_queries - 1
    if max_draft is None:
        return min(own, most)
    if max_draft > most:
        raise ConfigError(
            f"but this model's verifying pass takes {most} at most",
            option="max_draft", value=max_draft, remedy=f"give {most} or less",
        )  # fmt: skip
    return max_draft
