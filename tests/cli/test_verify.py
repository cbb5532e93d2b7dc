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
from foredraft.cli import main
from foredraft.cli.commands import app
from foredraft.cli.words import STDIN, made_ready
from foredraft.drafters.lookup import Lookup
from foredraft.model.tokenizer import Tokenizer
from foredraft.verify.defects import DEFECTS
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


@pytest.fixture(scope="module")
def chat_pair(pair: list[str]) -> list[str]:
    """The target with a chat template, and the draft model."""
    folder = Path(shutil.copytree(pair[2], Path(pair[2]).parent / "chat"))
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}<{{ message.role }}> {{ message.content }}\n{% endfor %}<assistant>"
    )
    return ["verify", "--model", str(folder), *pair[3:]]


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


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    found: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=refuse)
    return found


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
    assert re.search(
        r"fails with probability 0\.9 or more if the total variation .* is 0\.\d{4} or more\.", done.stdout
    )
    assert "Not covered: differences within a cell" in done.stdout
    assert rest[-1] == "PASSED: no difference from plain decoding was found."


def test_the_document_and_the_page_have_every_figure(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html = tmp_path / "page.html"
    assert main([*pair, *TEXTS, *FEW, "--detect", "0.9", "--json", "--html", str(html)]) == 3
    found, page = document(capsys), html.read_text()
    check_alone(page)
    assert "Inconclusive: no difference was found" in page and page.count("✓ 4 of 4") == sum(
        len(identity["runs"]) for identity in found["identities"]
    )
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


def test_a_divergence_fails_and_is_printed_with_its_margin(
    pair: list[str], substituted: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html = tmp_path / "page.html"
    assert main([*pair, *TEXTS, *FEW, "--html", str(html)]) == 1
    out, page = capsys.readouterr().out, html.read_text()
    check_alone(page)
    assert "Failed: the output differs" in page and "✗ 0 of 4" in page and "new token 2" in page
    assert "auto, in a batch: 0 of 4 identical" in out and "none, in a batch: 4 of 4 identical" in out
    assert re.search(
        r"prompt 2, auto, one at a time, new token 2: token 0 instead of token \d+; the target's two most"
        r" likely tokens there are \d+ \(logit \S+\) and \d+ \(logit \S+\), margin \S+",
        out,
    )
    assert out.splitlines()[-1] == "FAILED: the output differs from plain decoding's, or a request failed."


def test_a_policy_that_always_drafts_is_tested_as_it_is(
    pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*pair, *TEXTS, *FEW, "--policy", "fixed"]) == 3
    out = capsys.readouterr().out
    assert f"drafter draft-model ({pair[4]}), policy fixed;" in out and "drafting always" not in out


def test_the_summary_names_no_distance_of_a_position_without_tokens(
    pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*pair, *TEXTS, *FEW]) == 3
    out = capsys.readouterr().out
    assert "too few" in out and "1.000 at draft position" not in out
    assert re.search(r"^Weak evidence: too few tokens for a test of position \d and .*;", out, re.MULTILINE)


def test_prompts_become_chats_on_request(
    chat_pair: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    encode = LLM.encode
    monkeypatch.setattr(LLM, "encode", lambda self, prompts: seen.append(prompts) or encode(self, prompts))
    assert main([*chat_pair, "Viktor", *FEW, "--chat", "--system", "Be brief.", "--json"]) == 3
    about = document(capsys)["about"]
    assert (about["chat"], about["system_message"]) == (True, "Be brief.")
    tokenizer = Tokenizer.from_folder(Path(chat_pair[2]))
    assert tokenizer is not None
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Viktor"}]
    assert seen[-1] == [tokenizer.encode_chat(messages)]


def test_a_chat_without_a_template_is_refused(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*pair, "Viktor", *FEW, "--chat"]) == 2
    assert "--chat needs a chat template, but the model has none" in capsys.readouterr().err
    assert main([*pair, "Viktor", *FEW, "--system", "Be brief."]) == 2
    assert "--system has no effect without --chat; add --chat, or leave it out" in capsys.readouterr().err


def test_too_few_samples_are_inconclusive(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*pair, *TEXTS, *FEW]) == 3
    printed = capsys.readouterr().out.splitlines()
    assert any(
        line.startswith("Weak evidence: the tests detect a total variation distance of ") for line in printed
    )
    assert printed[-1] == "INCONCLUSIVE: no difference was found, but one could have been missed."


