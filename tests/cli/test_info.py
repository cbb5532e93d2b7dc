"""`foredraft info`: text for people, a document for programs, and the refusals of `load`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from foredraft.cli import main
from foredraft.kernels.compilation import library
from foredraft.loading import capacity
from tests.support.checkpoints import save_checkpoint
from tests.support.quantising import KINDS, quantise


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["info", *words, "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.splitlines()


def test_the_text_has_models_memory_context_and_drafters(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(capsys, str(models / "big"), "--draft", str(models / "small"))
    assert lines[0].startswith(f"target: {models / 'big'}, LlamaForCausalLM, ")
    assert lines[1].startswith(f"draft: {models / 'small'}, LlamaForCausalLM, ")
    text = "\n".join(lines)
    assert "weights in 32 bits" in text and "weights in 16 bits" in text
    for name in ("int8", "int4") if library() is not None else ():
        assert f"weights with --weights {name}" in text
    assert "stay coded" not in text
    assert "KV cache of 1,000 tokens" in text
    assert "are free on cpu: room for one sequence of 2,048 tokens (the model's limit)" in text
    table = [" ".join(line.split()) for line in lines]
    assert any(line.startswith("draft-model yes the target's tokenizer, ") for line in table)
    assert any(line.startswith("retokenize no retokenize needs a draft model with") for line in table)


def test_json_is_one_document(models: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    [line] = shown(capsys, str(models / "big"), "--json", "--out", str(tmp_path / "x.json"))
    document = json.loads(line)
    assert document["models"][0]["name"] == str(models / "big") and document["models"][0]["role"] == "target"
    assert json.loads((tmp_path / "x.json").read_text()) == document


def test_without_a_model_the_demo_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys)
    assert lines[0].startswith("target: demo, ") and lines[1].startswith("draft: demo, ")


def test_the_model_may_be_given_by_its_option(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(models / "big")
    by_option = json.loads(shown(capsys, "--model", folder, "--json")[0])
    assert by_option["models"] == json.loads(shown(capsys, folder, "--json")[0])["models"]
    assert main(["info", folder, "--model", folder]) == 2
    assert "given as an argument and by --model; leave one out" in capsys.readouterr().err


def test_too_little_memory_is_shown_with_the_remedy(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "free_memory", lambda device: 1000)
    text = "\n".join(shown(capsys, str(models / "big")))
    assert "are free on cpu: the weights need 0.00" in text and "give a smaller model" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["./nowhere"], "neither a folder nor a hub name"),
        (["BIG", "--revision", "main"], "is a local folder, which has no revision 'main'"),
        (["BIG", "--dtype", "int4"], "--dtype"),
        (["BIG", "--device", "tpu"], "--device is 'tpu'; give 'cpu', 'cuda' or 'cuda:N'"),
        (["BIG", "BIG"], "info has no place for"),
        (["BIG", "--temperature", "0"], "Unknown option: --temperature"),
    ],
)
def test_mistakes_are_one_line_and_code_2(
    models: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["info", *(str(models / "big") if word == "BIG" else word for word in words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("foredraft: error: ") and message in captured.err


def test_a_model_that_load_refuses_is_refused_with_its_reason(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((models / "big" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"bits": 4}}))
    lines = []
    for command in (["info", str(tmp_path)], ["generate", "x", "--model", str(tmp_path)]):
        assert main(command) == 2
        lines.append(capsys.readouterr().err)
    assert lines[0] == lines[1] and "quantization_config" in lines[0]


def test_a_quantised_model_is_shown_with_its_format(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "coded"
    shutil.copytree(models / "big", folder)
    quantise(folder, KINDS["gptq"])
    first, *others = shown(capsys, str(folder))
    assert " M parameters, gptq, 4 bits in groups of 32, computing in float32; 3 layers of 64" in first
    assert any("stay coded" in line for line in others) and not any("--weights" in line for line in others)
    [line] = shown(capsys, str(folder), "--json")
    assert json.loads(line)["models"][0]["quantisation"] == "gptq, 4 bits in groups of 32"
    [line] = shown(capsys, str(models / "big"), "--json")
    assert json.loads(line)["models"][0]["quantisation"] is None


@pytest.mark.skipif(library() is None, reason="no C compiler")
def test_a_row_that_is_left_out_has_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No kernel reads codes of rows that whole groups do not fill."""
    odd = save_checkpoint(tmp_path / "odd", dtype=torch.bfloat16, hidden_size=80, intermediate_size=80)
    capsys.readouterr()  # saving tells its progress
    text = "\n".join(shown(capsys, str(odd)))
    assert "weights with --weights int8" not in text
    assert re.search(
        r"^--weights int8 would take [\d.e-]+ GiB, no less than bfloat16: weights that", text, re.M
    )
