"""`load`: objects from names, cache sizes within memory, and errors that name the remedy."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import foredraft
from foredraft import CheckpointError, ConfigError, RequestError, SamplingParams, kinds, loading
from foredraft.drafters.asset import Nothing
from foredraft.drafters.lookup import Lookup
from foredraft.kinds import DRAFTERS, POLICIES
from foredraft.loading import load_for, options_for
from foredraft.loading.checkpoints import find_target, read_draft
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import weight_bytes
from tests.support import alphabets, checkpoints
from tests.support.adapters import save_adapter
from tests.support.blocks import save_block
from tests.support.heads import save_head
from tests.support.loaded import engine_of
from tests.support.running import python
from tests.support.spelled_heads import SPELLED

GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    checkpoints.save_checkpoint(folder / "big", tokenizer=True, seed=1)
    checkpoints.save_checkpoint(folder / "small", tokenizer=True, seed=2, num_hidden_layers=1)
    checkpoints.save_checkpoint(
        folder / "foreign", tokenizer=True, seed=3, num_hidden_layers=1, vocab_size=300
    )
    checkpoints.save_checkpoint(
        folder / "long", tokenizer=True, seed=1, num_hidden_layers=1, max_position_embeddings=131072
    )
    return folder


def load(models: Path, name: str = "big", **options: object) -> foredraft.LLM:
    return foredraft.load(models / name, **{"device": "cpu", "policy": "fixed", **options})  # type: ignore[arg-type]


def set_room(monkeypatch: pytest.MonkeyPatch, caches: int, *folders: Path) -> None:
    """Pretend so much free memory that `caches` bytes may be used beside the weights of these models."""
    cpu = torch.device("cpu")
    weights = sum(weight_bytes(ModelSpec.from_folder(folder), cpu, torch.float32) for folder in folders)
    monkeypatch.setattr(loading.capacity, "free_memory", lambda device: weights + 2 * caches)


class Echo(Lookup):
    """A drafter that only this test knows."""

    name = "echo"


def test_a_drafter_added_to_the_table_is_loaded(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = kinds.DrafterKind("copies the text", lambda: Nothing(Echo), lossless=False)
    monkeypatch.setitem(DRAFTERS, "echo", kind)
    llm = load(models, drafter="echo", max_batch=2, max_length=64)
    [output] = llm.generate("a b a b a b", GREEDY)
    assert output.stats.drafted > 0
    assert not output.lossless
    assert llm.generate("a b a b", SamplingParams(drafter="lookup", max_new_tokens=2))[0].lossless


def test_a_policy_added_to_the_table_is_loaded_with_its_longest_draft(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def make(longest: int) -> object:
        made.append(longest)
        return POLICIES["fixed"].make(longest)

    monkeypatch.setitem(POLICIES, "bold", kinds.PolicyKind("as long as possible", make, max_draft=7))  # type: ignore[arg-type]
    load(models, policy="bold"), load(models, policy="bold", max_draft=2)
    assert made == [7, 2]


# the assistant of a Gemma 4 is for no other target
@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "gemma4-assistant"])
def test_every_drafter_is_loaded_under_its_name(models: Path, name: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {}
    match DRAFTERS[name].given_by:
        case "draft" if name == "eagle3":
            taps = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
            words = ModelSpec.from_folder(models / "big").vocab_size
            given["draft"] = save_head(tmp_path / "head", "specforge", words, config={"eagle_config": taps})
        case "draft" if name in ("eagle", "medusa"):
            spelling = {"eagle": "eagle-1", "medusa": "fasterdecoding"}[name]
            words = ModelSpec.from_folder(models / "big").vocab_size
            given["draft"] = SPELLED[spelling].save(tmp_path / "heads", spelling, words)
        case "draft" if name in ("dflash", "dspark"):
            words = ModelSpec.from_folder(models / "big").vocab_size
            changed = {"aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 3}
            spelling = {"dflash": "speculators", "dspark": "rnn"}[name]
            given["draft"] = save_block(tmp_path / "head", spelling, words, config=changed)
        case "draft":
            given["draft"] = models / ("foreign" if name == "retokenize" else "small")
        case "plan":
            given["plan"] = "exit:1"
        case "adapter":
            given["adapter"] = save_adapter(models / "big", tmp_path / "adapter")
    llm = load(models, drafter=name, policy="auto", **given)
    assert llm.default_drafter == (None if name == "none" else name)
    assert all(drafter.name == key for key, drafter in engine_of(llm).drafters.items())
    stepper = hasattr(engine_of(llm).drafters.get(name), "step")
    assert stepper == DRAFTERS[name].stepper


@pytest.mark.parametrize("value", ["3", 2.5, True, 0, math.nan])
@pytest.mark.parametrize("option", ["max_draft", "max_batch", "max_length"])
def test_counts_must_be_whole_numbers(models: Path, option: str, value: object) -> None:
    alternative = ", or drafter='none'" if option == "max_draft" else ""
    message = f"{option} is {value!r}; give a whole number, 1 or more{alternative}"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        load(models, **{option: value})


@pytest.mark.parametrize("wrong", ["threshold=0.5", [("threshold", 0.5)], [], ""])
def test_policy_options_must_be_a_table(models: Path, wrong: object) -> None:
    with pytest.raises(ConfigError, match="policy_options is .*; give a table, such as {'threshold': 0.6}"):
        load(models, draft=models / "small", policy="confidence", policy_options=wrong)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (torch.bfloat16, torch.bfloat16), ("torch.bfloat16", torch.bfloat16), ("bf16", torch.bfloat16),
        (torch.float32, torch.float32), ("fp32", torch.float32), ("float", torch.float32),
        ("BF16", torch.bfloat16), (torch.half, torch.float16), ("fp16", torch.float16),
        ("half", torch.float16), (None, torch.float32),
    ],
)  # fmt: skip
def test_a_dtype_may_be_pytorchs_own_or_a_short_name(models: Path, given: Any, dtype: torch.dtype) -> None:
    options = options_for(models / "big", draft=models / "small", dtype=given)
    target = find_target(options)
    assert target.dtype == read_draft(options, models / "small", target).dtype == dtype
    if dtype == torch.bfloat16:
        assert engine_of(load(models, dtype=given)).cache.dtype == dtype


@pytest.mark.parametrize("wrong", [torch.int8, torch.float64, "fp8", "float8", 16, "", []])
def test_other_dtypes_are_refused(models: Path, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="^dtype is .*; give one of bfloat16, float16, float32"):
        load(models, dtype=wrong)


def test_a_list_is_refused_as_a_name(models: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy is \['fixed'\]; give one of auto, fixed"):
        load(models, policy=["fixed"])


def test_table_and_policies_agree_on_stopping_by_content() -> None:
    """`load` checks drafters by the table, a request by the loaded policy."""
    for kind in POLICIES.values():
        assert kind.make(3).stops_by_content == kind.stops_by_content


def test_every_policy_can_grow_to_its_longest_draft() -> None:
    """The heuristic policy starts at 5 tokens and would stay there if that were its longest draft."""
    from foredraft.decode.stats import Round

    lengths = {}
    for name, kind in POLICIES.items():
        policy = kind.make(kind.max_draft)
        assert policy.name == name
        if kind.uses_costs:
            continue  # its draft length depends on costs
        sequence = SimpleNamespace(policy_state=policy.start(), tokens=[], prompt=[])
        budgets = []
        for _ in range(9):
            budgets.append(policy.budget(sequence))  # type: ignore[arg-type]
            policy.learn(sequence, Round(budgets[-1], budgets[-1], budgets[-1] + 1), 1.0)  # type: ignore[arg-type]
        lengths[name] = budgets[0], budgets[-1]
    assert lengths == {
        "fixed": (5, 5),
        "heuristic": (5, 10),
        "confidence": (10, 10),
        "adaptive-exit": (12, 12),
        "target-confidence": (5, 5),
        "fallback": (10, 10),
    }


def test_the_default_draft_length_fits_the_verifying_pass(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    kind = kinds.PolicyKind("", lambda n: made.append(n) or POLICIES["fixed"].make(n), max_draft=10**6)  # type: ignore[func-returns-value]
    monkeypatch.setitem(POLICIES, "endless", kind)
    llm = load(models, policy="endless")
    assert made == [llm.loaded.runner.max_queries - 1]
    with pytest.raises(ConfigError, match="max_draft is 1000000, but this model's verifying pass takes"):
        load(models, policy="endless", max_draft=10**6)


@pytest.mark.parametrize("drafter", ["lookup", "none"])
def test_requests_may_name_a_draft_model_that_is_not_the_default_drafter(models: Path, drafter: str) -> None:
    llm = load(models, draft=models / "small", drafter=drafter)
    [output] = llm.generate("a b c", GREEDY)
    assert llm.default_drafter == (None if drafter == "none" else drafter)
    [named] = llm.generate("a b c", SamplingParams(temperature=0, max_new_tokens=8, drafter="draft-model"))
    assert named.stats.drafted > 0
    assert drafter != "none" or output.stats.drafted == 0


def test_the_draft_models_tokenizer_decides_the_default_drafter(models: Path, tmp_path: Path) -> None:
    llm = load(models, draft=models / "foreign")
    assert llm.default_drafter == "retokenize"
    assert set(engine_of(llm).drafters) == {"lookup", "prediction", "retokenize"}
    assert llm.generate("a b c", GREEDY)[0].stats.drafted > 0
    # other ids and another vocabulary size, but the same tokenizer
    relative = checkpoints.save_checkpoint(tmp_path / "relative", vocab_size=400)
    alphabets.save(alphabets.permuted(checkpoints.tiny_tokenizer())[0], relative)
    llm = load(models, draft=relative)
    assert llm.default_drafter == "draft-model"
    assert set(engine_of(llm).drafters) == {"lookup", "prediction", "draft-model"}
    assert engine_of(llm).drafters["draft-model"].vocabulary is not None  # type: ignore[attr-defined]
    same = engine_of(load(models, draft=models / "small")).drafters["draft-model"]
    assert same.vocabulary is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("draft", "drafter", "message"),
    [
        ("foreign", "draft-model", "has another tokenizer than the target .*big; give drafter='retokenize'"),
        ("small", "retokenize", "has the tokenizer of the target .*big; give drafter='draft-model'"),
    ],
)
def test_a_drafter_that_does_not_fit_the_tokenizer_is_refused_with_the_one_that_fits(
    models: Path, monkeypatch: pytest.MonkeyPatch, draft: str, drafter: str, message: str
) -> None:
    monkeypatch.setattr(loading.runners, "load_decoder", None)  # before anything large is read
    with pytest.raises(
        ConfigError, match=f"drafter is '{drafter}', but the draft model .*{draft} {message}"
    ) as caught:
        load(models, draft=models / draft, drafter=drafter)
    assert "\n" not in str(caught.value)


def test_an_adapter_given_as_a_draft_model_is_refused_with_its_own_option(
    models: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(models / "big", tmp_path / "adapter")
    for options in ({}, {"drafter": "kangaroo"}, {"drafter": "draft-model"}):
        with pytest.raises(ConfigError) as caught:
            load(models, draft=adapter, **options)
        assert str(caught.value) == (
            f"draft is {str(adapter)!r}, which is what drafter kangaroo reads; give adapter={str(adapter)!r} in its"
            " place"
        )


@pytest.mark.parametrize("without", [["big"], ["draft"], ["big", "draft"]])
def test_missing_tokenizers_are_refused_where_vocabulary_sizes_differ(
    models: Path, tmp_path: Path, without: list[str]
) -> None:
    """Vocabularies of the same size count as the same vocabulary."""
    for size in (384, 400):
        folders = {"big": tmp_path / f"big{size}", "draft": tmp_path / f"draft{size}"}
        checkpoints.save_checkpoint(folders["big"], tokenizer=True)
        checkpoints.save_checkpoint(folders["draft"], tokenizer=True, vocab_size=size)
        for name in without:
            (folders[name] / "tokenizer.json").unlink()
        if size == 384:
            llm = foredraft.load(folders["big"], draft=folders["draft"], device="cpu", policy="fixed")
            assert llm.default_drafter == "draft-model"
            assert llm.generate([5, 6, 7], GREEDY)[0].token_ids
            continue
        with pytest.raises(ConfigError) as caught:
            foredraft.load(folders["big"], draft=folders["draft"], device="cpu", policy="fixed")
        for part in (str(folders["big"]), "384", str(folders["draft"]), "400"):
            assert part in str(caught.value)
        assert str(caught.value).endswith(f"give {folders[without[0]]} as a folder with its tokenizer.json")


def test_a_retokenizing_draft_model_gets_twice_the_positions(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count as memory too."""
    llm = load(models, draft=models / "foreign", max_length=700, max_batch=2)
    drafter = engine_of(llm).drafters["retokenize"]
    assert drafter.cache.positions == drafter.positions == 1400  # type: ignore[attr-defined]
    assert drafter.cache.rows == 2  # type: ignore[attr-defined]
    spec = llm.loaded.spec
    row = 2 * spec.kv_heads * spec.head_dim * 4
    both = (
        spec.layers * 2048 + 1 * 2048
    ) * row  # positions are stored in units of 1024, with slack past the end
    for budget, fits in ((2 * both, True), (2 * both - 1, False)):
        set_room(monkeypatch, budget, models / "big", models / "foreign")
        if fits:
            load(models, draft=models / "foreign", max_length=700, max_batch=2)
        else:
            with pytest.raises(ConfigError, match="2 sequences of 700 positions need"):
                load(models, draft=models / "foreign", max_length=700, max_batch=2)


