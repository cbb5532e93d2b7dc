"""Which head a folder or a GGUF file holds, by its small files, and the asset of a drafter with a head.

Nothing here reads weights or imports a drafter: a drafter's file is imported once a place holds its head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from foredraft.drafters.asset import Asset, AssetSearch, Found, Missing
from foredraft.errors import CheckpointError, Option
from foredraft.model.config import read_json
from foredraft.model.gguf.file import architecture_of
from foredraft.model.safetensors_file import SINGLE, SafetensorsFile
from foredraft.model.source import weights_to_come
from foredraft.model.spec import CONFIG

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def config_of(place: Path) -> dict[str, Any]:
    """Return the config.json of a folder; an empty one where there is none that can be read."""
    try:
        return read_json(place / CONFIG) if (place / CONFIG).is_file() else {}
    except (CheckpointError, OSError):
        return {}


def architectures_of(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def not_downloaded(head: Path) -> bool:
    """Return whether a head is a folder of the hub's cache whose weights were not fetched."""
    return head.is_dir() and not has_weights(head) and _pickle(head) is None and weights_to_come(head)


def refuse_pickles(folder: Path) -> None:
    """Raise CheckpointError where the weights in a folder are pickles alone; none is ever read."""
    if (pickle := _pickle(folder)) is not None:
        raise CheckpointError(
            f"{pickle} is a pickle, which can run any program when it is read, so it is not read",
            remedy="convert it to model.safetensors, or give a copy of the head in that format",
        )


def _pickle(folder: Path) -> Path | None:
    """Return a pickle of a folder that has no weights in another format; None for other folders."""
    if has_weights(folder):
        return None
    return next((file for pattern in PICKLES for file in sorted(folder.glob(pattern))), None)


EAGLE3 = frozenset({
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel",
})  # fmt: skip
BLOCKS = {
    "DFlashDraftModel": "dflash", "DFlash2DraftModel": "dflash", "DFlashSpeculator": "dflash",
    "Qwen3DSparkModel": "dspark", "DSparkDraftModel": "dspark", "DSparkSpeculator": "dspark",
}  # fmt: skip
SPECULATORS_BLOCKS = {"dflash": "dflash", "dflash2": "dflash", "dspark": "dspark"}  # names of speculators
DFLASH = "dflash_config"
BIAS = "markov_w1.weight"  # in GGUF files; it makes a DFlash head one of DSpark
FIRST = "layers.0.self_attn.q_proj.weight"
FOREIGN = frozenset({"norm.weight", "hidden_norm.weight"})  # of other heads with an `fc`
TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # of a whole model
MEDUSA, MEDUSA_PICKLE = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
ASSISTANTS = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}


def is_eagle3(place: Path) -> bool:
    config = config_of(place)
    if "speculators_model_type" in config:
        return bool(config["speculators_model_type"] == "eagle3")
    named = not EAGLE3.isdisjoint(architectures_of(config))
    block = "block_size" in config or DFLASH in config
    return named or (config.get("num_hidden_layers") == 1 and "draft_vocab_size" in config and not block)


def is_eagle3_gguf(place: Path) -> bool:
    return architecture_of(place) == "eagle3"


def is_eagle(place: Path) -> bool:
    """Return whether a folder holds an EAGLE-1 or EAGLE-2 head, as its config and its tensors' names say."""
    if is_eagle3(place) or not (place / CONFIG).is_file():
        return False
    try:
        if (place / SINGLE).is_file():
            with SafetensorsFile(place / SINGLE) as opened:
                names = frozenset(opened.tensors)
                return {"fc.weight", FIRST} <= names and FOREIGN.isdisjoint(names)
        one_layer = read_json(place / CONFIG).get("num_hidden_layers") == 1
    except CheckpointError:
        return False
    whole = any((place / name).is_file() for name in TOKENIZERS)
    return one_layer and not whole and not has_weights(place)


def is_dflash(place: Path) -> bool:
    return _block_kind(place) == "dflash"


def is_dspark(place: Path) -> bool:
    return _block_kind(place) == "dspark"


