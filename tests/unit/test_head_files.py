"""Files of published heads: what is read in them, what is refused, and what a hub gives of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import foredraft
from foredraft.drafters.assets import EAGLE3_ASSET
from foredraft.drafters.head_kinds import head_kind
from foredraft.drafters.heads.configs import read_eagle
from foredraft.drafters.heads.gguf_files import read_gguf
from foredraft.drafters.heads.settings import HeadSettings, read_settings, write_settings
from foredraft.drafters.medusa import read_medusa
from tests.parity.test_heads import KEYS, V
from tests.support.checkpoints import reference_model
from tests.support.gguf_files import write_gguf
from tests.support.heads import AUX, BY_DRAFTER, FORMATS, save_head
from tests.support.hub_server import Client, Repository, serving
from tests.support.loaded import engine_of


def check_refused(target: Path, head: Path, message: str, drafter: str | None = None) -> None:
    with pytest.raises(foredraft.CheckpointError) as refusal:
        foredraft.load(target, draft=head, drafter=drafter, device="cpu")
    assert message in str(refusal.value) and "\n" not in str(refusal.value), refusal.value


def check_pickle(target: Path, file: Path, remedy: str, drafter: str | None = None) -> None:
    ran = file.parent / "ran"
    file.write_bytes(b"cposix\nsystem\n(S'touch %s'\ntR." % str(ran).encode())
    with pytest.raises(foredraft.CheckpointError, match=f"is a pickle.*{remedy}"):
        foredraft.load(target, draft=file.parent, drafter=drafter, device="cpu")
    assert not ran.exists()


Arrays = dict[str, np.ndarray]
LOAD: dict[str, Any] = {"policy": "fixed", "device": "cpu", "max_batch": 1, "max_length": 64}


def edited(**arrays: np.ndarray | None) -> Callable[[Arrays], None]:
    """Return an edit of tensors; "__" stands for "." in their names, None drops one."""

    def edit(tensors: Arrays) -> None:
        for name, values in arrays.items():
            own = name.replace("__", ".")
            tensors.pop(own, None)
            if values is not None:
                tensors[own] = values

    return edit


# what is wrong -> format, what is saved otherwise, what the line says
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "eagle3: hidden size": ("safeailab", {"size": 32, "config": {"target_hidden_size": 32}},
                            "for a target of hidden size 32, but the target's is 64"),
    "eagle3: layers beyond": ("safeailab", {"config": {"eagle_aux_hidden_state_layer_ids": [2, 5, 9]}},
                            "reads the target after layer 9, but the target has 7 layers"),
    "eagle3: a shape": ("safeailab", {"tensors": {"norm.weight": torch.ones(32)}},
                        "tensor norm.weight has shape [32], but config.json implies [64]"),
    "eagle3: a lying count of ids": ("safeailab", {"config": {"draft_vocab_size": 5}},
                                     "but config.json implies [5"),
    "eagle3: not reduced": ("safeailab", {"config": {"draft_vocab_size": 11}}, "but config.json implies [11"),
    "eagle3: a missing tensor": ("deep", {"tensors": {"layers.1.mlp.up_proj.weight": None}}, "lacks tensor layers.1."),
    "eagle3: an unknown tensor": ("safeailab", {"tensors": {"extra.weight": torch.ones(2)}},
                                  "tensor extra.weight is not part of"),
    "eagle3: an unknown key": ("safeailab", {"config": {"eagle_config": {"mystery": 1}}}, "mystery = 1 is not known"),
    "eagle3: another layer": ("modelopt", {"section": None, "config": {"eagle_config": {"use_mtp_layernorm": True}}},
                              "use_mtp_layernorm is True; supported are false"),
    "eagle3: another family's keys": ("safeailab", {"config": {"model_type": "phi3", "partial_rotary_factor": 0.5}},
                                      "partial_rotary_factor = 0.5 is not supported"),
    "eagle3: without the target's states": (
        "safeailab", {"config": {"eagle_config": {"use_aux_hidden_state": False}}}, "use_aux_hidden_state is False"),
    "p-eagle: a mask token beyond": ("p-eagle amazon", {"config": {"ptd_token_id": V}}, "ptd_token_id is 11"),
    "p-eagle: a lying state": ("p-eagle amazon", {"tensors": {"mask_hidden": torch.ones(1, 1, 64)}},
                               "tensor mask_hidden has shape [1, 1, 64], but config.json implies [1, 1, 192]"),
    "eagle3: both norms": ("safeailab", {"config": {"norm_before_fc": True, "fc_norm": True}}, "fc_norm is True"),
    "eagle3: another vocabulary": ("safeailab", {"vocabulary": V + 2},
                                   "for a target of vocabulary 13, but the target's is 11"),
    "eagle: a bias": ("eagle-1", {"config": {"bias": False}}, "config.json has bias = false, but fc.bias is there"),
    "eagle: no bias": ("eagle-1", {"tensors": {"fc.bias": None}, "config": {"bias": True}},
                       "bias = true, but fc.bias is missing"),
    "eagle: codes": ("eagle-1", {"tensors": {"fc.weight": torch.ones(64, 128, dtype=torch.int8)}},
                     "fc.weight is stored as I8"),
    "block: depth": ("block deepspec", {"config": {"num_target_layers": 9}},
                     "is for a target of 9 layers, but the target has 7"),
    "block: the normed state": ("block z-lab", {"section": {"target_layer_ids": [0, 2, 6]}},
                                "reads the target's last state after its norm"),
    "block: a layer twice": ("block z-lab", {"section": {"target_layer_ids": [0, 2, 2]}}, "must be a rising list"),
    "block: a lying count of layers": (
        "block z-lab", {"section": {"target_layer_ids": [0, 2]}, "tensors": {"fc.weight": torch.zeros(64, 192)}},
        "tensor fc.weight has shape [64, 192], but config.json implies [64, 128]"),
    "block: no layers": ("block z-lab", {"section": {"target_layer_ids": None}}, "target_layer_ids is missing"),
    "block: the anchor alone": ("block z-lab", {"config": {"block_size": 1}}, "block_size is 1"),
    "block: no block": ("block z-lab", {"config": {"block_size": None}}, "block_size is missing"),
    "block: past the cache": ("block z-lab", {"config": {"block_size": 4096}}, "block_size is 4096"),
    "block: mask token beyond": ("block z-lab", {"section": {"mask_token_id": V}}, "mask_token_id is 11"),
    "block: no mask token": ("block z-lab", {"section": {"mask_token_id": None}}, "mask_token_id is missing"),
    "block: a lying rank": ("block gated", {"tensors": {"markov_head.markov_w1.weight": torch.zeros(V, 6)}},
                            "but config.json implies [11, 5]"),
    "block: an unknown key": ("block z-lab", {"section": {"mystery": 1}}, "mystery = 1 is not known"),
    "block: groups": ("block dflash 2", {"section": {"conv_group_size": 48}}, "conv_group_size is 48"),
    "block: groups without taps": ("block z-lab", {"section": {"conv_group_size": 16}}, "conv_group_size is 16"),
    "block: a rank without candidates": ("block dflash 2", {"section": {"selector_top_k": None}}, "selector_top_k is"),
    "block: a missing convolution": ("block dflash 2", {"tensors": {"layers.1.mlp_conv.base_kernel": None}},
                                    "lacks tensor layers.1.mlp_conv.base_kernel"),
    "block: a lying selector": (
        "block dflash 2", {"tensors": {"candidate_selector.predecessor_codebook": torch.zeros(V, 6)}},
        "but config.json implies [11, 5]"),
    "block: another attention": ("block specforge", {"section": {"attention_mode": "mla"}},
                                 "attention_mode is 'mla'; supported are gqa"),
    "block: another projector": ("block specforge", {"section": {"projector_type": "domino"}},
                                 "projector_type is 'domino'; supported are dflash"),
    "block: sinks": ("block z-lab", {"section": {"attention_sink_bias": True}}, "attention_sink_bias is True"),
    "block: DFlash 2 in a file": ("block gguf", {"keys": {"selector_rank": 16}}, "selector_top_k is missing"),
    "block: a lying count of layers in a file": ("block gguf", {"keys": {"target_layers": [1, 3]}},
                                               "tensor fc.weight has shape [64, 192]"),
    "gguf: hidden size": ("gguf", {"keys": {"target_hidden_size": 32}}, "fc.weight has shape [64, 192], but"),
    "gguf: no layers": ("gguf", {"keys": {"target_layers": None}}, "target_layers"),
    "gguf: an unknown key": ("gguf", {"keys": {"mystery": 1}}, "mystery = 1 is not known"),
    "gguf: a lying count of ids": ("gguf", {"keys": {"draft_vocab_size": 5}}, "draft_vocab_size is 5"),
    "gguf: ids beyond": ("gguf", {"tensors": edited(d2t=np.arange(8, 14))},
                         "d2t does not give 6 different token ids below 11"),
    "gguf: an unknown tensor": ("gguf", {"tensors": edited(extra__weight=np.ones(2, np.float32))},
                                "extra.weight is not part of"),
    "gguf: a missing tensor": ("gguf", {"tensors": edited(fc__weight=None)}, "lacks tensor fc.weight"),
    "medusa: hidden size": ("fasterdecoding", {"size": 32},
                            "is for a target of hidden size 32, but the target's is 64"),
    "medusa: vocabulary": ("fasterdecoding", {"draft_vocab": V + 2, "tensors": {"token_map": None}},
                           "is for a target of vocabulary 13 (tensor 0.1.weight), but the target's is 11"),
    "medusa: ids": ("vllm", {"tensors": {"token_map": torch.tensor([1, 1, 2, 3, 4, 5])}},
                    "token_map does not give 6 different token ids below 11"),
    "medusa: a shape": ("fasterdecoding", {"tensors": {"2.0.linear.weight": torch.ones(64, 32)}},
                        "tensor 2.0.linear.weight has shape [64, 32], but the head 0.1.weight implies [64, 64]"),
    "medusa: a head": ("fasterdecoding", {"tensors": {"1.1.weight": None}}, "lacks tensors of head 1 of 4"),
    "medusa: a block": ("vllm", {"tensors": {"blocks.1.layers.0.weight": None}}, "lacks tensors of head 1 of 3"),
    "medusa: a mark": ("fasterdecoding", {"tensors": {"fc.weight": torch.ones(2)}},
                       "tensor 'fc.weight' is not part of Medusa heads"),
    "medusa: codes": ("fasterdecoding", {"tensors": {"0.1.weight": torch.ones(V, 64, dtype=torch.int8)}},
                      "tensor 0.1.weight is stored as I8"),
    "medusa: a factor": ("vllm", {"config": {"logit_scale": 0.5}}, "logit_scale = 0.5 is not supported"),
    "medusa: nothing": ("vllm", {"tensors": dict.fromkeys(
        [f"lm_heads.{n}.weight" for n in range(3)]
        + [f"blocks.{n}.layers.{b}.weight" for n in range(3) for b in range(2)])},
        "has no Medusa heads"),
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    reference_model(**KEYS).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", BAD)
def test_a_bad_head_is_refused_in_one_line(target: Path, tmp_path: Path, name: str) -> None:
    format, given, message = BAD[name]
    head = save_head(tmp_path / "head.gguf", format, **{"vocabulary": V, **given})
    check_refused(target, head, message, FORMATS[format]["of"])


@pytest.mark.parametrize(
    ("format", "file"),
    [
        ("safeailab", "pytorch_model.bin"),
        ("eagle-1", "pytorch_model.bin"),
        ("eagle-1", "medusa_lm_head.pt"),
        ("block gated", "pytorch_model.bin"),
    ],
)
def test_a_pickle_is_refused_and_never_read(target: Path, tmp_path: Path, format: str, file: str) -> None:
    folder = save_head(tmp_path / "head", format, V)
    (folder / "model.safetensors").unlink()
    if file == "medusa_lm_head.pt":
        (folder / "config.json").unlink()
    check_pickle(target, folder / file, "convert it to")


@pytest.mark.parametrize(
    ("format", "drafter", "message"),
    [
        (None, "eagle3", "is a whole model, and no EAGLE-3 head"),
        (None, "dflash", "is a whole model, and no DFlash head"),
        (None, "medusa", "is a whole model, and no Medusa heads"),
        ("safeailab", "draft-model", "is what drafter eagle3 reads"),
        ("block gated", "dflash", "is what drafter dspark reads"),
        ("vllm", "eagle3", "is what drafter medusa reads"),
    ],
)
def test_a_head_of_another_kind_is_refused(
    target: Path, tmp_path: Path, format: str | None, drafter: str, message: str
) -> None:
    head = target if format is None else save_head(tmp_path / "head", format, V)
    with pytest.raises(foredraft.ConfigError, match=message):
        foredraft.load(target, draft=head, drafter=drafter, device="cpu")


UNSUPPORTED: dict[str, tuple[dict[str, Any], list[str], str]] = {  # its config, its tensors, its name
    "hydra": ({"hydra_num_heads": 4, "model_type": "llama"}, ["hydra_head.0.linear.weight"], "Hydra"),
    "domino": (
        {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}},
        ["fc.weight", "hidden_norm.weight", "prefix_gru.weight_ih_l0"], "Domino",
    ),
    "dflare": ({"speculators_model_type": "dflare"}, ["fc.weight", "hidden_norm.weight"], "DFlare"),
    "lstm": ({"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"]}, ["speculator.forget_emb.weight"], "LSTM"),
    "another": ({"speculators_model_type": "xpress"}, ["fc.weight"], "Xpress of speculators"),
    "eagle3 with heads": (
        {"architectures": ["LlamaForCausalLMEagle3"]},
        ["layers.0.hidden_norm.weight", "parallel_draft_heads.0.lm_head.weight"], "EAGLE-3 with Medusa heads",
    ),
}  # fmt: skip


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_head_that_no_drafter_reads_is_refused_by_its_name(
    target: Path, tmp_path: Path, name: str, here: bool
) -> None:
    """Its config tells it where its tensors are not here; that of two of them does not."""
    config, tensors, kind = UNSUPPORTED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    if here:
        save_file({name: torch.ones(2) for name in tensors}, tmp_path / "model.safetensors")
    elif name in ("domino", "eagle3 with heads"):
        assert head_kind(tmp_path) in ("dflash", "eagle3")
        return
    check_refused(target, tmp_path, f"holds a head of the kind {kind}, which is not supported")


def test_keys_of_the_target_do_not_tell_what_a_head_is(target: Path, tmp_path: Path) -> None:
    """A config may have the `model_type` and the count of layers of the target, and no architecture."""
    for format in ("safeailab", "p-eagle amazon", "block z-lab", "block modelopt", "eagle-2"):
        of = FORMATS[format]["of"]
        layers = {"layer_types": ["full_attention"] * 40} if format.startswith("block") else {}
        inherited = {
            "model_type": "qwen2",
            "num_hidden_layers": 40,
            "architectures": ["Qwen2ForCausalLM"],
            **layers,
        }
        head = save_head(tmp_path / format, format, V)
        config = json.loads((head / "config.json").read_text())
        (head / "config.json").write_text(json.dumps(config | inherited))
        assert head_kind(head) == of
        llm = foredraft.load(target, draft=head, **LOAD)
        [output] = llm.generate([[1, 2, 3]], foredraft.SamplingParams(max_new_tokens=8, temperature=0))
        assert llm.default_drafter == of and output.stats.drafted > 0


def test_a_p_eagle_head_without_a_mask_token_takes_that_of_its_program(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = save_head(tmp_path / "head", "p-eagle specforge", V)
    llm = foredraft.load(target, draft=head, **LOAD)
    drafter: Any = engine_of(llm).drafters["p-eagle"]
    assert (drafter.head.record.mask_token, drafter.planned) == (9, 6)
    (head / "peagle_config.json").unlink()
    llm = foredraft.load(target, draft=head, **LOAD)
    drafter = engine_of(llm).drafters["p-eagle"]
    assert (drafter.head.record.mask_token, drafter.planned) == (0, None)
    assert "names no token for masked slots; token 0 is taken" in caplog.text


def test_an_eagle_head_is_told_from_other_folders(target: Path, tmp_path: Path) -> None:
    folder = save_head(tmp_path / "head", "eagle-1", V)
    assert head_kind(folder) == "eagle" and read_eagle(folder).record.pair_fc
    assert head_kind(save_head(tmp_path / "eagle3", "safeailab", V)) == "eagle3" and head_kind(target) is None
    whole = tmp_path / "whole"
    reference_model(**{**KEYS, "num_hidden_layers": 1}).save_pretrained(whole)
    assert head_kind(whole) is None
    assert foredraft.load(target, draft=folder, **LOAD).default_drafter == "eagle"


def test_a_gguf_head_is_told_from_a_model(target: Path, tmp_path: Path) -> None:
    keys = {"target_layers": None, "extract_layers": AUX}
    file = save_head(tmp_path / "head.gguf", "gguf", V, keys=keys)
    assert EAGLE3_ASSET.knows(file) and read_gguf(file).record.aux_layers == tuple(AUX)
    assert not EAGLE3_ASSET.knows(write_gguf(target, tmp_path / "model.gguf")) and not EAGLE3_ASSET.knows(
        target
    )
    llm = foredraft.load(target, draft=file, **LOAD)
    assert llm.default_drafter == "eagle3" and engine_of(llm).drafters["eagle3"].aux_layers == tuple(AUX)
    write_settings(file, HeadSettings(tap_shift=1))
    assert read_settings(save_head(tmp_path / "other.gguf", "gguf", V)) == HeadSettings()
    llm = foredraft.load(target, draft=file, **LOAD)
    assert engine_of(llm).drafters["eagle3"].aux_layers == tuple(layer + 1 for layer in AUX)


def test_an_older_map_of_a_gguf_head_tells_what_it_holds(tmp_path: Path) -> None:
    ids = np.array([0, 2, 3, 4, 8, 9], np.int64)
    for name, values in (("ids", ids), ("offsets", ids - np.arange(6))):
        edit = edited(d2t=None, d2t__weight=values)
        record = read_gguf(save_head(tmp_path / f"{name}.gguf", "gguf", V, tensors=edit)).record
        assert record.absolute_d2t is None and record.draft_vocab_size == 6


@pytest.mark.parametrize("format", BY_DRAFTER["medusa"])
def test_the_tensors_tell_how_many_medusa_heads_there_are(tmp_path: Path, format: str) -> None:
    form = FORMATS[format]
    folder = save_head(tmp_path / "heads", format, V, config={"base_model_name_or_path": "some/target"})
    assert head_kind(folder) == "medusa"
    files = read_medusa(folder)
    assert len(files.heads) == form["heads"] and files.verifier == "some/target"
    assert {len(head.blocks) for head in files.heads} == {form["blocks"]}
    assert files.draft_vocab_size == form.get("draft_vocab")


def test_medusa_heads_find_their_drafter(target: Path, tmp_path: Path) -> None:
    folder = save_head(tmp_path / "heads", "vllm", V)
    llm = foredraft.load(target, draft=folder, **LOAD)
    assert llm.default_drafter == "medusa"
    [output] = llm.generate([[1, 2, 3]], foredraft.SamplingParams(max_new_tokens=8, temperature=0))
    assert output.stats.drafted > 0


# --- heads of a hub on 127.0.0.1 ----------------------------------------------------------------------------

LOADING = """
import json, sys
import foredraft
for name in sys.argv[2:]:
    llm = foredraft.load(sys.argv[1], draft=name, policy="fixed", device="cpu", max_batch=1, max_length=64)
    [output] = llm.generate([[1, 2, 3]], foredraft.SamplingParams(max_new_tokens=8, temperature=0))
    print(json.dumps([llm.default_drafter, output.stats.drafted > 0]))
