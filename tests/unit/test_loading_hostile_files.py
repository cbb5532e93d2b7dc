"""Every file that `load` reads, with hostile values: it loads, or one line says why it does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import foredraft
from foredraft.drafters import strict_records
from foredraft.drafters.plan_files import read_plan, write_plan
from foredraft.errors import CheckpointError, ConfigError, ForedraftError
from foredraft.loading import capacity, options_for
from foredraft.loading.capacity import CacheLimits, Capacity
from foredraft.loading.checkpoints import default_params, find_target
from foredraft.model import config, source, spec
from foredraft.model.config import MAX_DEPTH, MAX_KEY_WIDTH, MAX_WIDTH, MOST, parse_json
from foredraft.model.weights import load_decoder
from tests.support import checkpoints
from tests.support.mutation import Mutation, assert_caught, defect
from tests.support.plans import plan_of

TEMPLATE = "{{ bos_token }}{{ messages[0].content }}"
# JSON texts: some are too deep, some too large, some of a type that no key has.
RAW = {
    "deep list": "[" * 100_000 + "]" * 100_000,
    "deep object": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "deep": "[" * 900 + "]" * 900,
    "large number": "1" + "0" * 400,
    "larger number": "1" + "0" * 5000,
    "negative number": "-1" + "0" * 400,
    "31 bits": str(2**31 - 1),
    "zero": "0",
    "infinity": "1e999",
    "nan": "NaN",
    "null": "null",
    "surrogate": '"\\ud800"',
    "surrogate key": '{"\\ud800\\n": 1}',
    "long text": '"' + "x" * 100_000 + '"',
    "NUL": '"\\u0000"',
    "list": '[null, [], "\\ud800"]',
    "object": '{"content": "\\ud800", "type": {}}',
}
FILES = {
    "config.json": "architectures hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim "
    "num_key_value_heads vocab_size max_position_embeddings rope_parameters rope_theta rope_scaling layer_types "
    "sliding_window rms_norm_eps eos_token_id dtype hidden_act quantization_config unknown",
    "generation_config.json": "temperature top_k top_p max_new_tokens stop_strings eos_token_id do_sample unknown",
    "tokenizer_config.json": "chat_template added_tokens_decoder bos_token",
    "special_tokens_map.json": "bos_token",
    "tokenizer.json": "model added_tokens decoder post_processor truncation version",
    "model.safetensors.index.json": "weight_map metadata",
    "foredraft plan": "layers skip_attention exit alpha c tau date max_draft temperature format model",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("hostile")
    single = checkpoints.save_checkpoint(base / "single", tokenizer=True)
    sharded = checkpoints.save_checkpoint(base / "sharded", tokenizer=True, shards=True)
    write_plan(plan_of(None), single / "foredraft plan")
    return {file: sharded if "index" in file else single for file in FILES}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "copy"


def copied(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return target


def read(folder: Path) -> None:
    """Read all files of a checkpoint as `load` does, up to the values of the weights."""
    target = find_target(options_for(folder, device="cpu"))
    default_params(target)
    Capacity(target, (), torch.device("cpu"), kernels=False).cache_size(CacheLimits(1, 512))
    load_decoder(folder, "meta")
    assert target.tokenizer is not None
    if target.tokenizer.chat is not None:
        target.tokenizer.encode_chat([{"role": "user", "content": "x"}])


def check(folder: Path, file: str) -> None:
    """Check that the files are read, or refused in one printable line."""
    try:
        if file == "foredraft plan":
            read_plan(folder / file)
        else:
            read(folder)
    except ForedraftError as error:
        line = str(error)
        assert "\n" not in line and len(line) < 1000 + len(str(folder))
        line.encode()


def check_file(folder: Path, file: str, values: dict[str, str]) -> None:
    """Check the file with each value as its whole content, and as the value of each of its keys."""
    path = folder / file
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    for raw in values.values():
        path.write_text(raw)
        check(folder, file)
        for key in FILES[file].split():
            path.write_text(json.dumps(content | {key: "HERE"}).replace('"HERE"', raw))
            check(folder, file)


@pytest.mark.parametrize("file", FILES)
def test_a_hostile_file_is_read_or_refused_in_one_line(
    folders: dict[str, Path], folder: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_file(copied(folders[file], folder), file, RAW)
    for record in caplog.records:
        line = record.getMessage()
        assert line.isprintable() and len(line) < 1000 + len(str(folder))


NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_any_json_is_read_or_refused_in_one_line(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, file: str
) -> None:
    folder = copied(folders[file], tmp_path_factory.mktemp("any") / "copy")
    path = folder / file
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    @settings(max_examples=100)
    @given(key=st.sampled_from(FILES[file].split()), value=NESTED)
    def examples(key: str, value: Any) -> None:
        path.write_text(json.dumps(content | {key: value}), encoding="utf-8")
        check(folder, file)

    examples()


@pytest.mark.parametrize("key", MOST)
def test_a_size_beyond_any_model_names_its_key(folders: dict[str, Path], folder: Path, key: str) -> None:
    config = json.loads((folders["config.json"] / "config.json").read_text())
    path = copied(folders["config.json"], folder) / "config.json"
    path.write_text(json.dumps(config | {key: 2**31 - 1}))
    remedy = f"{key} is 2147483647; it must be a whole number, at most {MOST[key]:,}"
    with pytest.raises(CheckpointError, match=remedy):
        foredraft.load(folder, device="cpu")


@pytest.mark.parametrize(
    ("heads", "keys", "dim", "refused"),
    [(4, 4, MAX_KEY_WIDTH // 4, False), (8, 8, MAX_KEY_WIDTH // 4, True), (64, 1, MAX_WIDTH // 32, True)],
)
def test_heads_are_no_wider_together_than_those_of_any_model(
    folders: dict[str, Path], heads: int, keys: int, dim: int, refused: bool
) -> None:
    config = json.loads((folders["config.json"] / "config.json").read_text())
    config |= {"num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": dim}
    if refused:
        with pytest.raises(CheckpointError, match=f"and head_dim = {dim}; their product must not be more"):
            spec.ModelSpec.from_hf(config)
    else:
        assert spec.ModelSpec.from_hf(config).head_dim == dim


def test_weights_that_do_not_fit_are_refused_before_the_kernels_are_checked(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of the kernels takes memory by the model's sizes."""

    def checked_kernels(*args: Any) -> None:
        raise AssertionError("the kernels were checked")

    monkeypatch.setattr(capacity, "unserved_because", checked_kernels)
    monkeypatch.setattr(capacity, "free_memory", lambda device: 1000)
    with pytest.raises(ConfigError, match="the weights need .* are free on cpu"):
        foredraft.load(folders["config.json"], device="cpu")


