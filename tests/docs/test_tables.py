"""The tables and lists of README and docs are those that results, declarations and docstrings make."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import figures
from foredraft.model.cache import KVCache
from foredraft.model.families import FAMILIES
from foredraft.model.spec import ModelSpec
from foredraft.model.unsupported import KNOWN
from foredraft.model.weights import parameter_count, weight_bytes
from recipes import family_table, option_tables, room_list
from recipes.family_table import CHECKPOINTS
from tests.support.pages import Page
from tests.support.running import ROOT

PACKAGE = ROOT / "src" / "foredraft"


def read(page: str | Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", option_tables.PAGES)
def test_the_tables_of_options_are_up_to_date(page: str) -> None:
    text = read(page)
    assert "<!-- options: " in text
    assert option_tables.brought_up_to_date(text) == text, "run python -m recipes.option_tables"


def test_the_tables_of_models_are_up_to_date() -> None:
    text = read(family_table.PAGE)
    assert text.count("<!-- table: ") == 2
    assert family_table.brought_up_to_date(text) == text, "run python -m recipes.family_table"


def test_what_is_shown_as_refused_is_refused_for_its_kind() -> None:
    for kind, names in family_table.EXAMPLES.items():
        assert {KNOWN[name][0] for name in names.split()} == {kind}


def test_every_family_has_a_public_checkpoint() -> None:
    assert CHECKPOINTS.keys() == FAMILIES.keys() - family_table.UNKNOWN


@pytest.mark.parametrize("architecture", CHECKPOINTS)
def test_the_parameters_are_those_that_the_makers_state(architecture: str) -> None:
    """OPT 350M has more here: its embedding and head are folded with their projections."""
    for checkpoint in CHECKPOINTS[architecture]:
        spec = family_table.spec_of(architecture, checkpoint)
        folded = 2 * spec.vocab_size * spec.hidden_size - spec.vocab_size * 512 - 2 * 512 * spec.hidden_size
        count = parameter_count(spec) - (folded if "word_embed_proj_dim" in checkpoint.config else 0)
        assert count / 1e9 == pytest.approx(checkpoint.billions, rel=0.015), checkpoint.name


def test_the_rooms_are_what_the_packages_say_of_themselves() -> None:
    text = read(room_list.ARCHITECTURE)
    assert "| `decode/` | The loop: " in text
    assert room_list.brought_up_to_date(text) == text, "run python -m recipes.room_list"


def test_the_files_are_what_the_modules_say_of_themselves() -> None:
    assert read(room_list.FILES) == room_list.list_of_files(), "run python -m recipes.room_list"


def test_every_file_that_the_architecture_names_exists() -> None:
    named = re.findall(r"`([a-z_/]+\.(?:py|inc))`", read(room_list.ARCHITECTURE))
    assert len(named) > 50
    assert not [name for name in named if not (ROOT / name).exists() and not [*PACKAGE.rglob(name)]]


@pytest.mark.parametrize("page", figures.PAGES)
def test_tables_match_the_results(page: str) -> None:
    text = read(page)
    assert figures.brought_up_to_date(text) == text, "run python -m benchmarks.figures --write"


def test_every_table_is_on_a_page() -> None:
    found = [match["name"] for page in figures.PAGES for match in figures.BLOCK.finditer(read(page))]
    assert sorted(found) == sorted(figures.TABLES)


def test_an_outdated_figure_is_found_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for page in figures.PAGES:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text(read(page), encoding="utf-8")
    assert figures.main([]) == 0  # it keeps the results that it reads
    monkeypatch.setattr(figures, "HERE", tmp_path / "benchmarks")
    assert figures.main([]) == 0
    page = tmp_path / "docs/reproduction.md"
    whole = page.read_text(encoding="utf-8")
    line = next(line for line in figures.speed() if line.startswith("| `draft-model` ÷ plain"))
    page.write_text(whole.replace(line, line.replace(".", ".9")), encoding="utf-8")
    assert figures.main([]) == 1
    assert capsys.readouterr().out == "docs/reproduction.md: tables are out of date\n"
    assert figures.main(["--write"]) == 0
    assert page.read_text(encoding="utf-8") == whole


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(KeyError, match="no such"):
        figures.brought_up_to_date("<!-- figures: no such -->\n<!-- /figures -->\n")


PAGE = Page(ROOT / "docs/guides/pairs.md")
DTYPE = torch.bfloat16
TOKENS = 4000  # of the caches of a pair on the page


SIZES = """hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size
    max_position_embeddings""".split()
LLAMA, QWEN, GEMMA, MISTRAL = (f"{name}ForCausalLM" for name in ("Llama", "Qwen3", "Gemma3", "Mistral"))
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
TIED_64, TIED_128, UNTIED_128 = TIED | {"head_dim": 64}, TIED | {"head_dim": 128}, UNTIED | {"head_dim": 128}
WINDOWS, NO_WINDOW = {"head_dim": 256, "sliding_window": 512}, UNTIED | {"sliding_window": None}
# model -> the published number of parameters, and the keys of its config.json that decide sizes
MODELS: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "meta-llama/Llama-3.1-8B-Instruct": (8_030_261_248, LLAMA, "4096 32 32 8 14336 128256 131072", UNTIED),
    "meta-llama/Llama-3.2-1B-Instruct": (1_235_814_400, LLAMA, "2048 16 32 8 8192 128256 131072", TIED_64),
    "Qwen/Qwen3-8B": (8_190_735_360, QWEN, "4096 36 32 8 12288 151936 40960", UNTIED_128),
    "Qwen/Qwen3-0.6B": (596_049_920, QWEN, "1024 28 16 8 3072 151936 40960", TIED_128),
    "google/gemma-3-1b-it": (999_885_952, GEMMA, "1152 26 4 1 6912 262144 32768", WINDOWS),
    "google/gemma-3-270m-it": (268_098_176, GEMMA, "640 18 4 1 2048 262144 32768", WINDOWS),
    "mistralai/Mistral-7B-Instruct-v0.3": (
        7_248_023_552,
        MISTRAL,
        "4096 32 32 8 14336 32768 32768",
        NO_WINDOW,
    ),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": (1_711_376_384, LLAMA, "2048 24 32 32 8192 49152 8192", TIED),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (134_515_008, LLAMA, "576 30 9 3 1536 49152 8192", TIED),
}
# Target, draft model, and the draft tokens that its cache holds for each token of the target.
PAIRS = (
    ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct", 1),
    ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", 1),
    ("google/gemma-3-1b-it", "google/gemma-3-270m-it", 1),
    ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", 1),
    ("mistralai/Mistral-7B-Instruct-v0.3", "meta-llama/Llama-3.2-1B-Instruct", 2),
)


def spec(name: str) -> ModelSpec:
    _, architecture, sizes, more = MODELS[name]
    keys = dict(zip(SIZES, map(int, sizes.split()), strict=True))
    return ModelSpec.from_hf({"architectures": [architecture], "torch_dtype": "bfloat16", **keys, **more})


def weights(name: str, device: str) -> float:
    kind = "cpu" if device == "cpu" else "meta"  # nothing is packed on the meta device, nor on a GPU
    return weight_bytes(spec(name), torch.device(kind), DTYPE, native=device == "cpu") / 2**30


def cache(name: str, tokens: int) -> float:
    return KVCache.bytes_of(spec(name), tokens, DTYPE) / 2**30


@pytest.mark.parametrize("name", MODELS)
def test_the_row_of_a_model_has_its_sizes(name: str) -> None:
    published = MODELS[name][0]
    assert parameter_count(spec(name)) == published
    row = (
        f"| `{name}` | {published / 1e6:,.0f} M | {weights(name, 'cuda'):.1f} | {weights(name, 'cpu'):.1f}"
        f" | {1024 * cache(name, 1000):.0f} | {spec(name).max_positions:,} |"
    )
    assert row in PAGE.text, row


@pytest.mark.parametrize(("target", "draft", "stretch"), PAIRS)
def test_the_row_of_a_pair_has_its_memory(target: str, draft: str, stretch: int) -> None:
    caches = cache(target, TOKENS) + cache(draft, stretch * TOKENS)
    gpu, cpu = (sum(weights(name, device) for name in (target, draft)) + caches for device in ("cuda", "cpu"))
    ratio = parameter_count(spec(target)) / parameter_count(spec(draft))
    row = f"| `{target}` | `{draft}` | {ratio:.1f} | {gpu:.1f} | {cpu:.1f} |"
    assert row in PAGE.text, row
    lines = [
        line for block in PAGE.blocks for line in block.text.splitlines() if target in line and draft in line
    ]
    for command in ("info", "generate"):
        assert any(line.startswith(f"foredraft {command} ") for line in lines), command
