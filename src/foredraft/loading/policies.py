"""The policy that was asked for, and its numbers."""

from __future__ import annotations

from collections.abc import Mapping

from foredraft.decode.calibration import Calibration
from foredraft.decode.params import is_number
from foredraft.decode.policy import Auto, Policy
from foredraft.errors import ConfigError
from foredraft.kinds import POLICIES, PolicyOption
from foredraft.model.runner import Runner

__all__ = ["check_settings", "longest_draft", "make_policy"]


def check_settings(policy: str, given: object) -> dict[str, float | str]:
    """As the policy takes them: numbers may come as words. Raises ConfigError that names what it cannot."""
    known = POLICIES[policy].settings
    if not isinstance(given, Mapping):
        example = {name: setting.default for name, setting in known.items()}
        instead = (
            f"give a table, such as {example}" if example else f"policy {policy!r} has none, leave it out"
        )
        raise ConfigError(f"policy_options is {given!r}; {instead}")
    settings: dict[str, float | str] = {}
    for name, value in given.items():
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise ConfigError(f"policy_options names {name!r}, which policy {policy!r} has not; {has}")
        settings[name] = _read(name, value, known[name])
    return settings


def _read(name: str, value: object, setting: PolicyOption) -> float | str:
    wrong = ConfigError(f"policy_options has {name} {value!r}; give {setting.allowed}")
    if not isinstance(value, str) and (setting.words or not is_number(value)):
        raise wrong
    if setting.words:
        if value not in setting.words:
            raise wrong
        return str(value)
    try:
        number = float(value)
    except ValueError:
        raise wrong from None
    if not setting.least <= number <= setting.most:
        raise wrong
    return number


def make_policy(
    policy: str,
    settings: Mapping[str, float | str],
    max_draft: int | None,
    target: Runner,
    planned: int | None = None,
) -> Policy:
    """With the longest draft that was asked for, or its own, as far as the target's passes take it; one that
    weighs costs keeps them measured. planned: the longest that a plan was made for; costs find their own."""
    own = planned if planned is not None and not POLICIES[policy].weighs else POLICIES[policy].max_draft
    made = POLICIES[policy].make(longest_draft(max_draft, own, target), **settings)
    if isinstance(made, Auto):
        made.calibrate = Calibration(made)
    return made


def longest_draft(max_draft: int | None, own: int, target: Runner) -> int:
    """Raises ConfigError where no pass takes what was asked for; `own` is cut to what it takes."""
    most = target.max_queries - 1
    if max_draft is None:
        return min(own, most)
    if max_draft > most:
        raise ConfigError(f"max_draft is {max_draft}; this model's verifying pass takes {most} at most")
    return max_draft
