"""Foredraft: faster text from a language model you already have, without changing what it says.

    import foredraft
    llm = foredraft.load("path/to/checkpoint", draft="path/to/small/checkpoint")
    print(llm.generate("def add(a, b):", foredraft.SamplingParams(temperature=0))[0].text)

Importing this package is cheap: the first use of a name below loads its module, and PyTorch with most.
"""

from __future__ import annotations

from foredraft.lazy import lazily

TYPE_CHECKING = False  # what `typing` calls so; importing it takes longer than all of this file
if TYPE_CHECKING:
    from foredraft.decode.params import SamplingParams
    from foredraft.decode.scores import Score
    from foredraft.decode.stats import RoundTrace, Stats
    from foredraft.errors import CheckpointError, ConfigError, ForedraftError, RequestError
    from foredraft.llm import LLM, Output, Piece, Stream
    from foredraft.loading import load
    from foredraft.pages.trace import write_trace

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CheckpointError",
    "ConfigError",
    "ForedraftError",
    "Output",
    "Piece",
    "RequestError",
    "RoundTrace",
    "SamplingParams",
    "Score",
    "Stats",
    "Stream",
    "__version__",
    "load",
    "write_trace",
]

__getattr__ = lazily(
    __name__,
    {
        "foredraft.errors": "CheckpointError ConfigError ForedraftError RequestError",
        "foredraft.llm": "LLM Output Piece Stream",
        "foredraft.decode.params": "SamplingParams",
        "foredraft.decode.stats": "RoundTrace Stats",
        "foredraft.decode.scores": "Score",
        "foredraft.loading": "load",
        "foredraft.pages.trace": "write_trace",
    },
)


def __dir__() -> list[str]:
    return __all__
