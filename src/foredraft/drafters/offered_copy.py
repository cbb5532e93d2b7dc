"""When policy `auto` makes a copy of the target in few bits without being asked.

`OFFER` says it to people: in the help, in `info`, in the notice of `load` and, word for word, in the docs.
"""

from __future__ import annotations

__all__ = ["DEFAULT_COPY", "LEAST", "OFFER", "SHARE"]

DEFAULT_COPY = "int4"
LEAST = 2**27  # bytes of the smallest target that gets one: a smaller one lies in the processor's caches
SHARE = 4  # it takes at most this fraction of the memory that the weights leave, 1 / SHARE
OFFER = (
    f"auto makes a copy in 4 bits by itself where a model of 16 or 32 bits takes {LEAST >> 20} MiB or more,"
    f" runs on the CPU kernels, and leaves memory for {SHARE} copies free"
)
