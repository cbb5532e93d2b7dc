"""Hybrids by bits: a position has the same logits in passes of any width and batch, and after any rollback."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import foredraft
from foredraft import LLM, SamplingParams
from foredraft.decode.prefix_cache import PrefixCache
from foredraft.drafters.retokenize import Translation
from foredraft.model.cache import CacheLayers
from foredraft.model.recurrent import COLUMNS, LOG, RecurrentRows
from foredraft.model.runner import Runner
from foredraft.model.runner.passes import Pass
from foredraft.model.weights import load_decoder
from tests.support.adapters import save_adapter
from tests.support.checkpoints import save_checkpoint
from tests.support.heads import save_head
from tests.support.hybrids import OTHERS, VARIANTS, add_mtp, save_hybrid
from tests.support.loaded import engine_of
from tests.support.mutation import Mutant, Mutation, assert_caught, caught_by, replaced
from tests.support.mutations import around

LENGTH = 300
KINDS = ("two values a key", "convolutions", "mamba", "blocks")  # a variant of each kind of recurrent layers
TEXTS = ["def f(x):\n", "for i in range(10): print(i)\n" * 9, "a b c d e f " * 60, "Once upon a time"]
LONG = SamplingParams(temperature=0, max_new_tokens=90, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=3, acceptance="coupled", max_new_tokens=40, ignore_eos=True)


@cache
def folder(variant: str = "two values a key", dtype: str = "bfloat16", layers: int = 8) -> Path:
    listed = variant in OTHERS or "layer_types" in VARIANTS[variant]
    keys = {} if listed else {"num_hidden_layers": layers}
    return save_hybrid(Path(tempfile.mkdtemp()), variant, dtype=dtype, seed=layers, **keys)


@cache
def runner_of(
    variant: str = "two values a key", dtype: str = "bfloat16", native: bool = True, bits: int | None = None
) -> Runner:
    return Runner(load_decoder(folder(variant, dtype), native=native, bits=bits))


def tokens_of(seed: int, count: int = LENGTH) -> list[int]:
    return torch.randint(3, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Reading:
    """Reads texts in the rows of a cache, and keeps the logits of every position."""

    def __init__(self, runner: Runner, rows: int = 1, positions: int = LENGTH + 80) -> None:
        self.runner, self.cache = runner, runner.new_cache(rows, positions)
        self.logits: list[dict[int, Tensor]] = [{} for _ in range(rows)]

    def prompt(self, tokens: list[int], row: int = 0) -> None:
        for start in range(0, len(tokens), self.runner.chunk):
            part = tokens[start : start + self.runner.chunk]
            hidden = self.runner.prefill(self.cache, row, part, start).hidden
            found = self.runner.head(hidden)[0]
            self.logits[row] |= {start + column: found[column] for column in range(len(part))}
            self.cache.lengths[row] = start + len(part)

    def go_on(self, fed: list[list[int]], kept: list[int], first: int = 0) -> None:
        """Feed tokens to rows from `first` on, and keep so many of each."""
        starts, width = self.cache.lengths[first : first + len(fed)], max(map(len, fed))
        padded = torch.tensor([[*own, *[own[-1]] * (width - len(own))] for own in fed])
        counts = [len(own) for own in fed]
        logits = self.runner.forward(self.cache, padded, starts, first_row=first, counts=counts).logits
        assert logits is not None
        for row, keep in enumerate(kept):
            for column in range(keep):
                self.logits[first + row][starts[row] + column] = logits[row, column]
            self.cache.lengths[first + row] += keep


@cache
def plain(runner: Runner, seed: int, prompt: int) -> dict[int, Tensor]:
    """Return the logits of a text that is read a token at a time behind a prompt."""
    reading, tokens = Reading(runner), tokens_of(seed)
    reading.prompt(tokens[:prompt])
    for token in tokens[prompt:]:
        reading.go_on([[token]], [1])
    return reading.logits[0]


def same(found: dict[int, Tensor], expected: dict[int, Tensor]) -> bool:
    return all(torch.equal(logits, expected[place]) for place, logits in found.items())


def check_widths(runner: Runner | None = None, prompt: int = 37) -> None:
    """Passes of 1, 2, 5 and 16 tokens, of which some were drafted wrongly, and a neighbour row that drafts, too."""
    runner, chance = runner or runner_of(), random.Random(1)
    reading, seeds = Reading(runner, 3), (5, 6, 7)
    for row, seed in enumerate(seeds):
        reading.prompt(tokens_of(seed)[:prompt], row)
    while min(reading.cache.lengths) < LENGTH - 16:
        fed, kept = [], []
        for row, seed in enumerate(seeds):
            at, width = reading.cache.lengths[row], chance.choice((1, 2, 5, 16))
            if at >= LENGTH - 16:
                width = 1
            right = chance.randint(1, width)
            fed.append([*tokens_of(seed, LENGTH + 60)[at : at + right], *(9 for _ in range(width - right))])
            kept.append(right)
        reading.go_on(fed, kept)
    for row, seed in enumerate(seeds):
        found = {place: logits for place, logits in reading.logits[row].items() if place < LENGTH}
        assert same(found, plain(runner, seed, prompt)), f"row {row}"


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("variant", [*VARIANTS, *OTHERS])
def test_passes_of_any_width_give_the_same_bits(variant: str, dtype: str, native: bool) -> None:
    check_widths(runner_of(variant, dtype, native))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("variant", KINDS)
def test_so_do_weights_of_few_bits(variant: str, bits: int) -> None:
    check_widths(runner_of(variant, bits=bits))


@pytest.mark.parametrize(
    ("variant", "keys"),
    [
        ("two values a key", {"linear_num_value_heads": 32, "num_hidden_layers": 4}),
        ("mamba", {"mamba_n_heads": 8, "mamba_expand": 16}),
        ("convolutions", {}),
    ],
)
def test_so_do_batches_of_many_rows(variant: str, keys: dict[str, Any]) -> None:
    """As many that a thread takes several blocks of heads at a time: a position has the bits that it has alone."""
    place = save_hybrid(Path(tempfile.mkdtemp()), variant, dtype="bfloat16", **keys)
    runner = Runner(load_decoder(place, native=True))
    reading, rows, tokens = Reading(runner, 70), 70, tokens_of(4, 12)
    for at in range(0, 12, 3):
        reading.go_on([tokens[at : at + 3]] * rows, [3] * rows)
    alone = Reading(runner)
    for token in tokens:
        alone.go_on([[token]], [1])
    assert all(same(found, alone.logits[0]) for found in reading.logits)


def check_prompts(variant: str = KINDS[0]) -> None:
    """By the kernels, a chunk of a prompt is a pass like any other, wherever it ends."""
    runner = runner_of(variant)
    for prompt in (1, 3, 63, 64, 65, 256, 257, 299):
        assert same(plain(runner, 8, prompt), plain(runner, 8, 1))


@pytest.mark.parametrize("variant", KINDS)
def test_prompts_may_be_cut_anywhere(variant: str) -> None:
    check_prompts(variant)


def check_rows(variant: str = KINDS[0]) -> None:
    """A row goes on after it was copied to another place, or taken out and put back."""
    runner = runner_of(variant)
    reading, tokens = Reading(runner, 4), tokens_of(9)
    reading.prompt(tokens[:100])
    reading.go_on([[*tokens[100:103], 9, 9]], [3])  # the log holds what the base does not
    span = reading.cache.take(0, 0, 103)
    reading.cache.copy_row(0, 2, 103)
    reading.cache.zero_row(0)
    reading.cache.put_back(replace(span, row=3))
    reading.cache.lengths[3] = 103
    for row in (2, 3):
        for at in range(103, 180):
            reading.go_on([tokens[at : at + 1]], [1], row)
        assert same(reading.logits[row], plain(runner, 9, 100))


@pytest.mark.parametrize("variant", KINDS)
def test_rows_may_be_moved_and_parked(variant: str) -> None:
    check_rows(variant)


def test_a_pass_that_the_log_does_not_reach_is_refused() -> None:
    runner = runner_of()
    reading = Reading(runner)
    reading.prompt(tokens_of(1)[:40])
    for start, message in ((30, "states at 40 to 40"), (140, "not for positions 140 to 141")):
        with pytest.raises(ValueError, match=message):
            runner.forward(reading.cache, torch.tensor([[5]]), [start])
    for at in range(40, 100):  # the test does not set the row's length
        runner.forward(reading.cache, torch.tensor([[5]]), [at])
    with pytest.raises(ValueError, match="states at 40 to 40, not for positions 100"):
        runner.forward(reading.cache, torch.tensor([[5]]), [100])


@cache
def loaded(
    variant: str = KINDS[0], model: Path | None = None, dtype: str = "bfloat16", **options: Any
) -> LLM:
    place = model or folder(variant, dtype)
    return foredraft.load(place, device="cpu", max_batch=3, max_length=900, **options)


# the drafter of a head -> a format of its files
HEADS = {
    "eagle3": "speculators", "p-eagle": "p-eagle speculators", "eagle": "eagle-1", "medusa": "vllm",
    "dflash": "block anchored", "dspark": "block gated", "mtp": "",
}  # fmt: skip


DRAFTS = (None, "hybrid", "attention", "mamba")  # of models of the other kinds


@cache
def predicting() -> Path:
    """Return the folder of a model with a layer that predicts further tokens."""
    place = save_hybrid(Path(tempfile.mkdtemp()), dtype="bfloat16", seed=8)
    add_mtp(place)
    return place


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    ("variant", "draft"),
    [*((KINDS[0], head) for head in HEADS), *((kind, draft) for kind in KINDS[1:] for draft in DRAFTS)],
)
def test_so_they_are_with_heads_and_of_every_kind(
    variant: str, draft: str | None, params: SamplingParams
) -> None:
    options = {} if draft is None else {"draft": str(drafts(draft))}
    llm = loaded(variant, predicting() if draft == "mtp" else None, **options)
    added = () if draft is None else (draft if draft in HEADS else "draft-model",)
    check_texts(llm, params, added)


@cache
def drafts(kind: str) -> Path:
    if kind == "hybrid":
        return folder(layers=4)
    if kind == "mamba":
        return folder("rotated mamba")
    if kind == "attention":
        return attending()
    return predicting() if kind == "mtp" else save_head(Path(tempfile.mkdtemp()) / "head", HEADS[kind], 320)


@cache
def adapter(dtype: str, depth: int = 5, noise: float = 0.3) -> str:
    return str(save_adapter(folder(dtype=dtype), Path(tempfile.mkdtemp()) / "made", depth=depth, noise=noise))


SKIPS, EXIT = "skip:attn=1,3,4/mlp=2", "exit:5"
# what a hybrid is loaded with, by its dtype -> the drafters that this adds
ASSETS: dict[str, tuple[Callable[[str], dict[str, Any]], tuple[str, ...]]] = {
    "itself alone": (lambda dtype: {}, ()),
    "a hybrid": (lambda dtype: {"draft": str(folder(layers=4, dtype=dtype))}, ("draft-model",)),
    "one that attends": (lambda dtype: {"draft": str(attending())}, ("draft-model",)),
    "skips": (lambda dtype: {"plan": SKIPS, "draft_weights": "int4"}, ("layer-skip", "low-bit")),
    "an exit": (
        lambda dtype: {"plan": EXIT, "draft_weights": "int8", "max_draft": COLUMNS - 1},
        ("layer-skip", "low-bit"),
    ),
    "few bits": (
        lambda dtype: {"weights": "int8", "plan": "exit:3", "draft_weights": "int4"},
        ("layer-skip", "low-bit"),
    ),
    "fewer bits": (
        lambda dtype: {"weights": "int4", "plan": EXIT, "adapter": adapter(dtype)},
        ("layer-skip", "kangaroo"),
    ),
    "an adapter": (lambda dtype: {"adapter": adapter(dtype)}, ("kangaroo",)),
    "one below attention": (lambda dtype: {"adapter": adapter(dtype, 2)}, ("kangaroo",)),
    "operators": (
        lambda dtype: {"plan": EXIT, "adapter": adapter(dtype), "kernels": False},
        ("layer-skip", "kangaroo"),
    ),
    "operators and skips": (lambda dtype: {"plan": SKIPS, "kernels": False}, ("layer-skip",)),
}


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ASSETS)
def test_texts_are_those_of_plain_decoding_under_every_drafter(
    kind: str, dtype: str, params: SamplingParams
) -> None:
    """Alone, in batches with rows that come and go, and with a drafter that is often wrong."""
    options, added = ASSETS[kind]
    check_texts(loaded(dtype=dtype, **options(dtype)), params, added)


def check_texts(llm: LLM, params: SamplingParams, added: tuple[str, ...]) -> None:
    texts = plain_texts(llm, params)
    names = [*engine_of(llm).drafters, "auto"]
    assert {"lookup", "prediction", *added} <= set(names)
    for name in names:
        for policy in policies(name):
            found = llm.generate(TEXTS, replace(params, drafter=name, policy=policy))
            assert [each.token_ids for each in found] == texts, (name, policy)
            assert name not in added or policy == "auto" or all(each.stats.drafted for each in found)


def plain_texts(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [llm.generate([text], replace(params, drafter="none"))[0].token_ids for text in TEXTS]


def policies(name: str) -> tuple[str, ...]:
    if name == "auto":
        return ("auto",)
    return ("fixed", "auto") if name in ("lookup", "prediction") else ("fixed", "auto", "confidence")


@cache
def attending() -> Path:
    return save_checkpoint(Path(tempfile.mkdtemp()), vocab_size=320, tokenizer=True)


def test_a_copy_in_few_bits_keeps_what_decides_how_fast_states_fade() -> None:
    llm = loaded(draft_weights="int4", plan=SKIPS)
    drafter: Any = engine_of(llm).drafters["low-bit"]
    own, copied = (
        runner.decoder.layers[0].attention for runner in (llm.loaded.runner, drafter.draft_pass.runner)
    )
    assert copied.rates is own.rates and copied.decay is own.decay and copied.taps is own.taps
    assert copied.qkv is not own.qkv


OWN = ("layer-skip", "kangaroo", "low-bit", "draft-model")


@cache
def with_trees(dtype: str = "bfloat16", drafted: int = 3, siblings: int = 8) -> LLM:
    options = {"plan": EXIT, "adapter": adapter(dtype), "draft_weights": "int4", "policy": "fixed"}
    draft, settings = str(folder(layers=4, dtype=dtype)), {"siblings": siblings}
    return foredraft.load(
        folder(dtype=dtype), device="cpu", max_batch=3, max_length=900, draft=draft, policy_options=settings,
        max_draft=drafted, **options,
    )  # fmt: skip


def check_trees(llm: LLM | None = None, own: tuple[str, ...] = OWN) -> None:
    """Siblings beside drafts: some are written, a token more with them, and the texts are those of plain decoding."""
    llm = llm or with_trees()
    for params in (GREEDY, SEEDED):
        texts = plain_texts(llm, params)
        for name in own:
            found = llm.generate(TEXTS, replace(params, drafter=name, policy="fixed"))
            assert [each.token_ids for each in found] == texts, name
            assert name == "draft-model" or any(each.stats.siblings for each in found), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("drafted", "siblings"), [(3, 8), (1, 26), (20, 7)])
def test_token_trees_give_the_same_texts(dtype: str, drafted: int, siblings: int) -> None:
    check_trees(with_trees(dtype, drafted, siblings))


@cache
def trees_of(variant: str) -> LLM:
    return foredraft.load(
        folder(variant), device="cpu", max_batch=3, max_length=900, draft=str(folder(layers=4)), plan="exit:4",
        draft_weights="int4", policy="fixed", policy_options={"siblings": 8}, max_draft=3,
    )  # fmt: skip


def check_trees_of(variant: str) -> None:
    check_trees(trees_of(variant), ("layer-skip", "low-bit", "draft-model"))


@pytest.mark.parametrize("variant", KINDS[1:])
def test_so_do_those_of_other_kinds(variant: str) -> None:
    check_trees_of(variant)


@pytest.mark.parametrize("native", [True, False])
def test_an_adapter_that_is_the_last_layer_is_always_right(native: bool) -> None:
    llm = loaded(
        dtype="float32", adapter=adapter("float32", 7, 0.0), **({} if native else {"kernels": False})
    )
    for each in llm.generate(TEXTS, replace(GREEDY, drafter="kangaroo", policy="fixed")):
        assert each.stats.accepted == each.stats.drafted > 0


def check_samples() -> None:
    """Samples of one prompt, more than there are rows, and requests of clients that park each other's."""
    llm = loaded()
    [alone] = llm.generate(TEXTS[:1], replace(SEEDED, drafter="none"), n=1)
    found = llm.generate(TEXTS[:1] * 2, SEEDED, n=4)
    assert len({tuple(each.token_ids) for each in found}) == 4
    assert found[0].token_ids == alone.token_ids == found[4].token_ids


