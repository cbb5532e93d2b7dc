"""`foredraft verify` on tiny random checkpoints: its report, its prompts and its exit codes."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft import LLM, Output, SamplingParams, demo
from foredraft.cli import main
from foredraft.drafters.lookup import Lookup
from tests.support.checkpoints import save_checkpoint
from tests.support.command import COMMAND, foredraft, without_progress
from tests.support.running import environment

QUICK = ["--tokens", "6", "--detect", "0.2", "--seed", "3", "--max-batch", "32"]
FEW = ["--tokens", "6", "--samples", "20", "--seed", "3"]
NOISE = 0.03  # standard deviation of the noise on the draft model's weights
TEXTS = ["def accept", "Viktor", "the target checks all", "x"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A target with spread distributions, and a draft model with noisy weights: its tokens are often accepted
    and often rejected."""
    base = tmp_path_factory.mktemp("models")
    big = save_checkpoint(
        base / "big", tokenizer=True, seed=3, eos_token_id=None, initializer_range=0.4, num_hidden_layers=1
    )
    small = shutil.copytree(big, base / "small")
    weights = load_file(small / "model.safetensors")
    random = torch.Generator().manual_seed(5)
    noisy = {k: w + NOISE * torch.randn(w.shape, generator=random) for k, w in weights.items()}
    save_file(noisy, small / "model.safetensors", {"format": "pt"})
    return ["verify", "--model", str(big), "--draft", str(small)]


