"""Tensors that predict further tokens stay unread: they change no logit and take no memory, and one line says so."""

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

import foredraft
from foredraft.errors import CheckpointError
from foredraft.loading.inspection import inspect_models
from foredraft.model.runner import Runner
from foredraft.model.tensor_names import predicts_further
from foredraft.model.weights import load_decoder
from foredraft.quantise import quantise_checkpoint
from tests.parity.test_logits import prompt_logits
from tests.support.checkpoints import save_checkpoint
from tests.support.mutation import Mutant, Mutation, assert_caught

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
    assert line == f"{len(names)} tensors that predict further tokens stay unread (the first: {min(names)})"
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


def test_a_quantised_checkpoint_leaves_them_out(tmp_path: Path) -> None:
    folder = with_tensors(tmp_path / "model", LAYER + MTP, num_nextn_predict_layers=1)
    quantise_checkpoint(str(folder), "int8", tmp_path / "int8")
    assert not {*LAYER, *MTP} & load_file(tmp_path / "int8" / "model.safetensors").keys()
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
    ("the model's last", THE_LAST, loads(LAYER, **NEXT), CheckpointError),
    ("any name that begins so", spelled("mtp", True), refuses(["mtp_other.weight"]), LOADED),
    ("the nested spelling is refused", spelled("model.mtp", False), NESTED, CheckpointError),
]


@pytest.mark.parametrize(("name", "mutation", "check", "raises"), DEFECTS, ids=[each[0] for each in DEFECTS])
def test_a_defect_is_caught(
    name: str, mutation: Any, check: Callable[[], None], raises: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check()
    assert_caught(Mutant(name, ((predicts_further, mutation),), check, raises), monkeypatch)