def test_samples_of_one_prompt() -> None:
    check_samples()


def test_prompts_that_are_kept_give_the_same_texts() -> None:
    prompt = "x = [1, 2, 3]\n" * 50
    first = foredraft.load(folder(), device="cpu", max_batch=2, max_length=900)
    engine_of(first).prefix_cache = PrefixCache(1 << 26)
    [cold] = first.generate([prompt], GREEDY)
    [warm] = first.generate([prompt + "y"], GREEDY)
    [again] = first.generate([prompt], GREEDY)
    assert not cold.cached_tokens and warm.cached_tokens >= 256 and again.cached_tokens >= 256
    assert again.token_ids == cold.token_ids
    [fresh] = loaded().generate([prompt + "y"], GREEDY)
    assert fresh.token_ids == warm.token_ids
    first.close()


def test_a_draft_model_reads_what_the_prefix_cache_has_of_the_target_alone() -> None:
    llm = foredraft.load(
        folder(), device="cpu", max_batch=2, max_length=900, draft=folder(layers=4), policy="fixed"
    )
    engine_of(llm).prefix_cache = PrefixCache(1 << 26)
    prompt = "x = [1, 2, 3]\n" * 50
    [plain] = llm.generate([prompt], replace(GREEDY, drafter="none"))
    [drafted] = llm.generate([prompt], GREEDY)
    assert drafted.cached_tokens and drafted.stats.drafted and drafted.token_ids == plain.token_ids
    llm.close()


