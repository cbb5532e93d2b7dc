"""Gemma 4 drafts for itself: without some of its layers, with fewer bits; and its own weights are quantised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft import LLM, SamplingParams
from foredraft.decode.policy import Fixed
from foredraft.drafters.skips import Skips
from foredraft.errors import ConfigError
from foredraft.kernels.compilation import library
from foredraft.model.spec import ModelSpec
from foredraft.tune import run
from tests.support import assistants
from tests.support.loaded import engine_of
from tests.support.planting import Mutant, assert_caught, defect

NEW = 24
PROMPTS = [[(3 * at + length) % 97 for at in range(length)] for length in (1, 3, 9, 40)]
WORDS = 97
NEEDS_KERNELS = pytest.mark.skipif(library() is None, reason="no kernels")
# drafter -> options of load; layers 1 and 3 of the target have the keys that layers 4 to 6 read
SELF: dict[str, dict[str, Any]] = {
    "layer-skip": {"plan": "skip:attn=2,4,5/mlp=0,6"},
    "low-bit": {"draft_weights": "int4"},
}
EXIT = {"plan": "exit:5"}


def load(folder: Path, kind: str, **options: Any) -> LLM:
    target = assistants.save_target(folder / kind, kind, WORDS)
    return foredraft.load(target, device="cpu", max_batch=4, max_length=128, policy="fixed", **options)


def same_ids(llm: LLM, drafter: str) -> tuple[int, int]:
    """Check the greedy ids of a batch and of single texts, and return how many tokens were accepted, and drafted."""
    greedy = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True, drafter="none")
    plain = [llm.generate([prompt], greedy)[0].token_ids for prompt in PROMPTS]
    engine_of(llm).policy = Fixed(3)
    outputs = llm.generate(PROMPTS, replace(greedy, drafter=drafter))
    assert [output.token_ids for output in outputs] == plain
    accepted, drafted = (sum(getattr(o.stats, name) for o in outputs) for name in ("accepted", "drafted"))
    return accepted, drafted


@NEEDS_KERNELS
@pytest.mark.parametrize(
    ("drafter", "options"),
    [("layer-skip", SELF["layer-skip"]), ("layer-skip", EXIT), ("low-bit", SELF["low-bit"])],
    ids=["plan", "exit", "low-bit"],
)
def test_the_target_drafts_for_itself(drafter: str, options: dict[str, Any], tmp_path: Path) -> None:
    accepted, drafted = same_ids(
        load(tmp_path, "shared", dtype="float32", drafter=drafter, **options), drafter
    )
    assert 0 < accepted < drafted


@NEEDS_KERNELS
def test_a_quantised_target_keeps_its_text(tmp_path: Path) -> None:
    """Linear layers of whole groups have codes; the projections of layers' inputs are too narrow here."""
    llm = load(tmp_path, "shared", dtype="bfloat16", weights="int8", drafter="layer-skip", **EXIT)
    assert same_ids(llm, "layer-skip")[0] > 0


def refused_plan(folder: Path) -> None:
    with pytest.raises(ConfigError, match="attention of layer 1, whose keys and values other layers read"):
        load(folder, "shared", drafter="layer-skip", plan="skip:attn=1")


def test_a_plan_never_skips_keys_that_others_read(tmp_path: Path) -> None:
    refused_plan(tmp_path)


@pytest.mark.parametrize("kind", ["shared", "unified"])
def test_no_search_where_layers_depend_on_others(kind: str, tmp_path: Path) -> None:
    spec = ModelSpec.from_folder(assistants.save_target(tmp_path, kind, WORDS))
    if kind == "unified":
        run._check_layers(spec)
        return
    with pytest.raises(ConfigError, match="whose layers read the keys and values of others"):
        run._check_layers(spec)


def unaware(check: Callable[..., Any]) -> Callable[..., Any]:
    return lambda own, layers, producers=(): check(own, layers)


def test_a_plan_that_skips_them_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant: Mutant = defect(
        "producers unknown", Skips.check, unaware, lambda: refused_plan(tmp_path), pytest.fail.Exception
    )
    assert_caught(mutant, monkeypatch)
