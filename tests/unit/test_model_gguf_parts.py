"""GGUF files in parts and in folders; the `gguf` package writes the parts."""

from __future__ import annotations

import errno
import random
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from foredraft.cli import main
from foredraft.errors import CheckpointError, ConfigError
from foredraft.kernels.compilation import library
from foredraft.model.gguf import source, tensors
from foredraft.model.gguf.tensors import part_names
from foredraft.model.locate import resolve
from foredraft.model.weights import load_decoder, read_tensors
from tests.support.checkpoints import save_checkpoint
from tests.support.gguf_files import write_gguf
from tests.support.mutation import assert_caught, defect

gguf = pytest.importorskip("gguf")

KEYS = {"num_key_value_heads": 2, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
MOST = 12  # tensors of a part: the model makes three parts


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    library()  # the kernels come from the cache of all tests
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "model", tokenizer=True, **KEYS)


@pytest.fixture(scope="module")
def split(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
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


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(model, tmp_path_factory.mktemp("whole") / "whole.gguf", "Q8_0")


def check_whole(folder: Path, whole: Path) -> None:
    found, wanted = (read_tensors(resolve(path), lambda name: True) for path in (folder, whole))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_any_part_or_the_folder_stands_for_all(number: int, whole: Path, folder: Path) -> None:
    given = part(folder, number) if number else folder
    check_whole(given, whole)
    assert resolve(given) == resolve(part(folder, 1))


def test_a_tensor_read_from_another_part_is_caught(
    whole: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(sound: Any) -> Any:
        return lambda self, info: self.parts[0]

    mutant = defect("first", tensors.GGUFModel.holder, first, lambda: check_whole(folder, whole), Exception)
    assert_caught(mutant, monkeypatch)


def test_links_to_parts_keep_their_names(whole: Path, folder: Path, tmp_path: Path) -> None:
    (links := tmp_path / "links").mkdir()
    for number in (1, 2, 3):
        blob = part(folder, number).rename(folder / f"blob{number}")
        part(links, number).symlink_to(blob)
    check_whole(part(links, 2), whole)
    check_whole(Path(shutil.copy(whole, tmp_path / "m-00001-of-00002.gguf")), whole)  # a name is no part


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_part_that_changes_is_noticed(number: int, folder: Path) -> None:
    made = resolve(folder)
    file = part(folder, number)
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="has changed while it was used"):
        load_decoder(made)
    load_decoder(again := resolve(folder))
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read" if number == 1 else "has changed while"):
        load_decoder(again)


@pytest.mark.parametrize(("number", "given"), [(1, 0), (2, 0), (2, 1), (1, 2), (3, 1), (1, 3)])
def test_a_missing_part_is_named(number: int, given: int, folder: Path) -> None:
    part(folder, number).unlink()
    assert refusal(part(folder, given) if given else folder) == (
        f"{part(folder, number)} is missing, part {number} of 3 of a model;"
        " put the parts of one model into one folder"
    )


def exchanged(folder: Path) -> None:
    one, two = part(folder, 2), part(folder, 3)
    kept = one.read_bytes()
    two.rename(one)
    two.write_bytes(kept)


def of_another_model(most: int, **changes: Any) -> Callable[[Path], None]:
    """Return a change that puts another model's second part into the place of the model's own."""

    def change(folder: Path) -> None:
        model = save_checkpoint(folder.with_name("other"), tokenizer=True, **(changes or KEYS))
        (made := folder.with_name("made")).mkdir()
        turned = (lambda each: each) if changes else (lambda each: dict(reversed(each.items())))
        write_gguf(model, made / "m.gguf", "F32" if changes else "Q8_0", most_tensors=most, tensors=turned)
        shutil.copy(next(made.glob("m-00002-of-*")), part(folder, 2))

    return change


def counted(folder: Path) -> None:
    for number in (1, 2, 3):
        content = part(folder, number).read_bytes()
        key = content.index(b"split.tensors.count") + len("split.tensors.count") + 4
        more = struct.pack("<i", struct.unpack_from("<i", content, key)[0] + 1)
        part(folder, number).write_bytes(content[:key] + more + content[key + 4 :])


OTHER = {"num_hidden_layers": 4}
MIXED: dict[str, tuple[Callable[[Path], None], str]] = {
    "exchanged": (exchanged, "{2} is part 3 of 3, but its name says part 2 of 3"),
    "of more parts": (of_another_model(4, **OTHER), "{2} is part 2 of 10, but its name says part 2 of 3"),
    "of other tensors": (of_another_model(13, **OTHER), "{2} has another 'split.tensors.count' than m-0"),
    "of the same tensors": (of_another_model(MOST), "-of-00003.gguf has, too"),
    "counted": (counted, "tensors, but split.tensors.count is "),
}


@pytest.mark.parametrize("name", MIXED)
def test_parts_that_do_not_belong_together_are_refused(name: str, folder: Path) -> None:
    change, says = MIXED[name]
    change(folder)
    assert says.format(*(part(folder, number) for number in range(4))) in refusal(folder)


@pytest.mark.parametrize("number", [1, 2])
def test_a_whole_file_in_the_place_of_a_part_is_refused(number: int, folder: Path, whole: Path) -> None:
    shutil.copy(whole, part(folder, number))
    said = f"{part(folder, number)} is no part of a model, but its name says part {number}"
    assert said in refusal(folder)


def test_a_part_without_its_name_is_refused(folder: Path) -> None:
    file = part(folder, 1).rename(folder / "model.gguf")
    assert "is one of 3 parts, but its name does not end in -00001-of-00003.gguf" in refusal(file)


def test_random_damage_to_a_part_is_refused_or_harmless(folder: Path) -> None:
    draw, refused = random.Random(0), 0
    sound = {number: part(folder, number).read_bytes() for number in (1, 2, 3)}
    heads = {1: sound[1].index(b"output_norm") if b"output_norm" in sound[1] else 9000, 2: 900, 3: 900}
    for _ in range(100):
        number = draw.choice((1, 1, 2, 3))
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
    assert 25 < refused < 100
    load_decoder(resolve(folder))


# --- folders --------------------------------------------------------------------------------------------------


def test_a_folder_with_one_file_is_the_file(model: Path, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    file = Path(shutil.copy(whole, tmp_path / "one"))
    for name in ("mmproj-Model.gguf", "README.md", "imatrix.gguf"):
        (file.parent / name).write_text("another")
    assert resolve(file.parent) == resolve(file)
    shutil.copy(model / "config.json", file.parent)  # as of a repository with both
    assert resolve(file.parent) == resolve(file)
    with pytest.raises(ConfigError, match="is a local folder, which has no revision"):
        resolve(file.parent, "main")


def test_a_folder_with_several_files_lists_them(folder: Path, model: Path) -> None:
    write_gguf(model, folder / "other-Q8_0.gguf")
    listed = "m-00001-of-00003.gguf, other-Q8_0.gguf"
    assert refusal(folder) == f"{folder} holds several GGUF files: {listed}; give one of them"
    shutil.copytree(model, folder, dirs_exist_ok=True)
    assert resolve(folder).path == folder, "safetensors come first"


# --- files of another kind ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("value", ["text", "array"])
def test_a_hole_in_the_metadata_is_not_read(value: str, tmp_path: Path) -> None:
    """A text or an array may be as long as the file, which has no end that a disk would set."""
    file = tmp_path / "model.gguf"
    kind = struct.pack("<IQ", 8, 10**12) if value == "text" else struct.pack("<IIQ", 9, 8, 10**10)
    with file.open("wb") as opened:
        opened.write(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + kind)
        opened.truncate(2 * 10**12)
    assert "more than any model has" in refusal(file)


# --- what is kept of a file ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_cache_that_cannot_be_written_costs_nothing_but_time(
    number: int, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = resolve(whole)
    source._content.cache_clear()
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=OSError(number, "refused")))
    found = resolve(whole)
    assert (found.config, found.tokenizer_json) == (kept.config, kept.tokenizer_json)


def test_what_is_kept_is_read_again(whole: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source._content.cache_clear()
    made = resolve(whole)
    assert [file.suffix for file in sorted((cache / "gguf").iterdir())] == [".content", ".json"]
    source._content.cache_clear()
    monkeypatch.setattr(source, "_made", Mock(side_effect=AssertionError))
    assert resolve(whole).config == made.config
