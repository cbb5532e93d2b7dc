"""Affinity: which of several replicas gets a request, so that prompts that begin alike meet one prefix cache.

Each key, a digest of the prompt's beginning, has its own order of all replicas (rendezvous hashing: Thaler
and Ravishankar, 1998). The first one whose load is below a bound gets the request (bounded loads: Mirrokni et
al., arXiv 1608.01350).
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# A replica takes at most this share of the mean load; smaller is more even and moves more keys.
BALANCE = 1.25
CHARACTERS_PER_TOKEN = 4  # of usual text, to compare prompts of token ids with prompts of text
# Fields, in their order.
PARTS = ("prompt_cache_key", "system", "instructions", "messages", "prompt", "input")


def prompt_key(body: Mapping[str, Any], characters: int) -> int | None:
    """Return the key of a request: the same for all requests whose prompts begin alike.

    A prompt is not tokenised for it, and no chat template is applied: both are functions of these fields. The
    client's own `prompt_cache_key` counts as part of the beginning, as in the OpenAI API.

    Examples:
        >>> prompt_key({"prompt": "Say hello."}, 4) == prompt_key({"prompt": "Say goodbye."}, 4)
        True
    """
    parts = [_beginning(body[name], characters) for name in PARTS if body.get(name)]
    text = "\n".join(parts)[:characters]
    return digest(text) if text else None


def _beginning(part: Any, characters: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, list):
        if part and isinstance(part[0], list | str):  # several prompts: the first one stands for all
            return _beginning(part[0], characters)
        if part and isinstance(part[0], int):
            part = part[: max(1, characters // CHARACTERS_PER_TOKEN)]
            return " ".join(str(token).rjust(CHARACTERS_PER_TOKEN - 1) for token in part)
    return json.dumps(part)


def digest(text: str) -> int:
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def order(key: int, replicas: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
    mixed = replicas ^ np.uint64(key)  # splitmix64's finaliser: every bit of the input moves every other one
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable")


def bound(loads: Sequence[int], free: int) -> int:
    return max(free, math.ceil(BALANCE * (sum(loads) + 1) / len(loads)))


def ranked(key: int | None, replicas: npt.NDArray[np.uint64], loads: Sequence[int], free: int) -> list[int]:
    """Return the places of all replicas, the best one for a request first."""
    if key is None:
        two = sorted(random.sample(range(len(loads)), min(2, len(loads))), key=loads.__getitem__)
        return [*two, *(place for place in range(len(loads)) if place not in two)]
    preferred, most = order(key, replicas).tolist(), bound(loads, free)
    fits = [place for place in preferred if loads[place] < most]
    return fits + [place for place in preferred if loads[place] >= most]
