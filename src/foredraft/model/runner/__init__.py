"""One `forward` over a batch, and what it hides: exact shapes (`shapes`) and packed products (`packed`)."""

from foredraft.model.runner.body import Forward
from foredraft.model.runner.compiled import check_compiler
from foredraft.model.runner.job import Drafted, Drawing, Resume, Stops
from foredraft.model.runner.native import unserved_because
from foredraft.model.runner.remembered import remembered_shapes
from foredraft.model.runner.runner import Runner, next_chunk
from foredraft.model.runner.shapes import ExactShapes, probe_shapes

__all__ = [
    "Drafted",
    "Drawing",
    "ExactShapes",
    "Forward",
    "Resume",
    "Runner",
    "Stops",
    "check_compiler",
    "next_chunk",
    "probe_shapes",
    "remembered_shapes",
    "unserved_because",
]
