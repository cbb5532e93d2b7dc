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
from foredraft.model.layers import RowSource
from foredraft.model.locate import resolve
from foredraft.model.quantisation.codes import quantise
from foredraft.model.runner.native.products import NativeCodes
from foredraft.model.weights import load_decoder
from foredraft.quantise import command
from tests.cli.conftest import Cli
from tests.support.checkpoints import TEXT, save_checkpoint

KEYS = {"hidden_size": 64, "intermediate_size": 96}
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


def quantise_to(folder: Path, cli: Cli, model: Path, *words: object) -> dict[str, Any]:
    return cli.document("quantise --dtype float32", "--model", model, "--out", folder, *words)


@pytest.mark.parametrize(("weights", "bits"), [("int4", 4), ("int8", 8)])
@pytest.mark.parametrize("most", [command.MOST, 20_000], ids=["one file", "several"])
def test_the_checkpoint_stands_for_the_codes(
    model: Path, tmp_path: Path, weights: str, bits: int, most: int, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setattr(command, "MOST", most)
    out = tmp_path / "few"
    assert quantise_to(out, cli, model, "--weights", weights)["weights"] == weights
    assert (len(list(out.glob("*.safetensors"))) == 1) is (most > 20_000)
    folder = resolve(model)
    found, original = load_decoder(out), load_decoder(folder, dtype=torch.float32)
    for one, other in zip(found.products, original.products, strict=True):
        assert torch.equal(one.dense(), quantise(other.dense(), bits).expand(torch.float32))
    embedding = quantise(original.embedding, bits).expand(torch.float32)
    assert torch.equal(found.embedding, embedding)
    with foredraft.load(out, device="cpu", drafter="lookup", max_length=64) as llm:
        said = llm.generate("the", GREEDY)[0].token_ids
        assert said == llm.generate("the", GREEDY, drafter="none")[0].token_ids
    coded = load_decoder(folder, dtype=torch.float32, native=True, bits=bits)
    loaded = [load_decoder(out, native=True), coded]
    for one, other in zip(*(decoder.products for decoder in loaded), strict=True):
        assert isinstance(one, NativeCodes) and isinstance(other, NativeCodes)
        x = torch.randn(5, one.shape[1])
        assert one.code_format == other.code_format and torch.equal(one(x), other(x))
    for decoder in loaded:
        assert torch.equal(rows_of(decoder.embedding), embedding)
    assert isinstance(loaded[1].embedding, NativeCodes)
    assert isinstance(loaded[0].embedding, NativeCodes) is folder.spec.tied


@pytest.mark.parametrize("model", ["tied", "BF16"], indirect=True)
def test_the_card_says_what_was_lost(model: Path, tmp_path: Path, cli: Cli) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 3)
    lost = {}
    for weights in ("int4", "int8"):
        words = ["--weights", weights, "--data", text]
        lost[weights] = quantise_to(tmp_path / weights, cli, model, *words)["quality"]
        assert f"{lost[weights]['same_top']:.1%}" in (tmp_path / weights / "README.md").read_text()
    assert 0 < lost["int8"]["kl"] < lost["int4"]["kl"] < lost["int4"]["kl_999"]
    assert 0 < lost["int4"]["embedding_kl"] < lost["int4"]["kl"]
    assert lost["int8"]["embedding_kl"] < lost["int4"]["embedding_kl"]
    assert lost["int4"]["same_top"] <= lost["int8"]["same_top"] <= 1
    assert lost["int8"]["perplexity_ratio"] == pytest.approx(1, abs=0.01)


def test_other_programs_load_it(model: Path, tmp_path: Path, cli: Cli) -> None:
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("accelerate")
    import transformers

    out = tmp_path / "few"
    quantise_to(out, cli, model, "--weights", "int4")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        want = theirs(ids).logits
    with foredraft.load(out, device="cpu", drafter="none", max_length=64) as llm:
        runner = llm.loaded.runner
        found = runner.forward(runner.new_cache(1, 64), ids, [0]).logits
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", ["tied"], indirect=True)
def test_what_cannot_be_honoured_is_refused(model: Path, tmp_path: Path, cli: Cli) -> None:
    mine, few, other = (tmp_path / name for name in ("mine", "few", "x"))
    mine.mkdir()
    (mine / "letter.txt").write_text("dear")
    quantise_to(few, cli, model)
    for words, says in (
        ([model, "--out", mine], "which holds other files"),
        ([few, "--out", tmp_path / "again"], "is quantised already"),
        ([model, "--out", other, "--data", tmp_path / "none.txt"], "none.txt"),
        ([model, "--out", few], "which holds other files"),
    ):
        assert says in cli.refused("quantise --model", *words)
    assert (mine / "letter.txt").read_text() == "dear" and not other.exists()


def test_a_copy_has_the_parameters_of_the_original(model: Path, tmp_path: Path, cli: Cli) -> None:
    """A head that is a coded copy of the embedding counts as none; the data is what `tune` takes as prompts."""
    few, data = tmp_path / "few", tmp_path / "prompts.jsonl"
    prompts = [{"prompt": TEXT[:80]}, {"prompt": TEXT[:40], "id": 1}]
    data.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    assert quantise_to(few, cli, model, "--weights", "int4", "--data", data)["quality"]["tokens"] > 0
    original, copy = (cli.document("info --device cpu", name)["models"][0] for name in (model, few))
    assert copy["parameters"] == original["parameters"]
