"""Checks of the drafting options that several commands share."""

from __future__ import annotations

from foredraft.cli.options import Given
from foredraft.errors import ConfigError, Option
from foredraft.kinds import RULES, default_drafter
from foredraft.kinds.compatibility import asset_options, check_effects

__all__ = ["check_drafting_options", "drafter_name", "refuse_lossy"]

LIBRARY_NAMES = {"policy_option": "policy_options"}  # option here -> option of `load`


def check_drafting_options(model: Given, drafting: Given, *, compare: bool = False) -> None:
    """Refuse drafting options that the drafter would ignore.

    Args:
        model: The options of the model.
        drafting: The drafting options.
        compare: The speed is compared with plain decoding's.

    Raises:
        ConfigError: An option would have no effect.
    """
    check_effects(
        drafter_name(drafting, model),
        compare=compare,
        options=[LIBRARY_NAMES.get(name, name) for name in drafting],
        policy=drafting.get("policy"),
        rule=drafting.get("acceptance"),
    )


def refuse_lossy(drafting: Given) -> None:
    """Refuse a lossy acceptance rule, for commands that compare the output with plain decoding's.

    Raises:
        ConfigError: The rule is lossy, or an option applies only to such a rule.
    """
    rule = drafting.get("acceptance")
    if rule is not None and not RULES[rule].lossless:
        raise ConfigError(
            "which is not lossless, so its output cannot be compared with plain decoding's",
            option="acceptance",
            value=rule,
            remedy="leave it out",
        )
    if "rollback" in drafting:
        raise ConfigError(
            ("applies only to ", Option("acceptance", "bild"), ", which is not lossless"),
            option="rollback",
            remedy="leave it out",
        )


def drafter_name(drafting: Given, model: Given) -> str:
    """Return --drafter, or the default drafter for the other options."""
    given = {*asset_options()} & drafting.keys()
    if "model" not in model:
        given.add("draft")  # of the demo models
    return drafting.get("drafter") or default_drafter(drafting.get("policy", "auto"), given)
