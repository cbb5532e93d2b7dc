"""Calls of the kernels, with the memory that they reach before and after, to be repeated by `driver.c` elsewhere."""

from __future__ import annotations

import bisect
import ctypes
import gc
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.kernels import building, compilation, pool
from foredraft.model import cache
from foredraft.model.runner.native import check, native_backend, products, structs

LINE = 64  # bytes that images are aligned to, as memory of tensors is
LARGEST = 1 << 24  # bytes of a call's memory
MOST = 9  # calls of a function that are kept of a part
ARGUMENTS = 16  # of a call, at most, as in driver.c
# The argument that is work memory, whose contents differ between levels.
WORK = {"product": 4, "forward": 12, "head": 4, "draft": 6, "inputs": 5}
HEADERS = 4 + 2 * ARGUMENTS  # numbers of a call's header there


class Numbers(array):  # type: ignore[type-arg]
    """An array that the garbage collector knows, so that `_regions` finds it."""


@dataclass
class Image:
    """Memory that a call reaches: its parts, their places in the image, and where pointers lie in it."""

    size: int = 0
    places: dict[tuple[int, int], int] = field(default_factory=dict)  # (address, bytes) -> offset
    pointers: dict[int, int] = field(default_factory=dict)  # offset -> the offset that lies there

    def read(self) -> bytes:
        """Return the memory as it is now, with offsets in place of addresses."""
        memory = bytearray(self.size)
        for (address, size), offset in self.places.items():
            memory[offset : offset + size] = ctypes.string_at(address, size)
        for at, offset in self.pointers.items():
            memory[at : at + 8] = offset.to_bytes(8, "little")
        return bytes(memory)


@dataclass
class Call:
    """A call of a function: its arguments, of which some are offsets in its image."""

    function: str
    arguments: list[tuple[int, bool]]
    image: Image
    before: bytes
    after: bytes = b""

    @property
    def work(self) -> tuple[int, int]:
        """Where work memory begins and ends in the image."""
        argument = WORK.get(self.function.split("_")[1])
        offset, points = (0, False) if argument is None else self.arguments[argument]
        sizes = {at: size for (_, size), at in self.image.places.items()}
        return offset, offset + sizes[offset] if points else 0


