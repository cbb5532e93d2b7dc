"""Runners: the models' weights on the device, ready to run."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from foredraft.drafters.vocabulary import VocabularyMap
from foredraft.errors import ConfigError, Option
from foredraft.kernels.compilation import library, must_compile
from foredraft.loading.checkpoints import Checkpoint, Checkpoints
from foredraft.loading.device import check_dtype
from foredraft.loading.memory import as_gib
from foredraft.loading.options import LoadOptions
from foredraft.model.runner import Runner, cached_shapes, check_compiler, probe_shapes, unserved_because
from foredraft.model.weights import expanded_bytes, load_decoder

__all__ = ["Runners", "check_compile", "make_runner", "make_runners"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Runners:
    """The loaded models.

    Attributes:
        device: The device that they run on.
        target: Runs the target.
        draft: Runs the draft model; None without one.
        vocabulary: Map from the target's ids to the draft model's; None where the ids are equal or the
            tokenizers differ.
    """

    device: torch.device
    target: Runner
    draft: Runner | None
    vocabulary: VocabularyMap | None


def check_compile(options: LoadOptions, device: torch.device) -> None:
    """Raise ConfigError where `compile` is on without a compiler or together with `kernels`."""
    if options.compile:
        check_compiler(device)
    if options.compile and options.kernels:
        raise ConfigError(
            (Option("compile"), " and ", Option("kernels"), " exclude each other"), remedy="leave one out"
        )


def make_runners(options: LoadOptions, checkpoints: Checkpoints, device: torch.device) -> Runners:
    """Load the weights of all models.

    Raises:
        ConfigError: The device cannot compute in a dtype, or the kernels cannot run a model.
        CheckpointError: The weights are not those of the config.
    """
    for dtype in dict.fromkeys(checkpoint.dtype for checkpoint in checkpoints.all):
        check_dtype(device, dtype)
    if options.allows_kernels and device.type == "cpu" and must_compile():
        options.report("kernels", 0, 1)
        library()
        options.report("kernels", 1, 1)
    made: list[Runner] = []
    for checkpoint in checkpoints.all:
        options.report("load", len(made), len(checkpoints.all))
        exact = options.deterministic and not made  # the draft model's bits do not reach the output
        made.append(
            make_runner(
                checkpoint, device, deterministic=exact, compile=options.compile, kernels=options.kernels
            )
        )
    options.report("load", len(made), len(made))
    target, draft = made[0], made[1] if len(made) > 1 else None
    return Runners(device, target, draft, _vocabulary_map(checkpoints, device))


def make_runner(
    checkpoint: Checkpoint,
    device: torch.device,
    *,
    deterministic: bool = True,
    compile: bool = False,
    kernels: bool | None = None,
) -> Runner:
    """Load the weights of one model.

    The probes for batch-invariant shapes end before the weights are read, so their memory is never held at
    once.
    """
    folder, dtype = checkpoint.folder, checkpoint.dtype
    outline = load_decoder(folder, "meta", dtype)  # checks names and shapes, and reads no value
    reason = "compile is on" if compile else "they are off" if kernels is False else None
    reason = reason or unserved_because(outline.spec, device, dtype)
    if kernels and reason is not None:
        raise ConfigError(
            f"but the kernels cannot run {folder} here: {reason}",
            option="kernels",
            value=True,
            remedy="leave it out",
        )
    if reason is None:
        runner = Runner(load_decoder(folder, device, dtype, native=True, bits=checkpoint.bits))
    else:
        probed = cached_shapes(outline, device, probe_shapes) if deterministic else None
        decoder = load_decoder(folder, device, dtype, bits=checkpoint.bits)
        runner = Runner(decoder, deterministic=deterministic, probed=probed, compile=compile)
    logger.info("%s: %s%s", folder, runner.choices, f"; no kernels: {reason}" if reason else "")
    for format, size in expanded_bytes(outline.spec, device, dtype, native=reason is None).items():
        logger.info("%s: weights of %s are expanded and take %s", folder, format, as_gib(size))
    return runner


def _vocabulary_map(checkpoints: Checkpoints, device: torch.device) -> VocabularyMap | None:
    """Return the map between two vocabularies of one tokenizer; None where none is needed."""
    target, draft = checkpoints.target, checkpoints.draft
    if draft is None or target.tokenizer is None or draft.tokenizer is None or checkpoints.other_tokenizer:
        return None
    sizes = target.spec.vocab_size, draft.spec.vocab_size
    return VocabularyMap.between(target.tokenizer, draft.tokenizer, sizes, device)
