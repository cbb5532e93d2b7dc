"""Plan: the sub-layers that a pass runs.

Every pass has a plan. That of the target runs all sub-layers; a draft of Draft & Verify (arXiv:2309.08168)
leaves some out, and an early exit (arXiv:2404.16710) leaves out all from one layer on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """The sub-layers that a pass runs, by layer.

    Attributes:
        attention: Whether each layer's attention runs.
        mlp: Whether each layer's MLP runs.
    """

    attention: tuple[bool, ...]
    mlp: tuple[bool, ...]

    @classmethod
    def full(cls, layers: int) -> Plan:
        """Return the plan that runs every sub-layer of a model with `layers` layers."""
        return cls((True,) * layers, (True,) * layers)

    def without(self, attention: Iterable[int] = (), mlp: Iterable[int] = ()) -> Plan:
        """Return this plan without the attention and the MLP of the given layers.

        Args:
            attention: Indices of the layers whose attention is skipped.
            mlp: Indices of the layers whose MLP is skipped.

        Raises:
            ValueError: An index is not a layer of the model.
        """
        return Plan(_cleared(self.attention, attention), _cleared(self.mlp, mlp))


def _cleared(runs: tuple[bool, ...], skip: Iterable[int]) -> tuple[bool, ...]:
    skipped = frozenset(skip)
    if not skipped <= frozenset(range(len(runs))):
        raise ValueError(f"cannot skip layers {sorted(skipped)}: the model has layers 0 to {len(runs) - 1}")
    return tuple(run and layer not in skipped for layer, run in enumerate(runs))
