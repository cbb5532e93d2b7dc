"""Forward passes by the project's own C kernels for CPUs (kernels/kernels.c)."""

from foredraft.kernels.compilation import library
from foredraft.model.runner.native.check import unserved_because
from foredraft.model.runner.native.native_backend import NativeBackend, PairDraft
from foredraft.model.runner.native.products import (
    NativeCodes,
    NativeLinear,
    NativeProduct,
    code_native,
    coded_bytes,
    fits,
    is_native,
    pack_codes,
    pack_native,
    pack_pieces,
)

__all__ = [
    "NativeBackend",
    "NativeCodes",
    "NativeLinear",
    "NativeProduct",
    "PairDraft",
    "code_native",
    "coded_bytes",
    "fits",
    "is_native",
    "library",
    "pack_codes",
    "pack_native",
    "pack_pieces",
    "unserved_because",
]
