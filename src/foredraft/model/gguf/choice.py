"""Choose one of several GGUF files by their names, as llama.cpp chooses one of a repository.

Contract: a file name tells the type of the weights ("model-Q4_K_M.gguf"), a part, and files that are no
language model. The case of letters does not matter. Where no type is wanted, the preferred types come first,
then the first file.

Rules: https://github.com/ggml-org/llama.cpp/blob/master/common/download.cpp. Here a type is a whole word: F16
does not find BF16.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from foredraft.model.gguf.parts import part_names

__all__ = ["choose", "models_among", "shown_types"]

PREFERRED = ("Q4_K_M", "Q8_0")
HEADS = ("eagle3-", "dflash-", "dspark-")  # parts of names: of drafters that are no whole models
NO_MODELS = ("mmproj", "imatrix", "mtp-")  # of what is neither
# the end of a name that is a type: Q4_K_M, UD-Q4_K_XL, IQ2_XXS, BF16, TQ1_0, MXFP4_MOE
TYPE = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:[IT]?Q\d\w*|B?F16|F32|MXFP4\w*|NVFP4\w*))(?:-\d{5}-of-\d{5})?\.gguf", re.I
)
MAX_SHOWN = 20  # names in a message


def models_among(names: Iterable[str], *, heads: bool = False) -> list[str]:
    """Return the language models among files: each by its name, or by that of its first part.

    Args:
        names: Of all files, with their folders.
        heads: Return the heads that draft for models instead.
    """
    files = (name for name in names if name.lower().endswith(".gguf"))
    whole = (name for name in files if not any(part in _base(name) for part in NO_MODELS))
    models = (name for name in whole if any(part in _base(name) for part in HEADS) == heads)
    return [*dict.fromkeys(part_names(name)[0] for name in models)]


def choose(models: Sequence[str], wanted: str | None) -> str | None:
    """Return the model of a type, or the one to take where no type is wanted; None where there is none.

    Args:
        models: What `models_among` returned.
        wanted: The type, or the name of a file.
    """
    for type in PREFERRED if wanted is None else (wanted,):
        pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(type)}[-./]", re.IGNORECASE)
        for name in models:
            if pattern.search(name) or type.lower() == _base(name):
                return name
    return next(iter(models), None) if wanted is None else None


def shown_types(models: Sequence[str]) -> str:
    """Return the types of models as a message lists them; of a model whose name tells none, the name."""
    types = (TYPE.search(name) for name in models)
    shown = [name if type is None else type[1] for name, type in zip(models, types, strict=True)]
    different = [*dict.fromkeys(shown)]
    more = len(different) - MAX_SHOWN
    return ", ".join(different[:MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _base(name: str) -> str:
    return PurePosixPath(name).name.lower()
