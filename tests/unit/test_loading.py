"""`load`: objects from names, cache sizes within memory, plans, and errors that name the remedy."""

from __future__ import annotations

import json
import logging
import math
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import foredraft
from foredraft import CheckpointError, ConfigError, RequestError, SamplingParams, loading
from foredraft.bench.bench_records import DraftCost
from foredraft.bench.measurement import measure_costs
from foredraft.decode.policy import Policy
from foredraft.decode.stats import Round
from foredraft.drafters.asset import Nothing
from foredraft.drafters.lookup import Lookup
from foredraft.drafters.plan_files import PlanFile, Skips, keep_plan, plan_place, write_plan
from foredraft.kernels.compilation import library
from foredraft.kinds.tables import DRAFTERS, POLICIES, DrafterKind, PolicyKind
from foredraft.loading import load_for, options_for
from foredraft.loading.checkpoints import find_target, read_draft
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import weight_bytes
from tests.support import alphabets, checkpoints, every_drafter
from tests.support.adapters import save_adapter
from tests.support.loaded import engine_of
from tests.support.plans import plan_of
from tests.support.running import python

GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    checkpoints.save_checkpoint(folder / "big", tokenizer=True, seed=1)
    checkpoints.save_checkpoint(folder / "small", tokenizer=True, seed=2, num_hidden_layers=1)
    checkpoints.save_checkpoint(folder / "foreign", tokenizer=True, num_hidden_layers=1, vocab_size=300)
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
    name = "echo"


