"""GGUF files of a hub on 127.0.0.1, by the names that llama.cpp and Ollama give them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft.model.gguf.tensors import choose, models_among, part_names, shown_types
from tests.support.checkpoints import save_checkpoint
from tests.support.hub_server import Client, Repository, commit, serving

pytest.importorskip("gguf")

from tests.support.gguf_files import write_gguf

KEYS = {"hidden_size": 64, "intermediate_size": 96, "eos_token_id": None}
BIG = "m-Q8_0-00001-of-00004.gguf"  # the other parts follow

LISTS = [
    # files, wanted, chosen
    (["m-F16.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf"], None, "m-Q4_K_M.gguf"),
    (["m-F16.gguf", "m-q8_0.gguf"], None, "m-q8_0.gguf"),
    (["b.gguf", "a-F16.gguf"], None, "b.gguf"),
    (["m-F16.gguf", "m-Q4_K_M.gguf"], "q4_k_m", "m-Q4_K_M.gguf"),
    (["m.BF16.gguf", "m.F16.gguf"], "F16", "m.F16.gguf"),
    (["m-IQ4_XS.gguf", "m-Q4_0.gguf", "m-IQ4_NL.gguf"], "iq4_nl", "m-IQ4_NL.gguf"),
    (["m-Q4_K_S.gguf", "m-Q4_K_M.gguf"], "Q4_K", None),
    (["m-UD-Q4_K_XL.gguf"], "UD-Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
    (["mmproj-Q8_0.gguf", "m-Q8_0.gguf"], "Q8_0", "m-Q8_0.gguf"),
    (["m-Q8_0-mmproj.gguf", "m-imatrix.gguf"], None, None),
    (["Q8_0/m-00002-of-00002.gguf", "Q8_0/m-00001-of-00002.gguf"], "q8_0", "Q8_0/m-00001-of-00002.gguf"),
    (["m-Q8_0-00002-of-00002.gguf", "m-Q8_0-00001-of-00002.gguf"], None, "m-Q8_0-00001-of-00002.gguf"),
    (["a.gguf", "b.gguf"], "B.gguf", "b.gguf"),
    (["README.md"], None, None),
]  # fmt: skip


@pytest.mark.parametrize(("files", "wanted", "chosen"), LISTS)
def test_a_file_is_chosen_by_its_name(files: list[str], wanted: str | None, chosen: str | None) -> None:
    assert choose(models_among(files), wanted) == chosen


def test_types_are_listed() -> None:
    files = "m-Q4_K_M.gguf m.IQ2_XXS.gguf m-BF16-00001-of-00002.gguf Q8_0/m-UD-Q4_K_XL.gguf chat.gguf".split()
    assert shown_types(models_among(files)) == "Q4_K_M, IQ2_XXS, BF16, UD-Q4_K_XL, chat.gguf"
    assert shown_types([f"m{number}.gguf" for number in range(25)]).endswith(", m19.gguf and 5 more")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with three types of one model, one of them in parts, and files that are no model."""
    folder = tmp_path_factory.mktemp("models")
    model = save_checkpoint(folder / "model", tokenizer=True, **KEYS)
    files = folder / "files"
    files.mkdir()
    write_gguf(model, files / "m-F16.gguf", "F16")
    write_gguf(model, files / "m-BF16.gguf", "BF16")
    write_gguf(model, files / "m-Q8_0.gguf", "Q8_0", most_tensors=8)
    for name in ("mmproj-Q8_0.gguf", "imatrix.gguf", "README.md", ".gitattributes"):
        (files / name).write_text(name)
    assert sorted(file.name for file in files.glob("m-Q*")) == part_names(BIG)
    return folder


@pytest.fixture
def client(folder: Path, tmp_path: Path) -> Iterator[Client]:
    with serving() as hub:
        hub.repositories["owner/many"] = Repository({"main": folder / "files", "v1": folder / "files"})
        yield Client(hub, tmp_path / "home")