@pytest.mark.parametrize("name", OWN)
def test_kept_prompts_and_samples_with_drafts_by_own_layers(name: str) -> None:
    llm = with_trees.__wrapped__()
    engine_of(llm).prefix_cache = PrefixCache(1 << 26)
    prompt = "x = [1, 2, 3]\n" * 50
    for params, n in ((GREEDY, 1), (SEEDED, 5)):
        plain = llm.generate([prompt, TEXTS[0]], replace(params, drafter="none"), n=n)
        for again in range(2):
            found = llm.generate([prompt, TEXTS[0]], replace(params, drafter=name, policy="fixed"), n=n)
            assert [each.token_ids for each in found] == [each.token_ids for each in plain], (n, again)
            assert all(each.stats.drafted for each in found)
    assert found[0].cached_tokens >= 256
    llm.close()


def test_every_choice_has_the_scores_of_its_prompt() -> None:
    outputs = loaded().generate(TEXTS[2:3], replace(SEEDED, prompt_logprobs=0, max_new_tokens=1), n=4)
    scores = [each.prompt_logprobs for each in outputs]
    assert len({len(each) for each in scores}) == 1 and len(scores[0]) == outputs[0].prompt_tokens
    assert all(each == scores[0] for each in scores)


@pytest.mark.parametrize("drafted", [COLUMNS - 1, 63])
def test_a_hybrid_drafts_as_far_as_its_log_reaches(drafted: int) -> None:
    """For a target that attends, and so takes longer drafts."""
    target = attending()
    llm = foredraft.load(
        target, device="cpu", draft=folder(layers=4), policy="fixed", max_draft=drafted, drafter="draft-model"
    )
    text = llm.generate(TEXTS[:2], replace(LONG, drafter="none"))
    found = llm.generate(TEXTS[:2], LONG)
    assert [each.token_ids for each in found] == [each.token_ids for each in text]
    assert max(each.stats.drafted for each in found) > COLUMNS
    llm.close()


