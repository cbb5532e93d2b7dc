"""`foredraft info` and `foredraft generate` on a multimodal checkpoint, of which the text model runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from foredraft.cli import main
from tests.support.wrapped import NEWER, OLDER, edit_config, save_wrapped

GREEDY = ["--temperature", "0", "--max-new-tokens", "12"]


@pytest.fixture(scope="module", params=[OLDER, NEWER])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_wrapped(tmp_path_factory.mktemp("wrapped"), "gemma3", request.param, tokenizer=True)
    padding = dict.fromkeys(("image_token_index", "boi_token_index", "eoi_token_index"), 0)
    edit_config(made, lambda config: config.update(padding))
    return made


def document(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_info_counts_the_text_model_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "info", str(folder), "--device", "cpu")["models"][0]
    tensors = load_file(folder / "model.safetensors")
    texts = {name: each for name, each in tensors.items() if "language_model" in name}
    assert found["architecture"] == "Gemma3ForConditionalGeneration"
    assert found["parameters"] == sum(tensor.numel() for tensor in texts.values())
    assert found["weights_checked"] and len(texts) < len(tensors)


def test_generate_gives_the_same_text_with_a_drafter(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "the target checks the draft", "--model", str(folder), "--device", "cpu", *GREEDY]
    texts = []
    for drafter in ("none", "lookup"):
        texts.append(document(capsys, *command, "--drafter", drafter)["outputs"][0]["text"])
    assert texts[0] == texts[1] != ""


def test_a_prompt_with_an_image_is_refused_by_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a <pad> b", "--model", str(folder), "--device", "cpu", *GREEDY]) == 2
    assert "token 0, the image_token_index" in capsys.readouterr().err
