"""The draft logits of DFlash and DSpark heads, in recorded rounds, against a plain float64 definition."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
from foredraft import LLM, SamplingParams, loading
from foredraft.decode.policy import Fixed
from foredraft.drafters.heads.block_files import is_dflash, is_dspark, read_block
from foredraft.drafters.heads.eagle3_files import is_eagle3
from tests.parity.test_heads import KEYS, PROMPTS, Recorder, V, model
from tests.support.blocks import SPELLINGS, defined_logits, save_block
from tests.support.blocks_gguf import SPELLINGS as GGUF
from tests.support.blocks_gguf import defined_gguf, save_block_gguf
from tests.support.checkpoints import reference_model
from tests.support.heads import LAYERS
from tests.support.loaded import engine_of
from tests.support.refused_heads import check_refused


def drafter_for(spelling: str) -> str:
    """Return the name of the drafter that reads a spelling."""
    of: str = SPELLINGS[GGUF[spelling][0] if spelling in GGUF else spelling]["of"]
    return of


def load(folder: Path, spelling: str, by: str = "kernels", dtype: str = "float32", **head: Any) -> LLM:
    """A target with a head of this spelling."""
    if not (folder / "target").exists():
        reference_model(**KEYS).save_pretrained(folder / "target")
    if not (folder / spelling).exists():
        save = save_block_gguf if spelling in GGUF else save_block
        save(folder / spelling, spelling, V, **head)
    with pytest.MonkeyPatch.context() as patch:
        if by == "operators":
            patch.setattr(loading.runners, "unserved_because", lambda *_: "for a test")
        return foredraft.load(
            folder / "target", draft=folder / spelling, drafter=drafter_for(spelling), policy="fixed",
            dtype=dtype, device="cpu", max_batch=4, max_length=512,
        )  # fmt: skip


def check_parity(spelling: str, by: str = "kernels", **head: Any) -> None:
    """Check every draft of three texts that are decoded together."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        llm = load(folder, spelling, by, **head)
        engine_of(llm).policy = Fixed(8)  # more than a block holds
        record = Recorder(llm)
        params = SamplingParams(
            max_new_tokens=16, temperature=1.0, seed=5, acceptance="speculative", ignore_eos=True
        )
        outputs = llm.generate([*PROMPTS, [5]], params)
        assert any(0 < output.stats.accepted < output.stats.drafted for output in outputs)
        whole = 0
        for text, drafted, logits in record.drafts:
            define = defined_gguf if spelling in GGUF else defined_logits
            want = define(folder / spelling, model(), text, drafted).float()[: len(logits)]
            whole += len(logits) == engine_of(llm).drafters[drafter_for(spelling)].max_draft
            torch.testing.assert_close(torch.stack(logits), want, rtol=2e-3, atol=2e-3)
            plain = GGUF[spelling][0] if spelling in GGUF else spelling
            assert want[0].isfinite().sum() == SPELLINGS[plain].get("words", V)
        assert whole > 12


@pytest.mark.parametrize(
    ("spelling", "by"),
    [*((spelling, "kernels") for spelling in (*SPELLINGS, *GGUF)), ("speculators", "operators")],
)
def test_draft_logits_are_those_of_the_definition(spelling: str, by: str) -> None:
    check_parity(spelling, by)


def test_the_record_is_the_same_in_every_spelling(tmp_path: Path) -> None:
    found = {}
    for spelling, form in SPELLINGS.items():
        folder = save_block(tmp_path / spelling, spelling, V)
        assert (is_dflash(folder), is_dspark(folder)) == (form["of"] == "dflash", form["of"] == "dspark")
        assert not is_eagle3(folder)
        found[spelling] = read_block(folder).record
    assert [found[each].taps for each in ("z-lab", "scaled", "speculators")] == [(1, 3, 6), (2, 5), (1, 3, 6)]
    assert found["deepspec"].taps == (0, 3, 5)
    assert {name: record.drafts for name, record in found.items()} == {
        "z-lab": 3, "scaled": 3, "speculators": 3, "anchored": 4, "deepspec": 4, "gated": 4, "rnn": 3,
    }  # fmt: skip
    assert found["speculators"].planned == 3 and found["speculators"].verifier == "some/target"
    assert found["scaled"].target_layers == LAYERS


