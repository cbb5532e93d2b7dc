"""From the options of `load` to checkpoints: the policy, the target, its tokenizer, and the assets of
drafters.

A tokenizer that cannot be its model's is refused, and so is a GGUF file whose vocabulary makes no tokenizer,
unless another one is given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TypeAlias

import torch

from foredraft import demo
from foredraft.decode.params import SamplingParams, is_number
from foredraft.decode.policy import Policy
from foredraft.drafters.asset import Asset, AssetSearch, Found, Missing
from foredraft.drafters.head_kinds import refuse_unsupported
from foredraft.errors import CheckpointError, ConfigError, Option, RequestError, did_you_mean
from foredraft.kinds.compatibility import (
    asset_options,
    check_fits_assets,
    check_named_drafter,
    default_drafter,
)
from foredraft.kinds.load_options import LoadOptions
from foredraft.kinds.tables import DRAFTERS, POLICIES, PolicyOption
from foredraft.loading.machine_limits import free_memory
from foredraft.model.checkpoint import Checkpoint
from foredraft.model.config import GENERATION, generation_defaults
from foredraft.model.locate import existing, locate, resolve, source_at
from foredraft.model.quantisation.codes import BITS
from foredraft.model.runner import Runner
from foredraft.model.source import ModelSource
from foredraft.model.spec import CONFIG, ModelSpec
from foredraft.model.tokenizer import FILE, GIVE_TOKENIZER, Tokenizer

logger = logging.getLogger(__name__)


def check_settings(policy: str, given: object) -> dict[str, float | str]:
    """Return `policy_options` as the policy takes them; numbers may come as text."""
    known = POLICIES[policy].settings
    if not isinstance(given, Mapping):
        example = {name: setting.default for name, setting in known.items()}
        problem = () if example else ("but ", Option("policy", policy), " has none")
        remedy = f"give a table, such as {example}" if example else "leave it out"
        raise ConfigError(problem, option="policy_options", value=given, remedy=remedy)
    settings: dict[str, float | str] = {}
    for name, value in given.items():
        if name not in known:
            remedy = f"give {', '.join(known)}{did_you_mean(name, known)}" if known else "leave it out"
            problem = (f"names {name!r}, which ", Option("policy", policy), " does not have")
            raise ConfigError(problem, option="policy_options", remedy=remedy)
        settings[name] = _read_setting(name, value, known[name])
    return settings


def _read_setting(name: str, value: object, setting: PolicyOption) -> float | str:
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
    if settings.get("siblings") and not target.takes_leaves:
        problem = "has siblings, which only passes of the C kernels take"
        raise ConfigError(problem, option="policy_options", remedy="leave them out")
    kind = POLICIES[policy]
    own = max(kind.max_draft, longest) if kind.uses_costs else planned or kind.max_draft
    return kind.make(longest_draft(max_draft, own, target), **settings)


def longest_draft(max_draft: int | None, own: int, target: Runner) -> int:
    """Return the longest draft in tokens: `max_draft`, or `own` as far as a verifying pass takes it."""
    most = target.max_queries - 1
    if max_draft is not None and max_draft > most:
        problem = f"but this model's verifying pass takes {most} at most"
        raise ConfigError(problem, option="max_draft", value=max_draft, remedy=f"give {most} or less")
    return min(own, most) if max_draft is None else max_draft


# The tokenizer and the model's default parameters -> sequences and positions that will be used at most.
Needs: TypeAlias = Callable[[Tokenizer | None, SamplingParams], tuple[int, int]]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def checked(options: LoadOptions) -> LoadOptions:
    """Check combinations, and fill in the demo models and the policy's settings."""
    given = {} if options.policy_options is None else options.policy_options
    options = replace(options, policy_options=check_settings(options.policy, given))
    revisions = (
        ("revision", options.revision, options.model),
        ("draft_revision", options.draft_revision, options.draft),
    )
    for option, revision, of in revisions:
        if revision is not None and of is None:
            problem = "but no hub id is given that has it"
            raise ConfigError(problem, option=option, value=revision, remedy="leave it out")
    if options.model is None:
        shipped = demo.head_path() if options.drafter == "eagle3" else demo.draft_path()
        draft = shipped if options.draft is None else options.draft
        options = replace(options, model=demo.target_path(), draft=draft)
    if options.drafter is not None:
        check_named_drafter(options.drafter, options.policy, options.assets)
    return options


