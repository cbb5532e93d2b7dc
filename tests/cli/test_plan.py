"""--plan and drafter layer-skip in every command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.support.checkpoints import save_checkpoint

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.heavy
def test_verify_tests_a_plan(tmp_path: Path, cli: Cli) -> None:
    """Distributions are flat, so drafts without the last attention are accepted about half the time."""
    big = save_checkpoint(tmp_path / "m", tokenizer=True, seed=3, initializer_range=0.4, eos_token_id=None)
    quick = "--tokens 6 --detect 0.1 --seed 3 --max-batch 32 --device cpu --policy fixed"
    command = [f"verify {quick} --model", big, "def accept", "Viktor", "x"]
    out = cli(*command, "--plan", "exit:2").out
    assert "drafter layer-skip (exit:2), policy fixed;" in out and "PASSED" in out
    out = cli(*command, "--plan", "skip:attn=2", "--self-test", code=1).out
    assert "drafter layer-skip (skip:attn=2), policy fixed;" in out
    assert "was found" in out, "a missing residual is found"
    assert "no plan for this model" in cli.refused(*command, "--drafter", "layer-skip")


def test_bench_has_a_row_for_the_plan(models: Path, tmp_path: Path, quick_bench: None, cli: Cli) -> None:
    (tmp_path / "words.jsonl").write_text('{"prompt": "def accept(draft, p):"}\n')
    quick = "--device cpu --new-tokens 8 --repeats 1 --methods layer-skip"
    command = [f"bench {quick} --model", models / "big", "--workload", tmp_path / "words.jsonl"]
    found = cli.document(*command, "--plan", "skip:attn=1")
    assert [row["contender"] for row in found["rows"]] == ["plain", "layer-skip"]
    assert found["rows"][1]["exactness"]["identical"] == 1
    assert found["options"]["plan"] == "skip:attn=1"
    cost = found["costs"][0]["drafting"]["layer-skip"]
    assert 0 < cost["first"] + cost["further"] < 5
    assert [model["role"] for model in found["models"]] == ["target"]
    told = "layer-skip has no plan for this model; make one with `foredraft tune`"
    assert told in cli.refused(*command)
