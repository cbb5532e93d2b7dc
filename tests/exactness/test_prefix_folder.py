"""Beginnings of texts on disk: they outlive a load, what cannot be believed is read anew, and the bits are the same."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

import foredraft
from foredraft import LLM, ConfigError, Output
from foredraft.decode import prefix_folder
from foredraft.decode.prefix_folder import SIZE, PrefixFolder
from foredraft.llm.output import WholeOutputs
from foredraft.llm.requests import Submission
from foredraft.loading import prefixes
from tests.exactness.test_hybrids import GREEDY, drafts, folder, tokens_of
from tests.support.loaded import engine_of
from tests.support.mutation import Mutant, assert_caught, caught_by
from tests.support.mutations import around, instead

TEXT, OTHER = tokens_of(21, 900), tokens_of(22, 900)
KEPT = 883  # tokens of the text: states are on disk 16 tokens before the end of a prompt
PARAMS = replace(GREEDY, max_new_tokens=20, logprobs=2, drafter="none")


@contextmanager
def loaded(place: Path | None, model: Path | None = None, **more: Any) -> Iterator[LLM]:
    options: dict[str, Any] = {"device": "cpu", "max_batch": 2, "max_length": 1000, "drafter": "none", **more}
    with foredraft.load(model or folder(), prefix_folder=place, **options) as llm:
        yield llm


def told(output: Output) -> Any:
    return output.token_ids, output.logprobs


@cache
def cold(dtype: str = "bfloat16") -> dict[str, Any]:
    with loaded(None, dtype=dtype) as llm:
        return {
            name: told(llm.generate([text], PARAMS)[0]) for name, text in (("text", TEXT), ("other", OTHER))
        }


def written(place: Path) -> list[Path]:
    """Keep one text and a part of another in a folder, and return its files."""
    with loaded(place) as llm:
        assert told(llm.generate([TEXT], PARAMS)[0]) == cold()["text"]
        llm.generate([OTHER[:600]], PARAMS)
    return sorted(place.iterdir())


def check_later_loads(place: Path | None = None) -> None:
    place = place or Path(tempfile.mkdtemp()) / "new" / "folder"
    written(place)
    for dtype, kept in (("bfloat16", (KEPT, 583)), ("float32", (0, 0)), ("bfloat16", (KEPT, KEPT))):
        with loaded(place, dtype=dtype) as llm:
            found = llm.generate([TEXT, OTHER], PARAMS)
        assert [told(each) for each in found] == [cold(dtype)["text"], cold(dtype)["other"]]
        assert tuple(each.cached_tokens for each in found) == kept


def test_later_loads_go_on_from_there() -> None:
    check_later_loads()


@pytest.mark.parametrize("options", [{"kernels": False}, {"weights": "int4"}, {}], ids=str)
def test_another_arithmetic_or_model_finds_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    written(tmp_path)
    with loaded(tmp_path, None if options else folder(layers=4), **options) as llm:
        assert llm.generate([TEXT], PARAMS)[0].cached_tokens == 0


def test_models_that_only_attend_find_their_texts(tmp_path: Path) -> None:
    for kept, more in ((0, 919), (899, 920)):
        with loaded(tmp_path, drafts("attention")) as llm:
            [output] = llm.generate([TEXT], PARAMS)
            [reply] = llm.generate([[*TEXT, *output.token_ids, 5]], PARAMS)
        assert (output.cached_tokens, reply.cached_tokens) == (kept, more)
    with loaded(None, drafts("attention")) as llm:
        assert told(llm.generate([TEXT], PARAMS)[0]) == told(output)


@pytest.mark.parametrize("draft", ["hybrid", "attention"])
def test_a_draft_model_finds_its_own_part(tmp_path: Path, draft: str) -> None:
    drafted = replace(PARAMS, drafter="draft-model", policy="fixed")
    for kept, most in ((0, 2000), (KEPT, 200)):
        with loaded(tmp_path, draft=drafts(draft)) as llm:
            runner: Any = engine_of(llm).drafters["draft-model"].draft_pass.runner  # type: ignore[union-attr]
            before = runner.forwarded
            [output] = llm.generate([TEXT], drafted)
            assert output.cached_tokens == kept and told(output) == cold()["text"] and output.stats.drafted
            assert most / 10 < runner.forwarded - before < most


def flipped(content: bytes) -> bytes:
    return (
        content[: len(content) // 2]
        + bytes([content[len(content) // 2] ^ 1])
        + content[len(content) // 2 + 1 :]
    )


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "a bit": flipped, "short": lambda content: content[:-1], "longer": lambda content: content + b"\0",
    "empty": lambda content: b"", "another form": lambda content: b"{}" * 40,
}  # fmt: skip


def check_broken() -> None:
    for name, breaks in BROKEN.items():
        place = Path(tempfile.mkdtemp())
        for file in written(place):
            file.write_bytes(breaks(file.read_bytes()))
        with loaded(place) as llm:
            [output] = llm.generate([TEXT], PARAMS)
        assert output.cached_tokens == 0 and told(output) == cold()["text"], name


def test_a_broken_file_is_not_believed() -> None:
    check_broken()


def test_what_was_broken_is_written_again(tmp_path: Path) -> None:
    """File by file, as they are read."""
    for file in written(tmp_path):
        file.write_bytes(b"")
    found = list[int]()
    while len(found) < 6 and KEPT not in found:
        with loaded(tmp_path) as llm:
            found.append(llm.generate([TEXT], PARAMS)[0].cached_tokens)
    assert found[0] == 0 and found[-1] == KEPT


def check_exchanged() -> None:
    """Files of other tokens under the names of these."""
    place = Path(tempfile.mkdtemp())
    alike: dict[tuple[int, ...], list[Path]] = {}  # by the positions that they hold
    for file in written(place):
        alike.setdefault(tuple(load(file.read_bytes()[SIZE:])["places"].tolist()), []).append(file)
    pairs = [files for files in alike.values() if len(files) == 2]
    assert len(pairs) == 2  # the first two chunks of both texts
    for one, other in pairs:
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)
    with loaded(place) as llm:
        assert told(llm.generate([TEXT], PARAMS)[0]) == cold()["text"]


def test_a_file_of_other_tokens_is_not_believed() -> None:
    check_exchanged()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="there are no modes")
def test_only_files_of_this_user_alone_are_believed(tmp_path: Path) -> None:
    files = written(tmp_path / "own")
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    for file in files:
        file.chmod(0o666)
    with loaded(tmp_path / "own") as llm:
        assert llm.generate([TEXT], PARAMS)[0].cached_tokens == 0
    (tmp_path / "own").chmod(0o777)
    with pytest.raises(ConfigError, match="prefix_folder is .* which other users can write; give a folder"):
        foredraft.load(folder(), device="cpu", prefix_folder=tmp_path / "own")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="prefix_folder is .* which is no folder"):
        foredraft.load(folder(), device="cpu", prefix_folder=tmp_path / "file")


def salted(llm: LLM, salt: str) -> Output:
    asked = Submission(TEXT, PARAMS, salts=(salt, ""))
    outputs: list[Output] = llm._open_thread().run(
        WholeOutputs(llm.requests.sequences(asked), llm.requests.output)
    )
    return outputs[0]


def test_each_key_finds_its_own(tmp_path: Path) -> None:
    with loaded(tmp_path) as llm:
        salted(llm, "one")
    with loaded(tmp_path) as llm:
        assert [salted(llm, salt).cached_tokens for salt in ("two", "", "one", "two")] == [0, 0, KEPT, 899]


def test_the_folder_is_bounded_and_the_oldest_files_go(tmp_path: Path) -> None:
    written(tmp_path)
    with loaded(tmp_path) as llm:
        cache = engine_of(llm).prefix_cache
        assert cache is not None and cache.folder is not None
        cache.folder.most_bytes = cache.folder.bytes  # as much as is there
        for first in range(5, 9):
            llm.generate([[first, *TEXT[:599]]], PARAMS)
        cache.close()
        assert (
            sum(file.stat().st_size for file in tmp_path.iterdir())
            == cache.folder.bytes
            <= cache.folder.most_bytes
        )
    with loaded(tmp_path) as llm:
        assert [llm.generate([[first, *TEXT[:599]]], PARAMS)[0].cached_tokens for first in (8, 5)] == [583, 0]


def test_a_disk_that_fails_harms_no_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = tmp_path / "own"
    with caplog.at_level(logging.INFO, logger="foredraft"), loaded(place) as llm:
        place.rmdir()
        assert told(llm.generate([TEXT], PARAMS)[0]) == cold()["text"]
    assert "cannot be kept in" in caplog.text


DEFECTS: dict[Callable[[], object], list[tuple[Any, ...]]] = {
    check_exchanged: [("nothing tells one file from another", prefix_folder._digest, around(lambda digest, *parts: digest(parts[1]) if len(parts) == 2 else digest(*parts)))],
    check_broken: [("contents are not checked", prefix_folder._digest, around(lambda digest, *parts: digest(*parts) if len(parts) == 3 else bytes(32)), (AssertionError, ValueError))],
    check_later_loads: [
        ("all models are one", prefixes._text, instead(lambda *given: ""), (AssertionError, ValueError)),
        ("states are left out", PrefixFolder.write, around(lambda write, own, kept, before, kind, *given: None if kind == "states" else write(own, kept, before, kind, *given))),
        ("states of another end", PrefixFolder.read, around(lambda read, own, kept, before, kind, count, key: (lambda span: span and replace(span, states=span.states and (span.states[0] * 0.5, *span.states[1:])))(read(own, kept, before, kind, count, key)))),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", caught_by(DEFECTS), ids=lambda mutant: str(mutant.name))
def test_defects_are_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
