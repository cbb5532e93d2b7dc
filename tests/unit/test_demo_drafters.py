"""The adapter and the EAGLE-3 head that ship with the demo models: found by their drafters' names, for the demo alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import foredraft
from foredraft import ConfigError, SamplingParams, demo
from foredraft.decode.stats import Stats
from foredraft.drafters.kangaroo import read_adapter, target_hash
from tests.support.checkpoints import save_checkpoint
from tests.support.loaded import engine_of

GREEDY = SamplingParams(temperature=0, max_new_tokens=32, ignore_eos=True)


def test_the_adapter_is_of_the_demo_target() -> None:
    config = read_adapter(demo.adapter_path())
    assert (
        config.target_hash == target_hash(demo.target_path())
        and config.model == "demo"
        and config.alpha > 0.6
    )


@pytest.mark.heavy
@pytest.mark.parametrize(("drafter", "alpha"), [("kangaroo", 0.5), ("eagle3", 0.6)])
def test_it_drafts_where_its_drafter_is_named(drafter: str, alpha: float) -> None:
    with foredraft.load(drafter=drafter, policy="fixed", max_draft=3, max_length=256, max_batch=1) as llm:
        outputs = llm.generate(demo.prompts()[:4], GREEDY)
        plain = llm.generate(demo.prompts()[:4], GREEDY.replace(drafter="none"))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    found = Stats.merge(output.stats for output in outputs).alpha
    assert found is not None and found > alpha  # an untrained one has next to nothing accepted
    with foredraft.load(policy="fixed", max_length=256, max_batch=1) as llm:
        assert drafter not in engine_of(llm).drafters


@pytest.mark.parametrize(
    ("drafter", "says"),
    [("kangaroo", "has no adapter for this model"), ("eagle3", "needs an EAGLE-3 head of")],
)
def test_other_models_do_not_get_it(tmp_path: Path, drafter: str, says: str) -> None:
    other = save_checkpoint(tmp_path, tokenizer=True)
    with pytest.raises(ConfigError, match=says):
        foredraft.load(other, drafter=drafter, device="cpu")
