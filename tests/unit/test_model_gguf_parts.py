"""GGUF files in parts, in folders, and larger than memory.

Parts are written by the `gguf` package. Seen to fail on: a tensor read from another part, parts that are not
counted, an identity of the first part alone, a tensor of two parts, parts of two models.
"""

from __future__ import annotations

import random
import shutil
import struct
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import foredraft
from foredraft.cli import main
from foredraft.errors import CheckpointError, ConfigError
from foredraft.model.gguf import parts
from foredraft.model.gguf.parts import GGUFModel, part_names
from foredraft.model.hub import resolve
from foredraft.model.weights import load_decoder, read_tensors
from tests.support.checkpoints import save_checkpoint
from tests.support.planting import assert_caught, defect
from tests.support.sparse_files import save_sparse

gguf = pytest.importorskip("gguf")

from tests.support.gguf_files import write_gguf, write_sparse_gguf  # noqa: E402

KEYS = {"num_key_value_heads": 2, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
MOST = 12  # tensors of a part: the model makes three parts


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "model", tokenizer=True, **KEYS)


@pytest.fixture(scope="module")
def split(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the parts of a file."""
    folder = tmp_path_factory.mktemp("split")
    write_gguf(model, folder / "m.gguf", "Q8_0", most_tensors=MOST)
    names = sorted(file.name for file in folder.iterdir())
    assert names == part_names("m-00001-of-00003.gguf"), names
    return folder


@pytest.fixture
def folder(split: Path, tmp_path: Path) -> Path:
    return shutil.copytree(split, tmp_path / "split")


def part(folder: Path, number: int) -> Path:
    return folder / f"m-{number:05}-of-00003.gguf"


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_decoder(resolve(path))
    message = str(caught.value)
    assert "\n" not in message and str(path.parent / "cache") not in message
    return message


def check_whole(folder: Path, whole: Path) -> None:
    """Check that parts hold what the file that was not split holds."""
    found, wanted = (read_tensors(resolve(path), lambda name: True) for path in (folder, whole))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_any_part_or_the_folder_stands_for_all(
    number: int, model: Path, folder: Path, tmp_path: Path
) -> None:
    whole = write_gguf(model, tmp_path / "whole.gguf", "Q8_0")
    given = part(folder, number) if number else folder
    check_whole(given, whole)
    assert resolve(given) == resolve(part(folder, 1))
    params = foredraft.SamplingParams(temperature=0, max_new_tokens=8)
    with (
        foredraft.load(given, device="cpu", max_length=64) as one,
        foredraft.load(whole, device="cpu", max_length=64) as two,
    ):
        assert one.generate("the cat", params)[0].text == two.generate("the cat", params)[0].text


def test_tensors_are_those_that_the_package_reads(folder: Path) -> None:
    opened, seen = GGUFModel(part(folder, 1)), set()
    for number in (1, 2, 3):
        for tensor in gguf.GGUFReader(part(folder, number)).tensors:
            info = opened.tensors[tensor.name]
            assert opened.holder(info).bytes_of(info).numpy().tobytes() == tensor.data.tobytes()
            seen.add(tensor.name)
    assert seen == opened.tensors.keys()


def test_a_tensor_read_from_another_part_is_caught(
    model: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write_gguf(model, tmp_path / "whole.gguf", "Q8_0")
    mutant = defect(
        "the first part", parts.GGUFModel.holder, lambda sound: lambda self, info: self.parts[0],
        lambda: check_whole(folder, whole), Exception,
    )  # fmt: skip
    assert_caught(mutant, monkeypatch)


def test_links_to_parts_keep_their_names(model: Path, folder: Path, tmp_path: Path) -> None:
    """The hub's cache names parts so."""
    links = tmp_path / "links"
    links.mkdir()
    for number in (1, 2, 3):
        blob = part(folder, number).rename(folder / f"blob{number}")
        part(links, number).symlink_to(blob)
    check_whole(part(links, 2), write_gguf(model, tmp_path / "whole.gguf", "Q8_0"))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_part_that_changes_is_noticed(number: int, folder: Path) -> None:
    made = resolve(folder)
    file = part(folder, number)
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="has changed while it was used"):
        load_decoder(made)
    assert resolve(folder) == made
    load_decoder(made)  # made again


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("given", [0, 1, 2, 3])
def test_a_missing_part_is_named(number: int, given: int, folder: Path) -> None:
    if number == given:
        return
    part(folder, number).unlink()
    message = refusal(part(folder, given) if given else folder)
    assert (
        message
        == f"{part(folder, number)} is missing, part {number} of 3 of a model; put the parts of one model into one folder"
    )


