"""Passes of a CPU by kernels of our own, compiled where they run (kernels.c, passes.inc)."""

from foredraft.kernels.compilation import library
from foredraft.model.runner.native.check import unserved_because
from foredraft.model.runner.native.fused import stretch
from foredraft.model.runner.native.linear import NativeLinear, arrange, fits
from foredraft.model.runner.native.passes import NativePasses

__all__ = ["NativeLinear", "NativePasses", "arrange", "fits", "library", "stretch", "unserved_because"]