def test_a_drafter_added_to_the_table_is_loaded(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = DrafterKind("copies the text", lambda: Nothing(Echo), lossless=False)
    monkeypatch.setitem(DRAFTERS, "echo", kind)
    llm = load(models, drafter="echo", max_batch=2, max_length=64)
    [output] = llm.generate("a b a b a b", GREEDY)
    assert output.stats.drafted > 0
    assert not output.lossless
    assert llm.generate("a b a b", SamplingParams(drafter="lookup", max_new_tokens=2))[0].lossless


def add_policy(monkeypatch: pytest.MonkeyPatch, longest: int) -> list[int]:
    """Add a policy "bold" to the table; returns a list that gathers the longest drafts that it is made with."""
    made: list[int] = []

    def make(longest: int) -> Policy:
        made.append(longest)
        return POLICIES["fixed"].make(longest)

    monkeypatch.setitem(POLICIES, "bold", PolicyKind("as long as possible", make, max_draft=longest))
    return made


def test_an_added_policy_has_its_longest_draft(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = add_policy(monkeypatch, longest=7)
    load(models, policy="bold"), load(models, policy="bold", max_draft=2)
    assert made == [7, 2]


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return every_drafter.save_models(tmp_path_factory.mktemp("drafting"))


@pytest.mark.parametrize("loaded", every_drafter.DRAFTERS)
def test_drafters_are_loaded_under_their_names(drafting: Path, loaded: str) -> None:
    drafters = engine_of(every_drafter.load(drafting, loaded, "cpu")).drafters
    assert {*every_drafter.DRAFTERS[loaded]} - {"none"} <= drafters.keys()
    for name, drafter in drafters.items():
        assert drafter.name == name and hasattr(drafter, "step") == DRAFTERS[name].autoregressive


@pytest.mark.parametrize("name", ["auto", "low-bit", "lookup", "none", "prediction", "suffix"])
def test_a_drafter_of_the_target_alone_is_the_default_that_is_given(models: Path, name: str) -> None:
    llm = load(models, drafter=name, policy="auto")
    assert llm.default_drafter == (None if name == "none" else name)


@pytest.mark.parametrize("value", ["3", 2.5, True, 0, math.nan])
@pytest.mark.parametrize("option", ["max_draft", "max_batch", "max_length"])
def test_counts_must_be_whole_numbers(models: Path, option: str, value: object) -> None:
    alternative = ", or drafter='none'" if option == "max_draft" else ""
    message = f"{option} is {value!r}; give a whole number, 1 or more{alternative}"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        load(models, **{option: value})


DTYPES = (torch.int8, torch.float64, "fp8", "float8", 16, "", [])
TABLES = ("threshold=0.5", [("threshold", 0.5)], [], "")
NO_TABLE = "policy_options is .*; give a table, such as {'threshold': 0.6}"
OTHER = "draft model .*foreign has another tokenizer than the target .*big; give drafter='retokenize'"
SAME = "draft model .*small has the tokenizer of the target .*big; give drafter='draft-model'"
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"draft": "small", "policy": "confidence", "policy_options": wrong}, NO_TABLE) for wrong in TABLES),
    *(({"dtype": wrong}, "^dtype is .*; give one of bfloat16, float16, float32") for wrong in DTYPES),
    ({"policy": ["fixed"]}, r"policy is \['fixed'\]; give one of auto, fixed"),
    ({"draft_revision": "v1"}, "draft_revision is 'v1', but no hub id is given that has it"),
    ({"draft": "small", "draft_revision": "v1"}, "is a local folder, which has no revision 'v1'"),
    ({"drafter": "lookup", "draft_sampling": "greedy"}, "draft_sampling is 'greedy', but no model drafts"),
    ({"draft": "foreign", "draft_sampling": "greedy"}, "'greedy', but the draft model .*foreign has another"),
    ({"draft": "foreign", "drafter": "draft-model"}, f"drafter is 'draft-model', but the {OTHER}"),
    ({"draft": "small", "drafter": "retokenize"}, f"drafter is 'retokenize', but the {SAME}"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_options_are_refused_before_anything_large_is_read(
    models: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(loading.runners, "load_decoder", None)
    given = {key: models / value if key == "draft" else value for key, value in options.items()}
    with pytest.raises(ConfigError, match=message) as caught:
        load(models, **given)
    assert "\n" not in str(caught.value)


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


def test_every_policy_can_grow_to_its_longest_draft() -> None:
    """The heuristic policy starts at 5 tokens and would stay there if that were its longest draft."""
    lengths = {}
    for name, kind in POLICIES.items():
        policy = kind.make(kind.max_draft)
        assert policy.name == name and policy.stops_by_content == kind.stops_by_content
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


def test_the_default_length_fits_the_verifying_pass(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = add_policy(monkeypatch, longest=10**6)
    llm = load(models, policy="bold")
    assert made == [llm.loaded.runner.max_queries - 1]
    with pytest.raises(ConfigError, match="max_draft is 1000000, but this model's verifying pass takes"):
        load(models, policy="bold", max_draft=10**6)


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


def test_an_adapter_as_a_draft_model_is_refused_with_its_own_option(models: Path, tmp_path: Path) -> None:
    adapter = save_adapter(models / "big", tmp_path / "adapter")
    for options in ({}, {"drafter": "kangaroo"}, {"drafter": "draft-model"}):
        with pytest.raises(ConfigError) as caught:
            load(models, draft=adapter, **options)
        assert str(caught.value) == (
            f"draft is {str(adapter)!r}, which is what drafter kangaroo reads; give adapter={str(adapter)!r} in its"
            " place"
        )


@pytest.mark.parametrize("without", [["big"], ["draft"], ["big", "draft"]])
def test_missing_tokenizers_need_equal_sizes(models: Path, tmp_path: Path, without: list[str]) -> None:
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


def check_memory(
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    llm: foredraft.LLM,
    draft: Path,
    draft_positions: int,
    length: int,
) -> None:
    """Check how much memory the caches of two sequences take; positions are stored in units of 1024."""
    spec = llm.loaded.spec
    both = (spec.layers * 2048 + draft_positions) * 2 * spec.kv_heads * spec.head_dim * 4
    for budget, fits in ((2 * both, True), (2 * both - 1, False)):
        set_room(monkeypatch, budget, models / "big", draft)
        refused = pytest.raises(ConfigError, match=f"2 sequences of {length} positions need")
        with nullcontext() if fits else refused:
            load(models, draft=draft, max_length=length, max_batch=2)


def test_retokenizing_takes_twice_the_positions(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(models, draft=models / "foreign", max_length=700, max_batch=2)
    drafter: Any = engine_of(llm).drafters["retokenize"]
    assert drafter.cache.positions == drafter.positions == 1400 and drafter.cache.rows == 2
    check_memory(models, monkeypatch, llm, models / "foreign", 2048, 700)


def test_a_draft_model_with_fewer_positions_gets_a_smaller_cache(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond its positions the target decodes without drafts, and the text stays the same."""
    small: dict[str, Any] = {"tokenizer": True, "num_hidden_layers": 1, "max_position_embeddings": 40}
    short = checkpoints.save_checkpoint(tmp_path / "short", seed=2, **small)
    foreign = checkpoints.save_checkpoint(tmp_path / "foreign", vocab_size=300, **small)
    params = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
    prompts = ["a b c", "the target checks", "a" * 30, "b" * 70]
    plain = load(models, max_length=1500).generate(prompts, params)
    for draft, name in ((short, "draft-model"), (foreign, "retokenize")):
        llm = load(models, draft=draft, max_length=1500, max_batch=2)
        assert engine_of(llm).drafters[name].cache.positions == 40  # type: ignore[attr-defined]
        outputs = llm.generate(prompts, params)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
        assert [output.stats.drafted > 0 for output in outputs] == [True, True, True, False]
        with monkeypatch.context() as patched:
            check_memory(models, patched, llm, draft, 1024, 1500)


NO_DEVICES = ("meta", "mps", "xpu", "gpu", "", "CPU", "cuda:", "cuda:-1", "cuda:1.5", "cuda:0:1")


@pytest.mark.parametrize(
    ("device", "count", "message"),
    [
        ("cpu:3", 0, "there is one CPU; give 'cpu'"),
        ("cpu:0", 0, "there is one CPU; give 'cpu'"),
        ("cuda", 0, "sees no CUDA device; give 'cpu'"),
        ("cuda:9", 2, "sees only cuda:0, cuda:1; give one of these"),
        ("cuda:256", 2, "sees only cuda:0, cuda:1; give one of these"),  # PyTorch counts modulo 256
        *((name, 2, "give 'cpu', 'cuda' or 'cuda:N'") for name in NO_DEVICES),
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


def test_caches_that_do_not_fit_are_told_by_size(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading.capacity, "free_memory", lambda device: 2**20)
    with pytest.raises(ConfigError, match=r"1 sequences of 131072 positions need \d+ MiB.*0 MiB may be used"):
        load(models, "long", max_length=131072)


def test_the_tables_do_not_import_torch() -> None:
    code = "import sys, foredraft.kinds.tables; print('torch' in sys.modules)"
    assert python("-c", code) == "False\n"


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
    added = {"added_tokens_decoder": {"384": {"content": "<tool>"}}}
    (spoilt / "tokenizer_config.json").write_text(json.dumps(added))
    with pytest.raises(CheckpointError, match="has no added token '<tool>' with the id 384"):
        foredraft.load(spoilt, device="cpu")
    llm = foredraft.load(padded, device="cpu", max_length=64)
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode([5, 500, 6]) == llm.tokenizer.decode([5, 6])  # no token, no text


@pytest.fixture(scope="module")
def beyond(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As text models of Gemma 3 and fine-tunes of Llama 2 have: added tokens beyond the ids of the model."""
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
        keys = {"vocab_size": size, "num_hidden_layers": layers, "eos_token_id": None}
        checkpoints.save_checkpoint(folder / name, **keys)
        alphabets.save(inner, folder / name)
    return folder


@pytest.mark.parametrize("draft", [None, "draft", "relative", "foreign"])
def test_added_tokens_may_lie_beyond_the_models_ids(beyond: Path, draft: str | None) -> None:
    options = {} if draft is None else {"draft": beyond / draft}
    llm = load(beyond, "model", max_length=256, drafter=None if draft else "none", **options)
    plain = load(beyond, "model", max_length=256, policy="auto")
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


# --- plans: given in every form or found, and their errors, lengths and costs ---------------------


NO_PLAN = "no plan for this model; make one with `foredraft tune`, or give plan"


@pytest.fixture
def plan(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlanFile:
    library()  # from the cache of all tests, where it is compiled
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return plan_of(models / "big", skip_mlp=(2,))


def load_big(models: Path, **options: Any) -> foredraft.LLM:
    given = {"device": "cpu", "max_batch": 2, "max_length": 96, "policy": "fixed", **options}
    return foredraft.load(models / "big", **given)


def self_draft(llm: foredraft.LLM) -> Any:
    return engine_of(llm).drafters["layer-skip"]


def test_a_plan_may_be_given_in_any_form(models: Path, plan: PlanFile, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    write_plan(plan, file)
    want = load_big(models).generate("a b c", GREEDY)[0].token_ids
    for given in (file, str(file), plan, plan.skips, "skip:attn=1/mlp=2"):
        llm = load_big(models, plan=given)
        assert self_draft(llm).skips == Skips((1,), (2,))
        assert llm.default_drafter == "layer-skip", "a given plan is used by default"
        [output] = llm.generate("a b c", GREEDY)
        assert output.token_ids == want and output.stats.drafted > 0 and output.lossless
        policy: Any = engine_of(llm).policy
        assert policy.max_draft == (5 if given == plan.skips or given == str(plan.skips) else 3)
    assert self_draft(load_big(models, plan="exit:2")).skips == Skips(exit=2)


def test_a_kept_plan_is_found(models: Path, plan: PlanFile) -> None:
    with pytest.raises(ConfigError, match=NO_PLAN):
        load_big(models, drafter="layer-skip")
    assert set(engine_of(load_big(models)).drafters) == {"lookup", "prediction"}
    keep_plan(plan)
    llm = load_big(models, drafter="layer-skip")
    policy: Any = engine_of(llm).policy
    assert (self_draft(llm).skips, policy.max_draft) == (plan.skips, 3)
    assert engine_of(load_big(models, drafter="layer-skip", max_draft=7)).policy.max_draft == 7  # type: ignore[attr-defined]
    assert engine_of(load_big(models, drafter="layer-skip", policy="heuristic")).policy.max_draft == 3  # type: ignore[attr-defined]
    assert self_draft(load_big(models, drafter="layer-skip", plan="exit:1")).skips == Skips(exit=1)
    # a request may name it where another drafter is the default
    llm = load_big(models, draft=models / "small")
    assert llm.default_drafter == "draft-model" and engine_of(llm).policy.max_draft == 5  # type: ignore[attr-defined]
    names = ("none", "lookup", "draft-model", "layer-skip")
    outputs = llm.generate(["a b c"] * 4, [replace(GREEDY, drafter=name) for name in names])
    assert len({tuple(output.token_ids) for output in outputs}) == 1
    assert outputs[3].stats.drafted > 0


def test_plans_that_do_not_fit_are_refused(models: Path, plan: PlanFile, tmp_path: Path) -> None:
    other = replace(plan, model="another", model_hash="0" * 64)
    write_plan(other, tmp_path / "other.json")
    (tmp_path / "text.json").write_text("exit 1")
    for given, message in (
        (tmp_path / "other.json", "plan is for 'another', which is another model than .*big; make one with"),
        (other, "plan is for 'another'"),
        (tmp_path / "none.json", "plan is '.*none.json', which cannot be read"),
        (tmp_path / "text.json", "plan is '.*text.json', which is not JSON"),
        ("exit:3", "plan exits before layer 3; give 1 to 2: the model has 3 layers"),
        ("skip:mlp=3", "plan skips the MLP of layer 3; give 0 to 2"),
        ("skip:mlp", "plan is 'skip:mlp'; give exit:LAYER, or skip:"),
        (replace(plan, layers=7), "plan is for a model of 7 layers, but this one has 3; make one with"),
        (replace(plan, layers=9, skip_mlp=(8,)), "plan skips the MLP of layer 8; give 0 to 2"),
    ):
        with pytest.raises(ConfigError, match=message) as refused:
            load_big(models, plan=given)
        assert "\n" not in str(refused.value)


def test_a_broken_kept_plan_is_left_out_unless_it_is_needed(
    models: Path, plan: PlanFile, caplog: pytest.LogCaptureFixture
) -> None:
    keep_plan(plan)
    place = plan_place(plan.model_hash)
    assert place is not None
    place.write_text("{}")
    with caplog.at_level(logging.WARNING):
        assert set(engine_of(load_big(models)).drafters) == {"lookup", "prediction"}
    assert "whose format is None" in caplog.text
    with pytest.raises(ConfigError, match="whose format is None"):
        load_big(models, drafter="layer-skip")


def test_a_plan_of_another_device_or_dtype_is_used_with_a_warning(
    models: Path, plan: PlanFile, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, and only where the plan is given or needed; the output is exact in any case."""
    elsewhere = replace(plan, device="cuda")
    keep_plan(elsewhere)
    for given, doubted in (
        ({"plan": elsewhere}, True),
        ({"drafter": "layer-skip"}, True),
        ({}, False),
        ({"plan": plan}, False),
        ({"plan": plan, "dtype": "bfloat16"}, True),
        ({"plan": "skip:attn=1", "dtype": "bfloat16"}, False),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load_big(models, **given)
        told = [one.getMessage() for one in caplog.records if "was measured on" in one.getMessage()]
        assert len(told) == doubted, given
        assert not told or "but runs on cpu in " in told[0]


def test_greedy_draft_sampling_needs_a_drafter_that_a_request_may_name(models: Path) -> None:
    load(models, drafter="lookup", draft=models / "small", draft_sampling="greedy")
    llm = load_big(models, plan="skip:attn=1", draft_sampling="greedy")
    assert llm.generate("a b c", replace(GREEDY, temperature=1.0))[0].stats.drafted > 0
    llm = load_big(models, plan="exit:1", draft=models / "foreign", draft_sampling="greedy")
    assert engine_of(llm).greedy_drafts


def test_a_draft_step_costs_the_kept_sub_layers(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock counts the sub-layers that run, and one unit for embedding and head."""
    now = 0.0
    for given, c in (("exit:1", 3 / 7), ("skip:attn=0-2", 4 / 7), ("skip:none", 1.0)):
        llm = load_big(models, plan=given, kernels=False)  # kernels would take all steps in one call
        runner = llm.loaded.runner
        forward, seen = runner.forward, set()

        def timed(*some: Any, plan: Any = None, forward: Any = forward, seen: Any = seen, **more: Any) -> Any:
            nonlocal now
            now += 7 if plan is None else 1 + sum((*plan.attention, *plan.mlp))
            seen.add((plan is not None, more.get("invariant", True)))
            return forward(*some, plan=plan, **more)

        monkeypatch.setattr(runner, "forward", timed)
        monkeypatch.setattr("foredraft.profiling.timing.time.perf_counter", lambda: now)
        costs = measure_costs(llm.loaded, 1, 20, 3, repeats=2)
        own = costs.drafting["layer-skip"]
        assert (own.first, own.further) == pytest.approx((c, c))
        assert costs.drafting["lookup"] == DraftCost(0.0, 0.0)
        assert seen == {(False, True), (True, given.startswith("exit"))}
