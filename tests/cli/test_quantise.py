"""`foredraft quantise`: a checkpoint of few bits that stands for what quantising while loading computes with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foredraft
from foredraft import SamplingParams
from foredraft.cli import main
from foredraft.model.gguf.tensors import RECORD
from foredraft.model.hub import resolve
from foredraft.model.layers import RowSource
from foredraft.model.quantisation import quantise
from foredraft.model.runner.native import NativeCodes
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import load_decoder
from foredraft.quantise import writing
from tests.support.checkpoints import TEXT, save_checkpoint

KEYS = {"hidden_size": 64, "intermediate_size": 96}
FLOAT32 = "--dtype", "float32"
GREEDY = SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module", params=["tied", "untied", "F16", "BF16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, or a GGUF file of the type that is named."""
    folder, tied = tmp_path_factory.mktemp("model") / "big", request.param == "tied"
    save_checkpoint(folder, "llama", tokenizer=True, tie_word_embeddings=tied, **KEYS)
    if not request.param.endswith("F16"):
        return folder
    pytest.importorskip("gguf")
    from tests.support.gguf_files import write_gguf

    return write_gguf(folder, folder.with_suffix(".gguf"), request.param)


def rows_of(embedding: Tensor | RowSource) -> Tensor:
    return embedding if isinstance(embedding, Tensor) else embedding.rows(torch.arange(embedding.shape[0]))


def original_is_tied(folder: Path) -> bool:
    return ModelSpec.from_folder(folder).tied


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any, str]:
    code = main(["quantise", *map(str, words)])
    told = capsys.readouterr()
    return code, told.out, told.err


@pytest.mark.parametrize(("weights", "bits"), [("int4", 4), ("int8", 8)])
@pytest.mark.parametrize("most", [writing.MOST, 20_000], ids=["one file", "several"])
def test_the_checkpoint_stands_for_the_codes(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    weights: str,
    bits: int,
    most: int,
) -> None:
    monkeypatch.setattr(writing, "MOST", most)
    out = tmp_path / "few"
    code, told, _ = run(capsys, "--model", model, "--weights", weights, "--out", out, *FLOAT32, "--json")
    assert code == 0 and json.loads(told)["weights"] == weights
    assert (len(list(out.glob("*.safetensors"))) == 1) is (most > 20_000)
    assert not (out / RECORD).exists(), "the folder has weights of its own"
    folder = resolve(model)
    found, original = load_decoder(out), load_decoder(folder, dtype=torch.float32)
    for one, other in zip(found.products, original.products, strict=True):
        assert torch.equal(one.dense(), quantise(other.dense(), bits).expand(torch.float32))
    embedding = quantise(original.embedding, bits).expand(torch.float32)
    assert torch.equal(found.embedding, embedding)
    with foredraft.load(out, device="cpu", drafter="lookup", max_length=64) as llm:
        said = llm.generate("the", GREEDY)[0].token_ids
        assert said == llm.generate("the", GREEDY, drafter="none")[0].token_ids
    loaded = [
        load_decoder(out, native=True),
        load_decoder(folder, dtype=torch.float32, native=True, bits=bits),
    ]
    for one, other in zip(*(decoder.products for decoder in loaded), strict=True):
        assert isinstance(one, NativeCodes) and isinstance(other, NativeCodes)
        x = torch.randn(5, one.shape[1])
        assert one.coding == other.coding and torch.equal(one(x), other(x))
    for decoder in loaded:
        assert torch.equal(rows_of(decoder.embedding), embedding)
    assert isinstance(loaded[1].embedding, NativeCodes)
    assert isinstance(loaded[0].embedding, NativeCodes) is original_is_tied(folder)


def test_the_card_says_what_was_lost(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 3)
    lost = {}
    for weights in ("int4", "int8"):
        words = (
            "--model",
            model,
            "--weights",
            weights,
            "--out",
            tmp_path / weights,
            "--data",
            text,
            "--json",
        )
        code, told, _ = run(capsys, *words)
        assert code == 0
        lost[weights] = json.loads(told)["quality"]
        assert f"{lost[weights]['same_top']:.1%}" in (tmp_path / weights / "README.md").read_text()
    assert 0 < lost["int8"]["kl"] < lost["int4"]["kl"] < lost["int4"]["kl_999"]
    assert 0 < lost["int4"]["embedding_kl"] < lost["int4"]["kl"]
    assert lost["int8"]["embedding_kl"] < lost["int4"]["embedding_kl"]
    assert lost["int4"]["same_top"] <= lost["int8"]["same_top"] <= 1
    assert lost["int8"]["perplexity_ratio"] == pytest.approx(1, abs=0.01)


def test_other_programs_load_it(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("accelerate")
    import transformers

    out = tmp_path / "few"
    assert run(capsys, "--model", model, "--weights", "int4", "--out", out, *FLOAT32)[0] == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        want = theirs(ids).logits
    with foredraft.load(out, device="cpu", drafter="none", max_length=64) as llm:
        runner = llm.loaded.runner
        found = runner.forward(runner.new_cache(1, 64), ids, [0]).logits
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_honoured_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter.txt").write_text("dear")
    few = tmp_path / "few"
    assert run(capsys, "--model", model, "--out", few)[0] == 0
    for words, says in (
        (("--model", model, "--out", mine), "which holds other files"),
        (("--model", few, "--out", tmp_path / "again"), "is quantised already"),
        (("--model", model, "--out", tmp_path / "x", "--data", tmp_path / "none.txt"), "none.txt"),
        (("--model", tmp_path / "nowhere", "--out", tmp_path / "x"), "neither a folder nor a hub name"),
        (("--model", model, "--out", few), "which holds other files"),
    ):
        code, _, told = run(capsys, *words)
        assert code == 2 and says in told and told.count("\n") == 1, told
    assert (mine / "letter.txt").read_text() == "dear" and not (tmp_path / "x").exists()


def test_a_copy_has_the_parameters_of_the_original(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its head is a coded copy of the embedding, where that was tied, and no further weights."""
    assert run(capsys, "--model", model, "--weights", "int4", "--out", tmp_path / "few", *FLOAT32)[0] == 0
    counts = []
    for name in (model, tmp_path / "few"):
        assert main(["info", str(name), "--json", "--device", "cpu"]) == 0
        counts.append(json.loads(capsys.readouterr().out)["models"][0]["parameters"])
    assert counts[0] == counts[1]


def test_data_is_what_tune_takes_as_prompts(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text(
        f'{{"prompt": {json.dumps(TEXT[:80])}}}\n{{"prompt": {json.dumps(TEXT[:40])}, "id": 1}}\n'
    )
    code, told, errors = run(
        capsys, "--model", model, "--out", tmp_path / "few", "--data", data, *FLOAT32, "--json"
    )
    assert code == 0, errors
    assert json.loads(told)["quality"]["tokens"] > 0
