"""Tensor names: how the names and layouts that a checkpoint stores become those that the decoder asks for.

The decoder knows the names of `LlamaForCausalLM`. A family that spells them otherwise has a `Naming` of its
own, which gives them back, too, for checkpoints that are written. A multimodal checkpoint spells those of its
text model as `language_model.model.*`, or as `model.language_model.*` with `lm_head.*`; a mix is refused.
Tensors that predict further tokens, `mtp.*` or layers behind the model's own (DeepSeek V3), do not touch its
logits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from foredraft.errors import CheckpointError
from foredraft.model.config import ConfigReader
from foredraft.model.safetensors_file import StoredTensor

KEYS = ("num_nextn_predict_layers", "num_mtp_layers")  # of the config: layers behind the model's own
PREFIX = re.compile(r"(model\.)?(language_model\.)?mtp(_layers)?\.")
LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")


def read_further_layers(read: ConfigReader) -> int:
    """Return how many layers behind the model's own predict further tokens."""
    return max(read.count(key, 0, if_null=0, allow_zero=True) for key in KEYS)


def predicts_further(name: str, layers: int, further: int) -> bool:
    """Return whether a tensor belongs to what predicts further tokens.

    Examples:
        >>> predicts_further("mtp.fc.weight", 8, 0), predicts_further("model.layers.8.eh_proj.weight", 8, 1)
        (True, True)
    """
    layer = LAYER.match(name)
    return bool(PREFIX.match(name)) or (layer is not None and layers <= int(layer[1]) < layers + further)


LAYERS, HEAD = "model.layers", "lm_head"
LINEAR, CONV1D = "Linear", "Conv1D"  # classes of linear layers; a Conv1D stores its weight as [K, M]
OTHER_PARTS = """  # parts of a multimodal checkpoint that no text passes through
    vision_tower multi_modal_projector visual audio_tower embed_vision embed_audio vision_embedder
    vision_adapter vision_projection
    """.split()
UNREAD = re.compile(rf"(?:model\.)?(?:{'|'.join(OTHER_PARTS)})\..+")
OLDER = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
NEWER = {"model.language_model.": "model.", "lm_head.": "lm_head."}
SPELLINGS = (OLDER, NEWER)