@pytest.mark.parametrize(
    "deep", ["[" * MAX_DEPTH + "]" * MAX_DEPTH, '{"a":' * MAX_DEPTH + "[]" + "}" * MAX_DEPTH]
)
def test_json_may_nest_up_to_a_bound(deep: str) -> None:
    inner = deep.replace("[]", "1") if deep.startswith("{") else deep
    assert parse_json(inner) == json.loads(inner)
    with pytest.raises(ValueError, match="nested more than 50 deep"):
        parse_json(f"[{inner}]")


# (name, point, mutation, file, values)
DEFECTS: list[tuple[str, Any, Mutation, str, dict[str, str]]] = [
    ("JSON of any depth", parse_json, lambda sound: json.loads, "config.json", {"a": RAW["deep list"]}),
    ("JSON of any depth in plans", parse_json, lambda sound: json.loads, "foredraft plan", {"a": RAW["deep object"]}),
    ("any file name", source.is_file_name, lambda sound: lambda text: True, "model.safetensors.index.json", {"a": '{"x": "' + 9999 * "x" + '"}'}),
    ("numbers that no float holds", strict_records._is, lambda sound: lambda value, hint: hint is float or sound(value, hint), "foredraft plan", {"a": RAW["null"]}),
]  # fmt: skip


@pytest.mark.parametrize("row", DEFECTS, ids=lambda row: str(row[0]))
def test_defects_are_caught(
    row: Any, folders: dict[str, Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, point, mutation, file, values = row
    copied(folders[file], folder)
    planted = defect(name, point, mutation, lambda: check_file(folder, file, values), Exception)
    assert_caught(planted, monkeypatch)


def test_unbounded_sizes(folders: dict[str, Path], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "MOST", {})
    with pytest.raises(ConfigError, match="the weights need"):
        test_a_size_beyond_any_model_names_its_key(folders, folder, "hidden_size")
