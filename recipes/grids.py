"""Write the grids of the block formats IQ1, IQ2 and IQ3 from the tables of the package `gguf`.

    python -m recipes.grids [FILE]

Source: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/quants.py (MIT licence).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from gguf import quants
from safetensors.torch import save_file

from foredraft.model.quantisation.blocks import FILE

# name in the file -> the package's class
GRIDS = {
    "iq1": quants.IQ1_S,
    "iq2_xxs": quants.IQ2_XXS,
    "iq2_xs": quants.IQ2_XS,
    "iq2_s": quants.IQ2_S,
    "iq3_xxs": quants.IQ3_XXS,
    "iq3_s": quants.IQ3_S,
}


def grids() -> dict[str, torch.Tensor]:
    """Return the points of each grid by name, [points, codes of a point] int8."""
    found = {}
    for name, kind in GRIDS.items():
        kind.init_grid()  # type: ignore[no-untyped-call]
        assert kind.grid is not None
        found[name] = torch.from_numpy(kind.grid).to(torch.int8).view(kind.grid_shape).contiguous()
    return found


if __name__ == "__main__":
    save_file(grids(), Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
