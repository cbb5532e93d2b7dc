"""LoRAs at loading: what is refused, and what of a model's memory, identity and drafters follows its LoRAs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import foredraft
from foredraft import CheckpointError, ConfigError, SamplingParams
from foredraft.drafters.kangaroo import adapter_place, target_hash
from foredraft.drafters.layer_skip import LowBit
from foredraft.drafters.plan_files import keep_plan, model_hash
from foredraft.kernels.compilation import library
from foredraft.loading.inspection import inspect_models
from foredraft.model.locate import resolve, with_loras
from foredraft.model.runner import Runner
from foredraft.model.weights import load_decoder
from tests.parity.test_logits import prompt_logits
from tests.parity.test_lora import TOKENS, merged_weights
from tests.support.adapters import save_adapter
from tests.support.checkpoints import save_checkpoint
from tests.support.loaded import engine_of
from tests.support.loras import edited, save_lora
from tests.support.plans import plan_of
from tests.support.quantising import KINDS, quantise

GREEDY = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
Q = "base_model.model.model.layers.1.self_attn.q_proj"
Tensors = dict[str, Tensor]
AGAIN = "made for the model without its LoRA: the output stays exact"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    big = save_checkpoint(folder / "big", tokenizer=True, seed=1, eos_token_id=None)
    save_checkpoint(folder / "small", tokenizer=True, seed=2, eos_token_id=None, num_hidden_layers=1)
    save_checkpoint(folder / "tied", tokenizer=True, tie_word_embeddings=True)
    save_checkpoint(folder / "other", tokenizer=True, hidden_size=32)
    save_lora(big, folder / "lora", lora_alpha=24)
    save_lora(big, folder / "saved", modules_to_save=["lm_head"], trained=("modules_to_save.default.weight",))
    save_lora(folder / "tied", folder / "tied-head", target_modules=["lm_head"])
    return folder


def load(models: Path, *loras: str, **options: Any) -> foredraft.LLM:
    given = {"device": "cpu", "max_batch": 2, "max_length": 96, "policy": "fixed", **options}
    return foredraft.load(models / "big", lora=[models / lora for lora in loras], **given)


def refusal(base: Path, *loras: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        foredraft.load(base, lora=loras, device="cpu", max_length=64)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(("LoRA ", str(loras[-1]))) and len(message) < 600
    return message


def without(*parts: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        name: tensor for name, tensor in tensors.items() if not any(p in name for p in parts)
    }


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def value(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: change(tensors[name]).contiguous()}


BROKEN: list[tuple[dict[str, Any], Callable[[Tensors], Tensors] | None, str]] = [
    ({"peft_type": "IA3"}, None, "peft_type 'IA3' is not supported; give a LoRA, or merge it"),
    ({"peft_type": None}, None, "peft_type None is not supported"),
    ({"use_dora": True}, None, "use_dora makes it DoRA"),
    ({"layer_replication": [[0, 2], [1, 3]]}, None, "layer_replication makes it a LoRA for a model whose layers"),
    ({"target_parameters": ["experts.up"]}, None, "target_parameters makes it a LoRA of single parameters"),
    ({"trainable_token_indices": [3]}, None, "trainable_token_indices makes it a LoRA with rows"),
    ({"alora_invocation_tokens": [3]}, None, "alora_invocation_tokens makes it an activated LoRA"),
    ({"init_lora_weights": "pissa"}, None, "init_lora_weights = 'pissa' changed the model's own weights"),
    ({"init_lora_weights": "pissa_niter_16"}, None, "'pissa_niter_16' changed the model's own weights; save it as"),
    ({"init_lora_weights": "OLoRA"}, None, "'OLoRA' changed the model's own weights"),
    ({"init_lora_weights": "magic"}, None, "init_lora_weights = 'magic' is not known"),
    ({"new_method": {"x": 1}}, None, "new_method = {'x': 1} is not known"),
    ({"r": 0}, None, "r is 0; it must be a finite number above 0"),
    ({"r": 2.5}, None, "r is 2.5; it must be a whole number"),
    ({"r": "8"}, None, "r is '8'"),
    ({"lora_alpha": 0}, None, "lora_alpha is 0"),
    ({"lora_alpha": -16}, None, "lora_alpha is -16"),
    ({"lora_alpha": float("nan")}, None, "lora_alpha is nan"),
    ({"lora_alpha": float("inf")}, None, "lora_alpha is inf"),
    ({"rank_pattern": {"(": 3}}, None, "rank_pattern has '(', which is no regular expression"),
    ({"alpha_pattern": {"q_proj": "x"}}, None, "alpha_pattern: q_proj is 'x'"),
    ({"bias": "some"}, None, "bias is 'some'; supported are none, all, lora_only"),
    ({"target_modules": [1]}, None, "target_modules is [1]; it must be a list of modules' names"),
    ({"target_modules": "("}, None, "target_modules has '(', which is no regular expression"),
    ({"target_modules": ["k_proj", "v_proj", "o_proj"]}, None, "self_attn.q_proj', which its target_modules do not"),
    ({"r": 16}, None, "of rank 4 and 4, but adapter_config.json says 16; take both files from one LoRA"),
    ({"rank_pattern": {"q_proj": 2}}, None, "self_attn.q_proj' of rank 4 and 4, but adapter_config.json says 2"),
    ({}, without("layers.1.self_attn.q_proj.lora_B"), "has lora_A of 'model.layers.1.self_attn.q_proj', but no lora_B"),
    ({}, without("lora_"), "changes nothing: its file has no tensors"),
    ({}, renamed("layers.2.self_attn.q_proj", "layers.7.self_attn.q_proj"), "layers.7.self_attn.q_proj', which "),
    ({}, value(f"{Q}.lora_A.weight", lambda a: a * float("nan")), "q_proj.lora_A.weight' with values that are not finite"),
    ({}, value(f"{Q}.lora_B.weight", lambda b: b / 0), "q_proj.lora_B.weight' with values that are not finite"),
    ({}, value(f"{Q}.lora_A.weight", Tensor.int), "q_proj.lora_A.weight' of dtype I32; save it in F16 or BF16"),
    ({}, value(f"{Q}.lora_A.weight", lambda a: a[:, :60]), "of shape [64, 60], but "),
    ({}, value(f"{Q}.lora_A.weight", lambda a: a[:, 0]), "of shapes [4] and [64, 4]; give a LoRA of linear layers"),
    ({}, value(f"{Q}.lora_A.weight", lambda a: a[:0]), "of shapes [0, 64] and [64, 4]"),
    ({}, renamed("layers.1.self_attn.q_proj.lora_A.weight", "layers.1.self_attn.q_proj.lora_magnitude_vector"), "DoRA"),
    ({}, renamed("layers.1.self_attn.q_proj.lora_A.weight", "layers.1.self_attn.q_proj.weight"), "does not explain"),
    ({}, renamed("layers.1.self_attn.q_proj.lora_A.weight", "layers.1.self_attn.q_proj.lora_A.bias"), "not explain"),
    ({}, lambda tensors: tensors | {f"{Q}.lora_A.default.weight": torch.ones(4, 64)}, "which are the same; remove one"),
    ({}, lambda tensors: tensors | {f"{Q}.lora_B.bias": torch.ones(64)}, "changes the bias of 'model.layers.1.self_attn.q"),
    ({"modules_to_save": ["norm"]}, lambda tensors: tensors | {f"{Q}_norm.weight": torch.ones(16)}, "q_proj_norm', which "),
]  # fmt: skip


@pytest.mark.parametrize(("config", "tensors", "message"), BROKEN, ids=lambda value: None)
def test_a_broken_or_foreign_lora_is_refused_in_one_line(
    config: dict[str, Any], tensors: Any, message: str, models: Path, tmp_path: Path
) -> None:
    lora = edited(models / "lora", tmp_path / "edited", config, tensors)
    assert message in refusal(models / "big", lora)


def test_a_lora_of_another_model_names_the_shapes_and_that_model(models: Path) -> None:
    message = refusal(models / "other", models / "lora")
    assert "is for 'model.layers.0.self_attn." in message and "of shape [64, 64], but" in message
    assert "has [32, 32] there; give the model that it was trained for, which it calls " in message
    assert message.endswith(f"'{models / 'big'}'")


def test_what_is_no_lora_is_refused(models: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    pickle, nothing, cut = (edited(models / "lora", tmp_path / name) for name in ("pickle", "nothing", "cut"))
    (pickle / "adapter_model.safetensors").rename(pickle / "adapter_model.bin")
    (nothing / "adapter_model.safetensors").unlink()
    content = (cut / "adapter_model.safetensors").read_bytes()
    (cut / "adapter_model.safetensors").write_bytes(content[:-9])
    for place, message in (
        (tmp_path / "empty", "has no adapter_config.json; give the folder of a LoRA"),
        (models / "small", "is no LoRA: it has a config.json"),
        (tmp_path / "file", "is a file; give the folder"),
        (tmp_path / "model.gguf", "is a GGUF file; give the folder that it was made from"),
        (Path("nowhere"), "neither a folder nor a hub name"),
        (pickle, "but a pickle, which can hold code; save it again with PEFT, as safetensors"),
        (nothing, "has no adapter_model.safetensors; download it again"),
        (cut, "adapter_model.safetensors"),
    ):
        assert message in refusal(models / "big", place), place


def test_a_lora_in_the_place_of_another_option_names_its_own(models: Path) -> None:
    lora = models / "lora"
    with pytest.raises(
        CheckpointError, match="is a LoRA, which changes another model; give that one, and this as"
    ):
        foredraft.load(lora)
    with pytest.raises(ConfigError, match=r"adapter is .*, which is a LoRA; give lora=.* in its place"):
        load(models, adapter=lora)


@pytest.mark.parametrize("given", [3, [3], {"a": 1}, True])
def test_values_that_are_no_sources_are_refused(given: Any, models: Path) -> None:
    with pytest.raises(ConfigError, match="lora is .*; give a folder or a hub id, or several"):
        foredraft.load(models / "big", lora=given)


def test_one_lora_may_be_given_by_itself(models: Path) -> None:
    texts = []
    for given in (models / "lora", str(models / "lora"), [models / "lora"], (str(models / "lora"),)):
        with foredraft.load(models / "big", lora=given, device="cpu", max_length=64) as llm:
            assert llm.lora == (str(models / "lora"),) and f"'{models / 'lora'}'" in repr(llm)
            texts.append(llm.generate("a b c", GREEDY)[0].token_ids)
    assert texts[0] == texts[1] == texts[2] == texts[3]
    with load(models) as plain:
        assert plain.lora == () and plain.generate("a b c", GREEDY)[0].token_ids != texts[0]


def test_two_loras_that_replace_a_tensor_are_refused(models: Path, tmp_path: Path) -> None:
    again = shutil.copytree(models / "saved", tmp_path / "again")
    head = save_lora(models / "big", tmp_path / "head", target_modules=["lm_head"])
    two = "replaces 'lm_head.weight', which LoRA {} changes, too; leave one of them out"
    assert two.format(models / "saved") in refusal(models / "big", models / "saved", again)
    assert two.format(head) in refusal(models / "big", head, models / "saved")
    last = f"changes 'lm_head.weight', which LoRA {models / 'saved'} replaces; leave one of them out"
    assert last in refusal(models / "big", models / "saved", head)


def test_a_head_that_peft_saved_as_it_was_is_no_replacement(models: Path, tmp_path: Path) -> None:
    base, name = models / "big", "lm_head.weight"
    one, two = (save_lora(base, tmp_path / f"{n}", target_modules=["lm_head"], seed=n) for n in (1, 2))
    own, first, second, both = (
        merged_weights(with_loras(base, loras), torch.float32)[name]
        for loras in ([], [one], [two], [one, two])
    )
    torch.testing.assert_close(both, first + second - own)


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights_are_refused(kind: str, models: Path, tmp_path: Path) -> None:
    base = shutil.copytree(models / "big", tmp_path / "quantised")
    quantise(base, KINDS[kind])
    message = refusal(base, models / "lora")
    assert f"whose weights are quantised in {base}; merge it into the model that was quantised" in message


@pytest.mark.parametrize("kind", [*KINDS][::6])
def test_a_head_beside_quantised_weights_is_merged(kind: str, models: Path, tmp_path: Path) -> None:
    base = shutil.copytree(models / "big", tmp_path / "quantised")
    quantise(base, KINDS[kind])
    head = save_lora(models / "big", tmp_path / "head", target_modules=["lm_head"])
    with foredraft.load(base, lora=head, device="cpu", max_length=64) as llm:
        assert llm.weights is not None and llm.lora == (str(head),)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_a_gguf_file_of_floats_merges_as_its_folder_does(kind: str, models: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.support.gguf_files import save_dequantised, write_gguf

    file = write_gguf(models / "big", tmp_path / "model.gguf", kind)
    twin = save_dequantised(models / "big", file, tmp_path / "twin")
    dtype = torch.float32
    got = merged_weights(with_loras(resolve(file), [models / "lora"]), dtype)
    want = merged_weights(with_loras(twin, [models / "lora"]), dtype)
    base = merged_weights(resolve(file), dtype)
    changed = {name for name in got if not torch.equal(got[name], base[name])}
    assert len(changed) == 12 and all(torch.equal(got[name], want[name]) for name in changed)
    with foredraft.load(file, lora=models / "lora", device="cpu", max_length=64) as llm:
        assert len(llm.generate("a b c", GREEDY)[0].token_ids) == 24


def test_a_gguf_file_with_quantised_weights_is_refused(models: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.support.gguf_files import write_gguf

    file = write_gguf(models / "big", tmp_path / "model.gguf", "Q8_0")
    assert f"whose weights are quantised in {file}" in refusal(file, models / "lora")


@pytest.mark.heavy
def test_memory_counts_a_head_that_is_no_longer_tied(models: Path) -> None:
    base, lora = models / "tied", models / "tied-head"
    [tied], [untied] = (
        inspect_models(base, lora=loras, device="cpu", draft=None).models for loras in ((), (lora,))
    )
    head = 384 * 64
    assert untied.parameters == tied.parameters + head
    assert untied.weight_bytes[32] == tied.weight_bytes[32] + 4 * head
    [info] = untied.loras
    assert (info.name, info.ranks, info.alphas, info.modules) == (str(lora), (4,), (8.0,), {"lm_head": 1})
    assert info.base == str(base) and info.replaced == 1 and tied.loras == ()


def test_the_hash_of_a_model_has_its_loras_by_their_content(models: Path, tmp_path: Path) -> None:
    base, lora = models / "big", models / "lora"
    copy = shutil.copytree(lora, tmp_path / "copy")
    scaled = edited(lora, tmp_path / "scaled", {"lora_alpha": 25})
    for hash_of in (model_hash, target_hash):
        plain, merged, again, other, both = (
            hash_of(with_loras(base, loras)) for loras in ([], [lora], [copy], [scaled], [lora, scaled])
        )
        assert plain == hash_of(base) and merged == again
        assert len({plain, merged, other, both}) == 4


def test_a_plan_for_the_base_serves_and_says_so(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    with load(models, "lora", drafter="none") as plain:
        want = plain.generate("a b c", GREEDY)[0].token_ids
    plan = plan_of(models / "big")
    with load(models, "lora", drafter="layer-skip", plan=plan) as llm:
        assert llm.generate("a b c", GREEDY)[0].token_ids == want
    assert f"the plan of 'big' was {AGAIN}" in caplog.text
    caplog.clear()
    keep_plan(plan)
    with load(models, "lora", drafter="layer-skip") as llm:
        assert llm.generate("a b c", GREEDY)[0].token_ids == want
    assert f"the kept plan was {AGAIN}" in caplog.text
    caplog.clear()
    own = plan_of(with_loras(models / "big", [models / "lora"]), skip_attention=(0,))
    keep_plan(own)
    with load(models, "lora", drafter="layer-skip") as llm:
        assert engine_of(llm).drafters["layer-skip"].skips == own.skips  # type: ignore[attr-defined]
    assert AGAIN not in caplog.text
    # the base refuses what was made for the model with the LoRA
    with pytest.raises(ConfigError, match="which is another model than .*big;"):
        load(models, drafter="layer-skip", plan=own)


def test_a_bases_adapter_serves(models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with load(models, "lora", drafter="none") as plain:
        want = plain.generate("a b c", GREEDY)[0].token_ids
    adapter = save_adapter(models / "big", tmp_path / "adapter")
    with load(models, "lora", drafter="kangaroo", adapter=adapter) as llm:
        assert llm.generate("a b c", GREEDY)[0].token_ids == want
    assert "the adapter of " in caplog.text and AGAIN in caplog.text
    caplog.clear()
    place = adapter_place(target_hash(models / "big"))
    assert place is not None
    place.parent.mkdir(parents=True, mode=0o700)
    save_adapter(models / "big", place)
    for path in (place, *place.iterdir()):
        path.chmod(0o700 if path.is_dir() else 0o600)
    with load(models, "lora", drafter="kangaroo") as llm:
        assert llm.generate("a b c", GREEDY)[0].token_ids == want
    assert AGAIN in caplog.text


@pytest.mark.skipif(library() is None, reason="no kernels")
def test_a_copy_in_few_bits_has_the_merged_weights(models: Path) -> None:
    with load(models, "lora", drafter="low-bit", draft_weights="int8") as llm:
        drafter = engine_of(llm).drafters["low-bit"]
        assert isinstance(drafter, LowBit)
        copy = drafter.draft_pass.runner.decoder.layers[1].attention.qkv.dense()
    merged = load_decoder(with_loras(models / "big", [models / "lora"])).layers[1].attention.qkv.dense()
    own = load_decoder(models / "big").layers[1].attention.qkv.dense()
    assert (copy - merged).abs().max() < 0.02 * merged.abs().max() < (copy - own).abs().max()


def test_the_names_of_a_wrapper_and_of_its_text_half_are_one(models: Path, tmp_path: Path) -> None:
    """Classes of transformers, and their files, put different prefixes in front of the same modules."""
    want = merged_weights(with_loras(models / "big", [models / "lora"]), torch.float32)
    for new in ("model.model.language_model.", "model.language_model.model."):
        lora = edited(models / "lora", tmp_path / new, None, renamed("base_model.model.", f"base_{new}"))
        got = merged_weights(with_loras(models / "big", [lora]), torch.float32)
        assert all(torch.equal(got[name], weight) for name, weight in want.items())


@pytest.mark.parametrize("outputs", [6, 10])
def test_a_weight_with_a_row_for_each_input_gets_the_transposed_change(outputs: int, tmp_path: Path) -> None:
    inputs, rank = 6, 2
    a, b = torch.randn(rank, inputs), torch.randn(outputs, rank)
    weight = torch.randn(inputs, outputs)
    base, lora = save_checkpoint(tmp_path / "gpt2", "gpt2"), tmp_path / "lora"
    save_file({"h.0.attn.c_proj.weight": weight}, base / "model.safetensors")
    lora.mkdir()
    (lora / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": rank, "lora_alpha": 2, "target_modules": ["c_proj"], "fan_in_fan_out": True,
    }))  # fmt: skip
    module = "base_model.model.transformer.h.0.attn.c_proj"
    tensors = {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    save_file(tensors, lora / "adapter_model.safetensors")
    merged = merged_weights(with_loras(base, [lora]), torch.float32)
    torch.testing.assert_close(merged["h.0.attn.c_proj.weight"], weight + (b @ a).T)


def test_a_merged_model_does_not_depend_on_the_files_of_its_lora(models: Path, tmp_path: Path) -> None:
    lora = shutil.copytree(models / "lora", tmp_path / "lora")
    runner = Runner(load_decoder(with_loras(models / "big", [lora])))
    before = prompt_logits(runner, TOKENS)
    (lora / "adapter_model.safetensors").write_bytes(b"\xff" * 10)
    assert torch.equal(before, prompt_logits(runner, TOKENS))