def test_a_draft_model_that_broke_off_reads_its_text_anew() -> None:
    """Out of memory, behind layers that had read on: the request goes on, or ends, and the next one is sound."""
    llm = loaded(draft=str(folder(layers=4)))
    drafter: Any = engine_of(llm).drafters["draft-model"]
    row = SimpleNamespace(row=0, id=-7, tokens=tokens_of(2, 90))
    drafter.read(row, 0, 40)
    runner = drafter.draft_pass.runner
    with replaced(runner, "prefill", broken_off(runner.prefill)), pytest.raises(torch.OutOfMemoryError):
        drafter.read(row, 40, 60)
    assert drafter.length(row) == 0
    drafter.read(row, 0, 60)


def broken_off(prefill: Any) -> Any:
    def mutated(*given: Any, **more: Any) -> None:
        prefill(*given, **more)
        raise torch.OutOfMemoryError

    return mutated


def continued(runner: Runner, tokens: list[int], count: int) -> list[int]:
    """Return what a model says greedily behind tokens that it reads for the first time."""
    reading = Reading(runner, positions=len(tokens) + count)
    reading.prompt(tokens[:-1])
    for _ in range(count):
        reading.go_on([tokens[-1:]], [1])
        tokens = [*tokens, int(reading.logits[0][len(tokens) - 1].argmax())]
    return tokens[-count:]


