"""`inspect_models`: what `load` would make of a model, without loading its weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
from foredraft.bench.machine_record import model_record
from foredraft.drafters.kangaroo import adapter_place, target_hash
from foredraft.drafters.plan_files import keep_plan
from foredraft.errors import ForedraftError
from foredraft.kernels.compilation import library
from foredraft.loading import capacity, inspection
from foredraft.loading.inspection import Inspection, inspect_models
from foredraft.model import layer_weights
from foredraft.model.cache import KVCache
from foredraft.model.checkpoint import weight_headers
from foredraft.model.source import ModelSource
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import load_decoder
from tests.support.adapters import save_adapter
from tests.support.checkpoints import save_checkpoint, save_pair, save_variant
from tests.support.loaded import engine_of
from tests.support.plans import plan_of


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`big` and `small` share a tokenizer, `other` has another one."""
    folder = save_pair(tmp_path_factory.mktemp("models"))
    save_checkpoint(folder / "other", tokenizer=True, seed=3, eos_token_id=None, vocab_size=320)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library()  # from the cache of all tests, where it is compiled
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))


def drafters(found: Inspection) -> dict[str, bool]:
    return {drafter.name: drafter.at_hand for drafter in found.drafters}


@pytest.mark.parametrize("variant", ["llama", "llama-gqa-tied", "llama-biases", "qwen3-tied", "gemma3"])
def test_parameters_are_those_of_the_file_and_of_the_loaded_model(tmp_path: Path, variant: str) -> None:
    folder = save_variant(tmp_path, variant)
    [model] = inspect_models(folder, device="cpu").models
    stored = sum(torch.Size(shape).numel() for _, shape in weight_headers(folder).values())
    llm = foredraft.load(folder, device="cpu", drafter="none", kernels=False, max_length=32, max_batch=1)
    assert model.parameters == stored == model_record("target", "x", llm.loaded.runner).parameters


