"""Planted defects of a model that drafts for itself, in real forwards by PyTorch's operators (form: `mutants`)."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from foredraft import LLM
from foredraft.decode.drafter import DraftPass
from foredraft.decode.engine import Engine
from foredraft.decode.policy import Fixed
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.drafters.plan_files import Skips
from foredraft.drafters.states import KnownStates
from tests.exactness import test_layer_skip as layer_skip
from tests.exactness.matrix import PROMPTS, check_cache
from tests.support.mutation import caught_by
from tests.support.mutations import instead, last_token_known, verified, with_the_drafts_plan

NEW = 40


@functools.cache
def loaded(family: str) -> LLM:
    with tempfile.TemporaryDirectory() as folder:
        return layer_skip.load(Path(folder), family, "float32", "operators")


def check(family: str, skips: Skips, gathered: bool | None = None) -> None:
    """Compare; gathered: passes write the keys of real columns alone."""
    engine: Any = loaded(family).loaded.engine
    engine.target.backend.gathers = gathered
    engine.drafters["layer-skip"] = LayerSkip(engine.target, engine.cache, skips)
    for gamma in (1, 4):  # drafts of one token are often accepted whole
        for row in range(engine.cache.rows):  # keys of an earlier text could stand in for missing ones
            engine.cache.zero_row(row)
        engine.policy = Fixed(gamma)
        rounds = check_cache(loaded(family), "layer-skip", PROMPTS[4], NEW).rounds
        assert gamma > 1 or any(turn.accepted == turn.drafted for turn in rounds)


skipping = functools.partial(check, "gemma2", Skips((0, 2), (1,)), gathered=True)
exiting = functools.partial(check, "llama", Skips(exit=2))


@instead
def any_shape(draft_pass: DraftPass, *args: Any, **more: Any) -> Any:
    aux = () if draft_pass.exit is None else (draft_pass.exit,)
    return draft_pass.runner.forward(*args, **more, plan=draft_pass.plan, aux_layers=aux, invariant=False)


def pending_token_alone(engine: Any, inputs: Any, draft: Any, starts: Any, options: Any) -> None:
    options["counts"] = [min(count, 1) for count in options["counts"]]


TABLE = {
    exiting: [
        ("states resumed from of a shape that is not exact", DraftPass.__call__, any_shape),
        ("the last drafted token taken for read, in real forwards", KnownStates.take, last_token_known),
    ],
    skipping: [
        ("a draft's plan verifies, in real forwards", Engine._verify, verified(with_the_drafts_plan)),
        ("the keys that a draft wrote left where they are", Engine._verify, verified(pending_token_alone)),
    ],
}
MUTANTS = caught_by(TABLE)
