"""`LoraTensors`: the tensors of a LoRA's file by the modules that they change.

Contract: every tensor is understood, or refused by name. A tensor's name is that of the module in the class
of `transformers`, behind `base_model.model.`:

    X.lora_A.weight [r, in], X.lora_B.weight [out, r]    the layer's weight becomes W + s·B·A
    X.lora_B.bias [out]                                  its bias becomes b + s·b_B
    X.lora_embedding_A [r, V], X.lora_embedding_B [D, r] the embedding becomes E + s·(B·A)ᵀ
    X.weight, X.bias                                     take the place of the model's own

Values are read when a weight is merged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from foredraft.errors import CheckpointError, shortened
from foredraft.model.lora.lora_config import MERGE_THERE, LoraConfig
from foredraft.model.safetensors_file import SafetensorsFile

FLOATS = ("F16", "BF16", "F32", "F64")  # dtypes of values, as safetensors names them
PREFIX = re.compile(r"(base_model\.model\.|base_model\.)")
ADAPTER = r"(\.default)?"  # the name of the adapter within PEFT, where another program saved the tensors
PART = re.compile(rf"(?P<module>.+)\.(?P<part>lora_(embedding_)?[AB]){ADAPTER}(\.(?P<kind>weight|bias))?")
SAVED = re.compile(rf"(?P<module>.+?)(\.base_layer|\.modules_to_save{ADAPTER})?\.(?P<kind>weight|bias)")
UNREAD = ".original_module."  # the model's own weights, which old versions of PEFT saved, too
OTHERS = {"lora_magnitude_vector": "DoRA", "trainable_tokens": "trained rows of an embedding"}
EMBEDDINGS = ("embed_tokens", "lm_head")  # saved by PEFT without being told to, if changed


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """B·A, which is scaled and added to a weight."""

    a: str  # name of A in the LoRA's file
    b: str  # name of B
    inputs: int  # columns of A
    outputs: int  # rows of B
    scale: float  # s
    embedding: bool  # the weight has a row for each input: it gets (B·A)ᵀ


@dataclass(frozen=True, slots=True)
class Shift:
    name: str
    shape: tuple[int, ...]
    scale: float


@dataclass(frozen=True, slots=True)
class Replacement:
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Change:
    module: str  # the module, as the LoRA names it
    kind: str  # "weight" or "bias"
    what: LowRankUpdate | Shift | Replacement  # what it does


class LoraTensors:
    def __init__(self, name: str, config: LoraConfig, file: SafetensorsFile) -> None:
        self.name, self.config, self.file = name, config, file
        self.parts: dict[str, dict[str, str]] = {}  # module -> part -> tensor
        self.saved: dict[tuple[str, str], str] = {}  # module and kind -> tensor
        for tensor in file.keys():  # noqa: SIM118 - no mapping
            self._sort(tensor)
        # the embedding's and the head's first: a change may be of what replaces them
        saved = self.saved.items()
        replacements = (Change(*of, Replacement(tensor, self.shape(tensor))) for of, tensor in saved)
        self.changes = [*replacements, *self._products()]
        if not self.changes:
            raise self.error("changes nothing: its file has no tensors", "give a LoRA that was trained")

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(sorted({change.module for change in self.changes}))

    def error(self, problem: str, remedy: str) -> CheckpointError:
        return CheckpointError(f"LoRA {self.name} {problem}", remedy=remedy)

    def shape(self, tensor: str) -> tuple[int, ...]:
        return tuple(self.file.get_slice(tensor).get_shape())

    def _sort(self, tensor: str) -> None:
        own = PREFIX.sub("", tensor, count=1) if PREFIX.match(tensor) else tensor
        if UNREAD in own:
            return
        for part, what in OTHERS.items():
            if part in own:
                raise self.error(f"has {shortened(tensor)}: {what}, which is not supported", MERGE_THERE)
        if (dtype := self.file.get_slice(tensor).get_dtype()) not in FLOATS:
            raise self.error(f"has {shortened(tensor)} of dtype {dtype}", f"save it in {' or '.join(FLOATS)}")
        found = PART.fullmatch(own)
        if found and (found["kind"] != "bias" or found["part"] == "lora_B"):
            part = "bias" if found["kind"] == "bias" else found["part"]
            self._note(self.parts.setdefault(found["module"], {}), part, tensor)
        elif (found := SAVED.fullmatch(own)) and self._may_save(found["module"], found["kind"]):
            self._note(self.saved, (found["module"], found["kind"]), tensor)
        else:
            problem = f"has {shortened(tensor)}, which its adapter_config.json does not explain"
            raise self.error(problem, MERGE_THERE)

    def _note(self, known: dict[Any, str], key: Any, tensor: str) -> None:
        if key in known:
            problem = f"has {shortened(known[key])} and {shortened(tensor)}, which are the same"
            raise self.error(problem, "remove one of them")
        known[key] = tensor

    def _may_save(self, module: str, kind: str) -> bool:
        named = module.rpartition(".")[2] in EMBEDDINGS or self.config.saves(module)
        return named or (kind == "bias" and self.config.biases)

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
                    yield Change(module, "weight", self._product(module, parts[a], parts[b], a != "lora_A"))
            if (bias := parts.get("bias")) is not None:
                yield Change(module, "bias", Shift(bias, self.shape(bias), self.config.scale_of(module)))

    def _product(self, module: str, a: str, b: str, embedding: bool) -> LowRankUpdate:
        a_shape, b_shape = self.shape(a), self.shape(b)
        if len(a_shape) != 2 or len(b_shape) != 2 or not all(a_shape + b_shape):
            problem = f"has changes of {shortened(module)} of shapes {[*a_shape]} and {[*b_shape]}"
            raise self.error(problem, "give a LoRA of linear layers")
        rank = self.config.rank_of(module)
        if a_shape[0] != rank or b_shape[1] != rank:
            raise self.error(
                f"has changes of {shortened(module)} of rank {a_shape[0]} and {b_shape[1]}, but"
                f" adapter_config.json says {rank}",
                "take both files from one LoRA",
            )
        return LowRankUpdate(a, b, a_shape[1], b_shape[0], self.config.scale_of(module), embedding)
