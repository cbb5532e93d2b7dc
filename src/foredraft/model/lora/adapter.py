"""What a LoRA's folder holds: `adapter_config.json`, and the tensors by the modules that they change.

Every key is read, changes nothing in a merged weight, or is refused by name. So is a LoRA whose effect is
more than W + s·B·A, or whose training changed the weights under it. Every tensor is understood, or refused by
name. A tensor's name is that of the module in the class of `transformers`, behind `base_model.model.`:

    X.lora_A.weight [r, in], X.lora_B.weight [out, r]    the layer's weight becomes W + s·B·A
    X.lora_B.bias [out]                                  its bias becomes b + s·b_B
    X.lora_embedding_A [r, V], X.lora_embedding_B [D, r] the embedding becomes E + s·(B·A)ᵀ
    X.weight, X.bias                                     take the place of the model's own

Values are read when a weight is merged.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import ConfigReader, read_json
from foredraft.model.safetensors_file import SafetensorsFile
from foredraft.model.spec import CONFIG, LORA_CONFIG, LORA_WEIGHTS


def lora_digest(lora: Path) -> str:
    digest = hashlib.sha256()
    for name in (LORA_CONFIG, LORA_WEIGHTS):
        try:
            with (lora / name).open("rb") as file:
                hashlib.file_digest(file, lambda: digest)  # adds the content to it
        except OSError as error:
            problem = f"{lora / name} cannot be read ({error.strerror})"
            raise CheckpointError(problem, remedy="give the LoRA again") from error
    return digest.hexdigest()


TARGETS, ALL_LINEAR = "target_modules", "all-linear"  # a key, and a value of it
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
    ties: bool  # changes of a tied embedding or head are of both
    base: str | None  # the model that it was trained for, as its maker named it; None where it does not say

    def rank_of(self, module: str) -> int:
        return int(_by_pattern(self.ranks, module, self.rank))

    def alpha_of(self, module: str) -> float:
        return float(_by_pattern(self.alphas, module, self.alpha))

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
    start = read.take("init_lora_weights", True)
    given = f"{read.where}: init_lora_weights = {shortened(start)}"
    way = start.lower() if isinstance(start, str) else start
    if isinstance(way, str) and way.startswith(CHANGES_THE_BASE):
        raise CheckpointError(f"{given} changed the model's own weights", remedy=SAVE_AS_LORA)
    if not (isinstance(way, bool | None) or way in LEAVES_THE_BASE):
        raise _unmergeable(f"{given} is not known")
    targets = read.take(TARGETS)
    if isinstance(targets, str) and targets != ALL_LINEAR:
        _check_pattern(read, TARGETS, targets)
    config = LoraConfig(
        rank=read.count("r", 8),
        alpha=read.number("lora_alpha", 8),
        ranks=_patterns(read, "rank_pattern", ConfigReader.count),
        alphas=_patterns(read, "alpha_pattern", ConfigReader.number),
        root=read.flag("use_rslora", if_null=False),
        targets=targets if isinstance(targets, str | None) else _names(read, TARGETS),
        saved=_names(read, "modules_to_save"),
        biases=read.choice("bias", ("none", "all", "lora_only"), "none") != "none",
        ties=read.flag("ensure_weight_tying", if_null=False),
        base=name if isinstance(name := read.take("base_model_name_or_path"), str) and name else None,
    )
    read.flag("lora_bias", if_null=False)  # its tensors say the same
    read.flag("fan_in_fan_out", if_null=False)  # and the layers
    read.take("exclude_modules")  # it has no tensors of these
    for key, value in read.unread().items():
        if value not in (False, [], {}, ""):
            given = f"{read.where}: {key} = {shortened(value)}"
            raise _unmergeable(f"{given} is not known, and ignoring it could change the output")
    return config


def _unmergeable(problem: str) -> CheckpointError:
    return CheckpointError(problem, remedy=MERGE_THERE)


def _patterns(read: ConfigReader, key: str, value_of: Any) -> dict[str, Any]:
    section = read.section(key)
    found = {} if section is None else {name: value_of(section, name) for name in section.config}
    for pattern in found:
        _check_pattern(read, key, pattern)
    return found


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


FLOATS = ("F16", "BF16", "F32", "F64")  # dtypes of values, as safetensors names them
PREFIX = re.compile(r"(base_model\.model\.|base_model\.)")
ADAPTER = r"(\.default)?"  # the name of the adapter within PEFT, where another program saved the tensors
PART = re.compile(rf"(?P<module>.+)\.(?P<part>lora_(embedding_)?[AB]){ADAPTER}(\.(?P<kind>weight|bias))?")
SAVED = re.compile(rf"(?P<module>.+?)(\.base_layer|\.modules_to_save{ADAPTER})?\.(?P<kind>weight|bias)")
UNREAD = ".original_module."  # the model's own weights, which old versions of PEFT saved, too
OTHERS = {"lora_magnitude_vector": "DoRA", "trainable_tokens": "trained rows of an embedding"}
EMBEDDINGS = ("embed_tokens", "lm_head")  # saved by PEFT without being told to, if changed


@dataclass(frozen=True, slots=True)
class Change:
    """What a LoRA does to a tensor: it replaces it, or adds s·b_B to a bias, or s·B·A to a weight."""

    lora: LoraTensors
    module: str  # the module, as the LoRA names it
    kind: str  # "weight" or "bias"
    tensors: tuple[str, ...]  # in the LoRA's file: one, or A and B
    shape: tuple[int, ...]  # of the tensor that it is for; of a product, rows of B and columns of A
    scale: float = 0.0  # s
    replaces: bool = False
    embedding: bool = False  # the weight has a row for each input: it gets (B·A)ᵀ

    @property
    def is_product(self) -> bool:
        return len(self.tensors) == 2


class LoraTensors:
    def __init__(self, name: str, config: LoraConfig, file: SafetensorsFile) -> None:
        self.name, self.config, self.stored = name, config, file.stored
        self.parts: dict[str, dict[str, str]] = {}  # module -> part -> tensor
        self.saved: dict[tuple[str, str], str] = {}  # module and kind -> tensor
        for tensor in self.stored:
            self._sort(tensor)
        # the embedding's and the head's first: a change may be of what replaces them
        self.changes = [
            *(Change(self, *of, (one,), self.shape(one), replaces=True) for of, one in self.saved.items()),
            *self._products(),
        ]
        if not self.changes:
            raise self.error("changes nothing: its file has no tensors", "give a LoRA that was trained")

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(sorted({change.module for change in self.changes}))

    def error(self, problem: str, remedy: str) -> CheckpointError:
        return CheckpointError(f"LoRA {self.name} {problem}", remedy=remedy)

    def shape(self, tensor: str) -> tuple[int, ...]:
        return self.stored[tensor].shape

    def values(self, tensor: str, rows: slice | None = None) -> Tensor:
        """Return a tensor, or rows of it, in float32."""
        values = self.stored[tensor].read(rows).to(torch.float32, copy=True)
        if not torch.isfinite(values).all():
            problem = f"has {shortened(tensor)} with values that are not finite"
            raise self.error(problem, "train it again, or download it again")
        return values

    def _sort(self, tensor: str) -> None:
        own = PREFIX.sub("", tensor, count=1) if PREFIX.match(tensor) else tensor
        if UNREAD in own:
            return
        for part, what in OTHERS.items():
            if part in own:
                raise self.error(f"has {shortened(tensor)}: {what}, which is not supported", MERGE_THERE)
        if (dtype := self.stored[tensor].dtype) not in FLOATS:
            raise self.error(f"has {shortened(tensor)} of dtype {dtype}", f"save it in {' or '.join(FLOATS)}")
        found = PART.fullmatch(own)
        if found and (found["kind"] != "bias" or found["part"] == "lora_B"):
            part = "bias" if found["kind"] == "bias" else found["part"]
            self._note(self.parts.setdefault(found["module"], {}), part, tensor)
        elif (found := SAVED.fullmatch(own)) and (
            found["module"].rpartition(".")[2] in EMBEDDINGS
            or self.config.saves(found["module"])
            or (found["kind"] == "bias" and self.config.biases)
        ):
            self._note(self.saved, (found["module"], found["kind"]), tensor)
        else:
            problem = f"has {shortened(tensor)}, which its adapter_config.json does not explain"
            raise self.error(problem, MERGE_THERE)

    def _note(self, known: dict[Any, str], key: Any, tensor: str) -> None:
        if key in known:
            problem = f"has {shortened(known[key])} and {shortened(tensor)}, which are the same"
            raise self.error(problem, "remove one of them")
        known[key] = tensor

    def _products(self) -> Iterator[Change]:
        for module, parts in self.parts.items():
            tied = self.config.ties and module.rpartition(".")[2] in EMBEDDINGS
            if not tied and not self.config.targets_module(module):
                problem = f"changes {shortened(module)}, which its target_modules do not name"
                raise self.error(problem, "take both files from one LoRA")
            for a, b in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
                if (a in parts) != (b in parts):
                    has, lacks = (a, b) if a in parts else (b, a)
                    raise self.error(f"has {has} of {shortened(module)}, but no {lacks}", "save it again")
                if a in parts:
                    yield self._product(module, parts[a], parts[b], a != "lora_A")
            if (bias := parts.get("bias")) is not None:
                yield Change(self, module, "bias", (bias,), self.shape(bias), self.config.scale_of(module))

    def _product(self, module: str, a: str, b: str, embedding: bool) -> Change:
        a_shape, b_shape = self.shape(a), self.shape(b)
        if len(a_shape) != 2 or len(b_shape) != 2 or not all(a_shape + b_shape):
            problem = f"has changes of {shortened(module)} of shapes {[*a_shape]} and {[*b_shape]}"
            raise self.error(problem, "give a LoRA of linear layers")
        rank, found = self.config.rank_of(module), (a_shape[0], b_shape[1])
        if {*found} != {rank}:
            given = f"has changes of {shortened(module)} of rank {found[0]} and {found[1]}"
            problem = f"{given}, but adapter_config.json says {rank}"
            raise self.error(problem, "take both files from one LoRA")
        shape, scale = (b_shape[0], a_shape[1]), self.config.scale_of(module)
        return Change(self, module, "weight", (a, b), shape, scale, embedding=embedding)


def open_lora(name: str, folder: Path, stack: ExitStack) -> LoraTensors:
    if not (folder / LORA_CONFIG).is_file():
        model = f": it has a config.json, but no {LORA_CONFIG}" if (folder / CONFIG).is_file() else ""
        lacks = "is a file" if folder.is_file() else f"has no {LORA_CONFIG}"
        problem = f"is no LoRA{model}" if model else lacks
        raise CheckpointError(f"LoRA {name} {problem}", remedy="give the folder of a LoRA, as PEFT saves it")
    config = read_lora_config(folder)
    if not (folder / LORA_WEIGHTS).is_file():
        pickled = (folder / LORA_WEIGHTS).with_suffix(".bin").is_file()
        but = ", but a pickle, which can hold code" if pickled else ""
        problem = f"LoRA {name} has no {LORA_WEIGHTS}{but}"
        remedy = "save it again with PEFT, as safetensors" if pickled else "download it again"
        raise CheckpointError(problem, remedy=remedy)
    return LoraTensors(name, config, stack.enter_context(SafetensorsFile(folder / LORA_WEIGHTS)))