def find_target(options: LoadOptions, *, weights: bool = True) -> Checkpoint:
    """Find the target and its LoRAs, fetching hub ids, and read its spec and its tokenizer."""
    source = resolve(str(options.model), options.revision, options.report, weights=weights)
    if options.lora:
        from foredraft.model.locate import with_loras

        source = with_loras(source, options.lora, options.report)
    tokenizer = None if options.tokenizer is None else Path(options.tokenizer)
    if tokenizer is not None and not (tokenizer / FILE).is_file():
        remedy = "give the folder of a checkpoint"
        raise ConfigError(f"which has no {FILE}", option="tokenizer", value=str(tokenizer), remedy=remedy)
    target = _read(source, options, tokenizer)
    if options.weights is None:
        return target
    if target.spec.quantisation is not None:
        problem = f"but {target.source} is quantised already ({target.spec.quantisation.described})"
        raise ConfigError(problem, option="weights", value=options.weights, remedy="leave it out")
    return replace(target, bits=BITS[options.weights])


def find_draft(options: LoadOptions, *, weights: bool = True) -> Path | None:
    """Return the folder or the GGUF file that option `draft` names, fetching a hub id; None without one."""
    if options.draft is None:
        return None
    local = existing(options.draft)
    if local is not None and options.draft_revision is None:
        return local
    return locate(str(options.draft), options.draft_revision, options.report, weights=weights, drafter=True)


def read_draft(options: LoadOptions, draft: Path, target: Checkpoint) -> Checkpoint:
    return _read(source_at(draft), options, like=target.tokenizer)


def _read(
    source: ModelSource,
    options: LoadOptions,
    tokenizer_folder: Path | None = None,
    like: Tokenizer | None = None,
) -> Checkpoint:
    """Read a checkpoint; the tokenizer may come from elsewhere, and its tables from an equal `like`."""
    spec = source.spec
    if spec.ignored:
        ignored = ", ".join(spec.ignored)
        logger.info("%s: ignored, because transformers does not read it: %s", source.named(CONFIG), ignored)
    given = source if tokenizer_folder is None else ModelSource(tokenizer_folder)
    tokenizer = given.tokenizer(spec.vocab_size, like=like)
    if tokenizer is not None:
        _check_tokenizer(given, source, spec, tokenizer)
    return Checkpoint(source, spec, tokenizer, DTYPES[str(options.dtype or spec.dtype)])


def _check_tokenizer(given: ModelSource, source: ModelSource, spec: ModelSpec, tokenizer: Tokenizer) -> None:
    """Raise CheckpointError where a given tokenizer cannot be the model's.

    Only added tokens may lie beyond the model's vocabulary: the text models of Gemma 3 share a tokenizer with
    the multimodal ones. The tokens that begin and end the model's texts must exist.
    """
    found = ""
    if tokenizer.size > spec.vocab_size:
        found = f"ids up to {tokenizer.size - 1}, but the model's vocabulary is {spec.vocab_size}"
    bos = () if spec.bos_token_id is None else (spec.bos_token_id,)
    for name, ids in (("bos_token_id", bos), ("eos_token_id", spec.eos_token_ids)):
        for id in ids:
            if not found and not tokenizer.has(id):
                found = f"no token {id}, which is the model's {name}"
    if not found:
        return
    file = given.named(FILE)
    if file == source.named(CONFIG):  # a GGUF file, which has both
        problem = f"{file} has a vocabulary that is not its model's: it has {found}"
        raise CheckpointError(problem, remedy=GIVE_TOKENIZER)
    raise CheckpointError(
        f"{file} is not the tokenizer of {source.named(CONFIG)}: it has {found}",
        remedy="put the model's own tokenizer there",
    )


def default_params(checkpoint: Checkpoint) -> SamplingParams:
    """Return the sampling parameters of generation_config.json, without values that no request may have."""
    params = SamplingParams()
    config, file = checkpoint.source.generation or {}, checkpoint.source.named(GENERATION)
    for option, value in generation_defaults(config, file, checkpoint.spec.vocab_size).items():
        try:
            params = replace(params, **{option: value})
        except RequestError as error:
            logger.warning("%s: %s; it is left out", file, error)
    return params


@dataclass(frozen=True, slots=True)
class ChosenDrafting:
    drafter: str  # the drafter for requests that do not give one
    found: Mapping[str, Found]  # all are built, since a request may name any of them
    missing: Mapping[str, Missing]  # what the other drafters lack

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
    """Choose the default drafter, find all assets, and check that drafter, policy and models fit together."""
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
            shipped=(demo.adapter_path(),) if target.source.path == demo.target_path() else (),
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
    """Return the drafter whose asset option `draft` names; None for a whole model."""
    owner = next((name for name, asset in assets.items() if asset.knows(draft)), None)
    option = None if owner is None else DRAFTERS[owner].given_by
    if owner is None:
        refuse_unsupported(draft)
    if option not in (None, "draft"):
        raise ConfigError(
            f"which is what drafter {owner} reads", option="draft", value=str(options.draft),
            remedy=("give ", Option(str(option), str(options.draft)), " in its place"),
        )  # fmt: skip
    return owner
