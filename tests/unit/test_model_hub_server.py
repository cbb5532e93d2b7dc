"""Downloads from a hub on 127.0.0.1: the files requested, the files cached, and the errors.

Each client is a process with a cache of its own, because `huggingface_hub` reads its settings at import. Seen
to fail on: all files of a repository requested, the revision not passed on, the hub's own progress bars, weights
not requested, each kind of error reported as another.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.checkpoints import save_checkpoint
from tests.support.hub_client import INSPECT, RESOLVE, Client
from tests.support.hub_server import TOKEN, Hub, Repository, commit, serving

LOAD = """
import json, sys
import foredraft
llm = foredraft.load("owner/big", draft="owner/small@v1", revision=sys.argv[1], device="cpu", max_length=64, policy="fixed")
[output] = llm.generate("x", foredraft.SamplingParams(temperature=0, max_new_tokens=4))
print(json.dumps([output.token_ids, output.stats.drafted]))
"""

# files of a repository that no model is loaded from
UNREAD = {
    "pytorch_model.bin",
    "consolidated.safetensors",
    "model.gguf",
    "README.md",
    "original/params.json",
    "original/model.safetensors",
    "onnx/config.json",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save `big` in shards with further files, `small`, and `other`, which serves as a revision of `big`."""
    folder = tmp_path_factory.mktemp("models")
    save_checkpoint(folder / "big", tokenizer=True, seed=1, shards=True)
    save_checkpoint(folder / "other", tokenizer=True, seed=3)
    save_checkpoint(folder / "small", tokenizer=True, seed=2, num_hidden_layers=1)
    big = folder / "big"
    for path in [
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "special_tokens_map.json",
        *UNREAD,
    ]:
        (big / path).parent.mkdir(exist_ok=True)
        (big / path).write_text(json.dumps({path: path}))  # equal contents would be downloaded once
    (big / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture
def client(folders: Path, tmp_path: Path) -> Iterator[Client]:
    with serving() as hub:
        hub.repositories["owner/big"] = Repository({"main": folders / "big", "refs/pr/1": folders / "other"})
        hub.repositories["owner/small"] = Repository({"v1": folders / "small"})
        yield Client(hub, tmp_path / "home")


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_downloaded_model_loads_again_offline(client: Client, folders: Path) -> None:
    first = client.run(LOAD, "main")
    assert first.returncode == 0, first.stderr
    assert "model-00001-of" in " ".join(client.hub.fetched())
    again = client.run(LOAD, "main", HF_HUB_OFFLINE="1")
    assert client.hub.log == []
    assert again.stdout == first.stdout
    ids, drafted = json.loads(first.stdout)
    assert len(ids) > 0 and drafted > 0
    # the local folder gives the same output
    script = LOAD.replace('"owner/big"', repr(str(folders / "big"))).replace(", revision=sys.argv[1]", "")
    local = client.run(script.replace('"owner/small@v1"', repr(str(folders / "small"))))
    assert local.stdout == first.stdout
    other = client.run(LOAD, "refs/pr/1")  # other weights
    assert json.loads(other.stdout)[0] != ids


def test_only_the_files_of_a_model_are_downloaded(client: Client, folders: Path) -> None:
    folder = client.resolve("owner/big")
    assert files(folder) == files(folders / "big") - UNREAD
    assert {"model.safetensors.index.json", "chat_template.jinja"} < files(folder)
    assert sorted(client.hub.fetched()) == sorted(Path(file).name for file in files(folder))
    for file in files(folder):
        assert (folder / file).read_bytes() == (folders / "big" / file).read_bytes()


def weights_of(hub: Hub) -> set[str]:
    return {file for file in hub.fetched() if file.endswith(".safetensors")}


def test_the_index_selects_the_weights_to_download(client: Client, folders: Path, tmp_path: Path) -> None:
    """Shards may have any name, similar names do not count, and model.safetensors has priority."""
    odd = tmp_path / "odd"
    shutil.copytree(folders / "big", odd)
    index = json.loads((odd / "model.safetensors.index.json").read_text())
    names = {file: file.replace("model-", "weights[1] ") for file in index["weight_map"].values()}
    for old, new in names.items():
        shutil.copy(odd / old, odd / new)
        (odd / old).write_bytes(old.encode())  # stands for weights in another precision
    index["weight_map"] = {tensor: names[file] for tensor, file in index["weight_map"].items()}
    (odd / "model.safetensors.index.json").write_text(json.dumps(index))
    client.hub.repositories["owner/odd"] = Repository({"main": odd})
    folder = client.resolve("owner/odd")
    assert weights_of(client.hub) == set(names.values())
    tensors = [tensor for file in names.values() for tensor in load_file(folder / file)]
    assert sorted(tensors) == sorted(index["weight_map"])
    assert client.resolve("owner/odd", HF_HUB_OFFLINE="1") == folder

    whole = tmp_path / "whole"
    shutil.copytree(odd, whole)
    shutil.copy(folders / "other/model.safetensors", whole)
    client.hub.repositories["owner/whole"] = Repository({"main": whole})
    client.resolve("owner/whole")
    assert weights_of(client.hub) == {"model.safetensors"}


@pytest.mark.parametrize("listed", [None, [], {"a": "../big/secret.safetensors", "b": "*.safetensors"}])
def test_an_index_without_valid_files_downloads_no_weights(
    client: Client, folders: Path, tmp_path: Path, listed: object
) -> None:
    """Loading the weights reports what is wrong with the index."""
    shutil.copytree(folders / "big", tmp_path / "broken")
    (tmp_path / "broken/model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    client.hub.repositories["owner/broken"] = Repository({"main": tmp_path / "broken"})
    if isinstance(listed, dict):
        message = client.refused("owner/broken")
        assert "has no *.safetensors on the hub, though model.safetensors.index.json names it" in message
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
    for name, revision, file in (
        ("owner/big", None, shard),
        ("owner/small", "v1", "model.safetensors"),
        ("owner/small", "v1", "config.json"),
    ):
        named = name if revision is None else f"{name}@{revision}"
        folder = client.resolve(named)
        for kept in client.home.rglob("trees"):
            shutil.rmtree(kept)
        (folder / file).unlink()
        message = client.refused(named, **environment)
        assert message == f"not all of {named} is in the local hub cache ({file} is missing), and {reason}"
    assert client.resolve("owner/small@v1") == folder  # online, the missing file is downloaded


def test_cached_files_are_not_downloaded_again(client: Client) -> None:
    folder = client.resolve("owner/small", "v1")
    assert client.resolve("owner/small@v1") == folder
    assert client.hub.fetched() == []
    whole = commit("owner/small", "v1")
    assert client.resolve("owner/small", whole) == folder
    assert (
        client.resolve("owner/small", whole, HF_ENDPOINT="http://127.0.0.1:9") == folder
    )  # no server listens there


def test_the_requested_revision_is_downloaded(client: Client, folders: Path) -> None:
    for name in ("owner/big@refs/pr/1", "owner/big@" + commit("owner/big", "refs/pr/1")):
        folder = client.resolve(name)
        assert folder.name == commit("owner/big", "refs/pr/1")
        weights = "model.safetensors"
        assert (folder / weights).read_bytes() == (folders / "other" / weights).read_bytes()
    assert client.resolve("owner/big").name == commit("owner/big", "main")


def test_an_interrupted_download_resumes(client: Client, tmp_path: Path) -> None:
    """The client stores chunks of 10 MiB, so the file is larger than two of them."""
    folder = tmp_path / "long"
    folder.mkdir()
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


@pytest.mark.parametrize("token", [None, TOKEN])
def test_each_refusal_of_the_hub_is_reported_in_one_line(
    client: Client, folders: Path, token: str | None
) -> None:
    environment = {} if token is None else {"HF_TOKEN": token}
    client.hub.repositories["owner/gated"] = Repository({"main": folders / "other"}, gated=True)
    message = client.refused("owner/gated", **environment)
    assert message.startswith(
        "owner/gated is gated on the hub; accept its terms there and log in (`hf auth login`"
    )
    message = client.refused("owner/none", **environment)
    assert message.startswith(
        "owner/none is neither a local folder nor a model on the hub; check its spelling"
    )
    for arguments in (["owner/big@v2"], ["owner/big", "v2"], ["owner/big", "0" * 40]):
        message = client.refused(*arguments, **environment)
        assert (
            message.startswith("owner/big has no revision ")
            and "give one of its branches, tags or full commit" in message
        )
    assert "has no revision 'main' on the hub" in client.refused("owner/small", **environment)


def test_an_invalid_token_is_reported(client: Client) -> None:
    message = client.refused("owner/big", HF_TOKEN="hf_invalid")
    assert message.startswith("the hub rejects the token sent for owner/big; log in")


def test_an_unreachable_hub_is_reported(client: Client) -> None:
    message = client.refused("owner/big", HF_ENDPOINT="http://127.0.0.1:9")
    assert message == (
        "owner/big is not in the local hub cache, or not all of it, and the hub cannot be reached; go online,"
        " or give a local folder"
    )


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "owner/part has no config.json on the hub; choose a checkpoint"),
        ("model.safetensors", "owner/part has no model.safetensors on the hub; choose a repository or"),
        (
            "model-00002-of-00017.safetensors",
            "owner/part has no model-00002-of-00017.safetensors on the hub, though model.safetensors.index.json",
        ),
    ],
)
def test_a_missing_file_on_the_hub_is_named(
    client: Client, folders: Path, tmp_path: Path, missing: str, message: str
) -> None:
    shutil.copytree(folders / ("big" if "-of-" in missing else "other"), tmp_path / "part")
    (tmp_path / "part" / missing).rename(tmp_path / "part/pytorch_model.bin")
    client.hub.repositories["owner/part"] = Repository({"main": tmp_path / "part"})
    assert client.refused("owner/part").startswith(message)


