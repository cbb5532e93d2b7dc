"""PrefixFolder: parts of the texts of a prefix cache as files, which outlive the process.

A name has a digest of what comes before the part and of all else that its bits depend on, the number of its
tokens, and a digest of these: so a part is looked up without reading files. A file begins with the digest of
its name and content, and a broken or foreign one is not believed. One thread writes, and what was not used
for longest goes first. No state of the folder is an error once it is open.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from foredraft.files import PRIVATE, TEMPORARY, replacing
from foredraft.model.cache import KVCache, Span
from foredraft.user_cache import DISK_SHARE, check_folder, make_folder, read_private, sweep

logger = logging.getLogger(__name__)

SIZE = hashlib.sha256().digest_size
SUFFIX = ".prefix"
WAITING = 2**29  # bytes of parts that wait to be written, at most: further ones are left out


class PrefixFolder:
    def __init__(self, folder: Path, identities: Mapping[KVCache, str]) -> None:
        """Open a folder of this user alone; `identities` say what the bits in each cache depend on."""
        make_folder(folder)
        self.folder, self._identities = check_folder(folder), identities
        sweep(self.folder, TEMPORARY)
        files = dict[str, os.stat_result]()
        for file in self.folder.glob(f"*{SUFFIX}"):
            with suppress(OSError):  # another process removed it
                files[file.name] = file.stat()
        order = sorted(files, key=lambda name: files[name].st_mtime_ns)
        self._sizes = OrderedDict((name, files[name].st_size) for name in order)  # the latest used one last
        self.bytes = sum(self._sizes.values())
        self.most_bytes = (shutil.disk_usage(self.folder).free + self.bytes) // DISK_SHARE
        self._counts: dict[str, set[int]] = {}  # of tokens, by the first part of names
        for name in self._sizes:
            self._count(name)
        self._writer = ThreadPoolExecutor(1, "foredraft-prefixes")  # Python waits for it at exit
        self._waiting = 0

    def counts(self, cache: KVCache, before: bytes, kind: str) -> list[int]:
        """Return how many tokens the parts of a kind have that follow a beginning, from the most on."""
        return sorted(self._counts.get(self._first(cache, before, kind), ()), reverse=True)

    def read(self, cache: KVCache, before: bytes, kind: str, count: int, key: bytes) -> Span | None:
        name = self._name(cache, before, kind, count, key)
        if name not in self._sizes:
            return None
        with suppress(OSError, MemoryError, SafetensorError, LookupError, ValueError):
            content = read_private(self.folder / name)
            if content[:SIZE] == _digest(name.encode(), content[SIZE:]):
                os.utime(self.folder / name)
                self._sizes.move_to_end(name)
                tensors = load(content[SIZE:])
                start, stop, base, parts = tensors.pop("places").tolist()
                found = tuple(tensors[str(place)] for place in range(len(tensors)))
                return Span(0, start, stop, found[:parts], found[parts:], base)
        self.bytes -= self._sizes.pop(name, 0)
        return None

    def write(self, cache: KVCache, before: bytes, kind: str, count: int, key: bytes, span: Span) -> None:
        """Write a part soon; a failure is only logged."""
        name = self._name(cache, before, kind, count, key)
        if name not in self._sizes and self._waiting + span.bytes <= WAITING:
            with suppress(RuntimeError):  # it is closed
                self._writer.submit(self._write, name, span)
                self._waiting += span.bytes

    def close(self) -> None:
        """Wait until everything is written."""
        self._writer.shutdown()

    def _write(self, name: str, span: Span) -> None:
        try:
            host, places = span.on_host(), torch.tensor([span.start, span.stop, span.base, len(span.parts)])
            tensors = enumerate((*host.parts, *host.states))
            content = save({"places": places} | {str(place): each.contiguous() for place, each in tensors})
            with replacing(self.folder / name) as new:
                new.touch(PRIVATE)
                new.write_bytes(_digest(name.encode(), content) + content)
            self._sizes[name] = SIZE + len(content)
            self.bytes += SIZE + len(content)
            self._count(name)
            while self.bytes > self.most_bytes:
                oldest, size = self._sizes.popitem(last=False)
                self.bytes -= size
                (self.folder / oldest).unlink(missing_ok=True)
        except OSError as error:
            logger.info("%s cannot be kept in %s (%s)", name, self.folder, error)
        finally:
            self._waiting -= span.bytes

    def _count(self, name: str) -> None:
        first, _, rest = name.partition("-")
        with suppress(ValueError):  # not a name of ours
            self._counts.setdefault(first, set()).add(int(rest.partition("-")[0]))

    def _first(self, cache: KVCache, before: bytes, kind: str) -> str:
        return _digest(self._identities[cache].encode(), kind.encode(), before).hex()[:SIZE]

    def _name(self, cache: KVCache, before: bytes, kind: str, count: int, key: bytes) -> str:
        return f"{self._first(cache, before, kind)}-{count}-{key.hex()[:SIZE]}{SUFFIX}"


def _digest(*parts: bytes) -> bytes:
    """Return the digest of parts, of which only the last may have any length."""
    return hashlib.sha256(b"\0".join(parts)).digest()
