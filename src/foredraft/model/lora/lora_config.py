"""`LoraConfig`: what `adapter_config.json` says of a LoRA.

Contract: every key is read, changes nothing in a merged weight, or is refused by name. A LoRA whose effect is
more than W + s·B·A, or whose training changed the weights under it, is refused with what to do instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import ConfigReader, read_json
from foredraft.model.lora.record import CONFIG

__all__ = ["ALL_LINEAR", "LoraConfig", "read_lora_config"]

ALL_LINEAR = "all-linear"  # a value of target_modules
MERGE_THERE = "merge it into its model with PEFT (merge_and_unload), and give the merged model"
# What other keys make of a LoRA, where they have a value -> its name.
OTHER_KINDS = {
    "use_dora": "DoRA, which also scales each row of a weight",
    "use_qalora": "QA-LoRA, which pools the inputs of its layers",
    "alora_invocation_tokens": "an activated LoRA, which acts behind certain tokens alone",
    "layer_replication": "a LoRA for a model whose layers are stacked anew",
    "target_parameters": "a LoRA of single parameters, such as fused experts",
    "trainable_token_indices": "a LoRA with rows of the embedding that were trained by themselves",
    "kasa_config": "KaSA, which changes the weights under it",
    "monteclora_config": "MonteCLoRA, which draws weights at random",
    "arrow_config": "Arrow, which chooses among LoRAs by token",
    "use_bdlora": "a block-diagonal LoRA",
    "megatron_config": "a LoRA of Megatron's layers",
}
# Ways to begin the training that change the model's own weights; what was trained fits those alone.
CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
SAVE_AS_LORA = "save it as an ordinary LoRA (PEFT's path_initial_model_for_weight_conversion)"
# Ways that leave them as they are.
LEAVES_THE_BASE = ("gaussian", "eva", "orthogonal", "mica")
# Keys that say how a LoRA was trained or saved.
HARMLESS = frozenset(
    """
    auto_mapping corda_config eva_config inference_mode layers_pattern layers_to_transform lora_dropout
    lora_ga_config loftq_config megatron_core peft_version qalora_group_size revision runtime_config task_type
    velora_config base_model_class modules_to_tie target_modules_to_tie
    """.split()
)


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What a LoRA is.

    Attributes:
        rank: r, the rank of its changes.
        alpha: α.
        ranks: Patterns of modules' names -> another rank.
        alphas: Patterns of modules' names -> another α.
        root: Changes are scaled by α/√r instead of α/r.
        targets: The modules that it changes: a regular expression, `ALL_LINEAR`, or ends of names; None where
            it does not say.
        saved: Ends of the names of modules whose weights it replaces.
        biases: It replaces biases, too.
        transposed: Weights of its layers are stored with a row for each input.
        ties: Changes of a tied embedding or head are of both.
        base: The model that it was trained for, as its maker named it; None where it does not say.
    """

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    root: bool
    targets: str | tuple[str, ...] | None
    saved: tuple[str, ...]
    biases: bool
    transposed: bool
    ties: bool
    base: str | None

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's change."""
        rank: int = _by_pattern(self.ranks, module, self.rank)
        return rank

    def alpha_of(self, module: str) -> float:
        """Return α of a module's change."""
        alpha: float = _by_pattern(self.alphas, module, self.alpha)
        return alpha

    def scale_of(self, module: str) -> float:
        """Return s, the factor of B·A."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (math.sqrt(rank) if self.root else rank)

    def targets_module(self, module: str) -> bool:
        """Return whether a module is one of those that it changes."""
        if self.targets is None or self.targets == ALL_LINEAR:
            return True
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, module) is not None
        return any(module == target or module.endswith(f".{target}") for target in self.targets)

    def saves(self, module: str) -> bool:
        """Return whether a module is, or lies in, one whose weights it replaces."""
        parts = module.split(".")
        around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        return any(each.endswith(self.saved) for each in around)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that a module's name ends with."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def read_lora_config(folder: Path) -> LoraConfig:
    """Read the `adapter_config.json` of a LoRA.

    Raises:
        CheckpointError: It is no LoRA, or one that is not supported.
    """
    read = ConfigReader(read_json(folder / CONFIG), str(folder / CONFIG), HARMLESS)
    kind = read.take("peft_type")
    if kind != "LORA":
        raise CheckpointError(
            f"{read.where}: peft_type {shortened(kind)} is not supported",
            remedy=f"give a LoRA, or {MERGE_THERE}",
        )
    for key, what in OTHER_KINDS.items():
        if read.take(key):
            raise CheckpointError(
                f"{read.where}: {key} makes it {what}, which is not supported", remedy=MERGE_THERE
            )
    _check_start(read)
    config = LoraConfig(
        rank=read.count("r", 8),
        alpha=read.number("lora_alpha", 8),
        ranks=_patterns(read, "rank_pattern", ConfigReader.count),
        alphas=_patterns(read, "alpha_pattern", ConfigReader.number),
        root=read.flag("use_rslora", if_null=False),
        targets=_targets(read),
        saved=_names(read, "modules_to_save"),
        biases=read.choice("bias", ("none", "all", "lora_only"), "none") != "none",
        transposed=read.flag("fan_in_fan_out", if_null=False),
        ties=read.flag("ensure_weight_tying", if_null=False),
        base=_base(read),
    )
    read.flag("lora_bias", if_null=False)  # its tensors say the same
    read.take("exclude_modules")  # it has no tensors of these
    for key, value in read.unread().items():
        if value not in (False, [], {}, ""):
            raise CheckpointError(
                f"{read.where}: {key} = {shortened(value)} is not known, and ignoring it could change"
                " the output",
                remedy=MERGE_THERE,
            )
    return config


def _check_start(read: ConfigReader) -> None:
    """Refuse a LoRA whose training began with other weights under it."""
    start = read.take("init_lora_weights", True)
    name = start.lower() if isinstance(start, str) else start
    if isinstance(name, str) and name.startswith(CHANGES_THE_BASE):
        raise CheckpointError(
            f"{read.where}: init_lora_weights = {shortened(start)} changed the model's own weights",
            remedy=SAVE_AS_LORA,
        )
    if not (isinstance(name, bool | None) or name in LEAVES_THE_BASE):
        raise CheckpointError(
            f"{read.where}: init_lora_weights = {shortened(start)} is not known", remedy=MERGE_THERE
        )


def _patterns(read: ConfigReader, key: str, value_of: Any) -> dict[str, Any]:
    section = read.section(key)
    found = {} if section is None else {name: value_of(section, name) for name in section.config}
    for pattern in found:
        _check_pattern(read, key, pattern)
    return found


def _targets(read: ConfigReader) -> str | tuple[str, ...] | None:
    given = read.take("target_modules")
    if given is None:
        return None
    if isinstance(given, str):
        if given != ALL_LINEAR:
            _check_pattern(read, "target_modules", given)
        return given
    return _names(read, "target_modules")


def _check_pattern(read: ConfigReader, key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"{read.where}: {key} has {shortened(pattern)}, which is no regular expression ({error})",
            remedy="correct it",
        ) from error


def _names(read: ConfigReader, key: str) -> tuple[str, ...]:
    given = read.take(key)
    listed = [] if given is None else given
    if not isinstance(listed, list) or not all(isinstance(name, str) and name for name in listed):
        raise read.error(key, "it must be a list of modules' names")
    return tuple(listed)


def _base(read: ConfigReader) -> str | None:
    name = read.take("base_model_name_or_path")
    return name if isinstance(name, str) and name else None
