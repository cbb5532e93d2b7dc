"""Train a small draft model that learns the target's distribution; it is a Hugging Face checkpoint."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from foredraft.errors import CheckpointError, ConfigError
from foredraft.files import replacing_folder
from foredraft.model.config import read_json
from foredraft.model.families import FAMILIES
from foredraft.model.quantisation.reading import KEYS as QUANTISATION_KEYS
from foredraft.model.spec import CONFIG, ModelSpec, with_dtype
from foredraft.model.tensor_layouts import LAST_NORM, LAYERS, written
from foredraft.model.unread import Checkpoint
from foredraft.model.weights import read_tensors
from foredraft.model.wrappers import text_config_of
from foredraft.train.loop import OnProgress, TrainingRun
from foredraft.train.preparation import check_out, prepare
from foredraft.train.processes import Processes, joined
from foredraft.train.result import Result
from foredraft.train.students import DraftStudent
from foredraft.train.target import step_weights
from foredraft.train.training_checkpoints import TrainingProgress
from foredraft.train.training_options import DraftOptions
from foredraft.train.validation import Validation
from foredraft.train.written_drafter import write_drafter

__all__ = ["draft_config", "train_draft"]

WEIGHTS = "model.safetensors"
# Files of the target that belong to its tokenizer and its defaults, which the draft model shares.
SHARED = ("token", "vocab", "merges", "special_tokens", "added_tokens", "chat_template", "generation_config")
SIZES = {
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
}  # option -> key of config.json
FULL, SLIDING = "full_attention", "sliding_attention"


def train_draft(
    options: DraftOptions,
    model: str | None = None,
    *,
    report: OnProgress = lambda stage, done, total, note: None,
    **load: Any,
) -> Result:
    """Train a draft model, or continue its training.

    Arguments, result and errors as `adapter.train_adapter`.
    """
    with joined(load.get("device")) as processes:
        return _trained(options, model, processes, report, load)


def _trained(
    options: DraftOptions,
    model: str | None,
    processes: Processes,
    report: OnProgress,
    load: Mapping[str, Any],
) -> Result:
    place = options.out

    def config_for(checkpoint: Checkpoint) -> dict[str, Any]:
        whole = text_config_of(read_json(checkpoint.folder / CONFIG))
        config = draft_config(whole, checkpoint.spec, options)
        return with_dtype(config, checkpoint.dtype)

    def check_place(checkpoint: Checkpoint, hash: str) -> None:
        config = config_for(checkpoint)
        check_out(place, lambda found: not found.samefile(checkpoint.folder) and _holds(found, config))

    prepared = prepare(model, options, load, processes, report, check_place)
    folder, target = prepared.checkpoint.folder, prepared.target
    config = config_for(prepared.checkpoint)
    try:
        spec = ModelSpec.from_hf(config)
    except CheckpointError as error:
        raise ConfigError(f"these sizes make no model: {error}", remedy="give others") from error
    start = _start(folder, options.from_layers)
    student = DraftStudent(
        spec, target.decoder.device, start, seed=options.seed, checkpointed=options.checkpointed
    )

    def keep(validation: Validation, progress: TrainingProgress) -> None:
        write = partial(_write, place, folder, config)
        write_drafter(student, processes, prepared.checkpoint.dtype, place, write)

    cost = step_weights(spec) / step_weights(target.spec)
    run = TrainingRun(
        student, target, prepared.batches, prepared.held_out, cost, options, prepared.folder,
        prepared.digest, processes, keep, place.exists, report,
    )  # fmt: skip
    return Result.of(place, run.train(), prepared)


def draft_config(config: Mapping[str, Any], target: ModelSpec, options: DraftOptions) -> dict[str, Any]:
    """Return the `config.json` of the draft model.

    Args:
        config: The target's.
        target: The target.
        options: Of the training.
    """
    if target.full_head_dim is not None or target.layer_input_size or target.sources:
        raise ConfigError(
            f"cannot train a draft model of the form of a {target.architecture}",
            remedy="train an adapter with `foredraft train adapter`",
        )
    made, family = dict(config), FAMILIES[target.architecture]
    for option, key in SIZES.items():
        value = getattr(options, option)
        if value is not None:
            made[family.size_key(key, config)] = value
    if options.heads is not None and options.kv_heads is None:
        made["num_key_value_heads"] = options.heads
    chosen = options.from_layers or [at % target.layers for at in range(options.layers)]
    if (wrong := next((layer for layer in chosen if layer >= target.layers), None)) is not None:
        raise ConfigError(
            f"names layer {wrong}, but the target has layers 0 to {target.layers - 1}", option="from_layers",
            remedy="name others",
        )  # fmt: skip
    if any(window is not None for window in target.windows) or "layer_types" in made:
        windows = [target.windows[layer] for layer in chosen]
        made["layer_types"] = [FULL if window is None else SLIDING for window in windows]
    if target.unrotated or "no_rope_layers" in made:
        made["no_rope_layers"] = [int(layer not in target.unrotated) for layer in chosen]
    for pattern in ("sliding_window_pattern", "_sliding_window_pattern"):
        made.pop(pattern, None)  # the list of layers says it
    made |= target.naming.written_keys
    for key in QUANTISATION_KEYS:
        made.pop(key, None)  # a draft model's own weights are not quantised
    return made


def _start(folder: Path, layers: tuple[int, ...]) -> dict[str, Tensor] | None:
    """Return the target's tensors by their names in a model of the given layers; None without any."""
    if not layers:
        return None
    found: dict[str, Tensor] = {}
    tensors, spec = read_tensors(folder, lambda name: True), ModelSpec.from_folder(folder)
    if spec.sum_norms:  # the last norm is that of the last layer's last sum, whose layer may come first here
        own = f"{LAYERS}.{spec.layers - 1}.post_feedforward_layernorm."
        tensors |= {
            name.replace(f"{LAST_NORM}.", own): value
            for name, value in tensors.items()
            if name.startswith(f"{LAST_NORM}.")
        }
    for name, value in tensors.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if match is None:
            found[name] = value
            continue
        for place, layer in enumerate(layers):
            if layer == int(match[1]):
                found[f"model.layers.{place}.{match[2]}"] = value
    return found


def _holds(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return whether a folder holds a draft model of this config and nothing else."""
    names = {file.name for file in folder.iterdir()}
    if not all(name in (CONFIG, WEIGHTS) or name.startswith(SHARED) for name in names):
        return False
    return CONFIG in names and read_json(folder / CONFIG) == dict(config)


def _write(place: Path, target: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write the checkpoint whole or not at all; an existing one is replaced."""
    place.absolute().parent.mkdir(parents=True, exist_ok=True)
    with replacing_folder(place) as new:
        stored = written(ModelSpec.from_hf(config).naming, tensors)
        whole = {name: tensor.contiguous() for name, tensor in stored.items()}
        (new / WEIGHTS).write_bytes(save(whole, {"format": "pt"}))  # save_file writes for this user alone
        (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        for file in target.iterdir():
            if file.is_file() and file.name.startswith(SHARED):
                shutil.copyfile(file, new / file.name)
