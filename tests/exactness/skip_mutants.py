"""Planted defects of a model that drafts for itself, in real forwards by PyTorch's operators. Each check holds what
it says, and the cache it leaves behind, against plain decoding."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import test_layer_skip as layer_skip
import torch
from test_bits import PROMPTS, row_of, steps_of

from foredraft import LLM
from foredraft.decode.engine import Engine
from foredraft.decode.policy import Fixed
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.drafters.skips import Skips
from planting import Mutant

NEW = 40
COUNT = len(PROMPTS[4]) + NEW - 1


@functools.cache
def loaded(family: str) -> tuple[LLM, torch.Tensor]:
    """A model, and the row that plain decoding leaves behind."""
    with tempfile.TemporaryDirectory() as folder:
        llm = layer_skip.load(Path(folder), family, "float32", "operators")
    [row] = [row_of(llm, sequence, COUNT) for sequence in steps_of(llm, PROMPTS[4], None, NEW)]
    return llm, row


def bits(family: str, skips: Skips) -> None:
    llm, want = loaded(family)
    runner: Any = llm.engine.target
    llm.engine.drafters["layer-skip"] = LayerSkip(runner, llm.engine.cache, skips)
    llm.engine.policy = Fixed(5)
    [row] = [row_of(llm, sequence, COUNT) for sequence in steps_of(llm, PROMPTS[4], "layer-skip", NEW)]
    assert torch.equal(row, want)


def skipping() -> None:
    bits("gemma2", Skips((0, 2), (1,)))


def exiting() -> None:
    bits("llama", Skips(exit=2))


MUTANTS = [
    Mutant(
        "states resumed from of a shape that is not exact",
        ((LayerSkip.__init__, "exact=skips.exit is not None", "exact=False"),),
        exiting,
    ),
    Mutant(
        "the last drafted token taken for read, in real forwards",
        ((LayerSkip.resume, "1), self._known)", "1), [known + (known > 0) for known in self._known])"),),
        exiting,
    ),
    Mutant(
        "the plan of a draft applied to the verifying pass, in real forwards",
        (
            (
                Engine._verify,
                "taps=taps,\n",
                "taps=taps, plan=self.drafters['layer-skip'].draft_pass.plan,\n",
            ),
        ),
        skipping,
    ),
    Mutant(
        "what a draft wrote left where it is",
        (
            (
                Engine._verify,
                "counts=[0 if i else min(1 + b, width)",
                "counts=[0 if i else min(1 + 0 * b, width)",
            ),
        ),
        skipping,
    ),
]

CHECKS = list(dict.fromkeys(mutant.check for mutant in MUTANTS))