def test_progress_is_reported_and_not_printed(client: Client) -> None:
    done = client.run(RESOLVE, "owner/big", TQDM_POSITION="-1")  # forces the hub's own bars to show
    _, _, reports = json.loads(done.stdout)
    assert done.stderr == ""
    assert {stage for stage, _, _ in reports} == {"download"}
    assert all(0 <= had <= total for _, had, total in reports) and reports[-1][2] == 1


def test_info_downloads_no_weights(client: Client, folders: Path, tmp_path: Path) -> None:
    out = tmp_path / "info.json"
    done = client.run(INSPECT, "owner/big", "--draft", "owner/small@v1", "--device", "cpu", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert weights_of(client.hub) == set() and "config.json" in client.hub.fetched()
    assert "The weights of the target are not downloaded, so its tensors were not checked." in done.stdout
    found = json.loads(out.read_text())
    assert [model["weights_checked"] for model in found["models"]] == [False, False]
    assert found["pair"]["drafter"] == "draft-model"
    client.resolve("owner/big")  # with its weights
    assert client.run(INSPECT, "owner/big", "--device", "cpu", "--out", str(out)).returncode == 0
    assert client.hub.fetched() == [] or weights_of(client.hub) == set()
    assert json.loads(out.read_text())["models"][0]["weights_checked"] is True


def test_info_refuses_what_a_download_refuses(client: Client, folders: Path, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    shutil.copytree(folders / "small", pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    client.hub.repositories["owner/pickled"] = Repository({"main": pickled})
    client.hub.repositories["owner/gated"] = Repository({"main": folders / "small"}, gated=True)
    for name in ("owner/pickled", "owner/gated", "owner/nought", "owner/big@none"):
        refusal = client.refused(name)
        done = client.run(INSPECT, name)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr == f"foredraft: error: {refusal}\n"
