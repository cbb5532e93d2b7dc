"""Plan files and the notation of skips: round trips, refused input, and the model of a plan."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from safetensors.torch import load_file, save_file

from foredraft import CheckpointError, ConfigError
from foredraft.drafters.asset import any_kept
from foredraft.drafters.plan_files import (
    PlanFile,
    Skips,
    find_plan,
    keep_plan,
    model_hash,
    plan_place,
    read_plan,
    write_plan,
)
from foredraft.tune.finals import earlier_plan_note
from tests.support.checkpoints import save_checkpoint
from tests.support.foreign import NOT_PRIVATE

PLAN = PlanFile(
    model="tiny", model_hash="a" * 64, layers=8, skip_attention=(1, 3), skip_mlp=(4,), device="cpu",
    dtype="float32", max_draft=4, alpha=0.8, c=0.5, tau=2.5, speedup=1.25, predicted=1.3, date="2026-11-21",
    foredraft="0.1.0", temperature=0.7,
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("plan", [PLAN, replace(PLAN, skip_attention=(), skip_mlp=(), exit=3)])
def test_a_plan_survives_writing_and_reading(plan: PlanFile, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    write_plan(plan, file, "out")
    assert read_plan(file) == plan
    assert list(tmp_path.iterdir()) == [file]
    file.write_text(json.dumps({name: own for name, own in asdict(plan).items() if name != "temperature"}))
    assert read_plan(file) == replace(plan, temperature=None), "as earlier versions wrote it"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": 2}, "whose format is 2, but this version reads format 1; make a new plan"),
        ({"skip_attention": [1, 8]}, "skips the attention of layer 8; give 0 to 7: the model has 8 layers"),
        ({"skip_mlp": [-1]}, "skips the MLP of layer -1; give 0 to 7"),
        ({"skip_mlp": [2, 2]}, "skips the MLP of a layer twice; give each layer once"),
        ({"skip_attention": [1.0]}, "whose skip_attention is .1.0., not a list of whole numbers"),
        ({"exit": 3}, "has both an exit and layers to skip; give one of the two"),
        ({"exit": 8, "skip_attention": [], "skip_mlp": []}, "exits before layer 8; give 1 to 7"),
        ({"layers": 0}, "whose layers is 0, not a whole number of 1 or more"),
        ({"max_draft": True}, "whose max_draft is True, not a whole number"),
        ({"alpha": "high"}, "whose alpha is 'high', not a finite number"),
        ({"c": float("nan")}, "whose c is nan, not a finite number"),
        ({"tau": ...}, "whose tau is missing, not a finite number"),
        ({"layers": 10**30}, "whose layers is 10+, not 10000 or less"),
        ({"max_draft": 100_000}, "whose max_draft is 100000, not 1000 or less"),
        ({"alpha": 7}, "whose alpha is 7, not from 0 to 1"),
        ({"c": -5}, "whose c is -5, not 0 or more"),
        ({"tau": 0}, "whose tau is 0, not 1 or more"),
        ({"speedup": 0.0}, "whose speedup is 0.0, not above 0"),
        ({"date": "yesterday"}, "whose date is 'yesterday', not a date as YYYY-MM-DD"),
        ({"temperature": -1}, "whose temperature is -1, not 0 or more"),
        ({"temperature": "warm"}, "whose temperature is 'warm', not a finite number or null"),
        ({"skip_heads": []}, "which has the unknown field 'skip_heads'"),
    ],
)
def test_a_file_with_a_wrong_field_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    content = {name: value for name, value in {**asdict(PLAN), **changed}.items() if value is not ...}
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message) as refused:
        read_plan(tmp_path / "plan.json")
    assert "plan.json" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "not JSON"), (b"\xff", "not JSON"), (b"[" * 10**5, "not JSON"), (b"[1]", "no JSON object")],
)
def test_a_file_without_a_plan_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(
        ConfigError, match=f"plan.json', which (is|holds) {message}.*; give a file that `foredraft tune`"
    ):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="cannot be read .No such file"):
        read_plan(tmp_path / "none.json")


def test_a_plan_warns_on_another_device_or_dtype() -> None:
    assert PLAN.doubt("cpu", "float32") is None
    for device, dtype in (("cuda", "float32"), ("cpu", "bfloat16")):
        message = PLAN.doubt(device, dtype)
        assert message is not None and "\n" not in message
        assert f"was measured on cpu in float32, but runs on {device} in {dtype}: the output stays" in message


def test_a_note_names_the_replaced_plan(cache: Path) -> None:
    assert earlier_plan_note(PLAN.model_hash, (), None, replaced=True) is None
    place = keep_plan(PLAN)
    assert place is not None
    assert earlier_plan_note(PLAN.model_hash, (), None, replaced=True) == (
        "The winner replaces the earlier plan skip:attn=1,3/mlp=4, measured at temperature 0.7 at 1.25 x plain"
        " decoding on 2026-11-21."
    )
    place.write_text("{}")
    assert earlier_plan_note(PLAN.model_hash, (), None, replaced=True) is None


def test_an_invalid_plan_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="skips the MLP of layer 8"):
        write_plan(replace(PLAN, skip_mlp=(8,)), tmp_path / "plan.json")
    with pytest.raises(ConfigError, match=r"out is '.*', which cannot be written \(No such file"):
        write_plan(PLAN, tmp_path / "none" / "plan.json", "out")
    assert list(tmp_path.iterdir()) == []


def test_a_plan_is_found_by_the_hash_of_its_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_plan(PLAN.model_hash) is None
    assert not any_kept("plans")
    place = keep_plan(PLAN)
    assert place is not None and place.is_relative_to(cache) and place == plan_place(PLAN.model_hash)
    assert any_kept("plans")
    assert find_plan(PLAN.model_hash) == PLAN and find_plan("b" * 64) is None
    other = place.rename(place.with_name("b" * 64 + ".json"))
    with pytest.raises(ConfigError, match="plan is for 'tiny', which is another model than"):
        find_plan("b" * 64)
    (place.parent / ("c" * 64 + ".json")).mkdir()
    with pytest.raises(ConfigError, match=r"c.json', which is no file"):
        find_plan("c" * 64)
    monkeypatch.setenv("FOREDRAFT_CACHE", "")
    assert find_plan("b" * 64) is plan_place("b" * 64) is keep_plan(PLAN) is None
    monkeypatch.setenv("FOREDRAFT_CACHE", str(other))
    with pytest.raises(ConfigError, match="plan is .*, which cannot be written"):
        keep_plan(PLAN)


@pytest.mark.parametrize("change", NOT_PRIVATE)
def test_a_plan_of_others_is_refused(change: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = keep_plan(PLAN)
    assert place is not None
    reason = NOT_PRIVATE[change](place, monkeypatch).replace(", which", "")
    with pytest.raises(ConfigError, match=f"which is not used, because .*{reason}; set FOREDRAFT_CACHE to"):
        find_plan(PLAN.model_hash)


def test_the_hash_depends_on_config_and_tensors_only(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model")
    hash = model_hash(folder)
    assert len(hash) == 64
    # the folder, the shards and the layout of the JSON do not matter
    shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "copy" / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=7))
    assert model_hash(tmp_path / "copy") == hash
    assert model_hash(save_checkpoint(tmp_path / "shards", shards=True)) == hash
    # the values of the config, and the dtypes and shapes of the tensors do
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert model_hash(tmp_path / "copy") != hash
    tensors = load_file(folder / "model.safetensors")
    for changed in (tensors["model.norm.weight"].double(), tensors["model.norm.weight"][:-1]):
        save_file(tensors | {"model.norm.weight": changed.contiguous()}, folder / "model.safetensors")
        assert model_hash(folder) != hash
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="neither model.safetensors nor"):
        model_hash(folder)


NOTATIONS = [
    ("exit:3", Skips(exit=3)),
    ("skip:none", Skips()),
    ("skip:attn=3,5-7/mlp=4", Skips((3, 5, 6, 7), (4,))),
    ("skip:mlp=0-1", Skips((), (0, 1))),
    ("skip:attn=0,2,4", Skips((0, 2, 4))),
]


@pytest.mark.parametrize(("text", "skips"), NOTATIONS)
def test_skips_are_formatted_and_parsed(text: str, skips: Skips) -> None:
    assert Skips.parse(text) == skips and str(skips) == text
    assert Skips.parse("skip:mlp=4/attn=5-6,3") == Skips((3, 5, 6), (4,)), "in any order"


LAYERS = st.sets(st.integers(0, 999)).map(lambda found: tuple(sorted(found)))


@given(st.builds(Skips, LAYERS, LAYERS) | st.builds(Skips, exit=st.integers(1, 999)))
def test_parse_inverts_str(skips: Skips) -> None:
    assert Skips.parse(str(skips)) == skips


@pytest.mark.parametrize(
    "text",
    "exit: exit:-1 exit:a exit:1,2 skip: skip:attn skip:attn= skip:head=1 skip:attn=1/attn=2 skip:attn=3-1"
    " skip:attn=1- skip:attn=0-999999999 skip:attn=²".split(),
)
def test_parse_refuses_other_texts(text: str) -> None:
    with pytest.raises(ConfigError, match="plan is '.*'; give exit:LAYER, or skip:attn=LAYERS/mlp=LAYERS"):
        Skips.parse(text)


def test_skips_convert_to_a_plan() -> None:
    plan = Skips((1,), (0, 2)).plan(3)
    assert plan.attention == (True, False, True) and plan.mlp == (False, True, False)
    exiting = Skips(exit=2).plan(3)
    assert exiting.attention == exiting.mlp == (True, True, False)
