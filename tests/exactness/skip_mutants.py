"""Planted defects of a model that drafts for itself, in real forwards by PyTorch's operators.

Each check compares the tokens, and the cache that is left behind, with plain decoding. A table entry reads: name,
seam, spoiler, check. A spoiler takes the sound function and returns the defective one.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from foredraft import LLM
from foredraft.decode.drafter import DraftPass
from foredraft.decode.engine import Engine
from foredraft.decode.policy import Fixed
from foredraft.drafters.known_states import KnownStates
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.drafters.skips import Skips
from tests.exactness import test_layer_skip as layer_skip
from tests.exactness.test_bits import PROMPTS, row_of, steps_of
from tests.support.loaded import engine_of
from tests.support.planting import defect
from tests.support.spoilers import last_token_known, verified, with_the_drafts_plan

NEW = 40
COUNT = len(PROMPTS[4]) + NEW - 1


@functools.cache
def loaded(family: str) -> tuple[LLM, torch.Tensor]:
    """Return a model, and the cache row that plain decoding leaves behind."""
    with tempfile.TemporaryDirectory() as folder:
        llm = layer_skip.load(Path(folder), family, "float32", "operators")
    [row] = [row_of(llm, sequence, COUNT) for sequence in steps_of(llm, PROMPTS[4], None, NEW)]
    return llm, row


def bits(family: str, skips: Skips, gathered: bool | None = None) -> None:
    """Compare; gathered: passes write the keys of real columns alone."""
    llm, want = loaded(family)
    runner: Any = llm.loaded.runner
    runner.backend.gathers = gathered
    engine_of(llm).drafters["layer-skip"] = LayerSkip(runner, engine_of(llm).cache, skips)
    for gamma in (1, 4):  # drafts of one token are often accepted whole
        for row in range(engine_of(llm).cache.rows):
            # keys of an earlier text could stand in for missing ones
            engine_of(llm).cache.zero_row(row)
        engine_of(llm).policy = Fixed(gamma)
        for sequence in steps_of(llm, PROMPTS[4], "layer-skip", NEW):
            assert gamma > 1 or any(turn.accepted == turn.drafted for turn in sequence.rounds)
            assert torch.equal(row_of(llm, sequence, COUNT), want)


def skipping() -> None:
    bits("gemma2", Skips((0, 2), (1,)), gathered=True)


def exiting() -> None:
    bits("llama", Skips(exit=2))


def any_shape(call: Callable[..., Any]) -> Callable[..., Any]:
    def spoilt(draft_pass: DraftPass, *args: Any, **more: Any) -> Any:
        taps = () if draft_pass.tap is None else (draft_pass.tap,)
        return draft_pass.runner.forward(*args, **more, plan=draft_pass.plan, taps=taps, invariant=False)

    return spoilt


def pending_token_alone(engine: Any, inputs: Any, draft: Any, starts: Any, options: Any) -> None:
    options["counts"] = [min(count, 1) for count in options["counts"]]


MUTANTS = [
    defect("states resumed from of a shape that is not exact", DraftPass.__call__, any_shape, exiting),
    defect(
        "the last drafted token taken for read, in real forwards", KnownStates.take, last_token_known, exiting
    ),
    defect(
        "the plan of a draft applied to the verifying pass, in real forwards",
        Engine._verify,
        verified(with_the_drafts_plan),
        skipping,
    ),
    defect(
        "the keys that a draft wrote left where they are",
        Engine._verify,
        verified(pending_token_alone),
        skipping,
    ),
]

CHECKS = list(dict.fromkeys(mutant.check for mutant in MUTANTS))
