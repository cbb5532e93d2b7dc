"""Forward passes by the project's own C kernels for CPUs (kernels/kernels.c)."""

from foredraft.kernels.compilation import library
from foredraft.model.runner.native.check import unserved_because
from foredraft.model.runner.native.codes import NativeCodes, code_native, coded_bytes, pack_codes, pack_pieces
from foredraft.model.runner.native.forward import run_layers
from foredraft.model.runner.native.linear import NativeLinear, fits, pack_native
from foredraft.model.runner.native.passes import NativePasses

__all__ = [
    "NativeCodes",
    "NativeLinear",
    "NativePasses",
    "code_native",
    "coded_bytes",
    "fits",
    "library",
    "pack_codes",
    "pack_native",
    "pack_pieces",
    "run_layers",
    "unserved_because",
]
