"""`LoraConfig`: what `adapter_config.json` says of a LoRA. It needs no PyTorch.

Every key is read, changes nothing in a merged weight, or is refused by name. So is a LoRA whose effect is
more than W + s·B·A, or whose training changed the weights under it.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import ConfigReader, read_json

LORA_CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # of a LoRA's folder
PIECE = 2**20  # bytes that are hashed at a time


def is_lora(folder: Path) -> bool:
    return (folder / LORA_CONFIG).is_file() and not (folder / "config.json").is_file()


def lora_digest(lora: Path) -> str:
    digest = hashlib.sha256()
    for name in (LORA_CONFIG, WEIGHTS):
        try:
            with (lora / name).open("rb") as file:
                while piece := file.read(PIECE):
                    digest.update(piece)
        except OSError as error:
            problem = f"{lora / name} cannot be read ({error.strerror})"
            raise CheckpointError(problem, remedy="give the LoRA again") from error
    return digest.hexdigest()


ALL_LINEAR = "all-linear"  # a value of target_modules
MERGE_THERE = "merge it into its model with PEFT (merge_and_unload), and give the merged model"
OTHER_KINDS = {  # what other keys make of a LoRA, where they have a value
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
LEAVES_THE_BASE = ("gaussian", "eva", "orthogonal", "mica")  # what leaves them as they are
HARMLESS = frozenset(  # keys that say how a LoRA was trained or saved
    """
    auto_mapping corda_config eva_config inference_mode layers_pattern layers_to_transform lora_dropout
    lora_ga_config loftq_config megatron_core peft_version qalora_group_size revision runtime_config task_type
    velora_config base_model_class modules_to_tie target_modules_to_tie
    """.split()
)


@dataclass(frozen=True, slots=True)
class LoraConfig:
    rank: int  # r, the rank of its changes
    alpha: float  # α
    ranks: Mapping[str, int]  # patterns of modules' names -> another rank
    alphas: Mapping[str, float]  # patterns of modules' names -> another α
    root: bool  # changes are scaled by α/√r instead of α/r
    targets: str | tuple[str, ...] | None  # expression, `ALL_LINEAR`, or ends of modules' names
    saved: tuple[str, ...]  # ends of the names of modules whose weights it replaces
    biases: bool  # it replaces biases, too
    transposed: bool  # weights of its layers are stored with a row for each input
    ties: bool  # changes of a tied embedding or head are of both
    base: str | None  # the model that it was trained for, as its maker named it; None where it does not say

    def rank_of(self, module: str) -> int:
        rank: int = _by_pattern(self.ranks, module, self.rank)
        return rank

    def alpha_of(self, module: str) -> float:
        alpha: float = _by_pattern(self.alphas, module, self.alpha)
        return alpha

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        return self.alpha_of(module) / (math.sqrt(rank) if self.root else rank)

    def targets_module(self, module: str) -> bool:
        if self.targets is None or self.targets == ALL_LINEAR:
            return True
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, module) is not None
        return any(module == target or module.endswith(f".{target}") for target in self.targets)

    def saves(self, module: str) -> bool:
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
    read = ConfigReader(read_json(folder / LORA_CONFIG), str(folder / LORA_CONFIG), HARMLESS)
    kind = read.take("peft_type")
    if kind != "LORA":
        problem = f"{read.where}: peft_type {shortened(kind)} is not supported"
        raise CheckpointError(problem, remedy=f"give a LoRA, or {MERGE_THERE}")
    for key, what in OTHER_KINDS.items():
        if read.take(key):
            raise _unmergeable(f"{read.where}: {key} makes it {what}, which is not supported")
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
            given = f"{read.where}: {key} = {shortened(value)}"
            raise _unmergeable(f"{given} is not known, and ignoring it could change the output")
    return config


def _unmergeable(problem: str) -> CheckpointError:
    return CheckpointError(problem, remedy=MERGE_THERE)


def _check_start(read: ConfigReader) -> None:
    start = read.take("init_lora_weights", True)
    given = f"{read.where}: init_lora_weights = {shortened(start)}"
    name = start.lower() if isinstance(start, str) else start
    if isinstance(name, str) and name.startswith(CHANGES_THE_BASE):
        raise CheckpointError(f"{given} changed the model's own weights", remedy=SAVE_AS_LORA)
    if not (isinstance(name, bool | None) or name in LEAVES_THE_BASE):
        raise _unmergeable(f"{given} is not known")


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
        problem = f"{read.where}: {key} has {shortened(pattern)}, which is no regular expression ({error})"
        raise CheckpointError(problem, remedy="correct it") from error


def _names(read: ConfigReader, key: str) -> tuple[str, ...]:
    given = read.take(key)
    listed = [] if given is None else given
    if not isinstance(listed, list) or not all(isinstance(name, str) and name for name in listed):
        raise read.error(key, "it must be a list of modules' names")
    return tuple(listed)


def _base(read: ConfigReader) -> str | None:
    name = read.take("base_model_name_or_path")
    return name if isinstance(name, str) and name else None
