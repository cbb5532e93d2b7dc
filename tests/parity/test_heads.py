"""The draft logits of published heads, in recorded rounds, against a plain float64 definition of each format."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foredraft
from foredraft import LLM, SamplingParams
from foredraft.bench.measurement import measure_costs
from foredraft.decode.policy import Fixed
from foredraft.drafters.head_kinds import head_kind
from foredraft.drafters.heads.block_configs import read_block
from foredraft.drafters.heads.configs import read_eagle3
from foredraft.drafters.heads.record import draft_ids
from tests.support.checkpoints import reference_model
from tests.support.coded import loading_by
from tests.support.head_logits import definition_of
from tests.support.heads import BY_DRAFTER, FORMATS, LAYERS, save_head
from tests.support.loaded import engine_of

V = 11
KEYS: dict[str, Any] = {
    "vocab_size": V, "num_hidden_layers": LAYERS, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
PROMPTS = [[3, 1, 4, 1, 5], [2, 7], [1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4, 5]]
BY = ("operators", "kernels")


def load(folder: Path, format: str, by: str = "kernels", dtype: str = "float32", **more: Any) -> LLM:
    """Load a target and a head in `folder`; each is written where it is missing."""
    if not (folder / "target").exists():
        reference_model(**KEYS).save_pretrained(folder / "target")
    if not (folder / format).exists():
        save_head(folder / format, format, V)
    with loading_by(by):
        return foredraft.load(
            folder / "target", draft=folder / format, drafter=FORMATS[format]["of"], policy="fixed",
            dtype=dtype, device="cpu", **{"max_batch": 4, "max_length": 512, **more},
        )  # fmt: skip


class Recorder:
    """Notes the logits of every draft, with the text before it and the tokens that it drew."""

    def __init__(self, llm: LLM) -> None:
        self.drafts: list[tuple[list[int], list[int], list[Tensor]]] = []
        drafter: Any = engine_of(llm).drafters[str(llm.default_drafter)]
        self.engine = engine_of(llm)
        self.open: dict[int, tuple[list[int], list[int], list[Tensor]]] = {}
        step = type(drafter).step

        def noted(tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Any) -> Tensor:
            logits = step(drafter, tokens, starts, counts, idle, at)
            for row, sequence in enumerate(self.engine.rows.sequences):
                if idle[row]:
                    continue
                if starts[row] == len(sequence.tokens) - 1:  # a draft begins
                    self.open[row] = list(sequence.tokens), [], []
                    self.drafts.append(self.open[row])
                else:
                    self.open[row][1].append(int(tokens[row, 0]))
                self.open[row][2].append(logits[row].clone())
            return logits

        drafter.step = noted
        drafter.fused_draft = lambda _: None  # each step is seen


@functools.cache
def model() -> Any:
    return reference_model(**KEYS)


def check_parity(format: str, by: str = "kernels", **head: Any) -> None:
    """Check every draft of texts that are decoded together."""
    form, define = FORMATS[format], definition_of(format)
    block = format.startswith("block")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if head:
            save_head(folder / format, format, V, **head)
        llm = load(folder, format, by)
        most = engine_of(llm).drafters[form["of"]].max_draft
        # of a block: a policy that would draft more than it holds, and a text of one token
        draft, prompts = (8, [*PROMPTS, [5]]) if block else (4, PROMPTS)
        engine_of(llm).policy = Fixed(draft)
        record = Recorder(llm)
        params = SamplingParams(
            max_new_tokens=16, temperature=1.0, seed=5, acceptance="speculative", ignore_eos=True
        )
        outputs = llm.generate(prompts, params)
        assert any(0 < output.stats.accepted < output.stats.drafted for output in outputs)
        for text, drafted, logits in record.drafts:
            want = define(folder / format, model(), text, drafted).float()[: len(logits)]
            torch.testing.assert_close(torch.stack(logits), want, rtol=2e-3, atol=2e-3)
            assert want[0].isfinite().sum() == form.get("draftable", form.get("draft_vocab", V))
    lengths = [len(logits) for _, _, logits in record.drafts]
    assert len(lengths) > 12 and (not block or lengths.count(most) > 12)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("format", FORMATS)
def test_draft_logits_are_those_of_the_definition(format: str, by: str) -> None:
    check_parity(format, by)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("format", FORMATS)
def test_the_draft_step_of_every_format_can_be_timed(tmp_path: Path, format: str, by: str) -> None:
    """Else policy `auto` assumes its costs for ever."""
    with load(tmp_path, format, by) as llm:
        assert FORMATS[format]["of"] in measure_costs(llm.loaded, 1, 16, 2, repeats=1).drafting


def test_every_format_is_found_and_read(tmp_path: Path) -> None:
    found = {}
    for format in BY_DRAFTER["eagle3"]:
        folder = save_head(tmp_path / format, format, V)
        assert head_kind(folder) == "eagle3"
        found[format] = read_eagle3(folder).record
    assert found["speculators"].planned == 4 and found["speculators"].verifier == "some/target"
    assert not found["whole"].own_head and found["whole"].draft_vocab_size == V
    assert found["speculators"].own_embedding and not found["safeailab"].own_embedding


def test_every_format_of_a_block_is_found_and_read(tmp_path: Path) -> None:
    found = {}
    for drafter, format in [(name, each) for name in ("dflash", "dspark") for each in BY_DRAFTER[name]]:
        folder = save_head(tmp_path / format, format, V)
        assert head_kind(folder) == drafter
        found[format.removeprefix("block ")] = read_block(folder).record
    assert {name: record.drafts for name, record in found.items()} == {
        "z-lab": 3, "scaled": 3, "speculators": 3, "dflash 2": 3, "dflash 2 of speculators": 3,
        "windows of modelopt": 3, "anchored": 4, "deepspec": 4, "modelopt": 4, "specforge": 4, "gated": 4,
        "rnn": 3,
    }  # fmt: skip
    assert found["speculators"].planned == 3 and found["speculators"].verifier == "some/target"
    assert found["scaled"].target_layers == LAYERS


def test_absolute_ids_are_told_by_the_other_map(tmp_path: Path) -> None:
    ids = torch.tensor([1, 4, 5, 9])
    marks = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    for d2t in (ids, ids - torch.arange(4)):
        found = draft_ids("a head", 4, V, d2t, marks)
        assert found is not None and found.tolist() == ids.tolist()
    with pytest.raises(foredraft.CheckpointError, match="d2t and t2d name different token ids"):
        draft_ids("a head", 4, V, ids, marks.roll(1))
    with pytest.raises(foredraft.CheckpointError, match="does not give 4 different token ids below 11"):
        draft_ids("a head", 4, V, torch.tensor([0, -1, 0, 0]), None)
