"""The defect that the self-test plants: corrections are drawn from p instead of norm(max(p - q, 0)).

Every greedy test passes with this defect, and so does every test whose drafter is the target itself. A
verification that cannot find it proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from foredraft.decode.accept import SurpriseLimit, Verdict
from foredraft.decode.distribution import Distribution
from foredraft.decode.draft import Draft
from foredraft.decode.engine import Engine
from foredraft.decode.noise import RESIDUAL, Keys, Noise
from foredraft.model.device import upload

__all__ = ["without_residual"]


@contextmanager
def without_residual(engine: Engine) -> Iterator[None]:
    """Plant the defect in the rounds of this engine within the context.

    Rows under the `coupled` rule are unchanged: that rule has no residual.
    """

    def defective(
        draft: Draft,
        p: Distribution,
        keys: Keys | None,
        noise: Noise,
        is_coupled: list[bool],
        limit: SurpriseLimit | None,
    ) -> Verdict:
        verdict = accept(draft, p, keys, noise, is_coupled, limit)

        def pick(weights: Tensor) -> Tensor:
            assert keys is not None
            return noise.pick(weights, keys.columns(verdict.accepted), RESIDUAL)

        drawn = p.position(verdict.accepted).draw(pick)[:, 0]
        unchanged = upload(is_coupled, drawn.device)
        return replace(verdict, next_token=torch.where(unchanged, verdict.next_token, drawn))

    accept, engine.accept = engine.accept, defective
    try:
        yield
    finally:
        engine.accept = accept
