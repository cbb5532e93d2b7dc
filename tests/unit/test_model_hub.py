"""Names of models: folders, and downloads from a hub on 127.0.0.1: the files requested and cached, and the errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import load_file

import foredraft
from foredraft import CheckpointError, ConfigError, SamplingParams
from foredraft.model.locate import resolve
from tests.support.checkpoints import save_checkpoint
from tests.support.hub_server import TOKEN, Client, Hub, Repository, commit, serving
from tests.support.loras import save_lora

OPTIONS: dict[str, Any] = {"device": "cpu", "max_length": 64, "policy": "fixed"}

# files of a repository that no model is loaded from
UNREAD = {
    *"pytorch_model.bin consolidated.safetensors model.gguf README.md".split(),
    *"original/params.json original/model.safetensors onnx/config.json".split(),
}
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save `big` in shards with further files, `small`, and `other`, which serves as a revision of `big`."""
    folder = tmp_path_factory.mktemp("models")
    save_checkpoint(folder / "big", tokenizer=True, seed=1, shards=True, eos_token_id=None)
    save_checkpoint(folder / "other", tokenizer=True, seed=3)
    save_checkpoint(folder / "small", tokenizer=True, seed=2, num_hidden_layers=1)
    templates = "chat_template.jinja additional_chat_templates/tool_use.jinja special_tokens_map.json".split()
    for path in (folder / "big" / name for name in (*templates, *UNREAD)):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({str(path): 1}))  # equal contents would be downloaded once
    (folder / "big" / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture
def client(folders: Path, tmp_path: Path) -> Iterator[Client]:
    with serving() as hub:
        hub.repositories["owner/big"] = Repository({"main": folders / "big", "refs/pr/1": folders / "other"})
        hub.repositories["owner/small"] = Repository({"v1": folders / "small"})
        yield Client(hub, tmp_path / "home")


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def generated(client: Client, *models: str, revision: str | None = None, **environment: str) -> Any:
    """Return the greedy ids of a target with a draft model, and how many were drafted."""
    target, draft = models or ("owner/big", "owner/small@v1")
    more = OPTIONS | {"draft": draft, "revision": revision}
    with client.reading(environment), foredraft.load(target, **more) as llm:
        [output] = llm.generate("x", SamplingParams(temperature=0, max_new_tokens=4))
    return output.token_ids, output.stats.drafted


@pytest.mark.heavy
def test_a_downloaded_model_loads_again_offline(client: Client, folders: Path) -> None:
    ids, drafted = generated(client, revision="main")
    assert "model-00001-of" in " ".join(client.hub.fetched())
    assert len(ids) > 0 and drafted > 0
    assert generated(client, revision="main", HF_HUB_OFFLINE="1") == (ids, drafted)
    assert client.hub.log == []
    assert generated(client, str(folders / "big"), str(folders / "small")) == (ids, drafted)
    assert generated(client, revision="refs/pr/1")[0] != ids


def test_only_the_files_of_a_model_are_downloaded(client: Client, folders: Path) -> None:
    folder = client.resolve("owner/big")
    assert files(folder) == files(folders / "big") - UNREAD
    assert {INDEX, "chat_template.jinja"} < files(folder)
    assert sorted(client.hub.fetched()) == sorted(Path(file).name for file in files(folder))
    for file in files(folder):
        assert (folder / file).read_bytes() == (folders / "big" / file).read_bytes()


def weights_of(hub: Hub) -> set[str]:
    return {file for file in hub.fetched() if file.endswith(".safetensors")}


def test_the_index_selects_the_weights_to_download(client: Client, folders: Path, tmp_path: Path) -> None:
    odd = shutil.copytree(folders / "big", tmp_path / "odd")
    index = json.loads((odd / INDEX).read_text())
    names = {file: file.replace("model-", "weights[1] ") for file in index["weight_map"].values()}
    for old, new in names.items():
        shutil.copy(odd / old, odd / new)
        (odd / old).write_bytes(old.encode())  # stands for weights in another precision
    index["weight_map"] = {tensor: names[file] for tensor, file in index["weight_map"].items()}
    (odd / INDEX).write_text(json.dumps(index))
    client.hub.repositories["owner/odd"] = Repository({"main": odd})
    folder = client.resolve("owner/odd")
    assert weights_of(client.hub) == set(names.values())
    tensors = [tensor for file in names.values() for tensor in load_file(folder / file)]
    assert sorted(tensors) == sorted(index["weight_map"])
    assert client.resolve("owner/odd", HF_HUB_OFFLINE="1") == folder

    whole = shutil.copytree(odd, tmp_path / "whole")
    shutil.copy(folders / "other/model.safetensors", whole)
    client.hub.repositories["owner/whole"] = Repository({"main": whole})
    client.resolve("owner/whole")
    assert weights_of(client.hub) == {"model.safetensors"}


@pytest.mark.parametrize("listed", [None, [], {"a": "../big/secret.safetensors", "b": "*.safetensors"}])
def test_an_index_without_valid_files_downloads_no_weights(
    client: Client, folders: Path, tmp_path: Path, listed: object
) -> None:
    broken = shutil.copytree(folders / "big", tmp_path / "broken")
    (broken / INDEX).write_text(json.dumps({"weight_map": listed}))
    client.hub.repositories["owner/broken"] = Repository({"main": broken})
    if isinstance(listed, dict):
        message = client.refused("owner/broken")
        assert f"has no *.safetensors on the hub, though {INDEX} names it" in message
    else:
        client.resolve("owner/broken")
    assert weights_of(client.hub) == set()


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids downloading it; unset HF_HUB_OFFLINE, or give a local folder"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub cannot be reached; go online, or give a local folder"),
    ],
    ids=["offline", "no network"],
)  # fmt: skip
def test_an_incomplete_cache_is_reported_when_the_hub_is_unreachable(
    client: Client, folders: Path, environment: dict[str, str], reason: str
) -> None:
    """Older versions of the hub client keep no list of the files of a repository."""
    shard = sorted(folders.glob("big/model-*.safetensors"))[1].name
    for named, file in (
        ("owner/big", shard),
        ("owner/small@v1", "model.safetensors"),
        ("owner/small@v1", "config.json"),
    ):
        folder, home = client.resolve(named), client.home
        for kept in home.rglob("trees"):
            shutil.rmtree(kept)
        client.home = home.rename(home.with_name(file))  # this process remembers lists by their paths
        folder = client.home / folder.relative_to(home)
        (folder / file).unlink()
        message = client.refused(named, **environment)
        assert message == f"not all of {named} is in the local hub cache ({file} is missing), and {reason}"
    assert client.resolve("owner/small@v1") == folder  # online, the missing file is downloaded


