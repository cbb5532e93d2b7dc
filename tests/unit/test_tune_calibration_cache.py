"""Cached calibration texts: when they are reused, when they are replaced, and that the cache never fails."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft import LLM, user_cache
from foredraft.drafters.plan_files import model_hash
from foredraft.tune import calibration_cache
from foredraft.tune.calibration import CalibrationTexts, write_calibration_texts
from foredraft.tune.calibration_cache import CalibrationCache
from tests.support.checkpoints import save_checkpoint

PROMPTS = [[(5 * number + 7 * i) % 90 + 5 for i in range(8 + number)] for number in range(4)]
TOKENS = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), eos_token_id=None, initializer_range=0.12)


def loaded(folder: Path, **options: Any) -> LLM:
    return foredraft.load(folder, drafter="none", max_batch=4, max_length=300, **options)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return loaded(folder)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Searches:
    """Asks for texts as a search does, and counts the calls of the model."""

    def __init__(self, folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.llm, self.calls = folder, llm, 0
        self.given: dict[str, Any] = {"prompts": PROMPTS, "tokens": TOKENS, "temperature": 0.0}
        generate = llm.generate

        def counted(*given: Any, **named: Any) -> Any:
            self.calls += 1
            return generate(*given, **named)

        monkeypatch.setattr(llm, "generate", counted)

    def cache(self, **changes: Any) -> CalibrationCache:
        return CalibrationCache(self.folder, model_hash(self.folder), self.llm.loaded, **self.given | changes)

    def file(self) -> Path:
        path = user_cache.keyed_path(calibration_cache.KIND, self.cache().key)
        assert path is not None
        return path

    def texts(self, **changes: Any) -> tuple[CalibrationTexts, bool]:
        """The texts, and whether the model wrote them."""
        before, given = self.calls, self.given | changes
        found = self.cache(**changes).read_or(
            lambda: write_calibration_texts(self.llm, **given, progress=lambda *_: None)
        )
        return found, self.calls > before


@pytest.fixture
def searches(folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Searches:
    return Searches(folder, llm, monkeypatch)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_written_once(searches: Searches, temperature: float, cache: Path) -> None:
    first, was_written = searches.texts(temperature=temperature)
    assert was_written and len(list((cache / "texts").iterdir())) == 1, "there is no temporary file"
    assert searches.texts(temperature=temperature) == (first, False)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.5},
        {"prompts": PROMPTS[:3]},
        {"prompts": PROMPTS[::-1]},
        {"prompts": [[*PROMPTS[0], 9], *PROMPTS[1:]]},
        {"tokens": TOKENS - 1},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_other_arguments_have_texts_of_their_own(searches: Searches, changes: dict[str, Any]) -> None:
    searches.texts()
    assert searches.texts(**changes)[1] and not searches.texts()[1] and not searches.texts(**changes)[1]


def test_texts_depend_on_the_version_the_dtype_and_the_weights(
    searches: Searches, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches.texts()
    with monkeypatch.context() as patch:
        patch.setattr(foredraft, "__version__", "0.0.1")
        assert searches.texts()[1]
    for options in ({"dtype": "bfloat16"}, {"kernels": False}):
        assert Searches(folder, loaded(folder, **options), monkeypatch).texts()[1], options
    weights = folder / "model.safetensors"
    times = weights.stat()
    os.utime(
        weights, ns=(times.st_atime_ns, times.st_mtime_ns + 1)
    )  # as if the weights were trained further: the same shapes and sizes
    assert searches.texts()[1]
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not searches.texts()[1]


def change_file(change: Callable[[dict[str, Any]], Any], *, digest: bool = True) -> Callable[[str], str]:
    """A function that changes the document in a file; `digest` updates its digest, too."""

    def changed(text: str) -> str:
        content = json.loads(text)
        change(content["document"])
        if digest:
            content["digest"] = user_cache._digest_of(content["document"])
        return json.dumps(content)

    return changed


BROKEN: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "a list": lambda text: "[1, 2]",
    "deep": lambda text: "[" * 100_000,
    "of other circumstances": lambda text: text.replace('"foredraft": "', '"foredraft": "9'),
    "another token": change_file(lambda kept: kept["texts"][0][0].__setitem__(-1, 3), digest=False),
    "no texts": change_file(lambda kept: kept.pop("texts") and kept.update(texts=[])),
    "too few tokens": change_file(lambda kept: kept["texts"].pop()),
    "a text of no new token": change_file(lambda kept: kept["texts"].append([PROMPTS[0], len(PROMPTS[0])])),
    "an unknown token": change_file(lambda kept: kept["texts"][0][0].append(10**6)),
    "a negative token": change_file(lambda kept: kept["texts"][0][0].append(-1)),
    "no token": change_file(lambda kept: kept["texts"][0][0].append(2.5)),
    "another prompt": change_file(lambda kept: kept["texts"][0][0].insert(0, 3)),
    "a start from the end": change_file(lambda kept: kept["texts"].append([[*PROMPTS[0], 3, 4], -2])),
    "no start": change_file(lambda kept: kept["texts"][0].__setitem__(1, None)),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_an_invalid_file_is_replaced(searches: Searches, broken: str) -> None:
    first, _ = searches.texts()
    file = searches.file()
    whole = file.read_text()
    assert change_file(lambda content: None)(whole) == whole.strip(), (
        "without a change, the file stays the same"
    )
    file.write_text(BROKEN[broken](whole))
    assert searches.texts() == (first, True)
    assert file.read_text() == whole
    assert searches.texts() == (first, False)


def test_a_read_only_cache_is_not_an_error(
    searches: Searches, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = searches.texts()
    file = searches.file()
    file.unlink()
    file.mkdir()
    assert searches.texts() == searches.texts() == (first, True)
    for place in ("", str(cache / "texts" / "none"), os.devnull):
        if place.endswith("none"):
            Path(place).write_text("a file, where a folder should be")
        monkeypatch.setenv("FOREDRAFT_CACHE", place)
        assert searches.texts() == searches.texts() == (first, True)


def test_incomplete_texts_are_not_cached(searches: Searches, cache: Path) -> None:
    def interrupted() -> CalibrationTexts:
        write_calibration_texts(searches.llm, **searches.given, progress=lambda *_: None)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        searches.cache().read_or(interrupted)
    assert not (cache / "texts").exists()
    assert searches.texts()[1]
