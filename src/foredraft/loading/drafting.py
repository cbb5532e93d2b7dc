"""Drafting: the default drafter, and the assets of all drafters that can be built.

Contract: each kind of the table is asked for its asset (`drafters.asset`); no kind is known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch

from foredraft import demo
from foredraft.drafters.asset import Asset, AssetSearch, Found, Missing
from foredraft.errors import ConfigError, Option
from foredraft.kinds.compatibility import asset_options, check_fits_assets, default_drafter
from foredraft.kinds.tables import DRAFTERS
from foredraft.loading.checkpoints import find_draft, read_draft
from foredraft.loading.free_memory import free_memory
from foredraft.loading.options import LoadOptions
from foredraft.model.lora.record import base_of
from foredraft.model.unread import Checkpoint

__all__ = ["ChosenDrafting", "choose_drafting"]


@dataclass(frozen=True, slots=True)
class ChosenDrafting:
    """The drafters that were chosen for an engine.

    Attributes:
        drafter: The drafter for requests that do not give one.
        found: The assets of the drafters that can be built. All are built, since a request may name any of
            them.
        missing: What the other drafters lack.
    """

    drafter: str
    found: Mapping[str, Found]
    missing: Mapping[str, Missing]

    @property
    def models(self) -> tuple[Checkpoint, ...]:
        """The whole models that drafters run beside the target."""
        return tuple(model for found in self.found.values() for model in found.models)

    @property
    def planned(self) -> int | None:
        """The draft length that the default drafter's asset was made for; None where it was made for none."""
        found = self.found.get(self.drafter)
        return None if found is None else found.planned

    @property
    def longest(self) -> int:
        """The longest draft of all drafters that may pay beyond a policy's own; 0 for none."""
        return max((found.longest_draft for found in self.found.values()), default=0)


def choose_drafting(
    options: LoadOptions,
    target: Checkpoint,
    device: torch.device,
    *,
    fetch: bool = True,
    weights_here: bool = True,
) -> ChosenDrafting:
    """Choose the default drafter, find all assets, and check that drafter, policy and models fit together.

    Args:
        options: The options of `load`.
        target: The target.
        device: The device that will run it.
        fetch: Fetch the weights of a draft model that is a hub id.
        weights_here: The target's weights are on this machine.

    Raises:
        ForedraftError: They do not fit, or an asset cannot be used.
    """
    assets = {name: kind.asset() for name, kind in DRAFTERS.items() if kind.asset is not None}
    draft = find_draft(options, weights=fetch)
    owner = None if draft is None else _owner(draft, options, assets)
    drafter = options.drafter or default_drafter(options.policy, options.assets)

    @cache
    def read() -> Checkpoint:
        assert draft is not None, "no asset reads a draft model that is not there"
        return read_draft(options, draft, target)

    found: dict[str, Found] = {}
    missing: dict[str, Missing] = {}
    for name, asset in assets.items():
        search = AssetSearch(
            target=target,
            device=device,
            options={option: getattr(options, option) for option in asset_options()},
            needed=name == drafter,
            choosing=DRAFTERS[drafter].chooses,
            kernels=options.allows_kernels,
            weights_here=weights_here,
            draft=draft if owner in (None, name) else None,
            read_draft=read,
            shipped=(demo.adapter_path(),) if base_of(target.folder) == demo.target_path() else (),
            free_memory=partial(free_memory, device),
            found=tuple(found.values()),
        )
        one = asset.find(search)
        if isinstance(one, Found):
            found[name] = one
        elif search.draft != draft and DRAFTERS[name].given_by == "draft":
            missing[name] = replace(one, unfit=f"{draft} is what drafter {owner} reads")
        else:
            missing[name] = one
    if options.drafter is None:
        drafter = default_drafter(options.policy, options.assets, missing)
    check_fits_assets(drafter, options.policy, options.draft_sampling, found, missing)
    return ChosenDrafting(drafter, found, missing)


def _owner(draft: Path, options: LoadOptions, assets: Mapping[str, Asset]) -> str | None:
    """Return the drafter whose asset option `draft` names; None for a whole model.

    Raises:
        ConfigError: The drafter takes its asset by another option.
    """
    owner = next((name for name, asset in assets.items() if asset.knows(draft)), None)
    option = None if owner is None else DRAFTERS[owner].given_by
    if option not in (None, "draft"):
        raise ConfigError(
            f"which is what drafter {owner} reads", option="draft", value=str(options.draft),
            remedy=("give ", Option(str(option), str(options.draft)), " in its place"),
        )  # fmt: skip
    return owner
