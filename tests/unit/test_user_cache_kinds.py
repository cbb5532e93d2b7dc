"""What is kept in the cache folder beside documents: written at once, under a permissive umask, damaged, foreign.

`test_user_cache.py` has the documents and files under keys; the tests of each kind have its own content.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import foredraft
from foredraft import ConfigError, ForedraftError, user_cache
from foredraft.drafters.adapter_files import WEIGHTS, adapter_place, find_adapter, target_hash
from foredraft.drafters.plan_files import find_plan, keep_plan
from foredraft.profiling.samples import Samples
from tests.support.adapters import save_adapter
from tests.support.checkpoints import save_checkpoint
from tests.support.foreign import NOT_PRIVATE
from tests.support.limits import no_more_bytes
from tests.unit.test_drafters_plan_files import PLAN


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def keep_adapter(model: Path) -> Path:
    place = adapter_place(target_hash(model))
    assert place is not None
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    save_adapter(model, place)
    return place


@pytest.mark.usefixtures("open_umask")
def test_what_is_kept_under_a_permissive_umask_is_believed(model: Path, cache: Path) -> None:
    cache.mkdir(mode=0o700)
    place = keep_adapter(model)
    assert find_adapter(target_hash(model)) == place
    assert keep_plan(PLAN) is not None and find_plan(PLAN.model_hash) == PLAN
    kept = [path for path in cache.rglob("*") if path.is_file()]
    assert kept and all(path.stat().st_mode & 0o077 == 0 for path in kept)


@pytest.mark.usefixtures("open_umask")
def test_an_adapter_elsewhere_keeps_the_modes_that_its_user_asks_for(model: Path, tmp_path: Path) -> None:
    save_adapter(model, tmp_path / "adapter")
    assert (tmp_path / "adapter" / WEIGHTS).stat().st_mode & 0o044 == 0o044


@pytest.mark.parametrize("change", NOT_PRIVATE)
@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_an_adapter_that_others_could_have_written_is_not_used(
    name: str, change: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, hash = keep_adapter(model), target_hash(model)
    NOT_PRIVATE[change](place / name, monkeypatch)
    with pytest.raises(ConfigError, match="adapter is .*which is not used, because"):
        find_adapter(hash)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("spoil", [cut, emptied, a_pipe, a_folder, Path.unlink])
@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_a_damaged_adapter_is_one_line(name: str, spoil: Callable[[Path], object], model: Path) -> None:
    spoil(keep_adapter(model) / name)
    with pytest.raises(ForedraftError):
        foredraft.load(model, drafter="kangaroo", max_length=64, kernels=False)


@pytest.mark.parametrize("spoil", [cut, emptied, a_pipe, a_folder])
def test_a_damaged_plan_is_one_line(spoil: Callable[[Path], object]) -> None:
    place = keep_plan(PLAN)
    assert place is not None
    spoil(place)
    with pytest.raises(ConfigError, match="plan is "):
        find_plan(PLAN.model_hash)


@pytest.mark.parametrize("kind", ["profiles", "shapes", "notices", "texts"])
def test_a_full_disk_leaves_what_was_kept(kind: str, cache: Path) -> None:
    user_cache.write(kind, "key", [1])
    with no_more_bytes(3):
        user_cache.write(kind, "key", [2])
        user_cache.write_bytes("vocabularies", "key", ".bytes", b"12345")
    assert user_cache.read(kind, "key") == [1]
    assert user_cache.read_bytes("vocabularies", "key", ".bytes") is None
    assert not [path for path in cache.rglob("*") if path.name.startswith(".new-")]


def test_samples_that_no_measurement_gives_are_left_out() -> None:
    """A profile is measured again where its document holds anything else."""
    for found in (
        None,
        [],
        "x",
        {"a": "x"},
        {"a": [None]},
        {"a": [float("nan")]},
        {"a": [-1.0]},
        {"a": [1e999]},
    ):
        assert Samples.from_json(found).least == {}
