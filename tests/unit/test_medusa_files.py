"""Folders of Medusa heads: what is read in them, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
from foredraft.drafters.heads.medusa_files import is_medusa, read_medusa
from tests.parity.test_heads import KEYS, V
from tests.support.checkpoints import reference_model
from tests.support.medusa import SPELLINGS, save_medusa
from tests.support.refused_heads import check_pickle, check_refused

BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "hidden size": ("fasterdecoding", {"size": 32}, "is for a target of hidden size 32, but the target's is 64"),
    "vocabulary": ("fasterdecoding", {"words": V + 2, "tensors": {"token_map": None}},
                   "is for a target of vocabulary 13 (tensor 0.1.weight), but the target's is 11"),
    "words": ("vllm", {"tensors": {"token_map": torch.tensor([1, 1, 2, 3, 4, 5])}},
              "token_map does not give 6 different token ids below 11"),
    "a shape": ("fasterdecoding", {"tensors": {"2.0.linear.weight": torch.ones(64, 32)}},
                "tensor 2.0.linear.weight has shape [64, 32], but the head 0.1.weight implies [64, 64]"),
    "a head": ("fasterdecoding", {"tensors": {"1.1.weight": None}}, "lacks tensors of head 1 of 4"),
    "a block": ("vllm", {"tensors": {"blocks.1.layers.0.weight": None}}, "lacks tensors of head 1 of 3"),
    "a mark": ("fasterdecoding", {"tensors": {"fc.weight": torch.ones(2)}},
               "tensor 'fc.weight' is not part of Medusa heads"),
    "codes": ("fasterdecoding", {"tensors": {"0.1.weight": torch.ones(V, 64, dtype=torch.int8)}},
              "tensor 0.1.weight is stored as I8"),
    "a factor": ("vllm", {"config": {"logit_scale": 0.5}}, "logit_scale = 0.5 is not supported"),
    "nothing": ("vllm", {"tensors": dict.fromkeys(
        [f"lm_heads.{n}.weight" for n in range(3)]
        + [f"blocks.{n}.layers.{b}.weight" for n in range(3) for b in range(2)])},
        "has no Medusa heads"),
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    reference_model(**KEYS).save_pretrained(folder)
    return folder


def test_the_tensors_tell_how_many_heads_there_are(tmp_path: Path) -> None:
    for spelling, form in SPELLINGS.items():
        folder = save_medusa(
            tmp_path / spelling, spelling, V, config={"base_model_name_or_path": "some/target"}
        )
        assert is_medusa(folder)
        files = read_medusa(folder)
        assert len(files.heads) == form["heads"] and files.verifier == "some/target"
        assert {len(head.blocks) for head in files.heads} == {form["blocks"]}
        assert files.words == form.get("words")


@pytest.mark.parametrize("name", BAD)
def test_bad_heads_are_refused_in_one_line(target: Path, tmp_path: Path, name: str) -> None:
    spelling, given, message = BAD[name]
    folder = save_medusa(tmp_path / "heads", spelling, V, **given)
    check_refused(target, folder, message, "medusa")


def test_a_pickle_is_refused_and_never_read(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "heads"
    folder.mkdir()
    check_pickle(target, folder / "medusa_lm_head.pt", "convert it to")


def test_heads_find_their_drafter(target: Path, tmp_path: Path) -> None:
    with pytest.raises(foredraft.ConfigError, match="is a whole model, and no Medusa heads"):
        foredraft.load(target, draft=target, drafter="medusa", device="cpu")
    folder = save_medusa(tmp_path / "heads", "vllm", V)
    with pytest.raises(foredraft.ConfigError, match="is what drafter medusa reads"):
        foredraft.load(target, draft=folder, drafter="eagle3", device="cpu")
    llm = foredraft.load(target, draft=folder, policy="fixed", device="cpu", max_batch=1, max_length=64)
    assert llm.default_drafter == "medusa"
    [output] = llm.generate([[1, 2, 3]], foredraft.SamplingParams(max_new_tokens=8, temperature=0))
    assert output.stats.drafted > 0
