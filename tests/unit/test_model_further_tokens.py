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
from foredraft.model.further_tokens import predicts_further
from foredraft.model.runner import Runner
from foredraft.model.weights import load_decoder
from foredraft.quantise import quantise_checkpoint
from tests.parity.test_logits import prompt_logits
from tests.support.checkpoints import save_checkpoint
from tests.support.planting import Mutant, assert_caught

TOKENS = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(7))
MTP = ["mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "mtp.norm.weight"]
LAYER = [
    "model.layers.3.eh_proj.weight",
    "model.layers.3.self_attn.q_proj.weight",
    "model.layers.3.enorm.weight",
]


def with_tensors(folder: Path, names: list[str], **keys: object) -> Path:
    """Save a model of three layers with further tensors, and further keys of its config."""
    save_checkpoint(folder, eos_token_id=None)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: torch.randn(64, 64) for name in names}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


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
    names: list[str], keys: dict[str, object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, plain = (
        with_tensors(tmp_path / "further", names, **keys),
        save_checkpoint(tmp_path / "plain", eos_token_id=None),
    )
    with caplog.at_level(logging.INFO, "foredraft"):
        decoder = load_decoder(folder)
    [line] = [line for line in caplog.messages if "further tokens" in line]
    assert line == f"{len(names)} tensors that predict further tokens stay unread (the first: {min(names)})"
    assert torch.equal(
        prompt_logits(Runner(decoder), TOKENS), prompt_logits(Runner(load_decoder(plain)), TOKENS)
    )
    sizes = [inspect_models(each, device="cpu", draft=None).models[0] for each in (folder, plain)]
    assert sizes[0].weight_bytes == sizes[1].weight_bytes and sizes[0].parameters == sizes[1].parameters


@pytest.mark.parametrize(
    ("names", "keys", "named"),
    [
        (LAYER, {}, "model.layers.3.eh_proj.weight"),
        (LAYER, {"num_nextn_predict_layers": 0}, "model.layers.3.eh_proj.weight"),
        (
            [*LAYER, "model.layers.4.enorm.weight"],
            {"num_nextn_predict_layers": 1},
            "model.layers.4.enorm.weight",
        ),
        (["mtp_other.weight"], {}, "mtp_other.weight"),
        (["model.layers.1.mtp.weight"], {"num_nextn_predict_layers": 1}, "model.layers.1.mtp.weight"),
    ],
)
def test_other_tensors_are_refused_as_ever(
    names: list[str], keys: dict[str, object], named: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"tensor {named} in model.safetensors is not part of a Llama"):
        load_decoder(with_tensors(tmp_path / "model", names, **keys))


def test_a_wrong_number_of_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers is -1"):
        load_decoder(with_tensors(tmp_path / "model", LAYER, num_nextn_predict_layers=-1))


def test_a_quantised_checkpoint_leaves_them_out(tmp_path: Path) -> None:
    folder = with_tensors(tmp_path / "model", LAYER + MTP, num_nextn_predict_layers=1)
    quantise_checkpoint(str(folder), "int8", tmp_path / "int8")
    assert not {*LAYER, *MTP} & load_file(tmp_path / "int8" / "model.safetensors").keys()
    with foredraft.load(tmp_path / "int8", device="cpu", max_length=64) as llm:
        assert llm.weights is not None


Function = Callable[..., Any]
ONE_MORE = [*LAYER, "model.layers.4.enorm.weight"]


def loads(names: list[str], **keys: object) -> Callable[[], None]:
    """Return a check that a checkpoint with these tensors loads."""

    def check() -> None:
        with tempfile.TemporaryDirectory() as folder:
            load_decoder(with_tensors(Path(folder) / "model", names, **keys))

    return check


def refuses(names: list[str], **keys: object) -> Callable[[], None]:
    """Return a check that a checkpoint with these tensors does not load."""

    def check() -> None:
        with pytest.raises(CheckpointError):
            loads(names, **keys)()

    return check


def copies() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = with_tensors(Path(folder) / "model", LAYER + MTP, num_nextn_predict_layers=1)
        quantise_checkpoint(str(model), "int8", Path(folder) / "int8")
        load_decoder(Path(folder) / "int8")


DEFECTS = [
    ("nothing is left unread", lambda sound: lambda *_: False, loads(MTP), CheckpointError),
    (
        "one layer too many is left unread",
        lambda sound: lambda name, layers, further: sound(name, layers, further + 1),
        refuses(ONE_MORE, num_nextn_predict_layers=1),
        pytest.fail.Exception,
    ),
    (
        "layers are left unread where none is counted",
        lambda sound: lambda name, layers, further: sound(name, layers, max(further, 1)),
        refuses(LAYER),
        pytest.fail.Exception,
    ),
    (
        "the model's last layer is left unread",
        lambda sound: lambda name, layers, further: sound(name, layers - 1, further + 1),
        copies,
        CheckpointError,
    ),
    (
        "any name that begins so is left unread",
        lambda sound: lambda name, *rest: name.startswith("mtp") or sound(name, *rest),
        refuses(["mtp_other.weight"]),
        pytest.fail.Exception,
    ),
    (
        "the nested spelling is refused",
        lambda sound: lambda name, *rest: not name.startswith("model.mtp") and sound(name, *rest),
        loads([f"model.{name}" for name in MTP]),
        CheckpointError,
    ),
]


@pytest.mark.parametrize(("name", "spoiler", "check", "raises"), DEFECTS, ids=[each[0] for each in DEFECTS])
def test_a_defect_is_caught(
    name: str, spoiler: Function, check: Callable[[], None], raises: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check()
    assert_caught(Mutant(name, ((predicts_further, spoiler),), check, raises), monkeypatch)
