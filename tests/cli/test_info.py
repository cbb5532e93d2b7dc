"""`foredraft info`: text for people, a document for programs, and the refusals of `load`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from foredraft.kernels import compilation
from foredraft.kernels.compilation import library
from foredraft.loading import capacity, inspection, runners
from tests.cli.conftest import Cli
from tests.support.checkpoints import save_checkpoint
from tests.support.quantising import KINDS, quantise


def shown(cli: Cli, *words: object) -> list[str]:
    out, err = cli("info --device cpu", *words)
    assert err == ""
    return out.splitlines()


def test_the_text_has_models_memory_context_and_drafters(models: Path, cli: Cli) -> None:
    lines = shown(cli, models / "big", "--draft", models / "small")
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


def test_the_text_names_the_kernels_level(models: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    level = compilation.level_in_use()
    if level is not None:
        [line] = [line for line in shown(cli, models / "big") if line.startswith("kernels: ")]
        assert line == f"kernels: {compilation.describe_level()}" and level in line
    monkeypatch.setattr(runners, "library", lambda: None)
    for module in (inspection, runners):
        monkeypatch.setattr(module, "unserved_because", lambda *_: "there are none")
    [line] = [line for line in shown(cli, models / "big") if line.startswith("no kernels: ")]
    assert line.endswith("because there are none; install a C compiler, or the wheel for this CPU")


def test_json_is_one_document_and_model_may_be_an_option(models: Path, tmp_path: Path, cli: Cli) -> None:
    folder, file = str(models / "big"), tmp_path / "x.json"
    found = cli.document("info", folder, "--out", file)
    assert found["models"][0]["name"] == folder and found["models"][0]["role"] == "target"
    assert json.loads(file.read_text()) == found
    assert cli.document("info --model", folder)["models"] == found["models"]


def test_without_a_model_the_demo_is_shown(cli: Cli) -> None:
    lines = shown(cli)
    assert lines[0].startswith("target: demo, ") and lines[1].startswith("draft: demo, ")


def test_too_little_memory_has_its_remedy(models: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setattr(capacity, "free_memory", lambda device: 1000)
    text = "\n".join(shown(cli, models / "big"))
    assert "are free on cpu: the weights need 0.00" in text and "give a smaller model" in text


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("big --dtype int4", "--dtype"),
        ("big big", "info has no place for"),
        ("big --model big", "given as an argument and by --model; leave one out"),
        ("big --temperature 0", "Unknown option: --temperature"),
    ],
)
def test_mistakes_fail(models: Path, line: str, says: str, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.chdir(models)
    assert says in cli.refused(f"info {line}")


def test_a_quantised_model_is_shown_with_its_format(models: Path, tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "coded"
    shutil.copytree(models / "big", folder)
    quantise(folder, KINDS["gptq"])
    first, *others = shown(cli, folder)
    assert " M parameters, gptq, 4 bits in groups of 32, computing in float32; 3 layers of 64" in first
    assert any("stay coded" in line for line in others) and not any("--weights" in line for line in others)
    [described] = cli.document("info", folder)["models"]
    assert described["quantisation"] == "gptq, 4 bits in groups of 32"


@pytest.mark.skipif(library() is None, reason="no C compiler")
def test_a_row_that_is_left_out_has_a_reason(tmp_path: Path, cli: Cli) -> None:
    """No kernel reads codes of rows that whole groups do not fill."""
    odd = save_checkpoint(tmp_path / "odd", dtype=torch.bfloat16, hidden_size=80, intermediate_size=80)
    text = "\n".join(shown(cli, odd))
    assert "weights with --weights int8" not in text
    reason = r"^--weights int8 would take [\d.e-]+ GiB, no less than bfloat16: weights that"
    assert re.search(reason, text, re.M)