def test_a_draft_model_with_fewer_positions_gets_a_smaller_cache(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond its positions the target decodes without drafts, and the text stays the same."""
    short = checkpoints.save_checkpoint(
        tmp_path / "short", tokenizer=True, seed=2, num_hidden_layers=1, max_position_embeddings=40
    )
    foreign = checkpoints.save_checkpoint(
        tmp_path / "foreign",
        tokenizer=True,
        vocab_size=300,
        num_hidden_layers=1,
        max_position_embeddings=40,
    )
    params = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
    prompts = ["a b c", "the target checks", "a" * 30, "b" * 70]
    plain = load(models, max_length=1500).generate(prompts, params)
    for draft, name in ((short, "draft-model"), (foreign, "retokenize")):
        llm = load(models, draft=draft, max_length=1500, max_batch=2)
        assert engine_of(llm).drafters[name].cache.positions == 40  # type: ignore[attr-defined]
        outputs = llm.generate(prompts, params)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
        assert [output.stats.drafted > 0 for output in outputs] == [True, True, True, False]
        row = 2 * llm.loaded.spec.kv_heads * llm.loaded.spec.head_dim * 4
        both = (llm.loaded.spec.layers * 2048 + 1024) * row
        for budget, fits in ((2 * both, True), (2 * both - 1, False)):
            set_room(monkeypatch, budget, models / "big", draft)
            with nullcontext() if fits else pytest.raises(ConfigError, match="2 sequences of 1500 positions"):
                load(models, draft=draft, max_length=1500, max_batch=2)
        monkeypatch.undo()


def test_greedy_draft_sampling_needs_a_drafter_with_probabilities(models: Path) -> None:
    with pytest.raises(ConfigError, match="draft_sampling is 'greedy', but no model drafts"):
        load(models, drafter="lookup", draft_sampling="greedy")
    with pytest.raises(ConfigError, match="'greedy', but the draft model .*foreign has another tokenizer"):
        load(models, draft=models / "foreign", draft_sampling="greedy")
    load(
        models, drafter="lookup", draft=models / "small", draft_sampling="greedy"
    )  # a request may name the draft model


@pytest.mark.parametrize(
    ("device", "count", "message"),
    [
        ("cpu:3", 0, "there is one CPU; give 'cpu'"),
        ("cpu:0", 0, "there is one CPU; give 'cpu'"),
        ("cuda", 0, "sees no CUDA device; give 'cpu'"),
        ("cuda:9", 2, "sees only cuda:0, cuda:1; give one of these"),
        ("cuda:256", 2, "sees only cuda:0, cuda:1; give one of these"),  # PyTorch counts modulo 256
        *((name, 2, "give 'cpu', 'cuda' or 'cuda:N'") for name in ("meta", "mps", "xpu", "gpu", "", "CPU")),
        *(
            (name, 2, "give 'cpu', 'cuda' or 'cuda:N'")
            for name in ("cuda:", "cuda:-1", "cuda:1.5", "cuda:0:1")
        ),
    ],
)
def test_devices_that_do_not_exist_are_refused(
    models: Path, monkeypatch: pytest.MonkeyPatch, device: str, count: int, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigError, match=f"device is '{device}'.*{message}"):
        load(models, device=device)


LONG_ROW = 2 * 4 * 16 * 4  # bytes of a position in the cache of "long": k and v, heads, head dim, float32


@pytest.mark.parametrize(
    ("rows_at_once", "needed", "options", "rows", "positions"),
    [
        (100, None, {}, 8, 131072),  # enough for the most rows that are used by default
        (4.5, None, {}, 8, 65536),  # positions are halved in favour of rows,
        (0.06, None, {}, 1, 4096),  # but not below the length of a conversation,
        (0.01, None, {}, 1, 512),  # unless nothing else fits
        (2, None, {"max_length": 131072}, 2, 131072),  # a given length stays
        (1, None, {"max_batch": 4}, 4, 16384),
        (100, (1, 200), {}, 1, 200),
        (100, (5000, 200), {}, 8, 200),
        (4, (8, 131072), {}, 4, 131072),  # the longest text must fit; other requests wait
        (0.3, (8, 10**6), {}, 1, 32768),
        (100, (1, 200), {"max_length": 300, "max_batch": 2}, 2, 300),
    ],
)
def test_the_cache_size_fits_into_free_memory(
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows_at_once: float,
    needed: tuple[int, int] | None,
    options: dict[str, Any],
    rows: int,
    positions: int,
) -> None:
    """rows_at_once: rows of the model's full length that fit into memory. needed: rows and positions."""
    row = (131072 + 1024) * LONG_ROW
    set_room(monkeypatch, int(rows_at_once * row), models / "long")
    made: list[tuple[int, int]] = []  # of the target first; a self-check may make a small one later
    new_cache = loading.runners.Runner.new_cache

    def noted(self: loading.runners.Runner, count: int, length: int) -> object:
        made.append((count, length))
        return new_cache(self, 1, 64)  # only the numbers matter

    monkeypatch.setattr(loading.runners.Runner, "new_cache", noted)
    if needed is None:
        llm = load(models, "long", **options)
    else:
        llm = load_for(lambda *_: needed, models / "long", device="cpu", **options)
    assert made[0] == (rows, positions) and llm.max_length == positions


def test_caches_that_do_not_fit_are_refused_with_their_sizes(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading.capacity, "free_memory", lambda device: 2**20)
    with pytest.raises(ConfigError, match=r"1 sequences of 131072 positions need \d+ MiB.*0 MiB may be used"):
        load(models, "long", max_length=131072)


def test_the_tables_do_not_import_torch() -> None:
    code = "import sys, foredraft.kinds; print('torch' in sys.modules)"
    assert python("-c", code) == "False\n"


def test_a_revision_without_a_hub_id_is_refused(models: Path) -> None:
    with pytest.raises(ConfigError, match="draft_revision is 'v1', but no hub id is given that has it"):
        load(models, draft_revision="v1")
    with pytest.raises(ConfigError, match="^revision is 'v1', but no hub id is given"):
        foredraft.load(revision="v1")
    with pytest.raises(ConfigError, match="is a local folder, which has no revision 'v1'"):
        load(models, draft=models / "small", draft_revision="v1")


def test_a_tokenizer_of_another_model_is_refused(models: Path, tmp_path: Path) -> None:
    """It has too many ids, or lacks the model's end-of-text token. A padded vocabulary is accepted."""
    small, padded, endless = tmp_path / "small", tmp_path / "padded", tmp_path / "endless"
    for folder, keys in (
        (small, {"vocab_size": 383}),
        (padded, {"vocab_size": 512}),
        (endless, {"vocab_size": 512, "eos_token_id": [2, 500]}),
    ):
        checkpoints.save_checkpoint(folder, seed=1, **keys)  # type: ignore[arg-type]
        shutil.copy(models / "big/tokenizer.json", folder)
    for folder, message in (
        (small, "has ids up to 383, but the model's vocabulary is 383"),
        (endless, "has no token 500, which is the model's eos_token_id"),
    ):
        for options in ({}, {"draft": folder}):
            with pytest.raises(CheckpointError) as caught:
                foredraft.load(models / "big" if options else folder, device="cpu", **options)
            line = str(caught.value)
            assert line.startswith(
                f"{folder}/tokenizer.json is not the tokenizer of {folder}/config.json: it"
            )
            assert message in line and "\n" not in line
    spoilt = checkpoints.save_checkpoint(tmp_path / "spoilt", tokenizer=True)
    (spoilt / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {"384": {"content": "<tool>"}}})
    )
    with pytest.raises(CheckpointError, match="has no added token '<tool>' with the id 384"):
        foredraft.load(spoilt, device="cpu")
    llm = foredraft.load(padded, device="cpu", max_length=64)
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode([5, 500, 6]) == llm.tokenizer.decode([5, 6])  # no token, no text


