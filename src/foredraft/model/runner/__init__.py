"""The runner: one `forward` over a ragged batch, and the two back ends behind it."""

from foredraft.model.runner.compiled import check_compiler
from foredraft.model.runner.invariant_shapes import InvariantShapes, probe_shapes
from foredraft.model.runner.native import unserved_because
from foredraft.model.runner.passes import (
    DraftInputs,
    DraftVocab,
    Forward,
    FusedDraft,
    Leaves,
    Resume,
    SamplingInputs,
)
from foredraft.model.runner.runner import Runner, next_chunk
from foredraft.model.runner.shape_cache import cached_shapes

__all__ = [
    "DraftInputs",
    "DraftVocab",
    "Forward",
    "FusedDraft",
    "InvariantShapes",
    "Leaves",
    "Resume",
    "Runner",
    "SamplingInputs",
    "cached_shapes",
    "check_compiler",
    "next_chunk",
    "probe_shapes",
    "unserved_because",
]
