"""The adapter that ships with the demo models: found by the name of its drafter, for the demo target alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import foredraft
from foredraft import ConfigError, SamplingParams, demo
from foredraft.drafters.adapter_files import read_adapter, target_hash
from tests.support.checkpoints import save_checkpoint
from tests.support.loaded import engine_of

GREEDY = SamplingParams(temperature=0, max_new_tokens=32, ignore_eos=True)


def test_it_is_of_the_demo_target() -> None:
    config = read_adapter(demo.adapter_path())
    config.check(target_hash(demo.target_path()), "demo")
    assert config.model == "demo" and config.alpha > 0.6


def test_it_drafts_where_its_drafter_is_named() -> None:
    with foredraft.load(drafter="kangaroo", policy="fixed", max_length=256, max_batch=1) as llm:
        outputs = [llm.generate([prompt], GREEDY)[0] for prompt in demo.prompts()[:6]]
        plain = [llm.generate([prompt], replace(GREEDY, drafter="none"))[0] for prompt in demo.prompts()[:6]]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    accepted, drafted = (sum(getattr(o.stats, name) for o in outputs) for name in ("accepted", "drafted"))
    assert accepted > 0.25 * drafted  # an untrained one has next to nothing accepted
    with foredraft.load(policy="fixed", max_length=256, max_batch=1) as llm:
        assert "kangaroo" not in engine_of(llm).drafters


def test_other_models_do_not_get_it(tmp_path: Path) -> None:
    other = save_checkpoint(tmp_path / "other", tokenizer=True)
    with pytest.raises(ConfigError, match="has no adapter for this model"):
        foredraft.load(other, drafter="kangaroo", device="cpu")
