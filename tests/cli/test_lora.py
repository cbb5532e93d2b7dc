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
from foredraft.cli import main
from foredraft.drafters.kangaroo import find_adapter, target_hash
from foredraft.drafters.plan_files import find_plan, model_hash
from foredraft.model.locate import with_loras
from tests.cli.conftest import Cli
from tests.support.checkpoints import TEXT
from tests.support.loras import save_lora

GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
TEXT_OPTIONS = ["--temperature", "0", "--max-new-tokens", "12", "--ignore-eos", "--device", "cpu"]
MADE_FOR_BASE = "was made for the model without its LoRA"

pytestmark = pytest.mark.usefixtures("own_cache")


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


def ids(cli: Cli, *words: object) -> list[int]:
    return cli.ids("generate", "def accept", *words, *TEXT_OPTIONS)


def test_generate_writes_the_merged_models_text(models: Path, loras: tuple[Path, Path], cli: Cli) -> None:
    texts = []
    for given in ([], [loras[0]], [loras[1]], [*loras]):
        with foredraft.load(models / "big", lora=given, device="cpu", max_length=64) as llm:
            texts.append(llm.generate("def accept", GREEDY)[0].token_ids)
        words = [word for lora in given for word in ("--lora", lora)]
        assert ids(cli, "--model", models / "big", *words) == texts[-1]
    assert len({tuple(text) for text in texts}) == 4


def test_info_shows_each_lora(models: Path, loras: tuple[Path, Path], cli: Cli) -> None:
    big, (one, two) = models / "big", loras
    lines = cli("info --device cpu", big, "--lora", one, "--lora", two).out.splitlines()
    assert lines[0].startswith(f"target: {big}, LlamaForCausalLM, ")
    assert lines[1] == (
        f"LoRA: {one}, rank 4, alpha 24 over the root of the rank, 3 k_proj, 3 o_proj, 3 q_proj, 3 v_proj;"
        f" made for {big}"
    )
    parts = "1 lm_head, 3 up_proj, 1 tensor replaced"
    assert lines[2] == f"LoRA: {two}, rank 2, alpha 8, {parts}; made for {big}"
    [info] = cli.document("info", big, "--lora", one)["models"][0]["loras"]
    assert info["ranks"] == [4] and info["alphas"] == [24] and info["scaled_by"] == "sqrt(r)"


@pytest.mark.heavy
def test_tune_finds_a_plan_for_the_merged_model(
    models: Path,
    loras: tuple[Path, Path],
    target: list[str],
    prompts: str,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("foredraft.tune.run._winner", lambda finalists: 0)
    quick = "--tokens 48 --trials 3 --finalists 1 --max-draft 3 --new-tokens 6 --repeats 1"
    plan = Path(prompts).with_name("plan.json")
    cli(f"tune {quick}", *target, "--prompts", prompts, "--plan-out", plan)
    merged = model_hash(with_loras(models / "big", [loras[0]]))
    assert find_plan(model_hash(models / "big"), None) is None and find_plan(merged, None) is not None
    assert json.loads(plan.read_text())["model_hash"] == merged
    ids(cli, *target, "--drafter", "layer-skip")
    assert MADE_FOR_BASE not in caplog.text


def test_train_makes_drafters_of_the_merged_model(
    models: Path,
    loras: tuple[Path, Path],
    target: list[str],
    tmp_path: Path,
    cli: Cli,
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": TEXT * 3}) + "\n" for _ in range(4)))
    size = "--device cpu --length 32 --steps 4 --step-tokens 128 --validate-every 2 --warm-up 1"
    short = [*target, "--data", data, *size.split()]
    cli("train adapter", *short)
    merged = with_loras(models / "big", [loras[0]])
    assert find_adapter(target_hash(merged)) is not None and find_adapter(target_hash(models / "big")) is None
    with caplog.at_level(logging.WARNING):
        plain = ids(cli, *target, "--drafter", "none")
        assert ids(cli, *target, "--drafter", "kangaroo", "--policy", "fixed") == plain
    assert MADE_FOR_BASE not in caplog.text
    out = tmp_path / "draft"
    cli("train draft --layers 1 --from-layers 0", *short, "--out", out)
    assert ids(cli, *target, "--draft", out, "--drafter", "draft-model", "--policy", "fixed") == plain


def test_quantise_writes_the_merged_model(target: list[str], tmp_path: Path, cli: Cli) -> None:
    weights = []
    for name, given in (("int8", target), ("base", target[:2])):
        cli("quantise --weights int8 --dtype float32", *given, "--out", tmp_path / name)
        file = load_file(tmp_path / name / "model.safetensors")
        weights.append(file["model.layers.0.self_attn.q_proj.weight_packed"])
    assert not torch.equal(*weights)
    assert (tmp_path / "int8" / "tokenizer.json").is_file()
    assert ids(cli, "--model", tmp_path / "int8") == ids(cli, *target, "--weights", "int8")


def test_bench_names_the_lora(
    target: list[str], loras: tuple[Path, Path], tmp_path: Path, quick_bench: None, cli: Cli
) -> None:
    work = tmp_path / "words.jsonl"
    work.write_text('{"prompt": "def accept(draft, p):"}\n')
    command = ["bench --new-tokens 4 --repeats 1 --device cpu", *target, "--workload", work, "--methods"]
    assert cli.document(*command, "lookup")["models"][0]["name"] == f"big + {loras[0].name}"
    assert "transformers takes no LoRA here" in cli.refused(*command, "transformers")


def test_verify_names_the_lora(target: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["--tokens", "4", "--samples", "20", "--seed", "3", "--drafter", "lookup", "--device", "cpu"]
    assert main(["verify", *target, "def accept", "Viktor", *quick]) in (0, 3)
    assert f"Target {target[1]} + {target[3]}, float32 on cpu" in " ".join(capsys.readouterr().out.split())
