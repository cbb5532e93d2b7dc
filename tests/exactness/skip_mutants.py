"""Planted defects of a model that drafts for itself, in real forwards by PyTorch's operators. Each check holds what
it says, and the cache it leaves behind, against plain decoding."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch

from foredraft import LLM
from foredraft.decode.engine import Engine
from foredraft.decode.policy import Fixed
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.drafters.skips import Skips
from tests.exactness import test_layer_skip as layer_skip
from tests.exactness.test_bits import PROMPTS, row_of, steps_of
from tests.support.planting import Mutant

NEW = 40
COUNT = len(PROMPTS[4]) + NEW - 1


@functools.cache
def loaded(family: str) -> tuple[LLM, torch.Tensor]:
    """A model, and the row that plain decoding leaves behind."""
    with tempfile.TemporaryDirectory() as folder:
        llm = layer_skip.load(Path(folder), family, "float32", "operators")
    [row] = [row_of(llm, sequence, COUNT) for sequence in steps_of(llm, PROMPTS[4], None, NEW)]
    return llm, row


def bits(family: str, skips: Skips, gathered: bool | None = None) -> None:
    """gathered: passes write the keys of no column but the real ones."""
    llm, want = loaded(family)
    runner: Any = llm.engine.target
    runner.gathers = gathered
    llm.engine.drafters["layer-skip"] = LayerSkip(runner, llm.engine.cache, skips)
    for gamma in (1, 4):  # drafts of one token are often accepted whole
        for row in range(llm.engine.cache.rows):
            llm.engine.cache.zero_row(
                row
            )  # what an earlier text left there could stand in for what is missing
        llm.engine.policy = Fixed(gamma)
        for sequence in steps_of(llm, PROMPTS[4], "layer-skip", NEW):
            assert gamma > 1 or any(turn.accepted == turn.drafted for turn in sequence.rounds)
            assert torch.equal(row_of(llm, sequence, COUNT), want)


def skipping() -> None:
    bits("gemma2", Skips((0, 2), (1,)), gathered=True)


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
                "counts=[0 if i else min(1 + n, width)",
                "counts=[0 if i else min(1 + 0 * n, width)",
            ),
        ),
        skipping,
    ),
]

CHECKS = list(dict.fromkeys(mutant.check for mutant in MUTANTS))
