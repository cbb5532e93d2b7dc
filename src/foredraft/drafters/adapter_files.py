"""Adapter files: a folder with `config.json`, which describes what was trained, and `model.safetensors`.

An adapter is for one target, identified by `target_hash`; another target refuses it. A folder is written
whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from foredraft.drafters.adapter_kinds import ADAPTER_KINDS
from foredraft.drafters.strict_records import Bound, Count, StrictRecord, is_date
from foredraft.errors import CheckpointError, ConfigError, shortened
from foredraft.files import replacing_folder
from foredraft.model.checkpoint import first_values
from foredraft.model.config import read_json
from foredraft.model.identity import identity
from foredraft.model.lora.record import base_of
from foredraft.user_cache import cache_folder, check_file, check_folder, read_private, shut

__all__ = [
    "CONFIG",
    "VOCABULARY",
    "WEIGHTS",
    "AdapterConfig",
    "adapter_place",
    "adapters_kept",
    "find_adapter",
    "is_adapter",
    "read_adapter",
    "target_hash",
    "write_adapter",
]

FORMAT = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
VOCABULARY = "draft_vocabulary"  # the tensor of the ids that a reduced head has a row for, [n] int64
REMEDY = "give a folder that `foredraft train adapter` wrote"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What an adapter is, and how it was trained.

    Attributes:
        model: Name of the target, for display.
        target_hash: Hash of the target.
        layers: Layers of the target.
        depth: Layers of the target that run below the adapter.
        kind: One of `ADAPTER_KINDS`.
        draft_vocabulary: Token ids that it can draft; None is all.
        max_draft: Draft length that was best in the validation.
        alpha: α in the validation (docs/architecture.md, "Words").
        tau: τ in the validation, at `max_draft`.
        predicted: Speed-up that the validation predicts.
        temperature: Temperature of these figures.
        loss: The loss.
        steps: Steps of training.
        tokens: Tokens that were trained on, each as often as it was.
        date: Date, YYYY-MM-DD.
        foredraft: Version of Foredraft that wrote the file.
        format: Version of the file format.
    """

    model: str
    target_hash: str
    layers: Count
    depth: Count
    kind: str
    draft_vocabulary: int | None = None
    max_draft: Count
    alpha: float
    tau: float
    predicted: float
    temperature: float
    loss: str
    steps: Count
    tokens: Count
    date: str
    foredraft: str
    format: Count = FORMAT

    def __str__(self) -> str:
        """Return what it is, for display."""
        head = "" if self.draft_vocabulary is None else f" and {self.draft_vocabulary} words"
        return f"{self.kind} after layer {self.depth}{head}, trained on {self.date}"

    def check(self, hash: str, target: str) -> None:
        """Raise ConfigError if the adapter is for another target than the one with this hash and name."""
        if self.target_hash != hash:
            raise ConfigError(
                f"was trained for {shortened(self.model)}, which has other weights than {target}",
                option="adapter",
                remedy="train one with `foredraft train adapter`",
            )


MAX_LAYERS, MAX_DRAFT, MAX_STEPS = 10_000, 1_000, 10**12  # far above any that is of use
BOUNDS: dict[str, Bound] = {
    "layers": (lambda layers: layers <= MAX_LAYERS, f"{MAX_LAYERS} or less"),
    "kind": (ADAPTER_KINDS.__contains__, " or ".join(ADAPTER_KINDS)),
    "draft_vocabulary": (lambda words: words is None or words >= 1, "1 or more, or null"),
    "max_draft": (lambda draft: draft <= MAX_DRAFT, f"{MAX_DRAFT} or less"),
    "alpha": (lambda alpha: 0 <= alpha <= 1, "from 0 to 1"),
    "tau": (lambda tau: tau >= 1, "1 or more"),
    "predicted": (lambda value: value > 0, "above 0"),
    "temperature": (lambda temperature: temperature >= 0, "0 or more"),
    "steps": (lambda steps: steps <= MAX_STEPS, f"{MAX_STEPS} or less"),
    "date": (is_date, "a date as YYYY-MM-DD"),
}


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter, sound or not: its config.json names a target by its hash."""
    try:
        return "target_hash" in read_json(folder / CONFIG)
    except (CheckpointError, OSError):
        return False


def read_adapter(folder: Path, *, read: Callable[[Path], bytes] = Path.read_bytes) -> AdapterConfig:
    """Read the `config.json` of an adapter.

    Args:
        folder: The adapter's folder.
        read: Returns the content of a file.

    Raises:
        ConfigError: It cannot be read, or is not valid.
    """
    record = StrictRecord("adapter", REMEDY, "train a new one with `foredraft train adapter`", BOUNDS)
    found = record.read(AdapterConfig, folder / CONFIG, read)
    if found.depth >= found.layers:
        problem = f"whose depth is {found.depth}, but its target has {found.layers} layers"
        raise record.refused(folder / CONFIG, problem)
    return found


def write_adapter(folder: Path, config: AdapterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write an adapter's folder; an existing one is replaced, and kept where writing fails.

    Raises:
        OSError: It cannot be written.
    """
    with replacing_folder(folder) as new:
        (new / WEIGHTS).write_bytes(save(dict(tensors)))  # save_file writes for this user alone
        (new / CONFIG).write_text(json.dumps(asdict(config), indent=1, allow_nan=False) + "\n")
        if folder.parent == cache_folder("adapters"):
            shut(new)


def adapter_place(hash: str) -> Path | None:
    """Return the folder of a target's adapter in the cache folder, or None if there is no cache folder.

    The folder may not exist yet.
    """
    folder = cache_folder("adapters")
    return None if folder is None else folder / hash


def adapters_kept() -> bool:
    """Return whether the cache folder holds an adapter of any target."""
    folder = cache_folder("adapters")
    try:
        return folder is not None and any(folder.iterdir())
    except OSError:  # no folder, or one that cannot be read
        return False


def find_adapter(hash: str) -> Path | None:
    """Return the folder of the adapter in the cache folder for the target with this hash; None without one.

    Raises:
        ConfigError: The adapter cannot be used, or another user could have written it.
    """
    place = adapter_place(hash)
    if place is None or not os.path.lexists(place):
        return None
    read_adapter(place, read=_read_private)
    return place


def _read_private(config: Path) -> bytes:
    """Return the content of a kept adapter's `config.json`, after both files were checked.

    Raises:
        NotPrivateError: Another user could have written one of them.
        OSError: It cannot be read.
    """
    folder = check_folder(config.parent)
    if (folder / WEIGHTS).exists():  # else the reader of the weights reports what is missing
        check_file(folder / WEIGHTS)
    return read_private(folder / config.name)


def target_hash(folder: Path) -> str:
    """Return the SHA-256 hash of a model's config.json and its tensors' names, dtypes, shapes and first rows.

    The first rows tell a model from its fine-tuned offspring. Of a model with LoRAs, their files
    count besides.

    Raises:
        CheckpointError: The folder holds no model.
    """
    digest = hashlib.sha256(json.dumps(identity(folder), sort_keys=True).encode())
    for name, values in first_values(base_of(folder)):
        digest.update(name.encode() + values)
    return digest.hexdigest()
