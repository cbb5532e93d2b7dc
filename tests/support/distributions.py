"""The definition: the probability of every output, in plain Python and float64, without the library's transforms."""

from __future__ import annotations

import copy
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

from foredraft.decode.params import SamplingParams

Logits = Callable[[list[int]], list[float]]
Distribution = dict[tuple[int, ...], float]

TOO_CLOSE = 1e-5  # a cut nearer than this to a probability would hang on float32 rounding


def edited(
    logits: list[float], params: SamplingParams, prompt: list[int], new: list[int], eos: Collection[int]
) -> list[float]:
    found = []
    for token, x in enumerate(logits):
        x += (params.logit_bias or {}).get(token, 0.0)
        if token in eos and not params.ignore_eos and len(new) < params.min_new_tokens:
            x = -math.inf
        if token in prompt or token in new:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        if token in new:
            x -= params.presence_penalty
        x -= params.frequency_penalty * new.count(token)
        found.append(x)
    return found


def transformed(
    logits: list[float],
    params: SamplingParams,
    allowed: list[bool] | None = None,
    prompt: list[int] | None = None,
    new: list[int] | None = None,
    eos: Collection[int] = (),
) -> list[float]:
    logits = edited(logits, params, prompt or [], new or [], eos)
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
    if params.typical_p < 1:
        total = sum(weight.values())
        p = {t: w / total for t, w in weight.items()}
        entropy = -sum(x * math.log(x) for x in p.values() if x > 0)
        far = {t: abs(-math.log(x) - entropy) if x > 0 else math.inf for t, x in p.items()}
        mass, farthest = 0.0, 0.0
        for t in sorted(p, key=lambda t: far[t]):
            if mass >= params.typical_p:
                break
            mass, farthest = mass + p[t], far[t]
            assert abs(mass - params.typical_p) > TOO_CLOSE
        gaps = sorted(far.values())
        assert all(b - a > TOO_CLOSE or b == a or b - a < 1e-12 for a, b in itertools.pairwise(gaps))
        weight = {t: w for t, w in weight.items() if far[t] <= farthest + 1e-9}
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
) -> Distribution:
    found: Distribution = defaultdict(float)
    most = params.max_new_tokens if limit is None else limit

    def walk(new: list[int], state: Any, chance: float) -> None:
        allowed = None
        if state is not None and (mask := state.mask()) is not None:
            allowed = mask.tolist()
            if not any(allowed):
                after = copy.deepcopy(state)
                kept = after.retreat()
                rolled_back(new, after, len(new) if kept is None else kept, chance, ended=kept is None)
                return
        distribution = transformed(logits(prompt + new), params, allowed, prompt, new, eos)
        for token, p in enumerate(distribution):
            if p == 0:
                continue
            said, after = [*new, token], copy.deepcopy(state)
            if after is not None:
                kept = after.advance(token)
                if kept < len(said):
                    rolled_back(said, after, kept, chance * p)
                    continue
            if len(said) == most or (token in eos and not params.ignore_eos):
                found[tuple(said)] += chance * p
            else:
                walk(said, after, chance * p)

    def rolled_back(said: list[int], state: Any, kept: int, chance: float, ended: bool = False) -> None:
        if not ended:
            state.roll_back(kept)
        if state.ended_by is None:
            walk(said[:kept], state, chance)
        else:
            found[tuple(said[:kept])] += chance

    walk([], constraint, 1.0)
    return dict(found)


def greedy(
    logits: Logits, prompt: list[int], count: int, *, eos: Collection[int] = (), constraint: Any = None
) -> list[int]:
    params = SamplingParams(temperature=0, max_new_tokens=count)
    (output,) = outputs(logits, prompt, params, eos=eos, constraint=constraint)
    return list(output)
