"""Train a drafter, from the model and the data to what is written: kangaroo's adapter, or a small draft
model.

The draft model is a Hugging Face checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import foredraft
from foredraft.drafters.asset import ATTENTION, WITH_MLP
from foredraft.drafters.heads.writing import write_head
from foredraft.drafters.kangaroo import CONFIG as ADAPTER_CONFIG
from foredraft.drafters.kangaroo import WEIGHTS as ADAPTER_WEIGHTS
from foredraft.drafters.kangaroo import AdapterConfig, adapter_place, read_adapter, write_adapter
from foredraft.errors import CheckpointError, ConfigError, Option
from foredraft.model.checkpoint import Checkpoint
from foredraft.model.config import read_json
from foredraft.model.families import FAMILIES
from foredraft.model.quantisation.scheme import KEYS as QUANTISATION_KEYS
from foredraft.model.safetensors_file import SINGLE
from foredraft.model.source import ModelSource
from foredraft.model.spec import CONFIG, ModelSpec, with_dtype
from foredraft.model.tensor_names import LAST_NORM, LAYERS, written
from foredraft.model.weights import layer_parameters, layer_tensors, read_tensors
from foredraft.model.wrappers import text_config_of
from foredraft.train.head_run import (
    begin_dflash,
    begin_eagle3,
    begin_mtp,
    check_dflash,
    check_eagle3,
    check_mtp,
)
from foredraft.train.loop import OnProgress, Prepared, Trainee, TrainingRun, Validation
from foredraft.train.preparation import Asked, check_out, prepare
from foredraft.train.students import AdapterStudent, DraftStudent, overlap
from foredraft.train.target import Batches, Packed, step_weights
from foredraft.train.texts import frequent_tokens
from foredraft.train.training_checkpoints import TrainingProgress, joined
from foredraft.train.training_options import (
    AdapterOptions,
    DFlashOptions,
    DraftOptions,
    Eagle3Options,
    MTPOptions,
    TrainOptions,
)
from foredraft.user_cache import make_folder


@dataclass(frozen=True, slots=True)
class Result:
    """What was trained, and how far."""

    out: str  # the folder that was written
    work: str  # checkpoints and logs
    steps: int  # steps of the optimiser
    tokens: int  # tokens learned from, each as often as it was
    seconds: float  # of training
    documents: int  # documents to learn from
    held_out: int  # documents of the validation
    skipped: int  # bad lines that were left out
    predicted: float  # the speed-up that the best validation predicts
    stopped_early: bool  # the validation got no better, and training ended before the last step

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return asdict(self)


def train(
    options: TrainOptions,
    model: str | None = None,
    *,
    report: OnProgress = lambda *_: None,
    **load: Any,
) -> Result:
    """Train the drafter that the options are of, or continue its training.

    It is written whenever a validation is the best so far.
    """
    check, begin = STEPS[type(options)]
    with joined(load.get("device")) as processes:
        prepared = prepare(Asked(options, model, load, processes, report), check)
        trainee = begin(options, prepared)
        progress = TrainingRun(options, prepared, trainee, report).train()
        return Result(
            out=str(trainee.place), work=str(prepared.folder), steps=progress.step, tokens=progress.tokens,
            seconds=progress.seconds, documents=len(prepared.batches.documents),
            held_out=len(prepared.held_out), skipped=prepared.skipped, predicted=progress.best,
            stopped_early=progress.finished,
        )  # fmt: skip


def begin_adapter(options: AdapterOptions, prepared: Prepared) -> Trainee:
    torch.manual_seed(options.seed)
    student, place = _student(prepared, options), _place(options.out, prepared.hash)
    spec = prepared.target.spec
    layer = layer_parameters(spec, mlp=True)
    own = sum(value.numel() for value in student.parameters())
    reads = student.depth * layer + own + student.head.numel()
    cost = reads / (spec.layers * layer + spec.vocab_size * spec.hidden_size)

    def write(validation: Validation, progress: TrainingProgress, tensors: Mapping[str, Tensor]) -> None:
        make_folder(place.absolute().parent)
        config = AdapterConfig(
            model=prepared.name, target_hash=prepared.hash, layers=spec.layers, depth=student.depth,
            kind=options.kind,
            draft_vocabulary=None if student.vocabulary is None else len(student.vocabulary),
            max_draft=validation.max_draft, alpha=validation.alpha, tau=validation.tau,
            predicted=validation.predicted, temperature=options.temperature, loss=options.loss,
            steps=progress.step, tokens=progress.tokens, date=datetime.now(UTC).date().isoformat(),
            foredraft=foredraft.__version__,
        )  # fmt: skip
        write_adapter(place, config, tensors)

    return Trainee(student, cost, place, write)


def _place(out: Path | None, hash: str) -> Path:
    place = adapter_place(hash) if out is None else out
    if place is None:
        raise ConfigError("there is no cache folder to write the adapter to", remedy=("give ", Option("out")))
    check_out(place, _is_adapter)
    return place


def _is_adapter(folder: Path) -> bool:
    try:
        read_adapter(folder)
    except ConfigError:
        return False
    return {file.name for file in folder.iterdir()} <= {ADAPTER_CONFIG, ADAPTER_WEIGHTS}


@torch.no_grad()
def _student(prepared: Prepared, options: AdapterOptions) -> AdapterStudent:
    """Return an adapter that starts as the layer of the target which, alone above `depth`, drafts best.

    That is the one with the largest mean of Σ min(p, q) on held-out documents, in one pass over them.
    """
    target, spec = prepared.target, prepared.target.spec
    depth = options.depth or min(3, max(1, spec.layers // 8))
    if depth >= spec.layers:
        problem = f"but the target has {spec.layers} layers"
        raise ConfigError(problem, option="depth", value=depth, remedy="give fewer")
    vocabulary = frequent_tokens(prepared.batches.documents, options.draft_vocabulary, spec)

    def started(layer: int) -> AdapterStudent:
        start = layer_tensors(prepared.checkpoint.source, layer)
        return AdapterStudent(
            spec, target.head_weight, start, depth, mlp=options.kind == WITH_MLP, vocabulary=vocabulary,
            bias=target.head_bias,
        )  # fmt: skip

    own = spec.kv_heads_of(None), spec.head_dim_of(None)
    bare = spec.without_mlp if options.kind == WITH_MLP else ()
    alike = [  # the layers whose weights have the shapes of an adapter's
        layer
        for layer, window in enumerate(spec.windows)
        if spec.stores(layer)
        and layer not in bare
        and (spec.kv_heads_of(window), spec.head_dim_of(window)) == own
    ]
    layers = [layer for layer in alike if layer >= depth] or alike
    if not layers:
        problem = f"but no layer of {prepared.checkpoint.source} has both attention and an MLP to begin with"
        raise ConfigError(problem, option="kind", value=options.kind, remedy=f"give {ATTENTION}")
    held_out = Batches(prepared.held_out, prepared.batches.tokens, 0)
    packed = Packed.of(held_out.documents_of(0), target.decoder.device)
    states = target.states(packed, (depth,))
    log_p, shares = target.log_probs(states.last), list[float]()
    for student in map(started, layers):
        known = log_p if student.vocabulary is None else log_p[:, student.vocabulary]
        with target.autocast():
            log_q = student(packed, states.aux_states).float().log_softmax(-1)
        shares.append(float(overlap(known, log_q).mean()))
    found = torch.tensor(shares, device=target.decoder.device)
    return started(layers[int(prepared.processes.sum(found).argmax())])  # so that all processes choose alike


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


def _config(options: DraftOptions, checkpoint: Checkpoint) -> dict[str, Any]:
    whole = text_config_of(checkpoint.source.config)
    return with_dtype(draft_config(whole, checkpoint.spec, options), checkpoint.dtype)


def check_draft(options: DraftOptions, target: Checkpoint, hash: str) -> None:
    config = _config(options, target)
    check_out(options.out, lambda found: not found.samefile(target.source.path) and _holds(found, config))


def begin_draft(options: DraftOptions, prepared: Prepared) -> Trainee:
    source, target = prepared.checkpoint.source, prepared.target
    config = _config(options, prepared.checkpoint)
    try:
        spec = ModelSpec.from_hf(config)
    except CheckpointError as error:
        raise ConfigError(f"these sizes make no model: {error}", remedy="give others") from error
    student = DraftStudent(
        spec, target.decoder.device, _start(source, options.from_layers), seed=options.seed,
        checkpointed=options.checkpointed,
    )  # fmt: skip
    cost = step_weights(spec) / step_weights(target.spec)

    def write(_: Validation, __: TrainingProgress, tensors: Mapping[str, Tensor]) -> None:
        own = written(spec.naming, tensors)
        write_head(options.out, config, own, lambda new: source.write_others(new, SHARED))

    return Trainee(student, cost, options.out, write)


def draft_config(config: Mapping[str, Any], target: ModelSpec, options: DraftOptions) -> dict[str, Any]:
    """Return the `config.json` of the draft model."""
    # families whose lists of layers or names a shorter model would need in another form
    listed = target.plain_head_norms or not target.naming.inner
    if target.full_head_dim is not None or target.layer_input_size or target.sources or listed:
        problem = f"cannot train a draft model of the form of a {target.architecture}"
        raise ConfigError(problem, remedy="train an adapter with `foredraft train adapter`")
    made, family = dict(config), FAMILIES[target.architecture]
    for option, key in SIZES.items():
        if (value := getattr(options, option)) is not None:
            made[family.size_key(key, config)] = value
    if options.heads is not None and options.kv_heads is None:
        made["num_key_value_heads"] = options.heads
    chosen = options.from_layers or [at % target.layers for at in range(options.layers)]
    if (wrong := next((layer for layer in chosen if layer >= target.layers), None)) is not None:
        problem = f"names layer {wrong}, but the target has layers 0 to {target.layers - 1}"
        raise ConfigError(problem, option="from_layers", remedy="name others")
    if (recurs := next(filter(target.recurrent_layers.__contains__, options.from_layers), None)) is not None:
        problem = f"names layer {recurs}, which is recurrent, and a draft model that is trained attends"
        raise ConfigError(problem, option="from_layers", remedy="name layers that attend")
    if target.recurrent_layers or any(target.windows) or "layer_types" in made:
        windows = [target.windows[layer] for layer in chosen]
        made["layer_types"] = [FULL if window is None else SLIDING for window in windows]
    if target.unrotated or "no_rope_layers" in made:
        made["no_rope_layers"] = [int(layer not in target.unrotated) for layer in chosen]
    # the list of layers says it, and a draft model's own weights are not quantised
    gone = {"sliding_window_pattern", "_sliding_window_pattern", *QUANTISATION_KEYS}
    made |= target.naming.written_keys
    return {key: value for key, value in made.items() if key not in gone}


def _start(source: ModelSource, layers: tuple[int, ...]) -> dict[str, Tensor] | None:
    """Return the target's tensors by their names in a model of the given layers; None without any."""
    if not layers:
        return None
    tensors, spec = read_tensors(source, lambda name: True), source.spec
    if spec.sum_norms:  # the last norm is that of the last layer's last sum, whose layer may come first here
        own = f"{LAYERS}.{spec.layers - 1}.post_feedforward_layernorm."
        last = [name for name in tensors if name.startswith(f"{LAST_NORM}.")]
        tensors |= {name.replace(f"{LAST_NORM}.", own): tensors[name] for name in last}
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if match is None:
            found[name] = value
        else:
            places = [place for place, layer in enumerate(layers) if layer == int(match[1])]
            found |= {f"model.layers.{place}.{match[2]}": value for place in places}
    return found


def _holds(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return whether a folder holds a draft model of this config and nothing else."""
    names = {file.name for file in folder.iterdir()}
    if not all(name in (CONFIG, SINGLE) or name.startswith(SHARED) for name in names):
        return False
    return CONFIG in names and read_json(folder / CONFIG) == dict(config)


# what each kind of training does before the target is loaded, and after
STEPS: dict[type[TrainOptions], tuple[Callable[..., object], Callable[..., Trainee]]] = {
    AdapterOptions: (lambda options, _, hash: _place(options.out, hash), begin_adapter),
    DraftOptions: (check_draft, begin_draft),
    Eagle3Options: (check_eagle3, begin_eagle3),
    DFlashOptions: (check_dflash, begin_dflash),
    MTPOptions: (check_mtp, begin_mtp),
}
