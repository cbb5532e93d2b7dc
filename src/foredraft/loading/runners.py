"""Runners: the models' weights on the device, ready to run."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from foredraft.errors import ConfigError, Option
from foredraft.kernels.compilation import library, must_compile
from foredraft.loading.device import check_dtype
from foredraft.loading.options import LoadOptions
from foredraft.model.runner import Runner, cached_shapes, check_compiler, probe_shapes, unserved_because
from foredraft.model.transfers import as_gib
from foredraft.model.unread import Checkpoint
from foredraft.model.weights import expanded_bytes, load_decoder

__all__ = ["check_compile", "make_runner", "make_runners"]

logger = logging.getLogger(__name__)


def check_compile(options: LoadOptions, device: torch.device) -> None:
    """Raise ConfigError where `compile` is on without a compiler or together with `kernels`."""
    if options.compile:
        check_compiler(device)
    if options.compile and options.kernels:
        raise ConfigError(
            (Option("compile"), " and ", Option("kernels"), " exclude each other"), remedy="leave one out"
        )


def make_runners(options: LoadOptions, models: Sequence[Checkpoint], device: torch.device) -> list[Runner]:
    """Load the weights of whole models, the target's first.

    Raises:
        ConfigError: The device cannot compute in a dtype, or the kernels cannot run a model.
        CheckpointError: The weights are not those of the config.
    """
    for dtype in dict.fromkeys(checkpoint.dtype for checkpoint in models):
        check_dtype(device, dtype)
    if options.allows_kernels and device.type == "cpu" and must_compile():
        options.report("kernels", 0, 1)
        library()
        options.report("kernels", 1, 1)
    made: list[Runner] = []
    for checkpoint in models:
        options.report("load", len(made), len(models))
        exact = options.deterministic and not made  # a draft model's bits do not reach the output
        made.append(
            make_runner(
                checkpoint, device, deterministic=exact, compile=options.compile, kernels=options.kernels
            )
        )
    options.report("load", len(made), len(made))
    return made


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
    length = checkpoint.length
    outline = load_decoder(folder, "meta", dtype, length=length)  # checks names and shapes, reads no value
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
        runner = Runner(load_decoder(folder, device, dtype, native=True, bits=checkpoint.bits, length=length))
    else:
        probed = cached_shapes(outline, device, probe_shapes) if deterministic else None
        decoder = load_decoder(folder, device, dtype, bits=checkpoint.bits, length=length)
        runner = Runner(decoder, deterministic=deterministic, probed=probed, compile=compile)
    logger.info("%s: %s%s", folder, runner.choices, f"; no kernels: {reason}" if reason else "")
    rope = checkpoint.spec.rope
    if rope.long_factors:
        kind = "short" if runner.decoder.spec.rope.factors == rope.factors else "long"
        logger.info("%s: the %s factors of longrope, for texts up to %s tokens", folder, kind, length)
    for format, size in expanded_bytes(outline.spec, device, dtype, native=reason is None).items():
        logger.info("%s: weights of %s are expanded and take %s", folder, format, as_gib(size))
    return runner
