"""Back end: what runs the passes of one decoder.

There are two. `native.NativeBackend` has the project's own C kernels; `torch_backend.TorchBackend` has the
operators of PyTorch, with batch-invariant shapes, packed products, ragged passes and CUDA graphs. The runner
asks once which of them a decoder's weights are packed for.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from foredraft.model.cache import CacheLayers
from foredraft.model.plan import Plan
from foredraft.model.rope import Rope
from foredraft.model.runner.fused import DraftInputs, FusedDraft
from foredraft.model.runner.invariant_shapes import InvariantShapes
from foredraft.model.runner.passes import Forward, Pass

__all__ = ["Backend"]


class Backend(Protocol):
    """Runs the passes of one decoder."""

    @property
    def native(self) -> bool:
        """Whether the C kernels run the passes; caches then hold keys in blocks."""
        ...

    @property
    def fuses(self) -> bool:
        """Whether `draft` may run all steps of a draft in one call."""
        ...

    @property
    def takes_leaves(self) -> bool:
        """Whether passes may have leaves, with the bits that plain decoding gives their tokens."""
        ...

    @property
    def shapes(self) -> InvariantShapes:
        """The shapes of its passes."""
        ...

    @property
    def choices(self) -> list[str]:
        """The ways in which it runs passes on this machine, for the log."""
        ...

    def use_rotary_tables(self, tables: Mapping[Rope, Tensor]) -> None:
        """Set the rotary tables of all further passes, [P, 2, D] each."""
        ...

    def run(self, pass_: Pass) -> Forward:
        """Run a pass. Padding columns mean nothing, and are finite where the row's real ones are.

        Raises:
            ValueError: The pass is too wide, or its columns do not fit into the cache.
        """
        ...

    def draft(
        self, cache: CacheLayers, inputs: DraftInputs, plan: Plan, tap: int | None
    ) -> FusedDraft | None:
        """Run all steps of a draft in one call; None where this back end cannot. See `Runner.draft`."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, V] in float32, soft-capped, of states [N, D] after the last layer."""
        ...

    def uncaptured(self) -> AbstractContextManager[None]:
        """Capture no CUDA graph within the block."""
        ...