def check_retokenized() -> None:
    """A hybrid drafts what it would say behind the text, of which the end changes as it grows."""
    other = save_checkpoint(Path(tempfile.mkdtemp()), vocab_size=290, tokenizer=True)
    llm = foredraft.load(other, device="cpu", draft=folder(), policy="fixed", max_batch=2, max_length=900)
    drafter: Any = engine_of(llm).drafters["retokenize"]
    sound, seen = drafter._continue, list[tuple[list[int], list[int]]]()

    def spied(turns: dict[int, Any]) -> Any:
        said = sound(turns)
        seen.extend((turns[row].tokens, ids) for row, ids in said.items())
        return said

    try:
        texts = [llm.generate([text], replace(LONG, drafter="none"))[0].token_ids for text in TEXTS]
        before = drafter.draft_pass.runner.forwarded
        with replaced(drafter, "_continue", spied):
            found = llm.generate(TEXTS, LONG)
        assert [each.token_ids for each in found] == texts
        forwarded = drafter.draft_pass.runner.forwarded - before
        assert forwarded < 2 * sum(len(ids) for _, ids in seen), "little is read again"
        runner = runner_of()
        assert len(seen) > 100 and all(ids == continued(runner, text, len(ids)) for text, ids in seen)
    finally:
        llm.close()