"""
LOOKING = """
import sys
from foredraft.loading.inspection import inspect_models
for name in sys.argv[2:]:
    print([str(each.note) for each in inspect_models(sys.argv[1], draft=name, device="cpu").drafters])
"""
# repository -> format, its file where it is no folder, and the files that are fetched
REPOSITORIES = {
    "owner/eagle3": ("safeailab", "", ["config.json", "model.safetensors"]),
    "owner/eagle": ("eagle-1", "", ["config.json", "model.safetensors"]),
    "owner/medusa": ("fasterdecoding", "", ["config.json", "medusa_lm_head.safetensors"]),
    "owner/gguf": ("gguf", "eagle3-head-F32.gguf", ["eagle3-head-F32.gguf"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    reference_model(**KEYS).save_pretrained(folder / "target")
    for name, (format, file, _) in REPOSITORIES.items():
        place = folder / name
        if file:
            place.mkdir(parents=True)
        save_head(place / file, format, V)
        (place / ".gitattributes").write_text("")
    return folder


@pytest.fixture
def client(folder: Path, tmp_path: Path) -> Iterator[Client]:
    with serving() as hub:
        for name in REPOSITORIES:
            hub.repositories[name] = Repository({"main": folder / name})
        yield Client(hub, tmp_path / "home")


@pytest.mark.heavy
def test_heads_are_recognised_by_their_hub_ids(client: Client, folder: Path) -> None:
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        done = client.run(LOADING, str(folder / "target"), *REPOSITORIES, **environment)
        assert done.returncode == 0, done.stderr
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        assert found == [[FORMATS[format]["of"], True] for format, _, _ in REPOSITORIES.values()]
        fetched = sorted(file for file in client.hub.fetched() if not file.startswith("."))
        assert fetched == (
            [] if environment else sorted(file for _, _, own in REPOSITORIES.values() for file in own)
        )


def test_no_weights_are_fetched_to_look_at_a_head(client: Client, folder: Path) -> None:
    done = client.run(LOOKING, str(folder / "target"), "owner/eagle3", "owner/eagle", "owner/medusa")
    assert done.returncode == 0, done.stderr
    assert not any("safetensors" in file for file in client.hub.fetched())
    for line, called in zip(
        done.stdout.splitlines(), ("an EAGLE-3 head", "an EAGLE-1 or", "Medusa"), strict=True
    ):
        assert f"needs {called}" in line
