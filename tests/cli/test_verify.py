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

from foredraft import LLM, Output, demo
from foredraft.bench.settings import DEFECTS
from foredraft.cli import main
from foredraft.cli.commands import app
from foredraft.cli.prompts import read_prompts
from foredraft.cli.words import STDIN, made_ready
from tests.cli.conftest import ChatModel, Cli, document
from tests.support.checkpoints import save_checkpoint
from tests.support.command import COMMAND, foredraft, without_progress
from tests.support.drawings import check_alone, markers, texts
from tests.support.loaded import engine_of
from tests.support.running import environment

QUICK = ["--tokens", "6", "--detect", "0.2", "--seed", "3", "--max-batch", "32"]
FEW = ["--tokens", "6", "--samples", "20", "--seed", "3"]
NOISE = 0.03  # standard deviation of the noise on the draft model's weights
RESIDUAL = "residual: corrections drawn from p, not from the residual"
TEXTS = ["def accept", "Viktor", "the target checks all", "x"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A target with spread distributions, and a draft model whose tokens are often accepted and often rejected."""
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

    def altering(self: LLM, prompts: Any, params: Any, **more: Any) -> list[Output]:
        outputs = generate(self, prompts, params, **more)
        [own, *_] = params if isinstance(params, list) else [params]
        if own.greedy and own.drafter != "none":
            outputs = [replace(o, token_ids=[*o.token_ids[:2], 0, *o.token_ids[3:]]) for o in outputs]
        return outputs

    monkeypatch.setattr(LLM, "generate", altering)


@pytest.mark.heavy
def test_a_lossless_pair_passes(pair: list[str]) -> None:
    done = foredraft(*pair, *TEXTS, *QUICK[:2], "--detect", "0.1", *QUICK[4:])
    assert (done.returncode, without_progress(done.stderr)) == (0, [])
    assert done.stderr.startswith("foredraft: Importing PyTorch\n")
    header, *rest = done.stdout.splitlines()
    assert header.startswith(
        f"Target {pair[2]}, float32 on cpu; drafter auto (lookup, draft-model ({pair[4]})), policy auto;"
    )
    assert re.search(r"foredraft \S+, PyTorch \S+, Python \S+, ", header)
    texts = ("T=0", "T=0 penalties=0.9/-2/0.5", "T=1, coupled with seeds")
    texts += ("T=0.9 min-p=0.02 penalties=0.9/-2/0.5, coupled with seeds",)
    for first, text in zip((1, 7, 13, 19), texts, strict=True):
        assert rest[first] == (
            f"New tokens at {text}, compared with plain decoding of one prompt at a time: 4 prompts, 24 tokens"
        )
        assert [line.strip() for line in rest[first + 1 : first + 6]] == [
            "auto, one at a time: 4 of 4 identical",
            "none, in a batch: 4 of 4 identical",
            "auto, in a batch: 4 of 4 identical",
            "auto, drafting always, one at a time: 4 of 4 identical",
            "auto, drafting always, in a batch: 4 of 4 identical",
        ]
    controls = [line.split() for line in rest if "none (control)" in line]
    assert [line[-1] for line in controls] == ["ok"] * 3
    assert done.stdout.count("Tokens by position of the draft, given the text before them: ") == 3
    assert re.search(r"^  1  +\d+  +\d+  .*  ok$", done.stdout, re.MULTILINE)
    assert re.search(
        r"For corrections alone, some test does so at \d\.\d{3} at draft position 1, \d\.\d{3} at draft"
        r" position 2, \d\.\d{3} at draft position 3\.",
        done.stdout,
    )
    assert "FAILED" not in done.stdout
    assert "seed 3; drafting always, lookup and draft-model in turns" in done.stdout
    assert "\x1b" not in done.stdout
    assert re.search(r"with probability 0\.9 or more if the total variation .* is 0\.\d{4} or", done.stdout)
    assert "Not covered: differences within a cell" in done.stdout
    assert rest[-1] == "PASSED: no difference from plain decoding was found."


def test_the_document_and_the_page_have_every_figure(pair: list[str], tmp_path: Path, cli: Cli) -> None:
    html = tmp_path / "page.html"
    found = cli.document(*pair, *TEXTS, *FEW, "--detect", "0.9", "--html", html, code=3)
    page = html.read_text()
    check_alone(page)
    assert "Inconclusive: no difference was found" in page
    assert page.count("✓ 4 of 4") == sum(len(identity["runs"]) for identity in found["identities"])
    for test in found["tests"]:
        assert f"<td>{test['p_value']:.2g}</td><td>{test['detectable']:.4f}</td>" in page
    drawn = [text for text in texts(page) if text.text in ("drafter", "control")]
    assert len(drawn) == 2 and len(markers(page)) >= len(found["tests"])
    assert set(found) == {
        *("verdict", "about", "seed", "identities", "tests"),
        *("detect", "detectable", "power", "family_level", "power_by_position", "doubts"),
    }
    assert (found["about"]["model"], found["about"]["draft"]) == (pair[2], pair[4])
    assert [identity["passed"] for identity in found["identities"]] == [True] * 4
    assert [test["samples"] for test in found["tests"]] == [20] * 3 + [1] * 6
    assert [len(test["positions"]) for test in found["tests"]] == [4] * 3 + [0] * 6
    assert found["power_by_position"] == []  # 20 samples test no position
    assert found["tests"][2]["setting"]["min_p"] > 0


def test_a_divergence_is_told_and_fails(pair: list[str], substituted: None, tmp_path: Path, cli: Cli) -> None:
    html = tmp_path / "page.html"
    out = cli(*pair, *TEXTS, *FEW, "--html", html, code=1).out
    page = html.read_text()
    check_alone(page)
    assert "Failed: the output differs" in page and "✗ 0 of 4" in page and "new token 2" in page
    assert "auto, in a batch: 0 of 4 identical" in out and "none, in a batch: 4 of 4 identical" in out
    assert re.search(
        r"prompt 2, auto, one at a time, new token 2: token 0 instead of token \d+; the target's two most"
        r" likely tokens there are \d+ \(logit \S+\) and \d+ \(logit \S+\), margin \S+",
        out,
    )
    assert out.splitlines()[-1] == "FAILED: the output differs from plain decoding's, or a request failed."


def test_a_policy_that_always_drafts_is_tested_as_it_is(pair: list[str], cli: Cli) -> None:
    out = cli(*pair, *TEXTS, *FEW, "--policy", "fixed", code=3).out
    assert f"drafter draft-model ({pair[4]}), policy fixed;" in out and "drafting always" not in out


def test_too_few_samples_are_inconclusive_and_say_where(pair: list[str], cli: Cli) -> None:
    out = cli(*pair, *TEXTS, *FEW, code=3).out
    weak = [line for line in out.splitlines() if line.startswith("Weak evidence: ")]
    assert any("the tests detect a total variation distance of " in line for line in weak)
    assert any(re.search(r": too few tokens for a test of position \d and .*;", line) for line in weak)
    assert "1.000 at draft position" not in out, "no distance of a position without tokens"
    assert out.splitlines()[-1] == "INCONCLUSIVE: no difference was found, but one could have been missed."


def test_prompts_as_chats(pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    model = ChatModel(Path(pair[2]), tmp_path / "chat")
    seen: list[Any] = []
    encode = LLM.encode
    monkeypatch.setattr(LLM, "encode", lambda self, prompts: seen.append(prompts) or encode(self, prompts))
    chat = ["verify --model", model.folder, *pair[3:], "Viktor", *FEW, "--chat", "--system", "Be brief."]
    about = cli.document(*chat, code=3)["about"]
    assert (about["chat"], about["system_message"]) == (True, "Be brief.")
    assert seen[-1] == [model.encode(system="Be brief.", user="Viktor")]


@pytest.mark.heavy
def test_the_self_test_finds_the_planted_defect(pair: list[str], cli: Cli) -> None:
    out, err = cli(*pair, *TEXTS, *QUICK, "--samples", "900", "--self-test", code=1)
    assert out.splitlines()[-1] == f"SELF-TEST: the planted defect ({RESIDUAL}) was found."
    assert "FAILED" in out and not without_progress(err)
    found = cli.document(*pair, *TEXTS, *FEW, "--self-test", "round-noise", code=1)
    assert (found["planted"], found["found_planted"]) == ("round-noise", True)


@pytest.mark.heavy
def test_a_self_test_with_all_defects_is_inconclusive_if_one_is_not_found(pair: list[str], cli: Cli) -> None:
    out, err = cli(*pair, *TEXTS[:2], *FEW, "--self-test", "all", "--json", code=3)
    found = document(out)
    assert found["verdict"] == "inconclusive"
    assert [test["planted"] for test in found["self_tests"]] == list(DEFECTS)
    missed = [test["planted"] for test in found["self_tests"] if not test["found_planted"]]
    assert "residual" in missed and "round-noise" not in missed
    assert [line.split("(")[1].split(":")[0] for line in without_progress(err)] == missed


def test_all_defects_are_those_of_the_rule(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main([*pair, *TEXTS[:2], *FEW, "--acceptance", "coupled", "--self-test", "all", "--json"])
    planted = [test["planted"] for test in document(capsys.readouterr().out)["self_tests"]]
    assert planted == ["round-noise", "penalties"]


def test_a_self_test_that_finds_nothing_reports_an_error(pair: list[str], cli: Cli) -> None:
    out, err = cli(*pair, *TEXTS, *FEW, "--self-test", code=3)  # too few samples
    told = f"the planted defect ({RESIDUAL}) was NOT found"
    assert out.splitlines()[-1].startswith(f"SELF-TEST: {told}")
    assert without_progress(err) == [f"foredraft: error: {told}"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("some.txt", "def accept\n\nViktor\r\n  \nx"),
        ("some.jsonl", '{"prompt": "def accept"}\n{"prompt": "Viktor", "other": 1}\n\n{"prompt": "x"}\n'),
    ],
)
def test_prompts_of_a_file_are_its_lines(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    assert read_prompts((), str(tmp_path / name), None) == ["def accept", "Viktor", "x"]


@pytest.mark.heavy
def test_prompts_come_from_a_file_stdin_or_the_demo(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    (tmp_path / "some.txt").write_text("\n".join(TEXTS[:3]))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"Viktor\n")))
    monkeypatch.setattr(demo, "prompts", lambda: TEXTS[:2])
    for given, count in (["--prompts", tmp_path / "some.txt"], 3), (["-"], 1), ([], 2):
        assert cli.document(*pair, *given, *FEW, code=3)["identities"][0]["prompts"] == count, given


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--tokens 0", "--tokens is 0; give 1 or more"),
        ("--samples 0", "--samples is 0; give 1 or more"),
        ("--detect 1", "--detect is 1.0; give a total variation distance between 0 and 1"),
        ("--seed -1", "--seed is -1; give a whole number from 0"),
        ("--prompts /no/x", "'/no/x', which cannot be read (No such file or directory); give a text file"),
        ("a --prompts b", "prompts are given as arguments and by --prompts; leave one out"),
        ("--self-test --acceptance coupled", "residual breaks nothing under --acceptance coupled; leave one"),
        (
            "--self-test bonus",
            "--self-test is 'bonus', which is no defect to plant; give residual, position, coin, round-noise,"
            " penalties or all, and prompts before the option",
        ),
        ("--max-length 3", "exceed the 3 positions"),
        ("--n 3", "Unknown option"),
        ("x --chat", "--chat needs a chat template, but the model has none"),
        ("x --system y", "--system has no effect without --chat; add --chat, or leave it out"),
    ],
)
def test_a_wrong_command_is_refused(pair: list[str], line: str, says: str, cli: Cli) -> None:
    assert says in cli.refused(f"verify {line}", *pair[1:])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\n \n", "--prompts is '{file}', which has no prompts; give one per line"),
        (b'{"prompt": "x"}\n{"text": "x"}\n', 'line 2 of {file} has no "prompt"; give lines like'),
    ],
)
def test_wrong_files_of_prompts(pair: list[str], tmp_path: Path, content: bytes, says: str, cli: Cli) -> None:
    file = tmp_path / "some.jsonl"
    file.write_bytes(content)
    assert says.format(file=file) in cli.refused(*pair, "--prompts", file)


def test_a_missing_drafter_or_tokenizer_is_refused(pair: list[str], models: Path, cli: Cli) -> None:
    told = "there is no drafter, so there is nothing to verify; give --draft or --drafter lookup"
    assert told in cli.refused(*pair[:3], "x", "--drafter", "none")
    assert "no tokenizer.json" in cli.refused("verify x --drafter lookup --model", models / "mute")


def test_the_cache_has_the_verifications_size(pair: list[str], loaded: list[LLM], cli: Cli) -> None:
    about = cli.document(*pair, "x", "Viktor", *FEW, code=3)["about"]
    [llm] = loaded
    assert llm.tokenizer is not None
    assert llm.max_length == len(llm.tokenizer.encode("Viktor")) + 6
    assert about["max_batch"] == engine_of(llm).cache.rows == 8  # the CPU's limit


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("options", "code"), [([], 0), (["--self-test", "all"], 1)], ids=str)
def test_the_demo_models_pass_with_the_default_options(options: list[str], code: int) -> None:
    done = foredraft("verify", "--json", "--seed", "11", *options, timeout=3300)
    assert done.returncode == code, done.stderr
    found = json.loads(done.stdout)
    if not options:
        assert found["detectable"] <= 0.03
        assert all(each["detectable_correction"] < 0.2 for each in found["power_by_position"])


@pytest.mark.heavy
def test_the_exit_code_is_the_verdict_after_the_reader_closed_the_pipe(pair: list[str]) -> None:
    command = f"{shlex.join([*COMMAND, *pair, *FEW, *TEXTS[:1]])} | true"
    closed = subprocess.run(["bash", "-o", "pipefail", "-c", command], env=environment(), capture_output=True)
    assert closed.returncode == 3, closed.stderr


@pytest.mark.heavy
def test_a_single_prompt_shares_a_batch_with_a_copy_of_itself(pair: list[str], cli: Cli) -> None:
    for most in (1, 2):
        doubts = cli.document(*pair, *FEW, "--max-batch", most, "Viktor", code=3)["doubts"]
        assert any("room for one sequence only" in doubt for doubt in doubts) is (most == 1)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--self-test"], ["--self-test=residual"]),
        (["--self-test", "-"], ["--self-test=residual", STDIN]),
        (["--self-test", "coin", "--json"], ["--self-test", "coin", "--json"]),
        (["--self-test=all"], ["--self-test=all"]),
    ],
    ids=str,
)
def test_a_self_test_without_a_name_has_the_default(words: list[str], named: list[str]) -> None:
    assert made_ready(["verify", *words], app) == ["verify", *named]
