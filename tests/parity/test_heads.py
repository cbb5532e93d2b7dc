"""The draft logits of published heads, in recorded rounds, against a plain float64 definition of each spelling."""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foredraft
from foredraft import LLM, SamplingParams, loading
from foredraft.decode.policy import Fixed
from foredraft.drafters.heads.eagle3_files import is_eagle3, read_eagle3
from tests.support.checkpoints import reference_model
from tests.support.heads import LAYERS, SPELLINGS, save_head
from tests.support.loaded import engine_of
from tests.support.refused_heads import check_pickle, check_refused
from tests.support.spelled_heads import SPELLED

V = 11
KEYS: dict[str, Any] = {
    "vocab_size": V, "num_hidden_layers": LAYERS, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
PROMPTS = [[3, 1, 4, 1, 5], [2, 7], [1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4, 5]]
BY = ("operators", "kernels")


def load(folder: Path, spelling: str, by: str, dtype: str = "float32", **more: Any) -> LLM:
    """A target with a head of this spelling."""
    spelled = SPELLED[spelling]
    if not (folder / "target").exists():
        reference_model(**KEYS).save_pretrained(folder / "target")
    if not (folder / spelling).exists():
        spelled.save(folder / spelling, spelling, V)
    with pytest.MonkeyPatch.context() as patch:
        if by == "operators":
            patch.setattr(loading.runners, "unserved_because", lambda *_: "for a test")
        return foredraft.load(
            folder / "target", draft=folder / spelling, drafter=spelled.drafter, policy="fixed", dtype=dtype,
            device="cpu", **{"max_batch": 4, "max_length": 512, **more},
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


def check_parity(spelling: str, by: str = "kernels", **head: Any) -> None:
    """Check every draft of three texts that are decoded together."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if head:
            SPELLED[spelling].save(folder / spelling, spelling, V, **head)
        llm = load(folder, spelling, by)
        engine_of(llm).policy = Fixed(4)
        record = Recorder(llm)
        params = SamplingParams(
            max_new_tokens=14, temperature=1.0, seed=5, acceptance="speculative", ignore_eos=True
        )
        outputs = llm.generate(PROMPTS, params)
        assert any(0 < output.stats.accepted < output.stats.drafted for output in outputs)
        assert len(record.drafts) > 12
        for text, drafted, logits in record.drafts:
            want = SPELLED[spelling].define(folder / spelling, model(), text, drafted).float()
            assert len(logits) == len(want)
            torch.testing.assert_close(torch.stack(logits), want, rtol=2e-3, atol=2e-3)
            words = want[0].isfinite().sum()
            assert words == (SPELLED[spelling].words or V)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("spelling", SPELLED)
def test_draft_logits_are_those_of_the_definition(spelling: str, by: str) -> None:
    check_parity(spelling, by)


def test_the_record_is_the_same_in_every_spelling(tmp_path: Path) -> None:
    found = {}
    for spelling in SPELLINGS:
        folder = save_head(tmp_path / spelling, spelling, V)
        assert is_eagle3(folder)
        found[spelling] = read_eagle3(folder).record
    assert found["safeailab"].taps is None and found["specforge"].taps == (2, 3, 5)
    assert found["speculators"].taps == (1, 3, 6)
    assert found["speculators"].planned == 4 and found["speculators"].verifier == "some/target"
    assert found["qwen3"].norm_output and found["qwen3"].fc_norm and found["qwen3"].spec.head_norms
    assert not found["whole"].own_head and found["whole"].words == V
    assert found["speculators"].own_embedding and not found["safeailab"].own_embedding
    assert [found[each].norm_before_residual for each in ("safeailab", "residual")] == [False, True]


def test_absolute_ids_are_told_by_the_other_map(tmp_path: Path) -> None:
    from foredraft.drafters.heads.words import draft_words

    ids = torch.tensor([1, 4, 5, 9])
    marks = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    for d2t in (ids, ids - torch.arange(4)):
        words = draft_words("a head", 4, V, d2t, marks)
        assert words is not None and words.tolist() == ids.tolist()
    with pytest.raises(foredraft.CheckpointError, match="d2t and t2d name different token ids"):
        draft_words("a head", 4, V, ids, marks.roll(1))
    with pytest.raises(foredraft.CheckpointError, match="does not give 4 different token ids below 11"):
        draft_words("a head", 4, V, torch.tensor([0, -1, 0, 0]), None)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "hidden size": ({"target_size": 32, "config": {"target_hidden_size": 32}},
                    "for a target of hidden size 32, but the target's is 64"),
    "taps beyond": ({"config": {"eagle_aux_hidden_state_layer_ids": [2, 5, 9]}},
                    "reads the target after layer 9, but the target has 7 layers"),
    "a shape": ({"tensors": {"norm.weight": torch.ones(32)}},
                "tensor norm.weight has shape [32], but config.json implies [64]"),
    "a lying count of words": ({"config": {"draft_vocab_size": 5}}, "but config.json implies [5"),
    "a lying count of layers": ({"config": {"num_hidden_layers": 2}}, "lacks tensor layers.1."),
    "an unknown tensor": ({"tensors": {"extra.weight": torch.ones(2)}}, "tensor extra.weight is not part of"),
    "an unknown key": ({"config": {"eagle_config": {"mystery": 1}}}, "mystery = 1 is not known"),
    "another body": ({"config": {"model_type": "gemma2"}}, "model_type 'gemma2' is not supported"),
    "both norms": ({"config": {"norm_before_fc": True, "fc_norm": True}}, "fc_norm is True"),
    "no words": ({"config": {"draft_vocab_size": 11}}, "but config.json implies [11"),
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    reference_model(**KEYS).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", BAD)
def test_a_bad_head_is_refused_in_one_line(target: Path, tmp_path: Path, name: str) -> None:
    given, message = BAD[name]
    folder = save_head(tmp_path / "head", "safeailab", V, **given)
    check_refused(target, folder, message, "eagle3")


def test_a_head_for_another_vocabulary_is_refused(target: Path, tmp_path: Path) -> None:
    folder = save_head(tmp_path / "head", "safeailab", V + 2)
    with pytest.raises(
        foredraft.CheckpointError, match="for a target of vocabulary 13, but the target's is 11"
    ):
        foredraft.load(target, draft=folder, drafter="eagle3", device="cpu")


def test_a_pickle_is_refused_and_never_read(target: Path, tmp_path: Path) -> None:
    folder = save_head(tmp_path / "head", "safeailab", V)
    (folder / "model.safetensors").unlink()
    check_pickle(target, folder / "pytorch_model.bin", "convert it to model.safetensors", "eagle3")


def test_a_whole_model_is_no_head(target: Path, tmp_path: Path) -> None:
    with pytest.raises(foredraft.ConfigError, match="is a whole model, and no EAGLE-3 head"):
        foredraft.load(target, draft=target, drafter="eagle3", device="cpu")
    head = save_head(tmp_path / "head", "safeailab", V)
    with pytest.raises(foredraft.ConfigError, match="is what drafter eagle3 reads"):
        foredraft.load(target, draft=head, drafter="draft-model", device="cpu")


def test_ids_outside_the_words_have_no_probability() -> None:
    with tempfile.TemporaryDirectory() as place:
        llm = load(Path(place), "safeailab", "kernels")
        record = Recorder(llm)
        llm.generate(PROMPTS, SamplingParams(max_new_tokens=6, temperature=1.0, seed=1, ignore_eos=True))
        words = set(engine_of(llm).drafters["eagle3"].head.words.tolist())  # type: ignore[attr-defined]
        for _, drafted, logits in record.drafts:
            assert set(drafted) <= words
            for each in logits:
                assert {id for id, x in enumerate(each.tolist()) if x > -math.inf} == words
