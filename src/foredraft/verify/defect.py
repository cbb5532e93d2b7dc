"""A defect to plant: the classic one, the correction drawn from p instead of the residual max(p - q, 0).

It passes every greedy test, and every test in which the drafter is the target itself. A verification that
cannot find it proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from foredraft.decode.accept import Rollback, Verdict
from foredraft.decode.distribution import Distribution
from foredraft.decode.draft import Draft
from foredraft.decode.engine import Engine
from foredraft.decode.noise import RESIDUAL, Keys, Noise
from foredraft.model.device import upload

__all__ = ["without_residual"]


@contextmanager
def without_residual(engine: Engine) -> Iterator[None]:
    """Within, the rounds of this engine draw every correction from p; `coupled` rows have no residual."""

    def defective(
        draft: Draft,
        p: Distribution,
        keys: Keys | None,
        noise: Noise,
        is_coupled: list[bool],
        rollback: Rollback | None,
    ) -> Verdict:
        verdict = sound(draft, p, keys, noise, is_coupled, rollback)

        def pick(weights: Tensor) -> Tensor:
            assert keys is not None
            return noise.pick(weights, keys.columns(verdict.accepted), RESIDUAL)

        drawn = p.position(verdict.accepted).draw(pick)[:, 0]
        spared = upload(is_coupled, drawn.device)
        return replace(verdict, next_token=torch.where(spared, verdict.next_token, drawn))

    sound, engine.accept = engine.accept, defective
    try:
        yield
    finally:
        engine.accept = sound