@pytest.fixture
def substituted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the third token of every drafted output at temperature 0."""
    generate = LLM.generate

    def altering(self: LLM, prompts: Any, params: SamplingParams, **more: Any) -> list[Output]:
        outputs = generate(self, prompts, params, **more)
        if params.greedy and params.drafter != "none":
            outputs = [replace(o, token_ids=[*o.token_ids[:2], 0, *o.token_ids[3:]]) for o in outputs]
        return outputs

    monkeypatch.setattr(LLM, "generate", altering)


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    found: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=refuse)
    return found


def test_a_lossless_pair_passes(pair: list[str]) -> None:
    done = foredraft(*pair, *TEXTS, *QUICK)
    assert (done.returncode, without_progress(done.stderr)) == (0, [])
    assert done.stderr.startswith("foredraft: Importing PyTorch\n")
    header, *rest = done.stdout.splitlines()
    assert header.startswith(
        f"Target {pair[2]}, float32 on cpu; drafter draft-model ({pair[4]}), policy fixed;"
    )
    assert re.search(r"foredraft \S+, PyTorch \S+, Python \S+, ", header)
    assert rest[1].endswith("plain decoding of one prompt at a time: 4 prompts, 24 tokens")
    assert [line.strip() for line in rest[2:5]] == [
        "draft-model, one at a time: 4 of 4 identical",
        "none, in a batch: 4 of 4 identical",
        "draft-model, in a batch: 4 of 4 identical",
    ]
    assert sum(line.endswith("  ok") for line in rest) == 6
    assert "seed 3" in done.stdout and "\x1b" not in done.stdout
    assert re.search(
        r"fails with probability 0\.9 or more if the total variation .* is 0\.\d{4} or more\.", done.stdout
    )
    assert "Not covered: differences within a cell" in done.stdout
    assert rest[-1] == "PASSED: no difference from plain decoding was found."


def test_the_json_document_has_every_field(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*pair, *TEXTS, *FEW, "--detect", "0.9", "--json"]) == 3
    found = document(capsys)
    assert set(found) == {
        *("verdict", "about", "seed", "identity", "tests"),
        *("detect", "detectable", "power", "family_level", "doubts"),
    }
    assert (found["about"]["model"], found["about"]["draft"]) == (pair[2], pair[4])
    assert found["identity"]["passed"] is True
    assert [test["samples"] for test in found["tests"]] == [20] * 4 + [2] * 2


def test_a_divergence_fails_and_is_printed_with_its_margin(
    pair: list[str], substituted: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*pair, *TEXTS, *FEW]) == 1
    out = capsys.readouterr().out
    assert "draft-model, in a batch: 0 of 4 identical" in out and "none, in a batch: 4 of 4 identical" in out
    assert re.search(
        r"prompt 2, draft-model, one at a time, new token 2: token 0 instead of token \d+; the target's two most"
        r" likely tokens there are \d+ \(logit \S+\) and \d+ \(logit \S+\), margin \S+",
        out,
    )
    assert out.splitlines()[-1] == "FAILED: the output differs from plain decoding's, or a request failed."


def test_too_few_samples_are_inconclusive(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*pair, *TEXTS, *FEW]) == 3
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2].startswith("Weak evidence: the tests detect a total variation distance of ")
    assert printed[-1] == "INCONCLUSIVE: no difference was found, but one could have been missed."


def test_the_self_test_finds_the_planted_defect(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*pair, *TEXTS, *QUICK, "--samples", "900", "--self-test"]) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == "SELF-TEST: the planted defect (no residual) was found."
    assert "FAILED" in printed.out and not without_progress(printed.err)


def test_a_self_test_that_finds_nothing_reports_an_error(
    pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main([*pair[:3], "--draft", pair[2], *TEXTS, *QUICK, "--self-test"]) == 3
    )  # the draft model is the target: no token is rejected
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].startswith(
        "SELF-TEST: the planted defect (no residual) was NOT found"
    )
    [line] = without_progress(printed.err)
    assert line == "foredraft: error: the planted defect (no residual) was NOT found"


def test_a_drafter_that_drafts_nothing_is_weak_evidence(
    pair: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Lookup, "propose", lambda self, requests: [[] for _ in requests])
    assert main([*pair[:3], "--drafter", "lookup", *TEXTS, *QUICK]) == 3
    assert "Weak evidence: nothing was drafted at temperature 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("some.txt", "def accept\n\nViktor\r\n  \nx"),
        ("some.jsonl", '{"prompt": "def accept"}\n{"prompt": "Viktor", "other": 1}\n\n{"prompt": "x"}\n'),
    ],
)
def test_prompts_come_from_a_file(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    assert main([*pair, "--prompts", str(tmp_path / name), *FEW, "--json"]) == 3
    from_file = document(capsys)
    assert main([*pair, "def accept", "Viktor", "x", *FEW, "--json"]) == 3
    assert from_file == document(capsys)


def test_prompts_come_from_stdin_or_the_demo(
    pair: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"Viktor\n")))
    assert main([*pair, "-", *FEW, "--json"]) == 3
    assert document(capsys)["identity"]["prompts"] == 1
    monkeypatch.setattr(demo, "prompts", lambda: TEXTS[:2])
    assert main([*pair, *FEW, "--json"]) == 3
    assert document(capsys)["identity"]["prompts"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens is 0; give 1 or more"),
        (["--samples", "0"], "--samples is 0; give 1 or more"),
        (["--detect", "1"], "--detect is 1.0; give a total variation distance between 0 and 1"),
        (["--seed", "-1"], "--seed is -1; give a whole number from 0"),
        (["--drafter", "none"], "--draft has no effect with drafter none"),
        (
            ["--prompts", "/no/such/file"],
            "--prompts is '/no/such/file', which cannot be read (No such file or directory); give a text file",
        ),
        (["a", "--prompts", "b"], "prompts are given as arguments and by --prompts; leave one out"),
        (
            ["--self-test", "--acceptance", "coupled"],
            "--self-test removes the residual, but --acceptance coupled has none; leave one out",
        ),
        (["--max-length", "3"], "exceed the 3 positions"),
        ([""], "the prompt is empty"),
        (["--n", "3"], "Unknown option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_command_prints_one_line_and_exits_with_code_2(
    pair: list[str], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([*pair, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = without_progress(printed.err)
    assert line.startswith("foredraft: error: ") and message in line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n \n", "--prompts is '{file}', which has no prompts; give one per line"),
        (b'{"prompt": "x"}\n{"text": "x"}\n', 'line 2 of {file} has no "prompt"; give lines like'),
        (b'{"prompt": 3}\n', 'line 1 of {file} has no "prompt"'),
        (b"x\n", "line 1 of {file} is not JSON ("),
        (b"[1]\n", 'line 1 of {file} has no "prompt"'),
        (b'{"prompt": "\xff"}', "which is not UTF-8 text (byte 12); convert it first"),
    ],
)
def test_wrong_files_of_prompts_are_refused(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    file = tmp_path / "some.jsonl"
    file.write_bytes(content)
    assert main([*pair, "--prompts", str(file)]) == 2
    assert message.format(file=file) in capsys.readouterr().err


def test_a_missing_drafter_or_tokenizer_is_refused(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*pair[:3], "x", "--drafter", "none"]) == 2
    assert "there is no drafter, so there is nothing to verify; give --draft or --drafter lookup" in (
        capsys.readouterr().err
    )
    save_checkpoint(tmp_path / "mute")
    assert main(["verify", "--model", str(tmp_path / "mute"), "--drafter", "lookup", "x"]) == 2
    assert "no tokenizer.json" in capsys.readouterr().err


def test_the_cache_has_the_rows_and_positions_of_the_verification(
    pair: list[str], loaded: list[LLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*pair, "x", "Viktor", *FEW, "--json"]) == 3
    [llm] = loaded
    assert llm.tokenizer is not None
    assert llm.max_length == len(llm.tokenizer.encode("Viktor")) + 6
    assert document(capsys)["about"]["max_batch"] == llm._engine.cache.rows == 8  # the CPU's limit


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("options", "code"), [([], 0), (["--self-test"], 1)], ids=str)
def test_the_demo_models_pass_with_the_default_options(options: list[str], code: int) -> None:
    done = foredraft("verify", "--json", "--seed", "11", *options, timeout=1800)
    assert done.returncode == code, done.stderr
    assert json.loads(done.stdout)["detectable"] <= 0.03


def test_the_exit_code_is_the_verdict_after_the_reader_closed_the_pipe(pair: list[str]) -> None:
    """The exit code of `foredraft verify | true` is that of `foredraft verify`."""
    alone = foredraft(*pair, *FEW, *TEXTS)
    assert alone.returncode == 3
    closed = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{shlex.join([*COMMAND, *pair, *FEW, *TEXTS])} | true"],
        env=environment(), capture_output=True, timeout=120,
    )  # fmt: skip
    assert closed.returncode == 3, closed.stderr


def test_a_single_prompt_shares_a_batch_with_a_copy_of_itself(
    pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*pair, *FEW, "--max-batch", "1", "--json", "Viktor"]) == 3
    assert any("room for one sequence only" in doubt for doubt in document(capsys)["doubts"])
    assert main([*pair, *FEW, "--max-batch", "2", "--json", "Viktor"]) == 3
    assert not any("room for one sequence only" in doubt for doubt in document(capsys)["doubts"])