def test_the_requested_revision_is_downloaded_once(client: Client, folders: Path) -> None:
    folder = client.resolve("owner/small", "v1")
    assert client.resolve("owner/small@v1") == folder and client.hub.fetched() == []
    whole = commit("owner/small", "v1")
    assert client.resolve("owner/small", whole, HF_ENDPOINT="http://127.0.0.1:9") == folder  # nothing listens
    for name in ("owner/big@refs/pr/1", "owner/big@" + commit("owner/big", "refs/pr/1")):
        folder = client.resolve(name)
        assert folder.name == commit("owner/big", "refs/pr/1")
        weights = "model.safetensors"
        assert (folder / weights).read_bytes() == (folders / "other" / weights).read_bytes()
    assert client.resolve("owner/big").name == commit("owner/big", "main")


def test_an_interrupted_download_resumes(client: Client, tmp_path: Path) -> None:
    """The client stores chunks of 10 MiB, so the file is larger than two of them."""
    (folder := tmp_path / "long").mkdir()
    (folder / "config.json").write_text("{}")
    content = b"".join(number.to_bytes(8, "little") for number in range(3 * 2**20))
    (folder / "model.safetensors").write_bytes(content)
    client.hub.repositories["owner/long"] = Repository({"main": folder})
    client.hub.breaks["model.safetensors"] = 1
    fetched = client.resolve("owner/long")
    assert (fetched / "model.safetensors").read_bytes() == content
    ranges = [r.range for r in client.hub.log if r.method == "GET" and r.path.endswith("/model.safetensors")]
    assert ranges == [None, f"bytes={10 * 2**20}-"]


def test_a_failed_download_continues_with_the_missing_files(client: Client, folders: Path) -> None:
    last = max(folders.glob("big/model-*.safetensors"))
    client.hub.fails.add(last.name)
    message = client.refused("owner/big")
    assert message.startswith("owner/big could not be downloaded from the hub (Server error '500")
    assert "try again, or give a local folder" in message
    had = set(client.hub.fetched()) - client.hub.fails
    offline = client.refused("owner/big", HF_HUB_OFFLINE="1")
    assert offline.startswith(f"not all of owner/big is in the local hub cache ({last.name} is missing), and")
    client.hub.fails.clear()
    folder = client.resolve("owner/big")
    assert set(client.hub.fetched()).isdisjoint(had)
    assert had | set(client.hub.fetched()) == {Path(file).name for file in files(folder)}


