"""Vocabularies of related models: which tokenizers are the same, and q over the target's ids."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

import foredraft
from foredraft import SamplingParams
from foredraft.decode.sampling import SamplingTable, distribution_of
from foredraft.drafters.draft_model import DraftModel, VocabularyMap, same_tokenizer
from foredraft.model.tokenizer import Tokenizer
from tests.support import alphabets, checkpoints
from tests.support.loaded import engine_of
from tests.support.mutation import Mutant, Mutation, assert_caught
from tests.support.mutations import argument, changed, holding

Function = Callable[..., Any]
CPU = torch.device("cpu")
INNER = checkpoints.tiny_tokenizer()
PROMPTS = ["def accept(draft, p, q):", "Zwölf Boxkämpfer jagen", "🙂👍🏽 Съешь", "the target checks"]


def with_specials(inner: tokenizers.Tokenizer, *specials: str) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_str(inner.to_str())
    made.add_special_tokens(list(specials))
    return made


def moved(*specials: str, seed: int = 0) -> tuple[tokenizers.Tokenizer, list[int]]:
    """Return the tokenizer with permuted ids and special tokens added, and the new id of every old id."""
    inner, new = alphabets.permuted(INNER, seed)
    return with_specials(inner, *specials), [*new, *range(len(new), len(new) + len(specials))]


def set_in(*path: str, to: Any) -> Any:
    def change(content: dict[str, Any]) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = to

    return change


def without_tokens(count: int) -> Any:

    def change(content: dict[str, Any]) -> None:
        model = content["model"]
        kept = len(model["vocab"]) - count
        model["vocab"] = {piece: id for piece, id in model["vocab"].items() if id < kept}
        model["merges"] = model["merges"][: len(model["merges"]) - count]

    return change


def without_merges(content: dict[str, Any]) -> None:
    content["model"]["merges"] = content["model"]["merges"][:-20]


def swapped_merges(content: dict[str, Any]) -> None:
    merges = content["model"]["merges"]
    merges[3], merges[40] = merges[40], merges[3]


def sequence_of_one(content: dict[str, Any]) -> None:
    step = content["pre_tokenizer"]
    step["trim_offsets"] = not step["trim_offsets"]
    inner = {"type": "Sequence", "pretokenizers": [step, {"type": "Sequence", "pretokenizers": []}]}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [inner]}


SPECIAL = with_specials(INNER, "<x>")
SAME: dict[str, Any] = {
    "itself": lambda: INNER,
    "more special tokens": lambda: with_specials(INNER, "<tool>", "<think>"),
    "other ids": lambda: alphabets.permuted(INNER)[0],
    "a few tokens fewer": lambda: alphabets.changed(INNER, without_tokens(3)),
    "no pre-tokenizer": lambda: alphabets.changed(INNER, set_in("pre_tokenizer", to=None)),
    "other offsets, in a sequence": lambda: alphabets.changed(SPECIAL, sequence_of_one),
    "no post-processor": lambda: alphabets.changed(INNER, set_in("post_processor", to=None)),
}
OTHER: dict[str, Any] = {
    "another vocabulary": lambda: checkpoints.tiny_tokenizer(600),
    "fewer tokens": lambda: alphabets.changed(INNER, without_tokens(20)),
    "fewer merges": lambda: alphabets.changed(INNER, without_merges),
    "merges in another order": lambda: alphabets.changed(INNER, swapped_merges),
    "another pre-tokenizer": lambda: alphabets.changed(
        with_specials(INNER, "<x>"), set_in("pre_tokenizer", "add_prefix_space", to=True)
    ),
    "tokens with other bytes": lambda: alphabets.changed(
        with_specials(INNER, "<x>"), set_in("decoder", to={"type": "Fuse"})
    ),
    "another type": lambda: alphabets.word_piece(),
    "SentencePiece": lambda: alphabets.sentencepiece(),
}


@pytest.mark.parametrize("name", [*SAME, *OTHER])
def test_related_tokenizers_are_the_same_and_others_are_not(name: str) -> None:
    relative = Tokenizer((SAME | OTHER)[name]())
    mine = Tokenizer(INNER)
    assert same_tokenizer(mine, relative) == same_tokenizer(relative, mine) == (name in SAME)


def test_an_empty_sequence_of_steps_counts_as_no_steps() -> None:
    nothing, one, two = (
        Tokenizer(alphabets.changed(inner, set_in("normalizer", to={"type": kind, "normalizers": []})))
        for inner, kind in ((SPECIAL, "Sequence"), (INNER, "NFC"), (SPECIAL, "NFKC"))
    )
    assert same_tokenizer(nothing, one) and same_tokenizer(nothing, two) and not same_tokenizer(one, two)


@pytest.mark.parametrize(("more", "may"), [(2, True), (10, False)])
def test_vocabularies_are_told_apart_by_size_without_a_look_at_tokens(more: int, may: bool) -> None:
    """Only the ordinary tokens have to be shared; 1 % of them may not be."""
    added, *inner = (alphabets.byte_level(size) for size in (384, 384, 384 + more))
    added.add_special_tokens([f"<{number}>" for number in range(100)])
    small, large = map(Tokenizer, inner)
    assert may or not same_tokenizer(small, large)
    assert may or "fingerprint" not in {*vars(small), *vars(large)}
    assert same_tokenizer(small, Tokenizer(added))


def test_both_file_forms_of_sentencepiece_are_the_same_tokenizer() -> None:
    """One file has a normalizer where the other has a pre-tokenizer."""
    one, other = alphabets.sentencepiece(), alphabets.sentencepiece(metaspace=True)
    assert same_tokenizer(Tokenizer(one), Tokenizer(other))


def test_q_is_a_distribution_over_the_shared_ids() -> None:
    """The target lacks the draft's ids 0 and 5; the draft lacks the target's 1 and 6, and 5, whose id is too large."""
    pairs = [(0, 4), (2, 1), (3, 3), (4, 2), (5, 9), (9, 0)]
    vocabulary = VocabularyMap(pairs, (7, 6), 5, CPU)
    logits = torch.tensor([[9.0, 1.0, -1.0, 0.5, 2.0, 8.0]])
    columns = vocabulary.columns(logits)
    assert columns.shape == (1, 7)
    assert columns[0, [0, 2, 3, 4]].tolist() == [2.0, 1.0, 0.5, -1.0]
    for params in (SamplingParams(), SamplingParams(top_k=2), SamplingParams(top_p=0.6, temperature=3e38)):
        distribution, finite = distribution_of(columns[:, None], SamplingTable.of([params], CPU))
        q = distribution.dense(7)[0, 0]
        assert finite.all()
        assert q[[1, 5, 6]].tolist() == [0, 0, 0], "ids that the draft lacks are never drafted"
        if params.top_k == 0 and params.top_p == 1:
            torch.testing.assert_close(q[[0, 2, 3, 4]], torch.tensor([2.0, 1.0, 0.5, -1.0]).softmax(0))
        if params.top_k:
            assert (q > 0).tolist() == [True, False, True, *[False] * 4], "only shared ids count"
    assert vocabulary.read(torch.arange(7)).tolist() == [4, 5, 1, 3, 2, 5, 5]
    assert vocabulary.draft_ids == [4, 5, 1, 3, 2, 5, 5]


def test_tokens_are_matched_by_their_text() -> None:
    mine = with_specials(INNER, "<tool>", "<end>")  # 384, 385
    relative, new = moved("<end>", "<think>")
    target, draft = Tokenizer(mine), Tokenizer(relative)
    vocabulary = VocabularyMap.between(target, draft, (400, 390), CPU)
    assert vocabulary is not None
    assert vocabulary.draft_ids[:384] == new[:384]
    assert vocabulary.draft_ids[385] == new[384], "<end>"
    stand_in = min(new[:3])  # the first of its special tokens
    assert {vocabulary.draft_ids[id] for id in (384, *range(386, 400))} == {stand_in}
    columns = vocabulary.columns(torch.arange(390.0)[None])
    assert columns.isneginf().nonzero()[:, 1].tolist() == [384, *range(386, 400)]
    assert columns[0, 385] == new[384]


def test_the_unknown_token_is_the_stand_in() -> None:
    inner = alphabets.sentencepiece()
    mine = Tokenizer(with_specials(inner, "<x>"))
    vocabulary = VocabularyMap.between(mine, Tokenizer(inner), (421, 420), CPU)
    assert vocabulary is not None
    assert vocabulary.draft_ids[420] == inner.token_to_id("<unk>") == 0


def test_the_stand_in_is_within_the_drafts_vocabulary() -> None:
    bare = alphabets.changed(INNER, set_in("added_tokens", to=[]))
    for change in (set_in("model", "unk_token", to=None), set_in("model", "unk_token", to="<tool>")):
        draft = Tokenizer(alphabets.changed(with_specials(bare, "<tool>"), change))
        vocabulary = VocabularyMap.between(Tokenizer(INNER), draft, (400, 384), CPU)
        assert vocabulary is not None
        assert vocabulary.draft_ids[399] == 0
        wider = VocabularyMap.between(Tokenizer(INNER), draft, (400, 385), CPU)
        assert wider is not None
        assert wider.draft_ids[399] == 384


def test_equal_vocabularies_need_no_map() -> None:
    mine = Tokenizer(INNER)
    assert VocabularyMap.between(mine, Tokenizer(INNER), (384, 384), CPU) is None
    assert VocabularyMap.between(mine, Tokenizer(INNER), (384, 400), CPU) is not None


def relative_of(folder: Path, target: Path, seed: int, padding: int, specials: tuple[str, ...]) -> Path:
    """Save the target's weights under permuted ids, with special tokens and padding that only this model has.

    Without the map, the logits of these extra ids would always be the largest.
    """
    permuted, new = moved(*specials, seed=seed)
    size = permuted.get_vocab_size() + padding
    checkpoints.save_checkpoint(folder, seed=1, vocab_size=size)
    alphabets.save(permuted, folder)
    old, tensors = load_file(target / "model.safetensors"), load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = torch.zeros(size, old[name].shape[1])
        if name == "lm_head.weight":
            rows += 50 * old["model.norm.weight"].sign()
            rows[new[384:]] *= -1  # of either sign: one of them is large
        rows[new[: old[name].shape[0]]] = old[name]
        tensors[name] = rows
    save_file(
        {**{name: old.get(name, value) for name, value in tensors.items()},
         **{name: tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}},
        folder / "model.safetensors", metadata={"format": "pt"},
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    checkpoints.save_checkpoint(folder / "target", tokenizer=True, seed=1)
    relative_of(folder / "relative", folder / "target", 5, 9, ("<tool>", "<think>"))
    return folder


def test_a_relative_with_the_targets_weights_is_fully_accepted(models: Path) -> None:
    """The draft model is the target under other ids, so a wrong id or probability mass outside would show."""
    relative = models / "relative"
    llm = foredraft.load(models / "target", draft=relative, device="cpu", max_batch=3, policy="fixed")
    assert llm.default_drafter == "draft-model"
    assert isinstance(engine_of(llm).drafters["draft-model"], DraftModel)
    for more in ({"temperature": 0}, {"seed": 3}):
        for output in llm.generate(PROMPTS, max_new_tokens=24, **more):
            assert output.stats.drafted > 0
            assert output.stats.accepted == output.stats.drafted


full = test_a_relative_with_the_targets_weights_is_fully_accepted
q, matching = test_q_is_a_distribution_over_the_shared_ids, test_tokens_are_matched_by_their_text


def paired(change: Callable[[int, int], tuple[int, int]]) -> Mutation:
    """Map other pairs: `change` gets the target's id and the draft's."""
    return argument(1, lambda pairs: [change(*pair) for pair in pairs])


def with_missing_at_zero(columns: torch.Tensor) -> torch.Tensor:
    return columns.masked_fill(columns.isneginf(), 0.0)


MAP = VocabularyMap.__init__
DEFECTS: list[tuple[str, Any, Mutation, Any]] = [
    ("the map is inverted", MAP, paired(lambda target, draft: (draft, target)), q),
    ("missing ids get probability", VocabularyMap.columns, lambda _: lambda vocabulary, logits: logits[:, vocabulary.draft_ids], q),
    ("missing ids get logit 0", VocabularyMap.columns, changed(with_missing_at_zero), q),
    ("special tokens are off by one", MAP, paired(lambda target, draft: (target, draft + (target >= 384))), matching),
    ("tokens are matched by id", MAP, paired(lambda target, draft: (target, target)), matching),
    ("steps read target ids", VocabularyMap.read, lambda _: lambda vocabulary, tokens: tokens, full),
    ("prompts read target ids", DraftModel.read, holding(lambda drafter, *_: (drafter, "vocabulary", None)), full),
    ("ids beyond the draft are kept", MAP, argument(2, lambda sizes: (sizes[0], sys.maxsize)), q),
]  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: str(defect[0]))
def test_defects_are_caught(defect: Any, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, point, mutation, check = defect
    found = partial(check, *[models] * (check is full))
    assert_caught(Mutant(name, ((point, mutation),), found, (AssertionError, IndexError)), monkeypatch)
