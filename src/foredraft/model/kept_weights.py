"""Linear layers that are packed for the kernels, kept in the user's cache folder for later loads.

The key holds all that they depend on: the states of the model's files, dtype, bits, code and CPU. A file that
changes twice within a tick of its clock has one state, so nothing is kept while a file is new.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from foredraft import user_cache
from foredraft.kernels.building import sources_digest
from foredraft.kernels.compilation import describe_cpu
from foredraft.kernels.pool import Arena, as_fast_as_arena
from foredraft.model.layers import Product
from foredraft.model.quantisation.codes import CodeFormat
from foredraft.model.runner.native.products import NativeCodes, NativeLinear, is_native
from foredraft.model.source import ModelSource

logger = logging.getLogger(__name__)

KIND, SUFFIX = "weights", ".pt"  # of the user's cache
MOST = 16  # models that are kept
LEAST = 2**25  # bytes of a model that is kept: fewer are packed in half a second
NEW = 2e9  # nanoseconds in which a file is new: a tick of the coarsest clock, FAT's


class KeptWeights:
    """The linear layers of a load: those that an earlier load kept, or those that it makes and may keep."""

    def __init__(self, source: ModelSource, dtype: torch.dtype, bits: int | None, read: set[str]) -> None:
        """Find those of a checkpoint in a dtype and so many bits; `read` gets the tensors that made them."""
        self._began, self._describe = time.time_ns(), functools.partial(weights_key, source, dtype, bits)
        self._key, self._read = self._describe(), read
        self._made: dict[str, NativeLinear] = {}
        self._found: dict[str, NativeLinear] = {}
        if (file := user_cache.find_file(KIND, self._key, SUFFIX, large=True)) is not None:
            with (
                suppress(OSError, RuntimeError),  # it is gone, or there is no memory for the map
                torch.serialization.safe_globals([NativeCodes, NativeLinear, CodeFormat]),
            ):
                layers, names = torch.load(file, mmap=True, weights_only=True)
                self._found = _restored(layers)
                read |= names

    def product(self, name: str, make: Callable[[], Product]) -> Product:
        if self._found:
            return self._found[name]
        product = make()
        if is_native(product):
            self._made[name] = product
        return product

    def keep(self) -> None:
        """Keep what was made, after all tensors were read. A failure is only logged."""
        regions = [product.weight.untyped_storage() for product in self._made.values()]
        size = sum({region.data_ptr(): region.nbytes() for region in regions}.values())
        newest = max(changed for *_, changed in self._key["files"])
        if size < LEAST or self._began - newest < NEW or self._describe() != self._key:
            return
        if not user_cache.keep_newest(KIND, SUFFIX, MOST - 1, size):
            logger.info("the packed weights are not kept: they would take too much of the disk")
            return
        try:
            with user_cache.new_file(KIND, self._key, SUFFIX, large=True) as new:
                if new is not None:
                    layers = {name: _bytes(product) for name, product in self._made.items()}
                    torch.save((layers, self._read), new)
        except (OSError, RuntimeError) as error:  # the second: PyTorch's, of a full disk
            logger.info("the packed weights cannot be kept (%s)", str(error).partition("\n")[0])
        file = user_cache.find_file(KIND, self._key, SUFFIX, large=True)
        if file is not None and hasattr(os, "posix_fadvise"):
            with file.open("rb") as kept:  # what is read from the disk anew gets huge pages
                os.posix_fadvise(kept.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def weights_key(source: ModelSource, dtype: torch.dtype, bits: int | None) -> dict[str, Any]:
    """Return all that the packed weights of a model depend on, and what its layers make of them."""
    return {
        "files": [[str(file), *user_cache.state(file)] for file in sorted(source.files) if file.is_file()],
        "configs": [source.config, source.base.config],
        "loras": [(name, str(folder)) for name, folder in source.loras],
        "weights": [str(dtype), bits],
        "code": [torch.__version__, sources_digest(), code_digest()],
        "cpu": describe_cpu(),
    }


@functools.cache
def code_digest() -> str:
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _bytes(product: NativeLinear) -> tuple[NativeLinear, torch.dtype, tuple[int, ...]]:
    """Return a layer with its weight as bytes, since PyTorch saves no region of an arena in two dtypes."""
    weight = product.weight
    return replace(product, weight=weight.view(-1).view(torch.uint8)), weight.dtype, tuple(weight.shape)


def _restored(kept: dict[str, tuple[NativeLinear, torch.dtype, tuple[int, ...]]]) -> dict[str, NativeLinear]:
    """Return layers of a mapped file as they were made, in huge pages of the file, or copied to others."""
    fast, arena, found = as_fast_as_arena([each.weight for each, *_ in kept.values()]), Arena(), {}
    for name, (product, dtype, shape) in kept.items():
        weight = product.weight.view(dtype).view(shape)
        found[name] = replace(product, weight=weight if fast else arena.empty(shape, dtype).copy_(weight))
    return found
