"""GGUF files through the commands: drafting, chat templates, and messages that name the file.

A message or a report that named the folder in the cache would tell the user of a file that they do not know.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft import SamplingParams
from foredraft.cli import main
from foredraft.drafters.plan_files import PlanFile, write_plan
from tests.support.adapters import save_adapter
from tests.support.checkpoints import save_checkpoint

pytest.importorskip("gguf")

from tests.support.gguf_files import write_gguf

TEMPLATE = (
    "{% for m in messages %}{{ bos_token + m.role + ': ' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token + 'assistant: ' }}{% endif %}"
)
GREEDY = "--temperature", 0, "--max-new-tokens", 16


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def big(models: Path, tmp_path: Path) -> Path:
    return write_gguf(models / "big", tmp_path / "big.gguf")


def told(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    assert main([*map(str, words)]) == code
    read = capsys.readouterr()
    return read.err if code else read.out


def document(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(told(capsys, "generate", *words, *GREEDY, "--device", "cpu", "--json"))
    return found


def ids(document: dict[str, Any]) -> list[int]:
    [output] = document["outputs"]
    found: list[int] = output["token_ids"]
    return found


@pytest.mark.parametrize(("kind", "weights"), [("F32", None), ("Q8_0", "gguf, Q8_0")])
@pytest.mark.parametrize("draft", ["big", "small"])
def test_a_file_drafts_for_a_file(
    kind: str, weights: str | None, draft: str, big: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(models / "big", big, kind)
    drafting = "--draft", write_gguf(models / draft, big.with_name("draft.gguf"), kind), "--policy", "fixed"
    plain = document(capsys, "the cat", "--model", big, "--drafter", "none")
    found = document(capsys, "the cat", "--model", big, "--drafter", "draft-model", *drafting)
    assert ids(found) == ids(plain)
    assert found.get("weights") == plain.get("weights") == weights
    stats = found["stats"]
    assert stats["drafted"] > 0 and (stats["accepted"] == stats["drafted"]) is (draft == "big")


def test_a_chat_template_of_a_file_is_rendered(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(models / "big", tmp_path / "big")
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

    def edit(writer: Any) -> None:
        writer.add_chat_template(TEMPLATE)
        writer.add_eos_token_id(2)  # the models of these tests have no end

    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    params = SamplingParams(temperature=0, max_new_tokens=16)
    prompts, replies = [], []
    for model in (folder, write_gguf(models / "big", tmp_path / "big.gguf", edit=edit)):
        with foredraft.load(model, device="cpu", max_length=128) as llm:
            assert llm.tokenizer is not None
            prompts.append(llm.tokenizer.encode_chat(messages))
            replies.append(llm.chat(messages, params)[0].token_ids)
        replies.append(ids(document(capsys, "Hi", "--chat", "--system", "Be brief", "--model", model)))
    assert prompts[0] == prompts[1]
    assert replies == [replies[0]] * 4


def test_a_file_with_several_chat_templates_uses_each_for_its_messages(models: Path, tmp_path: Path) -> None:
    named = {
        "default": TEMPLATE,
        "tool_use": "{% for tool in tools %}{{ tool.name }} {% endfor %}" + TEMPLATE,
        "rag": "unused",
    }
    listed = [{"name": name, "template": text} for name, text in named.items()]

    def edit(writer: Any) -> None:
        writer.add_chat_template(listed)
        writer.add_eos_token_id(2)  # the models of these tests have no end

    file = write_gguf(models / "big", tmp_path / "big.gguf", edit=edit)
    messages, tools = [{"role": "user", "content": "Hi"}], [{"name": "clock"}]
    with foredraft.load(file, device="cpu", max_length=128) as llm:
        assert llm.tokenizer is not None and llm.tokenizer.chat is not None
        assert llm.tokenizer.chat.templates == named
        assert llm.tokenizer.chat.reads_tools
        prompts = [llm.tokenizer.chat.render(messages), llm.tokenizer.chat.render(messages, tools=tools)]
    assert prompts[1] == f"clock {prompts[0]}" and prompts[0].startswith("<s>user: Hi")


def test_a_file_without_a_default_template_says_which_it_has(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = [{"name": "rag", "template": TEMPLATE}]
    file = write_gguf(
        models / "big", tmp_path / "big.gguf", edit=lambda writer: writer.add_chat_template(listed)
    )
    message = told(capsys, "generate", "Hi", "--chat", "--model", file, code=2)
    assert "chat templates named rag, but none named default" in message


@dataclass(frozen=True)
class Refusal:
    """A command that is refused, and what it says; both name what a test makes in braces.

    Attributes:
        command: The words of the command.
        says: Part of the line on stderr.
    """

    command: str
    says: str


REFUSALS = [
    Refusal("generate a --model {q8} --weights int4", "but {q8} is quantised already (gguf, Q8_0)"),
    Refusal(
        "generate a --model {mute} --draft {other}",
        "{other} has a vocabulary of 97 and the target {mute} one of 384; to match their tokens, give {mute} as",
    ),
    Refusal(
        "generate a --model {big} --draft {stranger} --drafter draft-model",
        "the draft model {stranger} has another tokenizer than the target {big}",
    ),
    Refusal(
        "generate a --model {q8} --drafter kangaroo --adapter {adapter}", "which has other weights than {q8}"
    ),
    Refusal("generate a --model {q8} --plan {plan}", "which is another model than {q8}"),
    Refusal("quantise --model {q8} --out {out}", "{q8}', which is quantised already (gguf, Q8_0)"),
    Refusal("quantise --model {mute} --data {text} --out {out}", "but {mute} has no tokenizer"),
    Refusal("train adapter --model {mute} --data {text} --out {out}", "{mute} has no tokenizer"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.command)
def test_a_refusal_names_the_file(
    refusal: Refusal, big: Path, models: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {name: tmp_path / name for name in ("out", "text", "plan", "adapter")}
    made["text"].write_text("the cat\n")
    write_plan(
        PlanFile(
            model="another", model_hash="0" * 64, layers=3, skip_attention=(1,), device="cpu", dtype="float32",
            max_draft=3, alpha=0.8, c=0.5, tau=2.5, speedup=1.25, predicted=1.3,
            date="2026-11-21", foredraft="0.1.0",
        ),
        made["plan"],
    )  # fmt: skip
    save_adapter(models / "big", made["adapter"])
    few = save_checkpoint(tmp_path / "few", tokenizer=True, vocab_size=320)
    made |= {
        "big": big,
        "q8": write_gguf(models / "big", tmp_path / "q8.gguf", "Q8_0"),
        "mute": write_gguf(models / "big", tmp_path / "mute.gguf", vocabulary=False),
        "stranger": write_gguf(few, tmp_path / "stranger.gguf"),
        "other": write_gguf(models / "mute", tmp_path / "other.gguf"),
    }
    message = told(capsys, *refusal.command.format(**made).split(), code=2).splitlines()[-1]
    assert refusal.says.format(**made) in message and str(cache) not in message


def test_reports_name_the_file(
    big: Path, models: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = write_gguf(models / "small", tmp_path / "small.gguf")
    text = told(capsys, "info", big, "--draft", small)
    read = json.loads(told(capsys, "info", big, "--draft", small, "--json"))
    assert [model["folder"] for model in read["models"]] == [str(big), str(small)]
    workload, report = tmp_path / "words.jsonl", tmp_path / "report.json"
    workload.write_text('{"prompt": "the cat"}\n')
    told(
        capsys, "bench", "--model", big, "--draft", small, "--methods", "draft-model", "--workload", workload,
        "--new-tokens", 4, "--repeats", 1, "--out", report, "--device", "cpu",
    )  # fmt: skip
    names = [model["name"] for model in json.loads(report.read_text())["models"]]
    assert names == ["big.gguf", "small.gguf"]
    for shown in (text, json.dumps(read), report.read_text()):
        assert str(cache) not in shown
