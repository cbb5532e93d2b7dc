"""`foredraft train`: a drafter that other commands then use, and mistakes that cost nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from foredraft.train.training_checkpoints import TrainingCheckpoints
from tests.cli.conftest import Cli
from tests.support.checkpoints import TEXT
from tests.support.drawings import check_alone

SHORT = ["--length", "32", "--steps", "6", "--step-tokens", "128", "--validate-every", "3", "--warm-up", "1"]
CHECKPOINT = "checkpoints/step-*.pt"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of texts, where no earlier adapter is kept."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"text": TEXT * 3}) + "\n" for _ in range(4)))
    return file


@pytest.fixture
def target(models: Path) -> list[str]:
    return ["--model", str(models / "big"), "--device", "cpu"]


def command(target: list[str], what: str, data: Path, *more: object) -> list[str]:
    return ["train", what, *target, "--data", str(data), *SHORT, *map(str, more)]


def check_drafts(cli: Cli, target: list[str], *drafting: object) -> None:
    """Check that what was trained drafts, and that the text is that of plain decoding."""
    generate = ["generate", "def accept", *target, "--temperature", "0"]
    found = cli.document(*generate, *drafting, "--policy", "fixed")
    assert found["stats"]["drafted"] > 0 and found["lossless"]
    plain = cli.document(*generate, "--drafter", "none")
    assert plain["outputs"][0]["token_ids"] == found["outputs"][0]["token_ids"]


def test_an_adapter_is_kept_and_bad_lines_are_counted(target: list[str], data: Path, cli: Cli) -> None:
    data.write_text(data.read_text() + "[]\n{\n")
    out, err = cli(*command(target, "adapter", data, "--skip-bad-lines"))
    assert "done after 6 steps" in out and "so only --drafter kangaroo uses it;" in out
    assert "2 bad lines were left out" in err
    check_drafts(cli, target, "--drafter", "kangaroo")
    assert "the kept adapter: attention+mlp after layer 1" in cli("info", *target).out


def test_an_adapter_is_used_by_its_folder(target: list[str], data: Path, tmp_path: Path, cli: Cli) -> None:
    folder, html = tmp_path / "an adapter", tmp_path / "page.html"
    out = cli(*command(target, "adapter", data, "--out", folder, "--html", html)).out
    page = html.read_text()
    check_alone(page)
    assert str(folder) in page and "is predicted to run at" in page
    assert re.findall(r'<th scope="row">(\d+)</th>', page) == ["3", "6"], "the validations"
    assert re.findall(r'<h2 id="(\w+)"', page) == ["validation", "positions", "learning"]
    [line] = [line for line in out.splitlines() if line.startswith("use it with ")]
    assert line == f"use it with --adapter '{folder}'; `foredraft bench` measures it"
    option = shlex.split(line.removeprefix("use it with ").partition(";")[0])
    cli("generate x --max-new-tokens 4 --drafter kangaroo", *target, *option)


def test_a_draft_model_is_a_checkpoint(target: list[str], data: Path, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "drafts" / "tiny"
    document = cli.document(*command(target, "draft", data, "--out", out, "--layers", 1))
    assert document["out"] == str(out) and document["steps"] == 6 and document["documents"] > 1
    assert "draft-model" in cli("info", *target, "--draft", out).out


@pytest.mark.parametrize(
    ("kind", "more"),
    [("eagle3", ["--taps", "2,3", "--draft-length", "2"]), ("dflash", ["--layers", "1", "--block", "3"])],
)
def test_a_head_drafts_where_the_option_names_it(
    kind: str, more: list[str], target: list[str], data: Path, tmp_path: Path, cli: Cli
) -> None:
    out = tmp_path / "head"
    told = cli(*command(target, kind, data, *more, "--draft-vocabulary", 40, "--out", out)).out
    assert f"\nuse it with --draft {out}; `foredraft bench` measures it\n" in told
    check_drafts(cli, target, "--draft", out, "--drafter", kind)


LAYERS = "but the target has 3 layers, and a head reads after some of them in"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("eagle3", f"--taps is '2,1,0', {LAYERS}"),
        ("eagle3 --taps 1,3", "--taps is '1,3', but the target has 3 layers"),
        ("eagle3 --taps 2,x", "--taps is '2,x'; give layers such as 0,15"),
        ("eagle3 --taps 2,3 --decay 0", "--decay is 0.0; give a number above 0, at most 1"),
        ("eagle3 --from-head x", "--from-head is 'x', which holds no EAGLE-3 head; give the folder of one"),
        ("eagle3 --from-head x --taps 2,3", "--from-head is 'x', which has its own layers and draft voc"),
        ("dflash --block 1", "--block is 1; give 2 or more"),
        ("dflash --block 400", "--block is 400; give 256 or less"),
        ("dflash --taps 2,3", f"--taps is '2,3', {LAYERS}"),
        ("dflash --layers 1 --mask-token 99999", "--mask-token is 99999, but the model has "),
        ("dflash --decay 0", "--decay is 0.0; give a number above 0, at most 1"),
        ("adapter --loss mse", "--loss is 'mse'; give one of ce, kl, reverse-kl, tv, lk, or a mixture such"),
        ("adapter --depth 3", "--depth is 3, but the target has 3 layers; give fewer"),
        ("adapter --group-tokens 0", "--group-tokens is 0; give a whole number, 1 or more"),
        ("adapter --validation nowhere", "--validation is 'nowhere', which cannot be read (No such file"),
        ("adapter --adapter x", "Unknown option: --adapter"),
    ],
)
def test_mistakes_fail(target: list[str], data: Path, tmp_path: Path, line: str, says: str, cli: Cli) -> None:
    kind, *more = line.split()
    assert cli.refused(*command(target, kind, data, "--out", tmp_path / "made", *more)).startswith(says)
    assert not (tmp_path / "made").exists()


def test_bad_data_is_named(target: list[str], data: Path, cli: Cli) -> None:
    data.write_text('{"text": "a"}\n{"text"\n')
    told = cli.refused(*command(target, "adapter", data))
    assert "line 2 is not JSON; correct it, or give --skip-bad-lines" in told and "--data" in told
    data.write_text('{"prompt": "a", "response": "b"}')
    told = cli.refused(*command(target, "adapter", data))
    assert "holds a single document, and none can be held out" in told


def test_an_interrupt_within_a_save_waits_for_it(
    target: list[str], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """PyTorch takes it for a file that cannot be written."""
    sound, work = TrainingCheckpoints.save, tmp_path / "work"

    def interrupted(*args: Any, **more: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return sound(*args, **more)

    monkeypatch.setattr(TrainingCheckpoints, "save", interrupted)
    assert "interrupted" in cli(*command(target, "adapter", data, "--work", work), code=130).err
    assert list(work.glob(CHECKPOINT)), "the checkpoint is whole"
