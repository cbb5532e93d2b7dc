"""The config of Gemma 4's assistant: what its layers are, and whether it fits a target.

The layers of an assistant are those of a Gemma 4 that read the keys and values of another model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError, ConfigError, Option
from foredraft.model.config import ConfigReader, read_json
from foredraft.model.spec import CONFIG, OUTSIDE, ModelSpec
from foredraft.model.unread import Checkpoint
from foredraft.model.weights import parameter_count

__all__ = ["AssistantConfig", "is_assistant", "producers"]

TEXT_MODELS = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}


def is_assistant(place: Path) -> bool:
    """Return whether a folder holds an assistant, sound or not, as its config.json says."""
    try:
        return place.is_dir() and read_json(place / CONFIG).get("model_type") in TEXT_MODELS
    except (CheckpointError, OSError):
        return False


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    """What an assistant is.

    Attributes:
        spec: Of its layers, final norm and head.
        target_size: Size of the target's states.
        centroids: Of ordered embeddings; None: the head gives the logits of all tokens.
        chosen: The centroids whose tokens a step has logits for.
    """

    spec: ModelSpec
    target_size: int
    centroids: int | None
    chosen: int

    @classmethod
    def from_folder(cls, folder: Path) -> AssistantConfig:
        """Read the `config.json` of an assistant.

        Raises:
            CheckpointError: It is not one, or has a part that is not supported.
        """
        read = ConfigReader(read_json(folder / CONFIG))
        text = read.section("text_config")
        if text is None:
            raise read.error("text_config", "it must hold the config of the assistant's layers")
        own: dict[str, Any] = {
            **text.config,
            "model_type": TEXT_MODELS[read.take("model_type")],
            "tie_word_embeddings": read.flag("tie_word_embeddings", default=True),
            "dtype": text.take("dtype") or read.take("dtype") or "float32",
        }
        layers = text.count("num_hidden_layers")
        if text.count("num_kv_shared_layers", 0, if_null=0, allow_zero=True) not in (0, layers):
            raise text.error("num_kv_shared_layers", f"all {layers} layers of an assistant read other keys")
        spec = ModelSpec.from_hf(own | {"num_kv_shared_layers": 0})
        if spec.layer_input_size:
            raise text.error("hidden_size_per_layer_input", "it must be 0 in an assistant")
        return cls(_attending(spec), read.count("backbone_hidden_size", 1536), *_centroids(read, spec))

    @property
    def parameters(self) -> int:
        """The number of its weights."""
        projections = 3 * self.target_size * self.spec.hidden_size
        return parameter_count(self.spec) + projections + (self.centroids or 0) * self.spec.hidden_size

    def check(self, target: Checkpoint, folder: Path) -> None:
        """Raise ConfigError where the assistant is for another target than this one."""
        spec, own = target.spec, self.spec
        sizes = [
            ("states of size", self.target_size, spec.hidden_size),
            ("a vocabulary of", own.vocab_size, spec.vocab_size),
        ]
        producing = producers(spec)
        for window in dict.fromkeys(own.windows):
            kind = "full attention" if window is None else "a window"
            source = producing.get(window is None)
            theirs = None if source is None else spec.windows[source]
            heads = None if source is None else (spec.kv_heads_of(theirs), spec.head_dim_of(theirs))
            mine = own.kv_heads_of(window), own.head_dim_of(window)
            sizes.append((f"in layers with {kind}, key heads and their size of", mine, heads))  # type: ignore[arg-type]
        for what, wanted, found in sizes:
            if wanted != found:
                raise ConfigError(
                    f"{folder} is the assistant of another model than {target.source}: it needs {what}"
                    f" {wanted}, and the model has {found}",
                    remedy=("give ", Option("draft"), " the assistant that was made for the model"),
                )


def _attending(spec: ModelSpec) -> ModelSpec:
    """Return the spec of layers that attend, from a position that is not committed, to those before it.

    As in transformers, the window of such a query reaches from the last committed position over as many
    positions before it as the window has. The logits of an assistant are not soft-capped.
    """
    windows = tuple(window and window + 1 for window in spec.windows)
    sources = (OUTSIDE,) * spec.layers
    return replace(
        spec, windows=windows, sources=sources, rotated_ahead=1, logit_softcap=None,
        shared_intermediate_size=None,
    )  # fmt: skip


def _centroids(read: ConfigReader, spec: ModelSpec) -> tuple[int | None, int]:
    """Return the number of centroids, None without, and how many of them are chosen."""
    if not read.flag("use_ordered_embeddings", if_null=False):
        return None, 0
    count = read.count("num_centroids", 2048)
    if spec.vocab_size % count:
        raise read.error("num_centroids", f"it must divide the vocabulary of {spec.vocab_size}")
    if not spec.tied:
        raise read.error("tie_word_embeddings", "ordered embeddings are the head, too")
    chosen = read.count("centroid_intermediate_top_k", 32)
    if chosen > count:
        raise read.error("centroid_intermediate_top_k", f"there are {count} centroids")
    return count, chosen


def producers(spec: ModelSpec) -> dict[bool, int]:
    """Return the last layer with keys and values of its own, by whether it has full attention."""
    return {spec.windows[layer] is None: layer for layer in range(spec.layers) if spec.stores(layer)}
