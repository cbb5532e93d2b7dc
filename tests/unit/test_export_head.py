"""Heads in the formats of other engines: the same values, under the names that their loaders ask for."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import foredraft
from foredraft.cli import main
from foredraft.doctor.teacher_forced import head_drafts, read_text
from foredraft.drafters.eagle3 import Eagle3, load_eagle3
from foredraft.drafters.heads import writing
from foredraft.drafters.heads.configs import read_eagle3
from foredraft.drafters.heads.settings import HeadSettings, read_settings, write_settings
from foredraft.export import command
from foredraft.export.command import export_head
from foredraft.model.gguf.file import GGUFFile
from foredraft.model.runner import Runner
from foredraft.model.weights import load_decoder
from tests.parity.test_heads import KEYS
from tests.support.checkpoints import save_checkpoint
from tests.support.heads import BY_DRAFTER, save_head
from tests.support.mutation import assert_caught, defect
from tests.support.mutations import argument

V = 259
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]
LAYER = {
    "input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
    "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
}  # fmt: skip
# what the loaders know: sglang 0.5.23 (models/llama_eagle3.py), speculators 0.9.0 (models/eagle3/core.py), and
# llama.cpp (src/models/eagle3.cpp)
SGLANG = {f"midlayer.{name}.weight" for name in LAYER}
SGLANG |= {f"{name}.weight" for name in ("fc", "norm", "lm_head", "embed_tokens", "input_norm")} | {
    "d2t",
    "t2d",
}
SPECULATORS = {name.replace("midlayer", "layers.0") for name in SGLANG}
LLAMA_CPP = {f"blk.0.{name}.weight" for name in (
    "attn_norm", "attn_norm_2", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up",
    "ffn_down",
)}  # fmt: skip
LLAMA_CPP_KEYS = {
    "target_layers", "target_hidden_size", "norm_before_residual", "norm_before_fc", "block_count",
    "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count",
    "rope.freq_base", "attention.layer_norm_rms_epsilon", "vocab_size",
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = {**KEYS, "vocab_size": V}
    return save_checkpoint(tmp_path_factory.mktemp("target") / "target", "llama", tokenizer=True, **keys)


def drafts(target: Path, head: Path) -> dict[int, Tensor]:
    runner = Runner(load_decoder(target, dtype=torch.float32))
    files = Eagle3.read_files(head)
    spec = runner.decoder.spec
    record = read_settings(head).applied(files.record.for_target(spec, str(head)), spec)
    assert record.aux_layers is not None
    right = load_eagle3(replace(files, record=record), runner)
    return head_drafts(right, read_text(runner, TEXT, record.aux_layers), 3, 9)


def check_drafts(target: Path, head: Path, other: Path) -> None:
    want, found = drafts(target, head), drafts(target, other)
    assert want.keys() == found.keys() and len(want) > 5
    assert all(torch.equal(want[anchor], found[anchor]) for anchor in want)


def saved(target: Path, folder: Path, source: str) -> Path:
    size = load_decoder(target, dtype=torch.float32).spec.hidden_size
    return save_head(folder / "head", source, V, size=size)


def check_same(target: Path, folder: Path, source: str, format: str) -> dict[str, Any]:
    """Export a head, and check that what is written drafts with the same bits; return its config."""
    head = saved(target, folder, source)
    export_head(head, format, folder / "out", str(target))
    check_drafts(target, head, folder / "out")
    known = SGLANG if format == "specforge" else SPECULATORS
    stored = load_file(folder / "out" / "model.safetensors").keys()
    own = known | {name for name in stored if source == "qwen3" and "norm" in name}
    assert source == "deep" or stored <= own, stored - own
    config: dict[str, Any] = json.loads((folder / "out" / "config.json").read_text())
    return config


@pytest.mark.parametrize("format", ["speculators", "specforge"])
@pytest.mark.parametrize("source", BY_DRAFTER["eagle3"])
def test_a_folder_drafts_with_the_same_bits(target: Path, tmp_path: Path, source: str, format: str) -> None:
    if format == "specforge" and source in ("qwen3", "speculators"):
        with pytest.raises(foredraft.ConfigError, match="is none that SGLang computes"):
            check_same(target, tmp_path, source, format)
        return
    config = check_same(target, tmp_path, source, format)
    flags = {"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size"}
    assert flags <= config.keys(), "every flag is written"
    layer = config.get("transformer_layer_config", config)
    assert layer["rope_theta"] == 10000.0 and layer["model_type"] in ("llama", "qwen3")


def check_gguf(target: Path, folder: Path, source: str) -> None:
    head = saved(target, folder, source)
    export_head(head, "gguf", folder / "head.gguf", str(target))
    file, stored = GGUFFile(folder / "head.gguf"), load_file(head / "model.safetensors")
    assert file.metadata["general.architecture"] == "eagle3"
    own = {key.removeprefix("eagle3.") for key in file.metadata if key.startswith("eagle3.")}
    assert own == LLAMA_CPP_KEYS
    assert len(file.metadata["tokenizer.ggml.tokens"]) == V
    values = {name: file.bytes_of(info) for name, info in file.tensors.items()}
    needed = LLAMA_CPP | {"fc.weight", "output_norm.weight"}
    optional = {"d2t", "output.weight", "token_embd.weight", "enc.output_norm.weight"}
    assert needed <= values.keys() <= needed | optional
    record = read_eagle3(head).record
    for name, spelled in command.NAMES.items():
        tensor = stored.get(name.replace("midlayer", record.layer))
        if tensor is None:
            continue
        found = values[spelled].view(torch.float32).view(tensor.shape)
        if spelled.startswith(("blk.0.attn_q", "blk.0.attn_k")):
            heads = record.spec.heads if "attn_q" in spelled else record.spec.kv_heads
            # llama.cpp pairs neighbouring rows of a head; this puts the pairs half a head apart again
            found = found.view(heads, -1, 2, found.shape[1]).transpose(1, 2).reshape(tensor.shape)
        assert torch.equal(found, tensor), name
    if "d2t" in stored:
        ids = values["d2t"].view(torch.int64)
        assert file.tensors["d2t"].dtype == "I64"
        assert torch.equal(ids, stored["d2t"] + torch.arange(len(ids))), "the ids themselves"
    assert file.metadata["eagle3.target_layers"] == list(record.aux_layers or (2, 3, 4))
    assert file.metadata["eagle3.norm_before_residual"] == record.norm_before_residual
    check_drafts(target, head, folder / "head.gguf")


@pytest.mark.parametrize("source", ["safeailab", "residual", "whole"])
def test_a_gguf_file_has_the_loaders_values_and_keys(target: Path, tmp_path: Path, source: str) -> None:
    check_gguf(target, tmp_path, source)


@pytest.mark.parametrize(("source", "feature"), [("qwen3", "4 auxiliary layers"), ("deep", "2 layers")])
def test_what_llama_cpp_lacks_is_refused(target: Path, tmp_path: Path, source: str, feature: str) -> None:
    with pytest.raises(foredraft.ConfigError, match=f"a head with {feature} is none that llama.cpp computes"):
        check_gguf(target, tmp_path, source)
    assert not (tmp_path / "head.gguf").exists()


def test_the_doctors_settings_go_into_the_file(target: Path, tmp_path: Path) -> None:
    head = saved(target, tmp_path, "safeailab")
    settings = HeadSettings(tap_shift=1, rope_theta=500.0, norm_before_residual=True)
    write_settings(head, settings)
    for format in ("speculators", "specforge"):
        export_head(head, format, tmp_path / format, str(target))
        read = read_eagle3(tmp_path / format).record
        assert read.aux_layers == (3, 4, 5) and read.norm_before_residual and read.spec.rope.theta == 500.0
        check_drafts(target, head, tmp_path / format)


def test_the_command_and_its_errors(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = saved(target, tmp_path, "safeailab")
    words = ["export", "--model", str(target), "--draft", str(head), "--format", "gguf", "--out"]
    assert main([*words, str(tmp_path / "a.gguf")]) == 0
    assert "draft vocabulary 6, over the states after layers 2, 3, 4" in capsys.readouterr().out
    assert main([*words, str(tmp_path)]) == 2
    assert "which is a folder; give a file" in capsys.readouterr().err
    words[4] = str(target)
    assert main([*words, str(tmp_path / "b.gguf")]) == 2
    assert "which is no EAGLE-3 head" in capsys.readouterr().err


# --- planted defects ------------------------------------------------------------------------------------------


DEFECTS = {
    "q and k in the order of other files": (
        command._in_order,
        lambda _: lambda name, tensor, record: tensor,
        check_gguf,
        ("safeailab",),
    ),
    "other ids": (
        writing.maps_of,
        argument(0, lambda ids: (ids + 1).clamp(max=V - 1)),
        check_same,
        ("safeailab", "speculators"),
    ),
    "a flag left out": (
        writing.specforge_config,
        argument(1, partial(replace, norm_before_residual=False)),
        check_same,
        ("residual", "specforge"),
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_caught(name: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point, mutation, check, more = DEFECTS[name]
    assert_caught(defect(name, point, mutation, partial(check, target, tmp_path, *more)), monkeypatch)
