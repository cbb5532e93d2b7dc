"""Runners: the models' weights on the device that a name means, ready to run."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from foredraft.errors import ConfigError, Option, Text
from foredraft.kernels.compilation import library, must_compile
from foredraft.kinds.load_options import LoadOptions
from foredraft.loading.capacity import DEVICES
from foredraft.model.checkpoint import Checkpoint
from foredraft.model.memory import as_gib, dtype_name
from foredraft.model.runner import Runner, unserved_because
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import expanded_bytes, load_decoder

logger = logging.getLogger(__name__)


NATIVE_BFLOAT16 = (8, 0)  # the compute capability from which GPUs compute in bfloat16 natively


def find_device(name: str | None) -> torch.device:
    """Return the device of a name, a GPU with its index; None is the current GPU, or else the CPU."""
    if name is None:
        return _indexed(torch.device("cuda")) if torch.cuda.is_available() else torch.device("cpu")
    unknown = ConfigError(option="device", value=name, remedy="give 'cpu', 'cuda' or 'cuda:N'")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError, ValueError):  # the last for numbers that are too large
        raise unknown from None
    kind, _, index = str(name).partition(":")
    if kind not in DEVICES:
        raise unknown
    if kind == "cpu":
        if index:
            raise ConfigError("but there is one CPU", option="device", value=name, remedy="give 'cpu'")
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    problem, remedy = "but this PyTorch sees no CUDA device", "give 'cpu'"
    if count:
        known = ", ".join(f"cuda:{index}" for index in range(count))
        problem, remedy = f"but this PyTorch sees only {known}", "give one of these"
    if int(index or 0) >= count:  # `torch.device` takes it modulo 256
        raise ConfigError(problem, option="device", value=name, remedy=remedy)
    return _indexed(device)


def _indexed(device: torch.device) -> torch.device:
    """Return a GPU with its index."""
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


@torch.inference_mode()
def check_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """Run the operators of a layer in a dtype once; log a warning where a GPU emulates bfloat16."""
    name = dtype_name(dtype)
    first, second = (other for other in ("float32", "bfloat16", "float16") if other != name)
    others = ("give ", Option("dtype", first), " or ", Option("dtype", second))
    try:
        found = _layer_of_ones(device, dtype)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        if device.type == "cuda" and (dtype == torch.float32 or not _computes(device)):
            raise ConfigError(
                f"on which this PyTorch cannot compute ({reason})", option="device", value=str(device),
                remedy=("install a PyTorch that is built for this GPU, or give ", Option("device", "cpu")),
            ) from None  # fmt: skip
        problem = f"which {device} cannot compute in ({reason})"
        raise ConfigError(problem, option="dtype", value=name, remedy=others) from None
    if not torch.allclose(found, F.silu(torch.ones(8, 8)), atol=0.01):
        problem = f"in which {device} computes wrong values"
        raise ConfigError(problem, option="dtype", value=name, remedy=others)
    if device.type == "cuda":
        _warn_of_emulation(device, dtype)


def _warn_of_emulation(device: torch.device, dtype: torch.dtype) -> None:
    capability = torch.cuda.get_device_capability(device)
    if dtype == torch.bfloat16 and capability < NATIVE_BFLOAT16:
        shown = torch.cuda.get_device_name(device), *capability
        logger.warning(
            "%s (compute capability %d.%d) emulates bfloat16, slowly; float16 is faster there", *shown
        )


def _layer_of_ones(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return what the operators of a layer make of ones, on the CPU."""
    x = torch.ones(1, 1, 8, 64, device=device, dtype=dtype)
    mask = torch.zeros(1, 1, 8, 8, device=device, dtype=dtype)
    x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    return F.silu(F.rms_norm(F.linear(x[0, 0], x[0, 0]), (8,))).float().cpu()


def _computes(device: torch.device) -> bool:
    """Return whether a device computes in float32, which every GPU can."""
    try:
        _layer_of_ones(device, torch.float32)
    except RuntimeError:
        return False
    return True


def check_compile(options: LoadOptions, device: torch.device) -> None:
    """Raise ConfigError where `compile` is on without a compiler or together with `kernels`."""
    if options.compile:
        from foredraft.model.runner.compiled import check_compiler

        check_compiler(device)
    if options.compile and options.kernels:
        raise ConfigError(
            (Option("compile"), " and ", Option("kernels"), " exclude each other"), remedy="leave one out"
        )


def make_runners(options: LoadOptions, models: Sequence[Checkpoint], device: torch.device) -> list[Runner]:
    """Load the weights of whole models, the target's first."""
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
        made.append(make_runner(checkpoint, device, options, deterministic=exact))
    options.report("load", len(made), len(made))
    slow = [checkpoint for checkpoint, runner in zip(models, made, strict=True) if not runner.by_kernels]
    if slow and options.allows_kernels and device.type == "cpu":
        told = describe_operators(slow[0].spec, device, slow[0].dtype)
        logger.warning("%s: " + "%s" * len(told), slow[0].source, *told)
    return made


def describe_operators(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Text:
    """Return why PyTorch's operators run a model on a CPU, what that costs, and the remedy."""
    reason = unserved_because(spec, device, dtype)
    told = f"PyTorch's operators run instead of the kernels and take several times as long, because {reason}"
    if library() is None:
        return (f"{told}; install a C compiler, or the wheel for this CPU",)
    for other in (torch.bfloat16, torch.float32):
        if unserved_because(spec, device, other) is None:
            return f"{told}; give ", Option("dtype", dtype_name(other))
    return (f"{told}; no other dtype changes that",)


def make_runner(
    checkpoint: Checkpoint, device: torch.device, options: LoadOptions, *, deterministic: bool
) -> Runner:
    """Load the weights of one model, after the probes for batch-invariant shapes, to save memory."""
    source, dtype, compile, kernels = checkpoint.source, checkpoint.dtype, options.compile, options.kernels
    length = checkpoint.length
    outline = load_decoder(source, "meta", dtype, length=length)  # checks names and shapes, reads no value
    reason = "compile is on" if compile else "they are off" if kernels is False else None
    reason = reason or unserved_because(outline.spec, device, dtype)
    if kernels and reason is not None:
        problem = f"but the kernels cannot run {source} here: {reason}"
        raise ConfigError(problem, option="kernels", value=True, remedy="leave it out")
    if reason is None:
        runner = Runner(load_decoder(source, device, dtype, native=True, bits=checkpoint.bits, length=length))
    else:
        from foredraft.model.runner.shape_cache import cached_shapes

        probed = cached_shapes(outline, device) if deterministic else None
        decoder = load_decoder(source, device, dtype, bits=checkpoint.bits, length=length)
        runner = Runner(decoder, deterministic=deterministic, probed=probed, compile=compile)
    logger.info("%s: %s%s", source, runner.choices, f"; no kernels: {reason}" if reason else "")
    rope = checkpoint.spec.rope
    if rope.long_factors:
        kind = "short" if runner.decoder.spec.rope.factors == rope.factors else "long"
        logger.info("%s: the %s factors of longrope, for texts up to %s tokens", source, kind, length)
    for format, size in expanded_bytes(outline.spec, device, dtype, native=reason is None).items():
        logger.info("%s: weights of %s are expanded and take %s", source, format, as_gib(size))
    return runner
