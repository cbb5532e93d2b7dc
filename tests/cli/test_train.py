"""`foredraft train`: a drafter that other commands then use, and mistakes that cost nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli import main
from foredraft.train.training_checkpoints import TrainingCheckpoints
from tests.support.checkpoints import TEXT
from tests.support.command import foredraft
from tests.support.drawings import check_alone
from tests.support.running import environment

SHORT = ["--length", "32", "--steps", "6", "--step-tokens", "128", "--validate-every", "3", "--warm-up", "1"]
CHECKPOINT = "checkpoints/step-*.safetensors"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"text": TEXT * 3}) + "\n" for _ in range(4)))
    return file


def command(models: Path, what: str, data: Path, *more: str) -> list[str]:
    return [
        "train",
        what,
        "--model",
        str(models / "big"),
        "--device",
        "cpu",
        "--data",
        str(data),
        *SHORT,
        *more,
    ]


def test_an_adapter_is_kept_and_found_by_name(
    models: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(models, "adapter", data)) == 0
    printed = capsys.readouterr().out
    assert "done after 6 steps" in printed and "so only --drafter kangaroo uses it;" in printed
    generate = [
        "generate",
        "def accept",
        "--model",
        str(models / "big"),
        "--json",
        "--temperature",
        "0",
        "--device",
        "cpu",
    ]
    assert main([*generate, "--drafter", "kangaroo", "--policy", "fixed"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stats"]["drafted"] > 0 and found["lossless"]
    assert main([*generate, "--drafter", "none"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"] == found["outputs"][0]["token_ids"]
    assert main(["info", str(models / "big")]) == 0
    assert "the kept adapter: attention+mlp after layer 1" in capsys.readouterr().out


def test_what_is_written_elsewhere_is_used_by_its_folder(
    models: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, html = tmp_path / "an adapter", tmp_path / "page.html"
    assert main(command(models, "adapter", data, "--out", str(folder), "--html", str(html))) == 0
    page = html.read_text()
    check_alone(page)
    assert str(folder) in page and "is predicted to run at" in page
    assert re.findall(r'<th scope="row">(\d+)</th>', page) == ["3", "6"], "the validations"
    assert re.findall(r'<h2 id="(\w+)"', page) == ["validation", "positions", "learning"]
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("use it with ")]
    assert line == f"use it with --adapter '{folder}'; `foredraft bench` measures it"
    option = shlex.split(line.removeprefix("use it with ").partition(";")[0])
    big = "--model", str(models / "big"), "--device", "cpu", "--max-new-tokens", "4"
    assert main(["generate", "def accept", *big, *option, "--drafter", "kangaroo"]) == 0


def test_a_draft_model_is_a_checkpoint(
    models: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "drafts" / "tiny"
    assert main(command(models, "draft", data, "--out", str(out), "--layers", "1", "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["out"] == str(out) and document["steps"] == 6 and document["documents"] > 1
    assert main(["info", str(models / "big"), "--draft", str(out)]) == 0
    assert "draft-model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "more"),
    [("eagle3", ["--taps", "2,3", "--draft-length", "2"]), ("dflash", ["--layers", "1", "--block", "3"])],
)
def test_a_head_drafts_where_the_option_names_it(
    kind: str, more: list[str], models: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "head"
    given = *more, "--draft-vocabulary", "40", "--out", str(out)
    assert main(command(models, kind, data, *given)) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("use it with ")]
    assert line == f"use it with --draft {out}; `foredraft bench` measures it"
    generate = ["generate", "def accept", "--model", str(models / "big"), "--json", "--temperature", "0"]
    generate += ["--device", "cpu"]
    assert main([*generate, "--draft", str(out), "--drafter", kind, "--policy", "fixed"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stats"]["drafted"] > 0 and found["lossless"]
    assert main([*generate, "--drafter", "none"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"] == found["outputs"][0]["token_ids"]


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        (
            "eagle3",
            [],
            "--taps is '2,1,0', but the target has 3 layers, and a head reads after some of them in",
        ),
        ("eagle3", ["--taps", "1,3"], "--taps is '1,3', but the target has 3 layers"),
        ("eagle3", ["--taps", "2,x"], "--taps is '2,x'; give layers such as 0,15"),
        ("eagle3", ["--taps", "2,3", "--decay", "0"], "--decay is 0.0; give a number above 0, at most 1"),
        (
            "eagle3",
            ["--from-head", "nowhere"],
            "--from-head is 'nowhere', which holds no EAGLE-3 head; give the folder of one",
        ),
        (
            "eagle3",
            ["--from-head", "nowhere", "--taps", "2,3"],
            "--from-head is 'nowhere', which has taps and words of its own; leave out --taps and --draft-voc",
        ),
        ("dflash", ["--block", "1"], "--block is 1; give 2 or more"),
        ("dflash", ["--block", "400"], "--block is 400; give 256 or less"),
        (
            "dflash",
            ["--taps", "2,3"],
            "--taps is '2,3', but the target has 3 layers, and a head reads after some of them in",
        ),
        ("dflash", ["--layers", "1", "--mask-token", "99999"], "--mask-token is 99999, but the model has "),
        ("dflash", ["--decay", "0"], "--decay is 0.0; give a number above 0, at most 1"),
    ],
)
def test_a_mistake_on_a_head_is_one_line(
    models: Path,
    data: Path,
    tmp_path: Path,
    kind: str,
    more: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command(models, kind, data, "--out", str(tmp_path / "head"), *more)) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"foredraft: error: {message}")
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--loss", "mse"],
            "--loss is 'mse'; give one of ce, kl, reverse-kl, tv, lk, or a mixture such as ce=0.1,tv=0.9",
        ),
        (["--depth", "3"], "--depth is 3, but the target has 3 layers; give fewer"),
        (["--group-tokens", "0"], "--group-tokens is 0; give a whole number, 1 or more"),
        (
            ["--validation", "nowhere.txt"],
            "--validation is 'nowhere.txt', which cannot be read (No such file",
        ),
        (["--adapter", "x"], "Unknown option: --adapter"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_mistake_is_one_line(models: Path, data: Path, more: list[str], message: str) -> None:
    done = foredraft(*command(models, "adapter", data, *more))
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.splitlines()[-1].startswith(f"foredraft: error: {message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text"\n', "line 2 is not JSON; correct it, or give --skip-bad-lines"),
        ("", "which is empty; leave it out"),
        ('{"prompt": "a", "response": "b"}', "holds a single document, and none can be held out"),
    ],
)
def test_bad_data_is_named(models: Path, data: Path, content: str, message: str) -> None:
    data.write_text(content)
    done = foredraft(*command(models, "adapter", data))
    assert done.returncode == 2 and message in done.stderr.splitlines()[-1]
    assert "--data" in done.stderr.splitlines()[-1]


def test_bad_lines_are_counted(models: Path, data: Path) -> None:
    data.write_text(data.read_text() + "[]\n{\n")
    done = foredraft(*command(models, "adapter", data, "--skip-bad-lines"))
    assert done.returncode == 0 and "2 bad lines were left out" in done.stderr


def test_an_interrupt_within_a_save_waits_for_it(
    models: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """PyTorch takes it for a file that cannot be written."""
    sound, work = TrainingCheckpoints.save, tmp_path / "work"

    def interrupted(*args: Any, **more: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return sound(*args, **more)

    monkeypatch.setattr(TrainingCheckpoints, "save", interrupted)
    code = main(command(models, "adapter", data, "--work", str(work)))
    assert code == 130 and "interrupted" in capsys.readouterr().err
    assert list(work.glob(CHECKPOINT)), "the checkpoint is whole"


def test_an_interrupt_ends_it_and_the_same_command_goes_on(models: Path, data: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    words = command(models, "adapter", data, "--work", str(work))
    words[words.index("--steps") + 1] = "3000"
    process = subprocess.Popen(
        [sys.executable, "-m", "foredraft.cli", *words, "--patience", "0"], env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    ends = time.monotonic() + 100
    while not list(work.glob(CHECKPOINT)) and time.monotonic() < ends:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    steps = max(int(path.stem.removeprefix("step-")) for path in work.glob(CHECKPOINT))
    assert 3 <= steps < 3000
