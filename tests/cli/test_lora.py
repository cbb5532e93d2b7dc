"""`--lora` of every command: it runs, measures, searches, trains and writes the merged model."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import foredraft
from foredraft import SamplingParams
from foredraft.bench import forward_costs
from foredraft.bench import machine_record as machine
from foredraft.cli import main
from foredraft.drafters.adapter_files import find_adapter, target_hash
from foredraft.drafters.plan_files import find_plan, model_hash
from foredraft.model.lora.folder import with_loras
from foredraft.model.lora.record import RECORD
from tests.support.checkpoints import TEXT
from tests.support.command import without_progress
from tests.support.loras import save_lora

GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
TEXT_OPTIONS = ["--temperature", "0", "--max-new-tokens", "12", "--ignore-eos", "--device", "cpu", "--json"]
MADE_FOR_BASE = "was made for the model without its LoRA"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def loras(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("loras")
    one = save_lora(models / "big", folder / "one", lora_alpha=24, use_rslora=True)
    return one, save_lora(models / "big", folder / "two", seed=7, target_modules=["up_proj", "lm_head"], r=2)


@pytest.fixture
def target(models: Path, loras: tuple[Path, Path]) -> list[str]:
    return ["--model", str(models / "big"), "--lora", str(loras[0])]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"def accept{word}(draft, p, q)\n" for word in "abcdefgh"))
    return str(file)


def ids(capsys: pytest.CaptureFixture[str], *words: str) -> list[int]:
    assert main(["generate", "def accept", *words, *TEXT_OPTIONS]) == 0
    [output] = json.loads(capsys.readouterr().out)["outputs"]
    found: list[int] = output["token_ids"]
    return found


def test_generate_writes_the_merged_models_text(
    models: Path, loras: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for given in ([], [loras[0]], [loras[1]], [*loras]):
        with foredraft.load(models / "big", lora=given, device="cpu", max_length=64) as llm:
            texts.append(llm.generate("def accept", GREEDY)[0].token_ids)
        words = [word for lora in given for word in ("--lora", str(lora))]
        assert ids(capsys, "--model", str(models / "big"), *words) == texts[-1]
    assert len({tuple(text) for text in texts}) == 4


def test_info_shows_each_lora(
    models: Path, loras: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    big = models / "big"
    assert main(["info", str(big), "--lora", str(loras[0]), "--lora", str(loras[1]), "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"target: {big}, LlamaForCausalLM, ")
    assert lines[1] == (
        f"LoRA: {loras[0]}, rank 4, alpha 24 over the root of the rank, 3 k_proj, 3 o_proj, 3 q_proj, 3 v_proj;"
        f" made for {big}"
    )
    assert (
        lines[2]
        == f"LoRA: {loras[1]}, rank 2, alpha 8, 1 lm_head, 3 up_proj, 1 tensor replaced; made for {big}"
    )
    assert main(["info", str(big), "--lora", str(loras[0]), "--json"]) == 0
    [info] = json.loads(capsys.readouterr().out)["models"][0]["loras"]
    assert info["ranks"] == [4] and info["alphas"] == [24] and info["scaled_by"] == "sqrt(r)"


def test_a_lora_that_does_not_fit_is_one_line(
    models: Path, loras: tuple[Path, Path], prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        ["generate", "x"],
        ["info"],
        ["tune", "--prompts", prompts],
        ["quantise", "--out", str(tmp_path / "out")],
    ):
        assert main([*command, "--model", str(models / "big"), "--lora", str(models / "small")]) == 2
        [line] = without_progress(capsys.readouterr().err)
        assert line.startswith("foredraft: error: LoRA ") and "is no LoRA: it has a config.json" in line
    assert main(["generate", "x", "--model", str(loras[0])]) == 2
    assert f"give that one, and this as --lora {loras[0]}" in capsys.readouterr().err


def test_tune_finds_a_plan_for_the_merged_model(
    models: Path,
    loras: tuple[Path, Path],
    target: list[str],
    prompts: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    quick = ["--tokens", "48", "--trials", "8", "--max-draft", "3", "--new-tokens", "6", "--repeats", "1"]
    plan_out = Path(prompts).with_name("plan.json")
    code = main(["tune", *target, "--json", "--prompts", prompts, "--plan-out", str(plan_out), *quick])
    assert code == 0, capsys.readouterr().err
    merged = with_loras(models / "big", [loras[0]])
    assert find_plan(model_hash(models / "big"), None) is None
    if plan_out.exists():  # a plan that pays, which is luck on models this small
        assert json.loads(plan_out.read_text())["model_hash"] == model_hash(merged)
        capsys.readouterr()
        ids(capsys, *target, "--drafter", "layer-skip")
        assert MADE_FOR_BASE not in caplog.text


def test_train_makes_drafters_of_the_merged_model(
    models: Path,
    loras: tuple[Path, Path],
    target: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": TEXT * 3}) + "\n" for _ in range(4)))
    short = ["--data", str(data), "--device", "cpu", "--length", "32", "--steps", "4", "--step-tokens", "128"]
    short += ["--validate-every", "2", "--warm-up", "1"]
    assert main(["train", "adapter", *target, *short]) == 0
    merged = with_loras(models / "big", [loras[0]])
    assert find_adapter(target_hash(merged)) is not None and find_adapter(target_hash(models / "big")) is None
    capsys.readouterr()
    with caplog.at_level(logging.WARNING):
        plain = ids(capsys, *target, "--drafter", "none")
        assert ids(capsys, *target, "--drafter", "kangaroo", "--policy", "fixed") == plain
    assert MADE_FOR_BASE not in caplog.text
    out = tmp_path / "draft"
    assert (
        main(["train", "draft", *target, *short, "--layers", "1", "--from-layers", "0", "--out", str(out)])
        == 0
    )
    assert not (out / RECORD).exists()
    capsys.readouterr()
    assert ids(capsys, *target, "--draft", str(out), "--drafter", "draft-model", "--policy", "fixed") == plain


def test_quantise_writes_the_merged_model(
    models: Path,
    loras: tuple[Path, Path],
    target: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(
            ["quantise", *target, "--weights", "int8", "--out", str(tmp_path / "int8"), "--dtype", "float32"]
        )
        == 0
    )
    assert not (tmp_path / "int8" / RECORD).exists() and (tmp_path / "int8" / "tokenizer.json").is_file()
    assert (
        main(
            [
                "quantise",
                *target[:2],
                "--weights",
                "int8",
                "--out",
                str(tmp_path / "base"),
                "--dtype",
                "float32",
            ]
        )
        == 0
    )
    merged, base = (load_file(tmp_path / name / "model.safetensors") for name in ("int8", "base"))
    name = "model.layers.0.self_attn.q_proj.weight_packed"
    assert not torch.equal(merged[name], base[name])
    capsys.readouterr()
    assert ids(capsys, "--model", str(tmp_path / "int8")) == ids(capsys, *target, "--weights", "int8")


def test_bench_names_the_lora(
    target: list[str],
    loras: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(machine, "BYTES", 2**20)
    monkeypatch.setattr(machine, "TRIES", 2)
    monkeypatch.setattr(forward_costs, "REPEATS", 2)
    work = tmp_path / "words.jsonl"
    work.write_text('{"prompt": "def accept(draft, p):"}\n')
    options = ["--workload", str(work), "--new-tokens", "4", "--repeats", "1", "--device", "cpu", "--json"]
    assert main(["bench", *target, "--methods", "lookup", *options]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["models"][0]["name"] == f"big + {loras[0].name}"
    assert main(["bench", *target, "--methods", "transformers", *options]) == 2
    assert "transformers takes no LoRA here" in capsys.readouterr().err


def test_verify_names_the_lora(target: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["--tokens", "4", "--samples", "20", "--seed", "3", "--drafter", "lookup", "--device", "cpu"]
    assert main(["verify", *target, "def accept", "Viktor", *quick]) in (0, 3)
    assert f"Target {target[1]} + {target[3]}, float32 on cpu" in " ".join(capsys.readouterr().out.split())