EMBEDDING, POSITIONS, LAST_NORM = "model.embed_tokens", "model.embed_positions", "model.norm"
LLAMA_OUTER = {"embed_tokens": EMBEDDING, "norm": LAST_NORM}
LLAMA_INNER = {
    name: name
    for name in (
        "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    )
}  # fmt: skip
NAME = re.compile(r"(.+)\.(\w+)")  # module and tensor


@dataclass(frozen=True)
class Naming:
    """The names of a family's tensors, and which of its weights are stored as [K, M]; by default Llama's."""

    nested: bool = False  # they are those of a multimodal checkpoint
    prefixes: tuple[str, ...] = ("model.",)  # of all modules but the head; the first is written
    layers: str = "layers"  # the name of the list of layers
    outer: dict[str, str] = field(default_factory=lambda: LLAMA_OUTER, hash=False)  # outside the layers
    # of a layer -> in the decoder; a family's own name comes after that of Llama
    inner: dict[str, str] = field(default_factory=lambda: LLAMA_INNER, hash=False)
    heads: tuple[str, ...] = (HEAD,)  # the names of the head; the first is written
    transposed: frozenset[str] = frozenset()  # of a layer, stored as [K, M]
    ignored: tuple[str, ...] = ()  # tensors of a layer that carry no information

    @property
    def stored_layers(self) -> str:
        return f"{self.prefixes[0]}{self.layers}"

    @property
    def written_keys(self) -> dict[str, Any]:
        """The keys of a config that differ in a checkpoint which is written of the decoder's tensors."""
        return {}

    def plain(self, stored: Iterable[str]) -> dict[str, str]:
        """Return the decoder's names of stored tensors by their stored ones; other parts' are left."""
        found = {name: self._renamed(name) for name in stored if not (self.nested and UNREAD.fullmatch(name))}
        if self.nested:
            _check_spelling(found)
        first: dict[str, str] = {}
        for name, plain in found.items():
            if (other := first.setdefault(plain, name)) != name:
                raise _two_ways(other, name)
        return found

    def opened(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return stored tensors by the decoder's names."""
        return {
            name: transposed(stored[own]) if self._is_transposed(name) else stored[own]
            for own, name in self.plain(stored).items()
        }

    def _renamed(self, name: str) -> str:
        """Return the decoder's name of a stored tensor; its own for one that the family lacks."""
        name = unnested(name) if self.nested else name
        match = NAME.fullmatch(name)
        if match is None:
            return name
        module, kind = match.groups()
        if module in self.heads:
            return f"{HEAD}.{kind}"
        for prefix in self.prefixes:
            if not module.startswith(prefix):
                continue
            rest = module[len(prefix) :]
            if rest in self.outer:
                return f"{self.outer[rest]}.{kind}"
            layer = re.fullmatch(rf"{self.layers}\.(\d+)\.(.+)", rest)
            if layer is not None and layer[2] in self.inner:
                return f"{LAYERS}.{layer[1]}.{self.inner[layer[2]]}.{kind}"
        return name

    def stored_name(self, own: str) -> str:
        """Return the name that a checkpoint of the family gives a tensor of the decoder."""
        module, kind = own.rsplit(".", 1)
        if module == HEAD:
            return f"{self.heads[0]}.{kind}"
        outer = module in self.outer.values()  # a family may name every layer by itself
        layer = None if outer else re.fullmatch(rf"{re.escape(LAYERS)}\.(\d+)\.(.+)", module)
        names = self.outer if layer is None else self.inner
        wanted = module if layer is None else layer[2]
        stored = next((stored for stored, name in reversed(names.items()) if name == wanted), None)
        if stored is None:
            return own
        place = "" if layer is None else f"{self.layers}.{layer[1]}."
        return f"{self.prefixes[0]}{place}{stored}.{kind}"

    def stored_module(self, module: str) -> str:
        """Return the name that a checkpoint of the family gives a linear layer of the decoder."""
        return self.stored_name(f"{module}.weight").removesuffix(".weight")

    def stored_values(self, name: str, values: Tensor) -> Tensor:
        return values.T.contiguous() if self._is_transposed(name) else values

    def layer_class(self, module: str) -> str:
        return CONV1D if self._is_transposed(f"{module}.weight") else LINEAR

    def is_ignored(self, stored: str) -> bool:
        return any(
            re.fullmatch(rf"(?:{re.escape(prefix)})?{self.layers}\.\d+\.{re.escape(name)}", stored)
            for prefix in self.prefixes
            for name in self.ignored
        )

    def _is_transposed(self, name: str) -> bool:
        part = name.removeprefix(f"{LAYERS}.").partition(".")[2]
        return part.endswith(".weight") and part.removesuffix(".weight") in self.transposed


AS_STORED = Naming()


def _check_spelling(stored: Iterable[str]) -> None:
    found = ([name for name in stored if name.startswith(tuple(spelling))] for spelling in SPELLINGS)
    older, newer = (next(iter(names), None) for names in found)
    if older is not None and newer is not None:
        raise _two_ways(older, newer)


def _two_ways(one: str, other: str) -> CheckpointError:
    problem = f"the tensors {one} and {other} are spelled in two ways"
    return CheckpointError(problem, remedy="use a checkpoint that names all its text tensors alike")


def unnested(name: str) -> str:
    """Return the name that a tensor or module of the text model has in a checkpoint of that model alone."""
    for spelling in SPELLINGS:
        for prefix, plain in spelling.items():
            if name.startswith(prefix):
                return plain + name.removeprefix(prefix)
    return name


def transposed(stored: StoredTensor) -> StoredTensor:
    def read(rows: slice | None) -> Tensor:
        values = stored.whole().T
        return values if rows is None else values[rows]

    return replace(stored, shape=stored.shape[::-1], read=read)


def written(naming: Naming, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's tensors as a checkpoint of its family stores them, under its names."""
    return {naming.stored_name(name): naming.stored_values(name, values) for name, values in tensors.items()}