def test_the_self_test_finds_the_planted_defect(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*pair, *TEXTS, *QUICK, "--samples", "900", "--self-test"]) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == f"SELF-TEST: the planted defect ({RESIDUAL}) was found."
    assert "FAILED" in printed.out and not without_progress(printed.err)


def test_the_self_test_plants_the_defect_of_the_given_name(
    pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*pair, *TEXTS, *QUICK, "--samples", "900", "--self-test", "round-noise", "--json"]) == 1
    found = document(capsys)
    assert (found["planted"], found["found_planted"]) == ("round-noise", True)


@pytest.mark.slow
def test_the_self_test_with_all_defects_plants_each(
    pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*pair, *TEXTS, *QUICK, "--samples", "1500", "--self-test", "all"]) == 1
    printed = capsys.readouterr()
    found = [line for line in printed.out.splitlines() if line.startswith("SELF-TEST: ")]
    assert found == [
        f"SELF-TEST: the planted defect ({name}: {defect.summary}) was found."
        for name, defect in DEFECTS.items()
    ]
    assert without_progress(printed.err) == []


def test_a_self_test_with_all_defects_is_inconclusive_if_one_is_not_found(
    pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*pair, *TEXTS, *FEW, "--self-test", "all", "--json"]) == 3
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["verdict"] == "inconclusive"
    assert [test["planted"] for test in found["self_tests"]] == list(DEFECTS)
    missed = [test["planted"] for test in found["self_tests"] if not test["found_planted"]]
    assert "residual" in missed and "round-noise" not in missed
    assert [line.split("(")[1].split(":")[0] for line in without_progress(printed.err)] == missed


def test_all_defects_are_those_of_the_rule_under_test(
    pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main([*pair, *TEXTS, *FEW, "--acceptance", "coupled", "--self-test", "all", "--json"])
    planted = [test["planted"] for test in document(capsys)["self_tests"]]
    assert planted == ["round-noise", "penalties"]


def test_a_self_test_that_finds_nothing_reports_an_error(
    pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*pair, *TEXTS, *FEW, "--self-test"]) == 3  # too few samples
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].startswith(
        f"SELF-TEST: the planted defect ({RESIDUAL}) was NOT found"
    )
    [line] = without_progress(printed.err)
    assert line == f"foredraft: error: the planted defect ({RESIDUAL}) was NOT found"


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
    pair = [*pair, "--policy", "fixed"]  # how much `auto` drafts is a matter of time
    assert main([*pair, "--prompts", str(tmp_path / name), *FEW, "--json"]) == 3
    from_file = document(capsys)
    assert main([*pair, "def accept", "Viktor", "x", *FEW, "--json"]) == 3
    assert from_file == document(capsys)


def test_prompts_come_from_stdin_or_the_demo(
    pair: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"Viktor\n")))
    assert main([*pair, "-", *FEW, "--json"]) == 3
    assert document(capsys)["identities"][0]["prompts"] == 1
    monkeypatch.setattr(demo, "prompts", lambda: TEXTS[:2])
    assert main([*pair, *FEW, "--json"]) == 3
    assert document(capsys)["identities"][0]["prompts"] == 2


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
            "--self-test is 'residual', but corrections drawn from p, not from the residual breaks nothing under"
            " --acceptance coupled; leave one out",
        ),
        (
            ["--self-test", "bonus"],
            "--self-test is 'bonus', which is no defect to plant; give residual, position, coin, round-noise,"
            " penalties or all, and prompts before the option",
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
    assert document(capsys)["about"]["max_batch"] == engine_of(llm).cache.rows == 8  # the CPU's limit


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


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--self-test"], ["--self-test=residual"]),
        (["--self-test", "--json"], ["--self-test=residual", "--json"]),
        (["--self-test", "-"], ["--self-test=residual", STDIN]),
        (["--self-test", "coin", "--json"], ["--self-test", "coin", "--json"]),
        (["--self-test=all"], ["--self-test=all"]),
        (["x", "--seed", "3"], ["x", "--seed", "3"]),
        ([], []),
    ],
    ids=str,
)
def test_a_self_test_without_a_name_has_the_default(words: list[str], named: list[str]) -> None:
    assert made_ready(["verify", *words], app) == ["verify", *named]
