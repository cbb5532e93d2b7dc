"""Loading is strict: a damaged checkpoint is an error that names the tensor or the file.

Seen to fail on: unused tensors accepted, shapes not checked, files not compared with the index, weights kept as
views of the mapped file.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.errors import CheckpointError
from foredraft.model.runner import Runner
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import save_checkpoint, save_variant

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_variant(tmp_path / "model", "llama")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "sharded", shards=True)


def edit(folder: Path, changes: dict[str, Tensor | None]) -> None:
    tensors = load_file(folder / SINGLE)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / SINGLE)


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_decoder(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_sharded_checkpoint_gives_the_same_decoder(folder: Path, sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, two = load_decoder(folder), load_decoder(sharded)
    assert torch.equal(one.embedding, two.embedding)
    for first, second in zip(one.layers, two.layers, strict=True):
        assert torch.equal(first.attention.qkv.dense(), second.attention.qkv.dense())
        assert torch.equal(first.mlp.down.dense(), second.mlp.down.dense())


def test_fused_weights_keep_the_order_of_their_parts(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    parts = [tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(load_decoder(folder).layers[1].attention.qkv.dense(), torch.cat(parts))


def test_the_dtype_is_that_of_the_checkpoint_by_default(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, dtype=torch.bfloat16)
    assert load_decoder(tmp_path).dtype == torch.bfloat16
    assert load_decoder(tmp_path, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_a_loaded_model_does_not_depend_on_its_file(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Overwriting the file changes no logit: neither packed nor plain weights are views of the file."""
    save_variant(tmp_path, name, dtype=dtype)
    runner, tokens = Runner(load_decoder(tmp_path)), torch.arange(3, 35)[None]
    before = runner.forward(runner.new_cache(1, 64), tokens, [0]).logits
    size = (tmp_path / SINGLE).stat().st_size
    with (tmp_path / SINGLE).open("r+b") as file:
        file.write(b"\xff" * size)
    after = runner.forward(runner.new_cache(1, 64), tokens, [0]).logits
    assert before is not None
    assert after is not None
    assert torch.equal(before, after)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit(folder, {Q: None})
    assert f"tensor {Q} is missing" in refusal(folder)


def test_an_extra_tensor_is_named(folder: Path) -> None:
    edit(folder, {"model.layers.1.self_attn.q_norm.weight": torch.ones(16)})
    assert "model.layers.1.self_attn.q_norm.weight" in refusal(folder)


def test_a_tensor_of_a_surplus_layer_is_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    assert "model.layers.2." in refusal(folder)


def test_a_bias_that_the_config_switches_off_is_named(tmp_path: Path) -> None:
    save_variant(tmp_path, "llama-biases")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "mlp_bias": False}))
    assert ".mlp.down_proj.bias" in refusal(tmp_path)


def test_a_wrong_shape_is_named(folder: Path) -> None:
    edit(folder, {Q: torch.zeros(64, 60)})
    message = refusal(folder)
    assert Q in message
    assert "[64, 60]" in message
    assert "[64, 64]" in message


def test_a_transposed_shape_of_equal_size_is_named(folder: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    edit(folder, {name: torch.zeros(96, 64)})
    assert name in refusal(folder)


def test_a_missing_or_misshapen_head_norm_is_named(tmp_path: Path) -> None:
    save_variant(tmp_path, "qwen3")
    edit(tmp_path, {"model.layers.2.self_attn.k_norm.weight": None})
    assert "tensor model.layers.2.self_attn.k_norm.weight is missing" in refusal(tmp_path)
    edit(tmp_path, {"model.layers.2.self_attn.k_norm.weight": torch.ones(16)})
    assert "model.layers.2.self_attn.k_norm.weight has shape [16]" in refusal(tmp_path)


def test_a_missing_bias_is_named(tmp_path: Path) -> None:
    save_variant(tmp_path, "qwen2")
    edit(tmp_path, {"model.layers.0.self_attn.v_proj.bias": None})
    assert "tensor model.layers.0.self_attn.v_proj.bias is missing" in refusal(tmp_path)


def test_a_quantised_tensor_is_named(folder: Path) -> None:
    edit(folder, {Q: torch.zeros(64, 64, dtype=torch.int8)})
    message = refusal(folder)
    assert Q in message
    assert "I8" in message


@pytest.mark.parametrize("keep", [0.99, 0.5, 0.0])
def test_a_truncated_file_is_named(folder: Path, keep: float) -> None:
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[: int(keep * len(content))])
    assert SINGLE in refusal(folder)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / SINGLE).unlink()
    assert "neither" in refusal(folder)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refusal(sharded)


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1000])
    assert shard.name in refusal(sharded)


def test_a_shard_of_another_checkpoint_is_named(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    second.write_bytes(first.read_bytes())
    assert second.name in refusal(sharded)


def test_a_tensor_in_another_shard_than_the_index_lists_is_named(sharded: Path) -> None:
    """Otherwise the order of the files would decide which of two copies is loaded."""
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    other = next(shard for shard in sorted(sharded.glob("*.safetensors")) if shard.name != index[Q])
    save_file({**load_file(other), Q: torch.zeros(64, 64)}, other)
    message = refusal(sharded)
    assert Q in message
    assert other.name in message


def test_a_tensor_that_only_the_index_lists_is_named(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    shard = next(iter(index["weight_map"].values()))
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = shard
    (sharded / INDEX).write_text(json.dumps(index))
    message = refusal(sharded)
    assert "model.layers.9.mlp.up_proj.weight" in message
    assert shard in message


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd"])
def test_an_index_that_lists_a_file_outside_its_folder_is_refused(sharded: Path, shard: str) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"][Q] = shard
    (sharded / INDEX).write_text(json.dumps(index))
    assert shard in refusal(sharded)


def test_rotary_buffers_of_old_checkpoints_are_ignored(folder: Path) -> None:
    edit(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load_decoder(folder)


def test_a_stored_tied_head_must_equal_the_embedding(tmp_path: Path) -> None:
    save_variant(tmp_path, "llama-gqa-tied")
    embedding = load_file(tmp_path / SINGLE)["model.embed_tokens.weight"]
    edit(tmp_path, {"lm_head.weight": embedding.clone()})
    load_decoder(tmp_path)
    edit(tmp_path, {"lm_head.weight": embedding + 1})
    assert "lm_head.weight" in refusal(tmp_path)