FC = torch.zeros(64, 3 * 64)
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "hidden size": ("speculators", {"target_size": 32, "config": {"target_hidden_size": 32}},
                    "for a target of hidden size 32, but the target's is 64"),
    "depth": ("deepspec", {"config": {"num_target_layers": 9}},
              "is for a target of 9 layers, but the target has 7"),
    "taps beyond": ("speculators", {"config": {"aux_hidden_state_layer_ids": [1, 3, 8]}},
                    "reads the target after layer 8, but the target has 7 layers"),
    "the normed state": ("z-lab", {"section": {"target_layer_ids": [0, 2, 6]}},
                         "reads the target's last state after its norm"),
    "taps twice": ("z-lab", {"section": {"target_layer_ids": [0, 2, 2]}}, "must be a rising list"),
    "a lying count of taps": ("z-lab", {"section": {"target_layer_ids": [0, 2]}, "tensors": {"fc.weight": FC}},
                              "tensor fc.weight has shape [64, 192], but config.json implies [64, 128]"),
    "no taps": ("z-lab", {"section": {"target_layer_ids": None}}, "target_layer_ids is missing"),
    "a block of the anchor alone": ("z-lab", {"config": {"block_size": 1}}, "block_size is 1"),
    "no block": ("z-lab", {"config": {"block_size": None}}, "block_size is missing"),
    "a block past the cache": ("z-lab", {"config": {"block_size": 4096}}, "block_size is 4096"),
    "mask token beyond": ("z-lab", {"section": {"mask_token_id": V}}, "mask_token_id is 11"),
    "no mask token": ("z-lab", {"section": {"mask_token_id": None}}, "mask_token_id is missing"),
    "a lying rank": ("gated", {"tensors": {"markov_head.markov_w1.weight": torch.zeros(V, 6)}},
                     "but config.json implies [11, 5]"),
    "no bias": ("gated", {"config": {"markov_rank": 0}, "tensors": {"markov_head.markov_w1.weight": FC}}, "is not part of a head"),
    "layers": ("z-lab", {"config": {"num_hidden_layers": 3}}, "lacks tensor layers.2."),
    "an unknown key": ("z-lab", {"section": {"mystery": 1}}, "mystery = 1 is not known"),
    "DFlash 2": ("z-lab", {"config": {"architectures": ["DFlash2DraftModel"]}}, "a DFlash 2 head"),
    "another body": ("z-lab", {"config": {"model_type": "gemma2"}}, "model_type 'gemma2' is not supported"),
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    reference_model(**KEYS).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", BAD)
def test_a_bad_head_is_refused_in_one_line(target: Path, tmp_path: Path, name: str) -> None:
    spelling, given, message = BAD[name]
    folder = save_block(tmp_path / "head", spelling, V, **given)
    check_refused(target, folder, message)


def test_heads_of_other_kinds_and_vocabularies_are_refused(target: Path, tmp_path: Path) -> None:
    larger = save_block(tmp_path / "larger", "z-lab", V + 2)
    with pytest.raises(foredraft.CheckpointError, match="of vocabulary 13, but the target's is 11"):
        foredraft.load(target, draft=larger, device="cpu")
    with pytest.raises(foredraft.ConfigError, match="is a whole model, and no DFlash head"):
        foredraft.load(target, draft=target, drafter="dflash", device="cpu")
    folder = save_block(tmp_path / "head", "gated", V)
    with pytest.raises(foredraft.ConfigError, match="is what drafter dspark reads"):
        foredraft.load(target, draft=folder, drafter="dflash", device="cpu")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(foredraft.CheckpointError, match="is a pickle.*convert it to model.safetensors"):
        foredraft.load(target, draft=folder, drafter="dspark", device="cpu")


BAD_FILES: dict[str, tuple[dict[str, Any], str]] = {
    "taps beyond": ({"keys": {"target_layers": [1, 3, 8]}}, "reads the target after layer 8, but the target has 7"),
    "DFlash 2": ({"keys": {"selector_rank": 16}}, "is a DFlash 2 head"),
    "an unknown key": ({"keys": {"mystery": 1}}, "mystery = 1 is not known"),
    "a lying block": ({"keys": {"block_size": 1}}, "block_size is 1"),
    "a lying count of taps": ({"keys": {"target_layers": [1, 3]}}, "tensor fc.weight has shape [64, 192]"),
    "an unknown tensor": (
        {"tensors": lambda tensors: tensors.update({"blk.0.attn_sinks.weight": tensors["output_norm.weight"]})},
        "blk.0.attn_sinks.weight is not part of a head",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_in_one_line(target: Path, tmp_path: Path, name: str) -> None:
    given, message = BAD_FILES[name]
    file = save_block_gguf(tmp_path / "head.gguf", "gguf", V, **given)
    check_refused(target, file, message)