def test_a_hybrid_drafts_in_its_own_tokens() -> None:
    check_retokenized()


def check_own_layers() -> None:
    """Drafts by the target's own layers, step by step and at once."""
    check_drafts(
        {"plan": EXIT, "draft_weights": "int4", "adapter": adapter("bfloat16")}, ("confidence", "fixed")
    )


def check_operators() -> None:
    """Rows whose drafts end early, beside others."""
    check_drafts({"plan": "exit:4", "kernels": False}, ("confidence",))


@pytest.mark.parametrize("check", [check_own_layers, check_operators])
def test_drafts_of_rows_that_end_early(check: Callable[[], None]) -> None:
    check()


def check_drafts(options: dict[str, Any], policies: tuple[str, ...]) -> None:
    llm = foredraft.load(folder(), device="cpu", max_batch=3, max_length=900, **options)
    try:
        plain = plain_texts(llm, GREEDY)
        for name in [name for name in OWN if name in engine_of(llm).drafters]:
            for policy in policies:
                found = llm.generate(TEXTS, replace(GREEDY, drafter=name, policy=policy))
                assert [each.token_ids for each in found] == plain, (
                    name,
                    policy,
                )
    finally:
        llm.close()


def forgetting(forgets: Callable[..., bool]) -> Mutation:
    """Let passes, told by their cache and options, leave the logs as they were."""

    def mutated(forward: Any, runner: Runner, cache: CacheLayers, *given: Any, **options: Any) -> Any:
        rows = cache.recurrent
        kept = None if rows is None or not forgets(**options) else rows.logs.clone()
        found = forward(runner, cache, *given, **options)
        if rows is not None and kept is not None:
            rows.logs.copy_(kept)
        return found

    return around(mutated)


def begin_further(begin: Any, own: CacheLayers, row: int, start: int, *rest: Any, **more: Any) -> int:
    base = begin(own, row, start, *rest, **more)
    return base if more.get("certain") else max(base, start)


def apart(first: Any, rows: RecurrentRows, depth: int) -> RecurrentRows | None:
    part = first(rows, depth)
    return part and deepcopy(part)


def real_alone(runs: Any, pass_: Pass, queries: int, *, ragged: bool) -> Any:
    """Leave out what operators compute before the real columns of a row."""
    before = {pass_.first_row + b: 0 if ragged else real.start for b, real in enumerate(pass_.real)}
    return tuple(
        replace(run, first=run.first + n, count=run.count - n, start=run.start + n)
        for run in runs(pass_, queries, ragged=ragged)
        for n in [before[run.row]]
    )


