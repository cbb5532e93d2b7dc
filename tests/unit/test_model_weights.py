"""Loading is strict: a damaged checkpoint is an error that names the tensor or the file."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import foredraft
from foredraft.errors import CheckpointError
from foredraft.loading.inspection import inspect_models
from foredraft.model.runner import Runner
from foredraft.model.tensor_names import predicts_further
from foredraft.model.weights import load_decoder
from foredraft.quantise import quantise_checkpoint
from tests.parity.test_logits import prompt_logits
from tests.support.checkpoints import save_checkpoint, save_variant
from tests.support.mutation import Mutant, Mutation, assert_caught
from tests.support.quantising import SINGLE, edit_config, edit_tensors

INDEX = "model.safetensors.index.json"
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_variant(tmp_path / "model", "llama")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "sharded", shards=True)


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_decoder(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_sharded_checkpoint_gives_the_same_decoder(folder: Path, sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, two = load_decoder(folder), load_decoder(sharded)
    assert torch.equal(one.embedding, two.embedding)
    for first, second in zip(one.products, two.products, strict=True):
        assert torch.equal(first.dense(), second.dense())
    tensors = load_file(folder / SINGLE)
    parts = [tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(one.layers[1].attention.qkv.dense(), torch.cat(parts)), "the order of fused parts"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_a_loaded_model_does_not_depend_on_its_file(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Overwriting the file changes no logit: neither packed nor plain weights are views of the file."""
    decoder = load_decoder(save_variant(tmp_path, name, dtype=dtype))
    assert decoder.dtype == dtype and load_decoder(tmp_path, dtype=torch.float32).dtype == torch.float32
    runner, tokens = Runner(decoder), torch.arange(3, 35)[None]
    before = runner.forward(runner.new_cache(1, 64), tokens, [0]).logits
    size = (tmp_path / SINGLE).stat().st_size
    with (tmp_path / SINGLE).open("r+b") as file:
        file.write(b"\xff" * size)
    after = runner.forward(runner.new_cache(1, 64), tokens, [0]).logits
    assert before is not None and after is not None and torch.equal(before, after)


NORM, BIAS = "model.layers.2.self_attn.k_norm.weight", "model.layers.0.self_attn.v_proj.bias"
DOWN = "model.layers.0.mlp.down_proj.weight"
# variant, tensors, keys of config.json, and what is said
DAMAGED: list[tuple[str, dict[str, Tensor | None], dict[str, Any], str]] = [
    ("llama", {Q: None}, {}, f"tensor {Q} is missing"),
    ("qwen3", {NORM: None}, {}, f"tensor {NORM} is missing"),
    ("qwen2", {BIAS: None}, {}, f"tensor {BIAS} is missing"),
    ("llama", {NORM: torch.ones(16)}, {}, f"tensor {NORM} in {SINGLE} is not part of"),
    ("llama", {}, {"num_hidden_layers": 2}, "tensor model.layers.2."),
    ("llama-biases", {}, {"mlp_bias": False}, ".mlp.down_proj.bias"),
    ("llama", {Q: torch.zeros(64, 60)}, {}, f"{Q} has shape [64, 60], but config.json implies [64, 64]"),
    ("llama", {DOWN: torch.zeros(96, 64)}, {}, f"tensor {DOWN} has shape [96, 64]"),
    ("qwen3", {NORM: torch.ones(16)}, {}, f"tensor {NORM} has shape [16]"),
    ("llama", {Q: torch.zeros(64, 64, dtype=torch.int8)}, {}, f"tensor {Q} is stored as I8"),
]


@pytest.mark.parametrize(
    ("variant", "tensors", "keys", "said"), DAMAGED, ids=[f"{case[0]} {case[3]}" for case in DAMAGED]
)
def test_a_tensor_that_the_config_does_not_imply_is_named(
    tmp_path: Path, variant: str, tensors: dict[str, Tensor | None], keys: dict[str, Any], said: str
) -> None:
    folder = save_variant(tmp_path, variant)
    edit_tensors(folder, tensors)
    edit_config(folder, keys)
    assert said in refusal(folder)