class Recording:
    """A stand-in for the library of the kernels, which keeps calls: the first `MOST` of a function in each part."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self._kernels, self.calls, self._kept = kernels, list[Call](), Counter[str]()

    def __getattr__(self, name: str) -> Any:
        function = _Function(getattr(self._kernels, name), name, self)
        setattr(self, name, function)
        return function

    def begin_part(self) -> None:
        self._kept.clear()

    def wants(self, function: str) -> bool:
        """Count a call, and return whether it is to be kept."""
        self._kept[function] += 1
        return self._kept[function] <= MOST


class _Function:
    def __init__(self, function: Any, name: str, recording: Recording) -> None:
        self.__dict__.update(function=function, name=name, recording=recording)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.function, name, value)  # the types of arguments and the result

    def __call__(self, *arguments: Any) -> Any:
        if not arguments or not self.recording.wants(self.name):
            return self.function(*arguments)
        image = Image()
        numbers = _reach(image, arguments)
        if image.size > LARGEST:
            return self.function(*arguments)
        call = Call(self.name, numbers, image, image.read())
        result = self.function(*arguments)
        call.after = image.read()
        self.recording.calls.append(call)
        return result


def packed(calls: list[Call], *, after: bool = False) -> tuple[bytes, list[tuple[slice, slice]]]:
    """Return the file that `driver.c` reads, or the one that it shall write.

    Beside it: where the memory of each call lies there, in front of and behind its work memory.
    """
    names, headers, end = building.functions(), array("q"), LINE + len(calls) * HEADERS * 8
    parts, images = list[bytes](), list[tuple[slice, slice]]()
    for call in calls:
        at = -(-end // LINE) * LINE
        places, memory = array("q", call.image.pointers).tobytes(), call.after if after else call.before
        filled = *call.arguments, *[(0, False)] * (ARGUMENTS - len(call.arguments))
        values, points = zip(*filled, strict=True)
        number, behind = names.index(call.function), at + len(memory)
        headers.extend((number, at, len(places) // 8, behind, *values, *points))
        parts += [bytes(at - end), memory, places]
        first, last = call.work
        images.append((slice(at, at + first), slice(at + last, behind)))
        end = behind + len(places)
    return b"".join((len(calls).to_bytes(LINE, "little"), headers.tobytes(), *parts)), images


def _regions(arguments: tuple[Any, ...]) -> list[tuple[int, int, bool]]:
    """Return (first address, end, whether pointers may lie there) of all memory that Python holds, in order."""
    found = []
    for each in gc.get_objects():
        kind = type(each)
        if kind in (Tensor, torch.nn.Parameter):
            if each.device.type == "cpu" and each.layout == torch.strided and each.numel():
                last = sum((size - 1) * step for size, step in zip(each.shape, each.stride(), strict=True))
                found.append((each.data_ptr(), each.data_ptr() + (last + 1) * each.itemsize, False))
        elif issubclass(kind, ctypes.Structure | ctypes.Array):
            found.append((ctypes.addressof(each), ctypes.addressof(each) + ctypes.sizeof(each), True))
        elif kind is Numbers and len(each):
            address, count = each.buffer_info()
            found.append((address, address + count * each.itemsize, True))
    for each in arguments:
        if isinstance(each, bytes):
            found.append((_address(each), _address(each) + len(each), False))
    merged = list[tuple[int, int, bool]]()
    for first, end, points in sorted(found):
        if merged and first < merged[-1][1]:  # parts of one
            whole, before, any_points = merged[-1]
            merged[-1] = whole, max(before, end), any_points or points
        else:
            merged.append((first, end, points))
    return merged


def _address(argument: Any) -> int:
    if isinstance(argument, bytes):
        return ctypes.cast(ctypes.c_char_p(argument), ctypes.c_void_p).value or 0
    if isinstance(argument, ctypes.Array):
        return ctypes.addressof(argument) if len(argument) else 0
    if hasattr(argument, "_obj"):  # by reference
        return ctypes.addressof(argument._obj)
    return int(getattr(argument, "value", argument) or 0)


def _reach(image: Image, arguments: tuple[Any, ...]) -> list[tuple[int, bool]]:
    """Give an image all memory that arguments lead to, and return these as numbers."""
    regions = _regions(arguments)
    starts = [first for first, _, _ in regions]

    def offset_of(address: int) -> int | None:
        first, end, points = regions[max(0, bisect.bisect(starts, address) - 1)]
        if not first <= address < end:
            return None
        key = first, end - first
        if key not in image.places:
            image.places[key] = place = -(-image.size // LINE) * LINE + first % LINE
            image.size = -(-(place + key[1]) // 8) * 8
            for at in range(-first % 8, key[1] - 7, 8) if points else ():
                word = int.from_bytes(ctypes.string_at(first + at, 8), "little")
                if (target := offset_of(word)) is not None:
                    image.pointers[place + at] = target
        return image.places[key] + address - first

    numbers = list[tuple[int, bool]]()
    for address in map(_address, arguments):
        offset = offset_of(address)
        assert offset is not None or abs(address) < 2**32, (
            f"no object is known that holds argument {len(numbers)}"
        )
        numbers.append((address, False) if offset is None else (offset, True))
    return numbers


@contextmanager
def recording(kernels: ctypes.CDLL) -> Iterator[Recording]:
    stand_in = Recording(kernels)
    with pytest.MonkeyPatch.context() as patched:
        for module in (compilation, check, products):
            patched.setattr(module, "library", lambda: stand_in)
        patched.setattr(compilation, "_declared", {})
        for module in (native_backend, structs, cache):
            patched.setattr(module, "array", Numbers)
        patched.setattr(pool, "REGION", 0)  # a weight is packed into memory of its own
        yield stand_in