def no_row_moves(rows: RecurrentRows, source: int, target: int) -> None:
    rows.at[:, target] = rows.at[:, source]


def begins(work: Callable[[RecurrentRows, int, int], object]) -> Mutation:
    """Let a pass begin with other states."""
    return around(
        lambda begin, rows, row, start, *rest: (begin(rows, row, start, *rest), work(rows, row, start))[0]
    )


def check_mamba() -> None:
    check_widths(runner_of("blocks"))


def check_convolutions() -> None:
    check_widths(runner_of("convolutions"))


def check_parked_convolutions() -> None:
    check_rows("convolutions")


DEFECTS: dict[Callable[[], object], list[tuple[Any, ...]]] = {
    check_mamba: [
        ("Mamba: an entry is taken twice", RecurrentRows.begin, begins(lambda rows, row, start: rows.at[:, row].sub_(rows.at[:, row].clamp(max=1)))),
        ("Mamba: the states of a neighbour", RecurrentRows.begin, begins(lambda rows, row, start: rows.bases[:, row].copy_(rows.bases[:, row - 1]))),
    ],
    check_convolutions: [
        ("a convolution: the log of a neighbour", RecurrentRows.begin, begins(lambda rows, row, start: rows.logs[:, row].copy_(rows.logs[:, row - 1]))),
    ],
    check_parked_convolutions: [
        ("a convolution: what is taken lacks the log", RecurrentRows.take, around(lambda take, own, *given: (lambda bases, logs, *rest: (bases, torch.zeros_like(logs), *rest))(*take(own, *given)))),
    ],
    check_widths: [
        ("drafts are folded", CacheLayers.begin, around(lambda begin, own, row, start, count, *rest, **more: (begin(own, row, start, count, *rest, **more), start + count)[1]), (AssertionError, ValueError)),
        ("an entry is taken twice", RecurrentRows.begin, begins(lambda rows, row, start: rows.at[:, row].sub_(rows.at[:, row].clamp(max=1)))),
        ("an entry is dropped", RecurrentRows.begin, begins(lambda rows, row, start: rows.at[:, row].copy_((rows.at[:, row] + 1).clamp(max=start)))),
        ("the states of a neighbour", RecurrentRows.begin, begins(lambda rows, row, start: rows.bases[:, row].copy_(rows.bases[:, row - 1]))),
    ],
    check_own_layers: [
        ("steps of a draft are folded", CacheLayers.begin, around(begin_further), (AssertionError, ValueError)),
        ("a draft's entries are kept behind the verifying pass", Runner.forward, forgetting(lambda **options: "invariant" not in options)),
        ("what a draft logs is missing in layers that are resumed behind", Runner.forward, forgetting(lambda **options: "invariant" in options)),
        ("the draft's entry at the length counts", CacheLayers.begin, around(lambda begin, *given, **more: begin(*given, **more) + (not more.get("certain"))), (AssertionError, ValueError)),
        ("an adapter's layers have states of their own", RecurrentRows.first, around(apart), (AssertionError, ValueError)),
    ],
    check_retokenized: [
        ("states follow what may change", Translation.closed, lambda _: lambda own: len(own.tokens())),
        ("drafts reach further than the log", RecurrentRows.__init__, lambda init: lambda rows, *given: (init(rows, *given), setattr(rows, "reach", 2 * LOG))[0]),
    ],
    check_operators: [("padding before the real columns has no states", Pass.runs, around(real_alone))],
    check_trees: [("the entry of a leaf stays where it was", RecurrentRows.move, lambda _: lambda *given: None)],
    check_rows: [
        ("states stay behind", RecurrentRows.copy, lambda _: no_row_moves),
        ("what is taken lacks the log", RecurrentRows.take, around(lambda take, own, *given: (lambda bases, logs, *rest: (bases, torch.zeros_like(logs), *rest))(*take(own, *given)))),
        ("what is put back stands a token off", RecurrentRows.put_back, around(lambda put, own, row, parts: put(own, row, (parts[0], parts[1], parts[2] - 1, *parts[3:])))),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", caught_by(DEFECTS), ids=lambda mutant: str(mutant.name))
def test_defects_are_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