def _block_kind(place: Path) -> str | None:
    """Return the drafter of the block drafter's head in a folder or a GGUF file; None for another place."""
    if architecture_of(place) == "dflash":
        from foredraft.model.gguf.tensors import GGUFModel

        try:
            return "dspark" if BIAS in GGUFModel(place, lists=False).tensors else "dflash"
        except CheckpointError:
            return "dflash"
    config = config_of(place)
    told = config.get("speculators_model_type")
    if told is not None:
        return SPECULATORS_BLOCKS.get(told) if isinstance(told, str) else None
    named = [BLOCKS[name] for name in architectures_of(config) if name in BLOCKS]
    inner = config.get(DFLASH)
    kind = next(iter(named), "dflash" if isinstance(inner, dict) else None)
    ranks = [where.get("markov_rank") for where in (config, inner if isinstance(inner, dict) else {})]
    return "dspark" if kind and any(type(rank) is int and rank > 0 for rank in ranks) else kind


def is_medusa(place: Path) -> bool:
    """Return whether a folder holds Medusa heads, as its config or the name of its file says."""
    config = config_of(place)
    of_medusa = config.get("model_type") == "medusa" or "medusa_num_heads" in config
    named = of_medusa or "MedusaModel" in architectures_of(config)
    return named or any((place / name).is_file() for name in (MEDUSA, MEDUSA_PICKLE))


def is_assistant(place: Path) -> bool:
    """Return whether a folder holds an assistant, sound or not, as its config.json says."""
    return place.is_dir() and config_of(place).get("model_type") in ASSISTANTS


class HeadAsset(Asset):
    """A head: the folder, GGUF file or hub id that the user gives as the draft model."""

    def __init__(
        self,
        called: str,  # what messages call it, with its article
        where: str,  # it is, such as "its folder"
        knows: Callable[[Path], bool],
        drafter: str,  # the file in `drafters` and the class, whose `found` returns the head of a place
        *,
        needed: str | None = None,  # as `called`, where a named drafter needs it
        reads_headers: bool = True,  # of the weights, which therefore have to be here
    ) -> None:
        self.called, self._knows, self.drafter, self.reads_headers = called, knows, drafter, reads_headers
        remedy = ("give ", Option("draft"), f", {where}")
        self.missing = Missing(f"needs {called} of this model", remedy)
        self.required = Missing(f"which needs {needed or f'{called} of the model'}", remedy)

    def knows(self, place: Path) -> bool:
        return self._knows(place)

    def find(self, search: AssetSearch) -> Found | Missing:
        place = search.draft
        if place is None:
            return self.missing
        if not self.knows(place):
            called = self.called.removeprefix("an ").removeprefix("a ")
            return replace(self.missing, unfit=f"{place} is a whole model, and no {called}")
        if self.reads_headers and not_downloaded(place):
            return replace(self.missing, unfit=f"the weights of {place} are not downloaded")
        file, name = self.drafter.split(":")
        found: Found = getattr(import_module(f"foredraft.drafters.{file}"), name).found(place, search.target)
        return found


EITHER = "its folder or GGUF file"
EAGLE3_ASSET = HeadAsset(
    "an EAGLE-3 head", EITHER, lambda place: is_eagle3(place) or is_eagle3_gguf(place), "eagle3:Eagle3"
)
EAGLE_ASSET = HeadAsset("an EAGLE-1 or EAGLE-2 head", "its folder", is_eagle, "eagle3:Eagle")
MEDUSA_ASSET = HeadAsset("Medusa heads", "their folder", is_medusa, "medusa:Medusa")
DFLASH_ASSET = HeadAsset("a DFlash head", EITHER, is_dflash, "block_drafter:DFlash")
DSPARK_ASSET = HeadAsset("a DSpark head", EITHER, is_dspark, "block_drafter:DSpark")
ASSISTANT_ASSET = HeadAsset(
    "an assistant", "its folder or hub id", is_assistant, "gemma4_assistant:Gemma4Assistant",
    needed="the model's assistant", reads_headers=False,
)  # fmt: skip
