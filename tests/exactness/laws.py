"""The definition: what every output's probability must be, in plain Python and float64.

Written without a look at the library's own transforms: masks, temperature, top-k, top-p, min-p, each one
token at a time, and the law of whole outputs by walking every one of them.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

from foredraft.decode.sampling import SamplingParams

Logits = Callable[[list[int]], list[float]]
Law = dict[tuple[int, ...], float]

TOO_CLOSE = 1e-5  # a cut nearer than this to a probability would hang on float32 rounding


def transformed(
    logits: list[float], params: SamplingParams, allowed: list[bool] | None = None
) -> list[float]:
    """Probabilities after every transform."""
    tokens = [t for t in range(len(logits)) if (allowed is None or allowed[t]) and logits[t] > -math.inf]
    highest = max(logits[t] for t in tokens)
    if params.temperature == 0:
        winner = min(t for t in tokens if logits[t] == highest)
        return [float(t == winner) for t in range(len(logits))]
    weight = {t: math.exp((logits[t] - highest) / params.temperature) for t in tokens}
    if params.top_k:
        ranked = sorted(weight.values(), reverse=True)
        least = ranked[min(params.top_k, len(ranked)) - 1]
        weight = {t: w for t, w in weight.items() if w >= least}
    if params.top_p < 1:
        total, mass, least = sum(weight.values()), 0.0, math.inf
        for w in sorted(weight.values(), reverse=True):
            if mass / total >= params.top_p:
                break
            mass, least = mass + w, w
            assert abs(mass / total - params.top_p) > TOO_CLOSE
        weight = {t: w for t, w in weight.items() if w >= least}
    if params.min_p:
        least = max(weight.values()) * params.min_p
        assert params.min_p == 1 or all(abs(w - least) > TOO_CLOSE for w in weight.values())
        weight = {t: w for t, w in weight.items() if w >= least}
    total = sum(weight.values())
    return [weight.get(t, 0.0) / total for t in range(len(logits))]


def outputs(
    logits: Logits,
    prompt: list[int],
    params: SamplingParams,
    *,
    eos: Collection[int] = (),
    constraint: Any = None,
    limit: int | None = None,
) -> Law:
    """The probability of every output of plain, one-token-at-a-time decoding."""
    found: Law = defaultdict(float)
    most = params.max_new_tokens if limit is None else limit

    def walk(new: list[int], state: Any, chance: float) -> None:
        allowed = None
        if state is not None and (mask := state.mask()) is not None:
            allowed = mask.tolist()
        for token, p in enumerate(transformed(logits(prompt + new), params, allowed)):
            if p == 0:
                continue
            said, after = [*new, token], copy.deepcopy(state)
            if after is not None:
                kept = after.advance(token)
                if kept < len(said):
                    after.roll_back(kept)
                    walk(said[:kept], after, chance * p)
                    continue
            if len(said) == most or (token in eos and not params.ignore_eos):
                found[tuple(said)] += chance * p
            else:
                walk(said, after, chance * p)

    walk([], constraint, 1.0)
    return dict(found)


def greedy(
    logits: Logits, prompt: list[int], count: int, *, eos: Collection[int] = (), constraint: Any = None
) -> list[int]:
    """The output at temperature 0."""
    law = outputs(
        logits, prompt, SamplingParams(temperature=0, max_new_tokens=count), eos=eos, constraint=constraint
    )
    (output,) = law
    return list(output)