@pytest.fixture(scope="module")
def beyond(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models whose tokenizers have added tokens, special and plain, beyond the models' last ids.

    Text models of Gemma 3 have such tokens, and fine-tunes of Llama 2 with a padding token. `model` and
    `draft` share a tokenizer; `relative` has the same tokens under other ids; `foreign` has another tokenizer.
    """
    folder = tmp_path_factory.mktemp("beyond")
    for name, inner, layers in (
        ("model", checkpoints.tiny_tokenizer(), 3),
        ("draft", checkpoints.tiny_tokenizer(), 1),
        ("relative", alphabets.permuted(checkpoints.tiny_tokenizer())[0], 1),
        ("foreign", alphabets.sentencepiece(), 1),
    ):
        size = inner.get_vocab_size()
        inner.add_special_tokens(["<image>", "<pad2>"] if name == "relative" else ["<pad2>", "<image>"])
        inner.add_tokens(["<plain>", "the text"] if name == "foreign" else ["<plain>"])
        checkpoints.save_checkpoint(
            folder / name, vocab_size=size, num_hidden_layers=layers, eos_token_id=None
        )
        alphabets.save(inner, folder / name)
    return folder


@pytest.mark.parametrize("draft", [None, "draft", "relative", "foreign"])
def test_added_tokens_may_lie_beyond_the_models_ids(beyond: Path, draft: str | None) -> None:
    """Text is generated and drafted; a prompt with such a token is refused by its id."""
    options = {} if draft is None else {"draft": beyond / draft}
    llm = foredraft.load(
        beyond / "model",
        device="cpu",
        max_length=256,
        policy="fixed",
        drafter=None if draft else "none",
        **options,
    )  # type: ignore[arg-type]
    plain = foredraft.load(beyond / "model", device="cpu", max_length=256)
    prompts = ["the text checks <plai", "a <imag", "the text", "<s>the target</s>"]
    params = SamplingParams(temperature=0, max_new_tokens=40)
    outputs = llm.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain.generate(prompts, params)]
    assert all((output.stats.drafted > 0) is (draft is not None) for output in outputs)
    for prompt, id in (("a <pad2>", 384), ("a <image>", 385), ("a <plain>", 386)):
        with pytest.raises(RequestError, match=f"token id {id} is outside the model's vocabulary of 384"):
            llm.generate(prompt, params)


def test_a_draft_model_reads_no_id_beyond_its_vocabulary(beyond: Path, tmp_path: Path) -> None:
    """The target has ids for tokens that lie beyond the draft model's vocabulary, and emits them."""
    target = checkpoints.save_checkpoint(tmp_path / "target", vocab_size=400, eos_token_id=None)
    shutil.copy(beyond / "model/tokenizer.json", target)
    prompts = ["a <pad2> b", "<image><plain> the text", "<pad2>"]
    params = SamplingParams(temperature=0, max_new_tokens=30)
    plain = foredraft.load(target, device="cpu", max_length=256).generate(prompts, params)
    for draft in ("draft", "relative", "foreign"):
        llm = foredraft.load(target, draft=beyond / draft, device="cpu", max_length=256, policy="fixed")
        outputs = llm.generate(prompts, params)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
        assert all(output.error is None and output.stats.drafted > 0 for output in outputs)