def test_no_weight_is_read(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers are, so the checkpoint is opened; its tensors are only views of a mapped file."""
    copies, decoders = [], []
    sound = inspection.load_decoder

    def noted(source: ModelSource, device: str, *rest: Any, **named: Any) -> Any:
        decoders.append((source.path.name, device))
        return sound(source, device, *rest, **named)

    monkeypatch.setattr(layer_weights, "pack_native", lambda *given: copies.append(given))
    monkeypatch.setattr(inspection, "load_decoder", noted)
    inspect_models(models / "big", draft=models / "small", device="cpu")
    assert decoders == [("big", "meta"), ("small", "meta")] and copies == []


def test_figures_of_memory(models: Path) -> None:
    [model] = inspect_models(models / "big", device="cpu", dtype="bfloat16").models
    spec = ModelSpec.from_folder(models / "big")
    served = library() is not None  # the kernels keep codes
    assert sorted(model.weight_bytes) == ([4, 8] if served else []) + [16, 32]
    for bits in (4, 8) if served else ():
        held = load_decoder(models / "big", dtype=torch.bfloat16, native=True, bits=bits)
        coded = sum(product.weight.nbytes for product in held.products)  # type: ignore[attr-defined]
        assert coded < model.weight_bytes[bits] < model.weight_bytes[16]
    assert model.weight_bytes[32] == 2 * model.weight_bytes[16] >= 4 * model.parameters
    per_token = 2 * spec.layers * spec.kv_heads * spec.head_dim * 2  # keys and values of two bytes
    assert model.cache_bytes == 1000 * per_token
    assert model.dtype == "bfloat16"


@pytest.mark.parametrize("draft", [None, "small", "other"])
def test_the_longest_sequence_is_the_longest_that_load_accepts(
    models: Path, monkeypatch: pytest.MonkeyPatch, draft: str | None
) -> None:
    given = {} if draft is None else {"draft": models / draft}
    found = inspect_models(models / "big", device="cpu", **given)
    needed = sum(model.weight_bytes[32] for model in found.models)
    row = KVCache.bytes_per_row(ModelSpec.from_folder(models / "big"), 1200, torch.float32)
    monkeypatch.setattr(capacity, "free_memory", lambda device: needed + 2 * row)  # half of it is for caches
    longest = inspect_models(models / "big", device="cpu", **given).context.longest
    assert longest is not None and 100 < longest < ModelSpec.from_folder(models / "big").max_positions
    options = {"device": "cpu", "max_batch": 1, "policy": "fixed"} | given
    assert foredraft.load(models / "big", max_length=longest, **options).max_length == longest
    with pytest.raises(foredraft.ConfigError, match="1 sequences of"):
        foredraft.load(models / "big", max_length=longest + 1, **options)


def test_the_models_own_limit_bounds_a_sequence(models: Path) -> None:
    context = inspect_models(models / "big", device="cpu").context
    assert context.longest == ModelSpec.from_folder(models / "big").max_positions
    llm = foredraft.load(models / "big", device="cpu", policy="fixed")
    assert (context.rows, context.positions) == (engine_of(llm).rows.caches[0].rows, llm.max_length)


def test_too_little_memory_is_part_of_the_answer(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "free_memory", lambda device: 1000)
    context = inspect_models(models / "big", device="cpu").context
    assert context.longest is None and context.rows is None
    with pytest.raises(foredraft.ConfigError) as refusal:
        foredraft.load(models / "big", device="cpu")
    assert context.refusal == str(refusal.value)


@pytest.mark.parametrize("draft", [None, "small", "other"])
def test_drafters_are_those_that_load_makes(models: Path, draft: str | None) -> None:
    given: dict[str, Any] = {} if draft is None else {"draft": models / draft}
    found = inspect_models(models / "big", device="cpu", **given)
    llm = foredraft.load(models / "big", device="cpu", policy="fixed", max_length=64, max_batch=1, **given)
    at_hand = {name for name, is_at_hand in drafters(found).items() if is_at_hand}
    assert at_hand == engine_of(llm).drafters.keys()
    if found.pair is not None:
        big, small = found.models
        assert found.pair.drafter == llm.default_drafter and found.pair.same_tokenizer is (draft == "small")
        assert found.pair.parameter_ratio == big.parameters / small.parameters > 1
    assert (found.pair is None) is (draft is None)


def test_a_kept_plan_is_found(models: Path) -> None:
    plan = plan_of(models / "big")
    keep_plan(plan)
    found = inspect_models(models / "big", device="cpu")
    assert drafters(found)["layer-skip"]
    [note] = [drafter.note for drafter in found.drafters if drafter.name == "layer-skip"]
    assert note == f"the kept plan {plan.skips}"


def test_a_kept_adapter_is_found(models: Path) -> None:
    place = adapter_place(target_hash(models / "big"))
    assert place is not None
    place.parent.mkdir(mode=0o700, parents=True)
    save_adapter(models / "big", place)
    found = inspect_models(models / "big", device="cpu")
    [note] = [drafter.note for drafter in found.drafters if drafter.name == "kangaroo"]
    assert note is not None and note.startswith("the kept adapter: attention+mlp after layer ")
    llm = foredraft.load(models / "big", device="cpu", drafter="kangaroo", max_length=64, max_batch=1)
    assert llm.default_drafter == "kangaroo"
    os.chmod(place / "config.json", 0o666)
    with pytest.raises(foredraft.ConfigError, match="can be written by other users"):
        foredraft.load(models / "big", device="cpu", drafter="kangaroo", max_length=64, max_batch=1)


@pytest.mark.parametrize(("predicted", "serves"), [(0.86, False), (1.2, True)])
def test_a_kept_adapter_that_would_lose_serves_by_name(models: Path, predicted: float, serves: bool) -> None:
    place = adapter_place(target_hash(models / "big"))
    assert place is not None
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    save_adapter(models / "big", place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"predicted": predicted}))
    found = inspect_models(models / "big", device="cpu", spelling=lambda option: f"--drafter {option.value}")
    [note] = [drafter.note for drafter in found.drafters if drafter.name == "kangaroo"]
    assert note is not None and f", predicted {predicted:.2f} x" in note
    assert note.endswith("so only --drafter kangaroo uses it") is not serves
    options: dict[str, Any] = {"device": "cpu", "max_length": 64, "max_batch": 1}
    for more, expected in (({}, serves), ({"drafter": "kangaroo"}, True), ({"adapter": place}, True)):
        with foredraft.load(models / "big", **options, **more) as llm:
            assert ("kangaroo" in engine_of(llm).drafters) is expected, more


def broken(folder: Path, name: str) -> Path:
    save_checkpoint(folder, tokenizer=True, seed=1)
    config = json.loads((folder / "config.json").read_text())
    match name:
        case "architecture":
            config |= {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
        case "quantised":
            config |= {"quantization_config": {"quant_method": "gptq", "bits": 4}}
        case "unsupported key":
            config |= {"is_causal": False}
        case "shape":
            config |= {"intermediate_size": config["intermediate_size"] * 2}
        case "another vocabulary":
            save_checkpoint(folder, seed=1, vocab_size=300)
            (folder / "tokenizer.json").unlink()
            return folder
        case "no weights":
            (folder / "model.safetensors").unlink()
        case "broken weights":
            (folder / "model.safetensors").write_bytes(b"x" * 64)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


BROKEN = ("architecture", "quantised", "unsupported key", "shape", "another vocabulary", "no weights")


@pytest.mark.parametrize("name", [*BROKEN, "broken weights", "no folder"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_what_load_refuses_is_refused_alike(models: Path, tmp_path: Path, name: str, role: str) -> None:
    folder = tmp_path / "none" if name == "no folder" else broken(tmp_path / "broken", name)
    path, draft = (folder, models / "small") if role == "target" else (models / "big", folder)
    with pytest.raises(ForedraftError) as load_error:
        foredraft.load(path, draft=draft, device="cpu")
    with pytest.raises(ForedraftError) as info_error:
        inspect_models(path, draft=draft, device="cpu")
    assert str(info_error.value) == str(load_error.value)
    assert type(info_error.value) is type(load_error.value)
