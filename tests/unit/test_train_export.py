"""A distilled draft model in other programs: transformers and llama.cpp load it and draft with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foredraft.errors import ConfigError
from foredraft.train import trainers
from foredraft.train.training_options import DraftOptions
from tests.support.checkpoints import FAMILIES, HYBRIDS, TEXT, save_checkpoint, save_variant
from tests.support.variants_llama_like import FAMILIES as LLAMA_LIKE
from tests.support.variants_llama_like import GEMMA4_FAMILIES as GEMMA4
from tests.support.variants_norms import FAMILIES as NORMS

PROMPT = [1, 5, 9, 11, 20]
NEW = 12
# Layers of windows and without, so that the draft model's have to be named one by one.
FROM_LAYERS = {
    "llama": (0, 2),
    "mistral": (0, 2),
    "qwen2": (0, 2),
    "qwen3": (0, 2),
    "gemma2": (1, 2),
    "gemma3": (0, 5),
    **dict.fromkeys(LLAMA_LIKE, (0, 2)),
    "smollm3": (1, 3),  # the second one is not rotated
    **{name: (0, 3) if keys.get("num_hidden_layers") == 5 else (0, 2) for name, (*_, keys) in NORMS.items()},
    "opt-sums-normed": (2, 0),  # projected; the last norm is one of the last layer
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "data.txt"
    file.write_text(TEXT * 30)
    return file


def test_a_family_with_layers_of_several_shapes_is_refused(data: Path, tmp_path: Path) -> None:
    assert FAMILIES.keys() - FROM_LAYERS.keys() == GEMMA4.keys() | HYBRIDS
    target = save_checkpoint(tmp_path / "target", "gemma4", tokenizer=True)
    options = DraftOptions(data=(data,), out=tmp_path / "draft", work=tmp_path / "work", layers=2)
    with pytest.raises(ConfigError, match="draft model of the form of a Gemma4ForCausalLM"):
        trainers.train(options, str(target), device="cpu")


def distilled(family: str, data: Path, folder: Path, **config: Any) -> tuple[Path, Path]:
    keys = {"tie_word_embeddings": False, **config}
    target = save_variant(folder / "target", family, tokenizer=True, **keys)
    options = DraftOptions(
        data=(data,), out=folder / "draft", work=folder / "work", layers=2, from_layers=FROM_LAYERS[family], steps=4,
        step_tokens=128, group_tokens=128, length=32, validate_every=4, warm_up=2,
    )  # fmt: skip
    trainers.train(options, str(target), device="cpu")
    return target, folder / "draft"


@pytest.mark.parametrize("family", FROM_LAYERS)
def test_transformers_drafts_with_it(family: str, data: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folders = distilled(family, data, tmp_path)
    target, draft = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in folders)
    assert draft.config.num_hidden_layers == 2
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in folders]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    calls = []
    draft.register_forward_hook(lambda *_: calls.append(1))
    ids = torch.tensor([PROMPT])
    options = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(ids),
    }
    plain = target.generate(ids, **options)
    assert torch.equal(target.generate(ids, assistant_model=draft, **options), plain)
    assert len(calls) >= 2, "it was asked for drafts"


def test_llama_cpp_drafts_with_it(data: Path, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    from llama_cpp.llama_speculative import LlamaDraftModel

    from foredraft.bench.llama_cpp import write_gguf

    target, draft = distilled("llama", data, tmp_path)
    for folder in (target, draft):
        write_gguf(folder, folder / "model.gguf", torch.float32, vocabulary=True)
    options = {"n_ctx": 128, "verbose": False, "n_threads": 1, "logits_all": True}

    class Draft(LlamaDraftModel):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.model = llama_cpp.Llama(str(draft / "model.gguf"), **options)
            self.asked = 0

        def __call__(self, input_ids: Any, /, **_: Any) -> Any:
            self.asked += 1
            drafted = self.model.generate(input_ids.tolist(), temp=0.0)
            return np.array([next(drafted) for _ in range(3)], dtype=np.intc)

    def text(model: Any) -> list[int]:
        tokens = model.generate(list(PROMPT), temp=0.0)
        return [next(tokens) for _ in range(NEW)]

    plain = text(llama_cpp.Llama(str(target / "model.gguf"), **options))
    drafting = Draft()
    assert text(llama_cpp.Llama(str(target / "model.gguf"), draft_model=drafting, **options)) == plain
    assert drafting.asked >= 2
