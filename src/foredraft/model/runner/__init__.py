"""The runner: one `forward` over a ragged batch, and the exact shapes and packed weights behind it."""

from foredraft.model.runner.body import Forward
from foredraft.model.runner.compiled import check_compiler
from foredraft.model.runner.job import FusedDraft, Resume, SamplingInputs
from foredraft.model.runner.native import unserved_because
from foredraft.model.runner.runner import Runner, next_chunk
from foredraft.model.runner.shape_cache import cached_shapes
from foredraft.model.runner.shapes import ExactShapes, probe_shapes

__all__ = [
    "ExactShapes",
    "Forward",
    "FusedDraft",
    "Resume",
    "Runner",
    "SamplingInputs",
    "cached_shapes",
    "check_compiler",
    "next_chunk",
    "probe_shapes",
    "unserved_because",
]
