from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM
from foredraft.cli import main
from foredraft.model.tokenizer import Tokenizer
from tests.support.checkpoints import save_checkpoint, save_pair
from tests.support.command import BUSY, without_progress


class Cli:
    """Runs commands in this process; what was printed before is dropped."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, line: str, *words: object, code: int = 0) -> Any:
        """Run a command whose line is quoted as in a shell, and which exits with this code."""
        self.capsys.readouterr()
        exited = main([*shlex.split(line), *map(str, words)])
        printed = self.capsys.readouterr()
        assert exited == code, printed.err
        return printed

    def document(self, line: str, *words: object, code: int = 0) -> dict[str, Any]:
        """Return what the command prints with --json."""
        return document(self(line, *words, "--json", code=code).out)

    def ids(self, line: str, *words: object) -> list[int]:
        """Return the token ids of the first text of `generate`."""
        found: list[int] = self.document(line, *words)["outputs"][0]["token_ids"]
        return found

    def refused(self, line: str, *words: object) -> str:
        """Return the one line of a command that is refused, without its beginning."""
        printed = self(line, *words, code=2)
        [told] = without_progress(printed.err)
        assert printed.out == "" and told.startswith("foredraft: error: ")
        return told.removeprefix("foredraft: error: ")


@dataclass(frozen=True)
class Words:
    """The words of a command with options by name, which those of a call replace."""

    start: str
    options: dict[str, object]

    def __call__(self, **changes: object) -> list[str]:
        named = (self.options | changes).items()
        given = [str(word) for name, value in named for word in (f"--{name.replace('_', '-')}", value)]
        return [*self.start.split(), *given]


def document(text: str) -> dict[str, Any]:
    """Read one line of JSON, in which every number is finite."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    [line] = text.splitlines()
    found: dict[str, Any] = json.loads(line, parse_constant=refuse)
    return found


def told(stderr: str) -> list[str]:
    """Return the lines of stderr without the warnings of a busy machine, or one without bit-identical shapes."""
    return [line for line in stderr.splitlines() if not any(each in line for each in ("fixed shape", BUSY))]


class ChatModel:
    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = shutil.copytree(model, folder)
        template = "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}"
        (folder / "chat_template.jinja").write_text(template)

    def encode(self, **messages: str) -> list[int]:
        tokenizer = Tokenizer.from_folder(self.folder)
        assert tokenizer is not None
        return tokenizer.encode_chat([{"role": role, "content": messages[role]} for role in messages])


@pytest.fixture(scope="module", autouse=True)
def short_measuring() -> Iterator[None]:
    """Let a load measure costs for a moment only, since no test here asks what pays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foredraft.profiling.profile.BUDGET_SECONDS", 0.2)
        patch.setattr("foredraft.profiling.profile.BUDGET_AGAIN", 0.02)
        yield


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny random checkpoints: `big` and `small` share a tokenizer, `mute` has none."""
    folder = save_pair(tmp_path_factory.mktemp("models"))
    save_checkpoint(folder / "mute", seed=1)
    return folder


@pytest.fixture(scope="session")
def pair(models: Path) -> list[str]:
    """The options of both models."""
    return ["--model", str(models / "big"), "--draft", str(models / "small"), "--device", "cpu"]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def quick_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `bench` time the machine and the forwards a few times only, since no test here asks for exact ones."""
    monkeypatch.setattr("foredraft.bench.machine_record.BYTES", 2**20)
    monkeypatch.setattr("foredraft.bench.machine_record.TRIES", 2)
    monkeypatch.setattr("foredraft.bench.measurement.REPEATS", 2)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[LLM]:
    """Every `LLM` that a command loads, in order."""
    made: list[LLM] = []
    init = LLM.__init__

    def recorded(self: LLM, *arguments: Any, **options: Any) -> None:
        made.append(self)
        init(self, *arguments, **options)

    monkeypatch.setattr(LLM, "__init__", recorded)
    return made