def test_the_token_is_sent_to_the_hub_only(client: Client, folders: Path) -> None:
    client.hub.repositories["owner/secret"] = Repository({"main": folders / "other"}, private=True)
    assert "neither a local folder nor a model on the hub" in client.refused("owner/secret")
    client.resolve("owner/secret", HF_TOKEN=TOKEN)
    sent = {request.authorization for request in client.hub.log if "owner/secret" in request.path}
    assert sent == {f"Bearer {TOKEN}"}
    stored = [request for request in client.hub.log if request.path.startswith(str(folders))]
    assert stored and {request.authorization for request in stored} == {None}


def test_each_refusal_of_the_hub_is_reported_in_one_line(client: Client, folders: Path) -> None:
    client.hub.repositories["owner/gated"] = Repository({"main": folders / "other"}, gated=True)
    no_revision = "owner/big has no revision "
    for arguments, message in (
        (["owner/gated"], "gated on the hub; accept its terms there and log in (`hf auth login`"),
        (["owner/none"], "owner/none is neither a local folder nor a model on the hub; check its spelling"),
        (["owner/big@v2"], no_revision),
        (["owner/big", "v2"], no_revision),
        (["owner/big", "0" * 40], no_revision),
        (["owner/small"], "owner/small has no revision 'main' on the hub; give one of its branches"),
    ):
        for environment in ({}, {"HF_TOKEN": TOKEN}):
            assert message in (refusal := client.refused(*arguments, **environment))
        if len(arguments) == 1:
            assert client.info(*arguments) == (2, "", f"foredraft: error: {refusal}\n")
    message = client.refused("owner/big", HF_TOKEN="hf_invalid")
    assert message.startswith("the hub rejects the token sent for owner/big; log in")
    assert client.refused("owner/big", HF_ENDPOINT="http://127.0.0.1:9") == (
        "owner/big is not in the local hub cache, or not all of it, and the hub cannot be reached; go online,"
        " or give a local folder"
    )


SHARD = "model-00002-of-00017.safetensors"


@pytest.mark.parametrize(
    ("missing", "says"), [("config.json", "; choose"), ("model.safetensors", "; choose"), (SHARD, ", though")]
)
def test_a_missing_file_on_the_hub_is_named(
    client: Client, folders: Path, tmp_path: Path, missing: str, says: str
) -> None:
    part = shutil.copytree(folders / ("big" if missing == SHARD else "other"), tmp_path / "part")
    (part / missing).rename(part / "pytorch_model.bin")
    client.hub.repositories["owner/part"] = Repository({"main": part})
    assert (refusal := client.refused("owner/part")).startswith(
        f"owner/part has no {missing} on the hub{says}"
    )
    assert client.info("owner/part") == (2, "", f"foredraft: error: {refusal}\n")


RESOLVE = """
import json
from foredraft.model.locate import resolve
reports = []
resolve("owner/big", report=lambda *report: reports.append(report))
print(json.dumps(reports))
"""


def test_progress_is_reported_and_not_printed(client: Client) -> None:
    done = client.run(RESOLVE, TQDM_POSITION="-1")  # forces the hub's own bars to show
    reports = json.loads(done.stdout)
    assert done.stderr == ""
    assert {stage for stage, _, _ in reports} == {"download"}
    assert all(0 <= had <= total for _, had, total in reports) and reports[-1][2] == 1


def test_info_downloads_no_weights(client: Client, folders: Path, tmp_path: Path) -> None:
    out = tmp_path / "info.json"
    options = ("--device", "cpu", "--out", str(out))
    code, shown, _ = client.info("owner/big", "--draft", "owner/small@v1", *options)
    assert code == 0
    assert weights_of(client.hub) == set() and "config.json" in client.hub.fetched()
    assert "The weights of the target are not downloaded, so its tensors were not checked." in shown
    found = json.loads(out.read_text())
    assert [model["weights_checked"] for model in found["models"]] == [False, False]
    assert found["pair"]["drafter"] == "draft-model"
    client.resolve("owner/big")  # with its weights
    assert client.info("owner/big", *options)[0] == 0
    assert weights_of(client.hub) == set()
    assert json.loads(out.read_text())["models"][0]["weights_checked"] is True


# --- a LoRA: its two files are downloaded, of a revision, and are found again offline ------------------


