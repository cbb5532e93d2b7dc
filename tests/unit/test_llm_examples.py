"""The examples in the docstrings of the public API give the results that they show."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft import LLM, SamplingParams
from tests.support import checkpoints

PUBLIC: dict[str, Any] = {
    "load": foredraft.load,
    "Output": foredraft.Output,
    "Piece": foredraft.Piece,
    "SamplingParams": SamplingParams,
    "Score": foredraft.Score,
    "Stats": foredraft.Stats,
    "Stream": foredraft.Stream,
    "RoundTrace": foredraft.RoundTrace,
    "write_trace": foredraft.write_trace,
    "ForedraftError": foredraft.ForedraftError,
    **{
        name: getattr(LLM, name)
        for name in ("params", "generate", "chat", "stream", "save_texts", "cancel_all", "close", "encode")
    },
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A small model with a chat template."""
    folder = checkpoints.save_pair(tmp_path_factory.mktemp("models"))
    (folder / "big/chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    return foredraft.load(
        folder / "big", draft=folder / "small", device="cpu", max_batch=4, max_length=256, policy="fixed"
    )


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_gives_its_result(
    llm: LLM, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {name: getattr(foredraft, name) for name in foredraft.__all__}
    names |= {"foredraft": foredraft, "llm": llm, "Path": Path}
    [example] = [
        found
        for found in doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name, globs=names)
        if found.examples
    ]
    told: list[str] = []
    results = doctest.DocTestRunner().run(example, out=told.append)
    assert results.attempted > 0
    assert results.failed == 0, "".join(told)