def fetched(client: Client) -> list[str]:
    return sorted(file for file in client.hub.fetched() if file.endswith(".gguf"))


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("owner/many:F16", ["m-F16.gguf"]),
        ("owner/many:bf16", ["m-BF16.gguf"]),
        ("hf.co/owner/many:Q8_0", part_names(BIG)),
        ("https://huggingface.co/owner/many:q8_0@v1", part_names(BIG)),
        ("owner/many:m-F16.gguf", ["m-F16.gguf"]),
        ("owner/many", part_names(BIG)),
        ("hf.co/owner/many@v1", part_names(BIG)),
    ],
)
def test_the_file_of_a_type_is_downloaded(name: str, files: list[str], client: Client) -> None:
    file = client.resolve(name)
    assert file.name == files[0] and fetched(client) == files
    assert file.parent.name == commit("owner/many", "v1" if "@" in name else "main")
    assert client.resolve(name) == file and fetched(client) == []
    assert client.resolve(name, HF_HUB_OFFLINE="1") == file and client.hub.log == []
    assert client.resolve(name, HF_ENDPOINT="http://127.0.0.1:9") == file


def test_what_is_taken_without_a_type_is_told(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """Offline, only what is cached is chosen from."""
    code, out, _ = client.info("owner/many:F16", "--device", "cpu")
    assert code == 0 and not caplog.messages and "owner/many:F16 (m-F16.gguf)" in out
    client.resolve("owner/many:F16")
    client.info("owner/many", "--device", "cpu", HF_HUB_OFFLINE="1")
    [line] = caplog.messages
    assert "owner/many: m-F16.gguf is taken of the GGUF files in the cache (F16)" in line
    message = client.refused("owner/many:Q8_0", HF_HUB_OFFLINE="1")
    assert message.startswith(
        "not all of owner/many is in the local hub cache (a GGUF file of type Q8_0 is missing)"
    )
    code, out, _ = client.info("owner/many", "--device", "cpu")
    [_, line] = caplog.messages
    assert f"owner/many: {BIG} is taken of the GGUF files on the hub (BF16, F16, Q8_0)" in line
    assert code == 0 and f"owner/many ({BIG}), LlamaForCausalLM" in out


def test_what_the_hub_does_not_have_is_named(client: Client, folder: Path, tmp_path: Path) -> None:
    part = shutil.copytree(folder / "files", tmp_path / "part")
    (part / part_names(BIG)[2]).unlink()
    client.hub.repositories["owner/part"] = Repository({"main": part})
    client.hub.repositories["owner/plain"] = Repository({"main": folder / "model"})
    for name, message in {
        "owner/many:Q4_K_M": "owner/many has no GGUF file of type Q4_K_M on the hub; take one of BF16, F16, Q8_0",
        "owner/plain:Q8_0": "owner/plain has no GGUF file on the hub; leave out :Q8_0",
        "owner/part:Q8_0": "owner/part has no m-Q8_0-00003-of-00004.gguf on the hub, though the name of its first part names it",
        **dict.fromkeys(("owner/many:", "owner/many:Q8 0", "hf.co/many", "owner/many@v1:F16"), ""),
    }.items():
        assert client.refused(name).startswith(message), name


def test_safetensors_come_first(client: Client, folder: Path, tmp_path: Path) -> None:
    both = shutil.copytree(folder / "files", tmp_path / "both")
    shutil.copytree(folder / "model", both, dirs_exist_ok=True)
    client.hub.repositories["owner/both"] = Repository({"main": both})
    made = client.resolve("owner/both")
    assert (made / "model.safetensors").is_file() and fetched(client) == []
    assert client.resolve("owner/both:F16").name == "m-F16.gguf"
    assert (client.resolve("owner/both") / "model.safetensors").is_file()


@pytest.mark.heavy
def test_texts_are_those_of_the_local_file(client: Client, folder: Path) -> None:
    texts, greedy = [], foredraft.SamplingParams(temperature=0, max_new_tokens=8)
    names, files = (
        ("owner/many:Q8_0", "hf.co/owner/many:F16"),
        (folder / "files" / BIG, folder / "files/m-F16.gguf"),
    )
    options: dict[str, Any] = {"device": "cpu", "max_length": 64, "policy": "fixed"}
    for target, draft in (names, files):
        with client.reading({}), foredraft.load(target, draft=draft, **options) as llm:
            texts.append(llm.generate("the cat", greedy)[0].text)
            assert llm.model == str(target) or target is files[0]  # the name that a server gives the model
    assert texts[0] == texts[1]
