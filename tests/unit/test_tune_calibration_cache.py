"""Texts that are kept: when they serve again, when they are written anew, and what is never an error."""

from __future__ import annotations

import hashlib
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
from foredraft.tune.calibration import CalibrationTexts, calibrate
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
    """Asks for texts as a search does, and counts what the model is asked for."""

    def __init__(self, folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.llm, self.calls = folder, llm, 0
        self.given: dict[str, Any] = {"prompts": PROMPTS, "tokens": TOKENS, "temperature": 0.0}
        generate = llm.generate

        def counted(*given: Any, **named: Any) -> Any:
            self.calls += 1
            return generate(*given, **named)

        monkeypatch.setattr(llm, "generate", counted)

    def place(self, **changes: Any) -> CalibrationCache:
        return CalibrationCache(self.folder, model_hash(self.folder), self.llm, **self.given | changes)

    def file(self) -> Path:
        path = user_cache.keyed_path(calibration_cache.KIND, self.place().key)
        assert path is not None
        return path

    def texts(self, **changes: Any) -> tuple[CalibrationTexts, bool]:
        """And whether they were written."""
        before, given = self.calls, self.given | changes
        found = self.place(**changes).read_or(lambda: calibrate(self.llm, **given, progress=lambda *_: None))
        return found, self.calls > before


@pytest.fixture
def searches(folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Searches:
    return Searches(folder, llm, monkeypatch)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_written_once(searches: Searches, temperature: float, cache: Path) -> None:
    first, was_written = searches.texts(temperature=temperature)
    assert was_written and len(list((cache / "texts").iterdir())) == 1, "nothing lies beside the file"
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
def test_others_are_asked_for_in_other_circumstances(searches: Searches, changes: dict[str, Any]) -> None:
    searches.texts()
    assert searches.texts(**changes)[1] and not searches.texts()[1] and not searches.texts(**changes)[1]


def test_texts_belong_to_a_version_a_dtype_and_the_very_weights(
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
    )  # trained on, say: no other shape or size
    assert searches.texts()[1]
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not searches.texts()[1]


def told(change: Callable[[dict[str, Any]], Any], *, digest: bool = True) -> Callable[[str], str]:
    """The file with a change to its document; digest: its digest fits again."""

    def changed(text: str) -> str:
        content = json.loads(text)
        kept = content["document"]
        change(kept)
        if digest:
            kept["digest"] = hashlib.sha256(json.dumps(kept["texts"]).encode()).hexdigest()
        return json.dumps(content)

    return changed


BROKEN: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "a list": lambda text: "[1, 2]",
    "deep": lambda text: "[" * 100_000,
    "of other circumstances": lambda text: text.replace('"foredraft": "', '"foredraft": "9'),
    "another token": told(lambda kept: kept["texts"][0][0].__setitem__(-1, 3), digest=False),
    "no texts": told(lambda kept: kept.pop("texts") and kept.update(texts=[])),
    "too few tokens": told(lambda kept: kept["texts"].pop()),
    "a text of no new token": told(lambda kept: kept["texts"].append([PROMPTS[0], len(PROMPTS[0])])),
    "an unknown token": told(lambda kept: kept["texts"][0][0].append(10**6)),
    "a negative token": told(lambda kept: kept["texts"][0][0].append(-1)),
    "no token": told(lambda kept: kept["texts"][0][0].append(2.5)),
    "another prompt": told(lambda kept: kept["texts"][0][0].insert(0, 3)),
    "a start from the end": told(lambda kept: kept["texts"].append([[*PROMPTS[0], 3, 4], -2])),
    "no start": told(lambda kept: kept["texts"][0].__setitem__(1, None)),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_file_that_is_not_what_it_should_be_is_replaced(searches: Searches, broken: str) -> None:
    first, _ = searches.texts()
    file = searches.file()
    whole = file.read_text()
    assert told(lambda kept: None)(whole) == whole.strip(), "what is changed below is that, and nothing else"
    file.write_text(BROKEN[broken](whole))
    assert searches.texts() == (first, True)
    assert file.read_text() == whole
    assert searches.texts() == (first, False)


def test_a_cache_that_cannot_be_written_is_no_error(
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


def test_texts_that_were_not_written_to_the_end_are_not_kept(searches: Searches, cache: Path) -> None:
    def interrupted() -> CalibrationTexts:
        calibrate(searches.llm, **searches.given, progress=lambda *_: None)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        searches.place().read_or(interrupted)
    assert not (cache / "texts").exists()
    assert searches.texts()[1]