def test_rotary_buffers_of_old_checkpoints_are_ignored(folder: Path) -> None:
    edit_tensors(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load_decoder(folder)
    (folder / SINGLE).unlink()
    assert "neither" in refusal(folder)


@pytest.mark.parametrize("damage", ["missing", "truncated", "of another checkpoint"])
def test_a_damaged_shard_is_named(sharded: Path, damage: str) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    content = {"truncated": second.read_bytes()[:-1000], "of another checkpoint": first.read_bytes()}
    second.unlink()
    if damage in content:
        second.write_bytes(content[damage])
    assert second.name in refusal(sharded)


def test_a_tensor_in_another_shard_than_the_index_lists_is_named(sharded: Path) -> None:
    """Otherwise the order of the files would decide which of two copies is loaded."""
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    other = next(shard for shard in sorted(sharded.glob("*.safetensors")) if shard.name != index[Q])
    save_file({**load_file(other), Q: torch.zeros(64, 64)}, other)
    message = refusal(sharded)
    assert Q in message and other.name in message


@pytest.mark.parametrize("shard", [None, "../model.safetensors", "/etc/passwd"])
def test_an_index_that_lists_what_is_not_there_is_refused(sharded: Path, shard: str | None) -> None:
    index = json.loads((sharded / INDEX).read_text())
    name = Q if shard else "model.layers.9.mlp.up_proj.weight"
    listed = shard or next(iter(index["weight_map"].values()))
    index["weight_map"][name] = listed
    (sharded / INDEX).write_text(json.dumps(index))
    message = refusal(sharded)
    assert listed in message and (shard is not None or name in message)


def test_a_stored_tied_head_must_equal_the_embedding(tmp_path: Path) -> None:
    save_variant(tmp_path, "llama-gqa-tied")
    embedding = load_file(tmp_path / SINGLE)["model.embed_tokens.weight"]
    edit_tensors(tmp_path, {"lm_head.weight": embedding.clone()})
    load_decoder(tmp_path)
    edit_tensors(tmp_path, {"lm_head.weight": embedding + 1})
    assert "lm_head.weight" in refusal(tmp_path)


# --- tensors that predict further tokens stay unread: they change no logit, and one line says so ---------------

TOKENS = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(7))
MTP = ["mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "mtp.norm.weight"]
LAYER = [f"model.layers.3.{name}.weight" for name in ("eh_proj", "self_attn.q_proj", "enorm")]
ONE_MORE = [*LAYER, "model.layers.4.enorm.weight"]


def with_tensors(folder: Path, names: list[str], **keys: object) -> Path:
    """Save a model of three layers with further tensors, and further keys of its config."""
    save_checkpoint(folder, eos_token_id=None)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: torch.randn(64, 64) for name in names}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("plain"), eos_token_id=None)


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (MTP, {}),
        ([f"model.{name}" for name in MTP], {}),
        (["model.mtp_layers.0.input_proj.weight"], {"num_nextn_predict_layers": 1}),
        (LAYER, {"num_nextn_predict_layers": 1}),
        (LAYER, {"num_mtp_layers": 2, "num_nextn_predict_layers": None}),
    ],
)
def test_they_stay_unread(
    names: list[str], keys: dict[str, object], plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_tensors(tmp_path / "further", names, **keys)
    with caplog.at_level(logging.INFO, "foredraft"):
        decoder = load_decoder(folder)
    [line] = [line for line in caplog.messages if "further tokens" in line]
    assert (
        line
        == f"{len(names)} tensors that predict further tokens are left to drafters (the first: {min(names)})"
    )
    found, wanted = (prompt_logits(Runner(each), TOKENS) for each in (decoder, load_decoder(plain)))
    assert torch.equal(found, wanted)
    sizes = [inspect_models(each, device="cpu", draft=None).models[0] for each in (folder, plain)]
    assert sizes[0].weight_bytes == sizes[1].weight_bytes and sizes[0].parameters == sizes[1].parameters


NOT_PART = "tensor {} in model.safetensors is not part of a Llama"


@pytest.mark.parametrize(
    ("names", "number", "says"),
    [
        (LAYER, None, NOT_PART),
        (LAYER, 0, NOT_PART),
        (["model.layers.4.enorm.weight", *LAYER[1:]], 1, NOT_PART),
        (["mtp_other.weight"], None, NOT_PART),
        (["model.layers.1.mtp.weight"], 1, NOT_PART),
        (LAYER, -1, "num_nextn_predict_layers is -1"),
    ],
)
def test_other_tensors_are_refused_as_ever(
    names: list[str], number: int | None, says: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=says.format(names[0])):
        load_decoder(with_tensors(tmp_path / "model", names, num_nextn_predict_layers=number))


def test_a_quantised_checkpoint_keeps_them(tmp_path: Path) -> None:
    folder = with_tensors(tmp_path / "model", LAYER + MTP, num_nextn_predict_layers=1)
    quantise_checkpoint(str(folder), "int8", tmp_path / "int8")
    assert {*LAYER, *MTP} <= load_file(tmp_path / "int8" / "model.safetensors").keys()
    with foredraft.load(tmp_path / "int8", device="cpu", max_length=64) as llm:
        assert llm.weights is not None


def loads(names: list[str], **keys: object) -> Callable[[], None]:
    """Return a check that a checkpoint with these tensors loads, and its copy in few bits."""

    def check() -> None:
        with tempfile.TemporaryDirectory() as folder:
            model = with_tensors(Path(folder) / "model", names, **keys)
            load_decoder(model)
            quantise_checkpoint(str(model), "int8", Path(folder) / "int8")
            load_decoder(Path(folder) / "int8")
            kept = load_file(Path(folder) / "int8" / SINGLE)
            parts = [{name[15:] for name in kept if name.startswith(f"model.layers.{n}.")} for n in (0, 2)]
            assert parts[0] == parts[1], "the last layer is quantised like the first"

    return check


def refuses(names: list[str], **keys: object) -> Callable[[], None]:
    def check() -> None:
        with pytest.raises(CheckpointError):
            loads(names, **keys)()

    return check


def counted(change: Callable[[int, int], tuple[int, int]]) -> Mutation:
    """Change the numbers of layers that are the model's, and that predict further tokens."""
    return lambda sound: lambda name, layers, more: sound(name, *change(layers, more))


def spelled(begin: str, unread: bool) -> Mutation:
    """Decide alike for all names that begin so."""
    return lambda sound: lambda name, *rest: unread if name.startswith(begin) else sound(name, *rest)


LOADED = pytest.fail.Exception  # nothing was refused
NEXT = {"num_nextn_predict_layers": 1}
NESTED = loads([f"model.{name}" for name in MTP])
ONE_TOO_MANY = counted(lambda layers, more: (layers, more + 1))
ALWAYS_ONE = counted(lambda layers, more: (layers, max(more, 1)))
THE_LAST = counted(lambda layers, more: (layers - 1, more + 1))
DEFECTS = [
    ("nothing is unread", spelled("", False), loads(MTP), CheckpointError),
    ("one too many", ONE_TOO_MANY, refuses(ONE_MORE, **NEXT), LOADED),
    ("none is counted", ALWAYS_ONE, refuses(LAYER), LOADED),
    ("the model's last", THE_LAST, loads(LAYER, **NEXT), AssertionError),
    ("any name that begins so", spelled("mtp", True), refuses(["mtp_other.weight"]), LOADED),
    ("the nested spelling is refused", spelled("model.mtp", False), NESTED, CheckpointError),
]


@pytest.mark.parametrize(("name", "mutation", "check", "raises"), DEFECTS, ids=[each[0] for each in DEFECTS])
def test_a_defect_is_caught(
    name: str, mutation: Any, check: Callable[[], None], raises: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check()
    assert_caught(Mutant(name, ((predicts_further, mutation),), check, raises), monkeypatch)