def test_parts_in_each_others_place_are_refused(folder: Path) -> None:
    one, two = part(folder, 2), part(folder, 3)
    kept = one.read_bytes()
    two.rename(one)
    two.write_bytes(kept)
    assert f"{one} is part 3 of 3, but its name says part 2 of 3" in refusal(folder)


def test_a_part_of_another_model_is_refused(folder: Path, model: Path, tmp_path: Path) -> None:
    """Their parts differ in number, in the number of all tensors, or in the names of these."""
    other = save_checkpoint(tmp_path / "other", tokenizer=True, num_hidden_layers=4)
    for most, says in (
        (4, "part 2 of 10, but its name says part 2 of 3"),
        (13, "has another 'split.tensors.count' than m-0"),
    ):
        made = tmp_path / f"made{most}"
        made.mkdir()
        write_gguf(other, made / "m.gguf", most_tensors=most)
        second = next(made.glob("m-00002-of-*"))
        shutil.copy(second, part(folder, 2))
        assert f"{part(folder, 2)} " in (message := refusal(folder)) and says in message
    again = tmp_path / "again"
    again.mkdir()
    write_gguf(model, again / "m.gguf", most_tensors=MOST, tensors=lambda each: dict(reversed(each.items())))
    shutil.copy(part(again, 2), part(folder, 2))
    message = refusal(folder)
    assert "has tensor" in message and "-of-00003.gguf has, too" in message


def test_a_whole_file_in_the_place_of_a_part_is_refused(folder: Path, model: Path) -> None:
    for number, says in (
        (2, "is no part of a model, but its name says part 2"),
        (1, "but its name says part 1 of 3"),
    ):
        write_gguf(model, part(folder, number), "Q8_0")
        assert (
            f"{part(folder, number)} is no part of a model" in (message := refusal(folder))
            and says in message
        )


def test_tensors_are_counted(folder: Path) -> None:
    for number in (1, 2, 3):
        content = part(folder, number).read_bytes()
        key = content.index(b"split.tensors.count") + len("split.tensors.count") + 4
        count = struct.unpack_from("<i", content, key)[0]
        part(folder, number).write_bytes(content[:key] + struct.pack("<i", count + 1) + content[key + 4 :])
    assert f"hold {count} tensors, but split.tensors.count is {count + 1}" in refusal(folder)


def test_a_part_without_its_name_is_refused(folder: Path) -> None:
    file = part(folder, 1).rename(folder / "model.gguf")
    assert "is one of 3 parts, but its name does not end in -00001-of-00003.gguf" in refusal(file)


def test_a_whole_file_may_have_the_name_of_a_part(model: Path, tmp_path: Path) -> None:
    whole = write_gguf(model, tmp_path / "m-00001-of-00002.gguf", "Q8_0")
    check_whole(whole, write_gguf(model, tmp_path / "whole.gguf", "Q8_0"))


