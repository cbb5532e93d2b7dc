"""GGUF files through the commands: drafting, chat templates, and the names in messages and reports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft import SamplingParams
from tests.cli.conftest import Cli
from tests.support.adapters import save_adapter

pytest.importorskip("gguf")

from tests.support.gguf_files import write_gguf

TEMPLATE = (
    "{% for m in messages %}{{ bos_token + m.role + ': ' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token + 'assistant: ' }}{% endif %}"
)
GREEDY = "--temperature", 0, "--max-new-tokens", 16

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def big(models: Path, tmp_path: Path) -> Path:
    return write_gguf(models / "big", tmp_path / "big.gguf")


def document(cli: Cli, *words: object) -> dict[str, Any]:
    return cli.document("generate", *words, *GREEDY, "--device", "cpu")


@pytest.mark.parametrize(("kind", "weights"), [("F32", None), ("Q8_0", "gguf, Q8_0")])
@pytest.mark.parametrize("draft", ["big", "small"])
def test_a_file_drafts_for_a_file(
    kind: str, weights: str | None, draft: str, big: Path, models: Path, cli: Cli
) -> None:
    write_gguf(models / "big", big, kind)
    drafting = "--draft", write_gguf(models / draft, big.with_name("draft.gguf"), kind), "--policy", "fixed"
    plain = document(cli, "the cat", "--model", big, "--drafter", "none")
    found = document(cli, "the cat", "--model", big, "--drafter", "draft-model", *drafting)
    assert found["outputs"][0]["token_ids"] == plain["outputs"][0]["token_ids"]
    assert found.get("weights") == plain.get("weights") == weights
    stats = found["stats"]
    assert stats["drafted"] > 0 and (stats["accepted"] == stats["drafted"]) is (draft == "big")


def with_templates(models: Path, tmp_path: Path, templates: str | list[dict[str, str]]) -> Path:
    """Return a file with a chat template, or with several."""

    def edit(writer: Any) -> None:
        writer.add_chat_template(templates)
        writer.add_eos_token_id(2)  # the models of these tests have no end

    return write_gguf(models / "big", tmp_path / "big.gguf", edit=edit)


def test_a_chat_template_of_a_file_is_rendered(models: Path, tmp_path: Path, cli: Cli) -> None:
    folder = shutil.copytree(models / "big", tmp_path / "big")
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    params = SamplingParams(temperature=0, max_new_tokens=16)
    prompts, replies = [], []
    for model in (folder, with_templates(models, tmp_path, TEMPLATE)):
        with foredraft.load(model, device="cpu", max_length=128) as llm:
            assert llm.tokenizer is not None
            prompts.append(llm.tokenizer.encode_chat(messages))
            replies.append(llm.chat(messages, params)[0].token_ids)
        chat = "generate Hi --chat --system 'Be brief' --device cpu --model"
        replies.append(cli.ids(chat, model, *GREEDY))
    assert prompts[0] == prompts[1]
    assert replies == [replies[0]] * 4


@pytest.fixture(scope="module")
def named(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files and a folder by the names that the refused commands have in braces."""
    folder = tmp_path_factory.mktemp("named")
    save_adapter(models / "big", folder / "adapter")
    write_gguf(models / "big", folder / "q8.gguf", "Q8_0")
    write_gguf(models / "big", folder / "mute.gguf", vocabulary=False)
    write_gguf(models / "mute", folder / "other.gguf")
    return {path.stem: path for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("generate a --model {q8} --weights int4", "but {q8} is quantised already (gguf, Q8_0)"),
        (
            "generate a --model {mute} --draft {other}",
            "{other} has a vocabulary of 97 and the target {mute} one of 384; to match their tokens, give {mute} as",
        ),
        ("generate a --model {q8} --drafter kangaroo --adapter {adapter}", "has other weights than {q8}"),
    ],
)
def test_refusals_name_it(command: str, says: str, named: dict[str, Path], cli: Cli) -> None:
    assert says.format(**named) in cli.refused(command.format(**named))


@pytest.mark.heavy
def test_reports_name_the_file(big: Path, models: Path, tmp_path: Path, quick_bench: None, cli: Cli) -> None:
    small = write_gguf(models / "small", tmp_path / "small.gguf")
    read = cli.document("info", big, "--draft", small)
    assert [model["folder"] for model in read["models"]] == [str(big), str(small)]
    workload = tmp_path / "words.jsonl"
    workload.write_text('{"prompt": "the cat"}\n')
    quick = "--methods draft-model --new-tokens 4 --repeats 1 --device cpu"
    report = cli.document(f"bench {quick} --model", big, "--draft", small, "--workload", workload)
    assert [model["name"] for model in report["models"]] == ["big.gguf", "small.gguf"]
