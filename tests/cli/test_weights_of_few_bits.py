"""Commands say in which bits the target's weights are, since another text may come of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft.cli import main
from foredraft.cli.exit_codes import INCONCLUSIVE
from foredraft.kernels.compilation import library
from tests.support.checkpoints import save_checkpoint
from tests.support.quantising import KINDS, quantise

SIZES = {"hidden_size": 64, "intermediate_size": 96, "eos_token_id": None}
NEEDS_KERNELS = pytest.mark.skipif(library() is None, reason="no kernels")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("models") / "big", tokenizer=True, **SIZES)


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("models") / "coded", tokenizer=True, **SIZES)
    quantise(folder, KINDS["gptq"])
    return folder


def told(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([*map(str, words), "--device", "cpu"]) == 0
    return capsys.readouterr().out


def document(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(told(capsys, *words, "--json"))
    return found


def test_generate_names_them(model: Path, coded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "generate", "the cat", "--max-new-tokens", 4, "--model"
    assert "weights" not in document(capsys, *words, model)
    assert document(capsys, *words, model, "--weights", "int4")["weights"] == "int4"
    assert document(capsys, *words, coded)["weights"].startswith("gptq, 4 bits in groups of ")


def test_a_model_names_them(model: Path, coded: Path) -> None:
    for folder, options, weights in (
        (model, {}, None),
        (model, {"weights": "int8"}, "int8"),
        (coded, {}, "gptq, 4 bits in groups of 32"),
    ):
        with foredraft.load(folder, device="cpu", max_length=64, **options) as llm:
            assert llm.weights == weights and (weights or "float32 on cpu") in repr(llm)


@NEEDS_KERNELS
def test_verify_names_them_and_finds_a_copys_drafts_exact(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    few = "the cat", "--tokens", 8, "--detect", 0.5, "--out", tmp_path / "report.json"
    drafting = "--weights", "int8", "--drafter", "low-bit", "--draft-weights", "int4"
    code = main(["verify", "--model", str(model), *map(str, (*drafting, *few)), "--device", "cpu"])
    assert code in (0, INCONCLUSIVE), "few samples may say little"
    text = capsys.readouterr().out
    assert "float32, weights int8 on cpu; drafter low-bit" in text
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["about"]["weights"] == "int8"


@NEEDS_KERNELS
def test_bench_names_them_and_makes_the_copy_that_a_method_needs(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    workload = tmp_path / "words.jsonl"
    workload.write_text('{"prompt": "the cat"}\n{"prompt": "one two"}\n')
    words = (
        "bench", "--model", model, "--methods", "low-bit", "--workload", workload, "--new-tokens", 8,
        "--repeats", 1, "--out", tmp_path / "report.json",
    )  # fmt: skip
    told(capsys, *words)
    plain = json.loads((tmp_path / "report.json").read_text())
    assert plain["models"][0]["weights"] is None and plain["options"]["draft_weights"] == "int4"
    assert len(plain["models"]) == 1, "the copy is no model of its own"
    assert "float32, weights int8; temperature" in told(capsys, *words, "--weights", "int8")
    coded = json.loads((tmp_path / "report.json").read_text())
    assert coded["models"][0]["weights"] == "int8"
    assert coded["models"][0]["step_bytes"] < 0.4 * plain["models"][0]["step_bytes"]
