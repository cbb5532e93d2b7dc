"""The EAGLE-3 head that ships with the demo models: found by the name of its drafter, for the demo target alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import foredraft
from foredraft import ConfigError, SamplingParams, demo
from foredraft.decode.stats import Stats
from tests.support.checkpoints import save_checkpoint
from tests.support.loaded import engine_of

GREEDY = SamplingParams(temperature=0, max_new_tokens=32, ignore_eos=True)


def test_it_drafts_where_its_drafter_is_named() -> None:
    with foredraft.load(drafter="eagle3", policy="fixed", max_draft=3, max_length=256, max_batch=1) as llm:
        outputs = [llm.generate([prompt], GREEDY)[0] for prompt in demo.prompts()[:6]]
        plain = [llm.generate([prompt], replace(GREEDY, drafter="none"))[0] for prompt in demo.prompts()[:6]]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    stats = Stats.merge(output.stats for output in outputs)
    assert stats.alpha is not None and stats.alpha > 0.6
    with foredraft.load(policy="fixed", max_length=256, max_batch=1) as llm:
        assert "eagle3" not in engine_of(llm).drafters


def test_other_models_do_not_get_it(tmp_path: Path) -> None:
    other = save_checkpoint(tmp_path / "other", tokenizer=True)
    with pytest.raises(ConfigError, match="needs an EAGLE-3 head of"):
        foredraft.load(other, drafter="eagle3", device="cpu")
