"""Commands say in which bits the target's weights are, since another text may come of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft.cli import main
from foredraft.cli.interrupt import INCONCLUSIVE
from foredraft.kernels.compilation import library
from tests.cli.conftest import Cli
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


def test_generate_names_them(model: Path, coded: Path, cli: Cli) -> None:
    words = "generate 'the cat' --max-new-tokens 4 --device cpu --model"
    assert "weights" not in cli.document(words, model)
    assert cli.document(words, model, "--weights", "int4")["weights"] == "int4"
    assert cli.document(words, coded)["weights"].startswith("gptq, 4 bits in groups of ")


@NEEDS_KERNELS
def test_verify_names_them_and_runs(model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    few = "--device cpu --tokens 8 --detect 0.5 --weights int8 --drafter low-bit --draft-weights int4"
    code = main(["verify", "the cat", *few.split(), "--model", str(model), "--out", str(report)])
    assert code in (0, INCONCLUSIVE), "few samples may say little"
    assert "float32, weights int8 on cpu; drafter low-bit" in capsys.readouterr().out
    assert json.loads(report.read_text())["about"]["weights"] == "int8"


@pytest.mark.heavy
@NEEDS_KERNELS
def test_bench_names_them_and_makes_a_copy(model: Path, tmp_path: Path, quick_bench: None, cli: Cli) -> None:
    workload, report = tmp_path / "words.jsonl", tmp_path / "report.json"
    workload.write_text('{"prompt": "the cat"}\n')
    quick = "bench --methods low-bit --new-tokens 8 --repeats 1 --device cpu"
    words = [quick, "--model", model, "--workload", workload, "--out", report]
    plain = cli.document(*words)
    assert plain["models"][0]["weights"] is None and plain["options"]["draft_weights"] == "int4"
    assert len(plain["models"]) == 1, "the copy is no model of its own"
    assert "float32, weights int8; temperature" in cli(*words, "--weights", "int8").out
    coded = json.loads(report.read_text())
    assert coded["models"][0]["weights"] == "int8"
    assert coded["models"][0]["step_bytes"] < 0.4 * plain["models"][0]["step_bytes"]