def test_random_damage_to_a_part_is_refused_or_harmless(folder: Path) -> None:
    draw = random.Random(0)
    sound = {number: part(folder, number).read_bytes() for number in (1, 2, 3)}
    heads = {1: sound[1].index(b"output_norm") if b"output_norm" in sound[1] else 9000, 2: 900, 3: 900}
    refused = 0
    for _ in range(150):
        number = draw.choice((1, 2, 2, 3, 3))
        damaged = bytearray(sound[number])
        for _ in range(draw.choice((1, 1, 4))):
            damaged[draw.randrange(min(heads[number], len(damaged)))] = draw.randrange(256)
        if draw.random() < 0.2:
            del damaged[draw.randrange(len(damaged)) :]
        part(folder, number).write_bytes(bytes(damaged))
        with suppress(CheckpointError):
            refused += 1
            load_decoder(resolve(folder))
            refused -= 1
        part(folder, number).write_bytes(sound[number])
    assert 50 < refused < 150
    load_decoder(resolve(folder))


# --- folders --------------------------------------------------------------------------------------------------


def test_a_folder_with_one_file_is_the_file(model: Path, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    file = write_gguf(model, tmp_path / "one/Model.GGUF".replace("GGUF", "gguf"))
    for name in ("mmproj-Model.gguf", "README.md", "imatrix.gguf"):
        (tmp_path / "one" / name).write_text("another")
    assert resolve(file.parent) == resolve(file)
    shutil.copy(model / "config.json", file.parent)  # as of a repository with both
    assert resolve(file.parent) == resolve(file)
    with pytest.raises(ConfigError, match="is a local folder, which has no revision"):
        resolve(file.parent, "main")


def test_a_folder_with_several_files_lists_them(folder: Path, model: Path) -> None:
    write_gguf(model, folder / "other-Q8_0.gguf")
    message = refusal(folder)
    assert message == (
        f"{folder} holds several GGUF files: m-00001-of-00003.gguf, other-Q8_0.gguf; give one of them"
    )


def test_safetensors_of_a_folder_come_first(model: Path, folder: Path, tmp_path: Path) -> None:
    both = shutil.copytree(model, tmp_path / "both")
    write_gguf(model, both / "m.gguf")
    assert resolve(both) == both


# --- files of another kind, and larger than the memory ---------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "kind", "says"),
    [
        ("clip", "mmproj", "is the vision part of a model (mmproj)"),
        ("clip", None, "is the vision part of a model (mmproj)"),
        ("llama", "adapter", "is an adapter for a model (LoRA)"),
        (None, "imatrix", "is an importance matrix (imatrix), made for quantising a model"),
    ],
)
def test_a_file_that_is_no_language_model_is_refused_by_its_kind(
    architecture: str | None, kind: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.gguf"
    writer = gguf.GGUFWriter(file, architecture or "none")
    if architecture is None:
        del writer.kv_data[0]["general.architecture"]
    if kind is not None:
        writer.add_type(kind)
    writer.add_tensor("v.patch_embd.weight", torch.zeros(4, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert refusal(file) == f"{file} {says}; give the file of the language model"
    assert main(["info", str(file)]) == 2
    assert capsys.readouterr().err == f"foredraft: error: {refusal(file)}\n"


def test_a_file_larger_than_the_memory_is_described_and_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_sparse_gguf(save_sparse(tmp_path / "model"), tmp_path / "model.gguf")
    capsys.readouterr()  # progress of saving
    assert main(["info", str(file), "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert "the weights need 1024.0 GiB in float16" in captured.out and captured.err == ""
    tokenizer = ["--tokenizer", str(tmp_path / "model")]
    assert main(["generate", "--model", str(file), "--device", "cpu", *tokenizer, "hi"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "the weights need 1024.0 GiB in float16" in captured.err


@pytest.mark.parametrize("value", ["text", "array"])
def test_a_hole_in_the_metadata_is_not_read(value: str, tmp_path: Path) -> None:
    """A text or an array may be as long as the file, which has no end that a disk would set."""
    file = tmp_path / "model.gguf"
    kind = struct.pack("<IQ", 8, 10**12) if value == "text" else struct.pack("<IIQ", 9, 8, 10**10)
    with file.open("wb") as opened:
        opened.write(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + kind)
        opened.truncate(2 * 10**12)
    assert "more than any model has" in refusal(file)