@pytest.fixture(scope="module")
def loras(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loras")
    save_lora(folders / "big", folder / "lora", lora_alpha=24)
    save_lora(folders / "big", folder / "second", lora_alpha=24, seed=9)
    (folder / "empty").mkdir()
    (folder / "empty" / "README.md").write_text("none")
    return folder


@pytest.fixture
def with_loras(client: Client, loras: Path) -> Client:
    repository = Repository({"main": loras / "lora", "v2": loras / "second"})
    client.hub.repositories |= {
        "owner/lora": repository,
        "owner/empty": Repository({"main": loras / "empty"}),
    }
    return client


def adapted(client: Client, *loras: str, **environment: str) -> tuple[list[str], list[int]]:
    """Return the names of the LoRAs of a model, and its greedy ids."""
    with client.reading(environment), foredraft.load("owner/big", lora=loras, **OPTIONS) as llm:
        [output] = llm.generate("x", SamplingParams(temperature=0, max_new_tokens=8))
        return [*llm.lora], output.token_ids


def test_a_lora_is_downloaded_once_and_found_offline(with_loras: Client, loras: Path) -> None:
    names, ids = adapted(with_loras, "owner/lora")
    fetched = with_loras.hub.fetched()
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {*fetched} and "README.md" not in fetched
    assert adapted(with_loras, "owner/lora", HF_HUB_OFFLINE="1") == (names, ids)
    assert with_loras.hub.log == []
    assert adapted(with_loras, str(loras / "lora"))[1] == ids
    wanted = (["owner/lora@main"], ["owner/lora@v2"], ["owner/lora", "owner/lora@v2"])
    found = [adapted(with_loras, *each) for each in wanted]
    assert [names for names, _ in found] == [*wanted]
    assert found[0][1] == ids and ids != found[1][1] != found[2][1] != ids, "a revision is another LoRA"


def test_a_lora_that_the_hub_does_not_have_is_named(with_loras: Client) -> None:
    for name, environment, says in (
        ("owner/empty", {}, "owner/empty has no adapter_config.json on the hub"),
        ("owner/lora:Q4_K_M", {}, "LoRA 'owner/lora:Q4_K_M' is neither a folder nor a hub name"),
        ("owner/other", {"HF_HUB_OFFLINE": "1"}, "is not in the local hub cache"),
    ):
        with pytest.raises(CheckpointError, match=says) as caught:
            adapted(with_loras, name, **environment)
        assert "\n" not in str(caught.value)


def test_info_needs_no_weights_of_the_model(with_loras: Client) -> None:
    code, shown, _ = with_loras.info("owner/big", "--lora", "owner/lora")
    assert code == 0 and "LoRA: owner/lora, rank 4, alpha 24, 3 k_proj" in shown
    assert not weights_of(with_loras.hub) - {"adapter_model.safetensors"}
    assert "The weights of the target are not downloaded" in shown


# --- names that lead to no model ------------------------------------------------------------------------


def test_a_folder_is_returned_unchanged_and_a_file_refused(tmp_path: Path) -> None:
    assert resolve(tmp_path).path == resolve(str(tmp_path)).path == tmp_path
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match="is a file, but not a GGUF file"):
        resolve(tmp_path / "model.bin")


NAMES = [*"nowhere ./no/where /no/where a/b/c owner/ owner/name@ @main owner@main".split(), "owner/name@a b"]
LONG = ["n" * 300, "o/" + "n" * 300, "o" * 300 + "/n", "n/" * 5000]
IMPOSSIBLE = [*LONG, "~nosuchuser/x", "~nosuchuser", "a\0b", "o/a--b"]


@pytest.mark.parametrize("name", NAMES + IMPOSSIBLE)
def test_a_name_that_is_neither_a_folder_nor_a_hub_name_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="neither a folder nor a (hub name|name that)") as caught:
        resolve(name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_a_local_folder_with_a_revision_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a local folder, which has no revision 'v1'; leave"):
        resolve(tmp_path, "v1")
    for name in ("owner/name@v1", "owner/name:Q8_0"):  # a folder may have such a name
        (tmp_path / name).mkdir(parents=True)
        assert resolve(tmp_path / name).path == tmp_path / name
    with pytest.raises(ConfigError, match="owner/name@v1 names another revision than 'v2'; give one"):
        resolve("owner/name@v1", "v2")


def unknown() -> RepositoryNotFoundError:
    """Bypass the constructor, which takes a response of an http client that differs between versions."""
    error = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    Exception.__init__(error, "404\nmany lines")
    return error


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (unknown(), "neither a local folder nor a model on the hub"),
        (type("ReadTimeout", (Exception,), {})("timed out\nmany lines"), "(timed out)"),
        (type("ConnectError", (Exception,), {})(), "(ConnectError)"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError("\nodd"), "(odd)"),
    ],
    ids=["unknown", "http client", "no message", "disk", "empty line"],
)
def test_any_error_of_the_download_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, shown: str
) -> None:
    """Errors of the http client derive from Exception only; the client differs between versions."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=error))
    with pytest.raises(CheckpointError, match="local folder") as caught:
        resolve("owner/name")
    assert shown in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_interrupt_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        resolve("owner/name")
