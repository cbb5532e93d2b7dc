"""The trace page: its data, and its behaviour in a browser if one is installed."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft import ConfigError, RoundTrace, SamplingParams, write_trace
from foredraft.cli.render import legend
from foredraft.pages.trace import ORIGINS

PROMPT = "def close(self):\n    </script><script>alert(1)</script><b>&amp;"


@pytest.fixture(scope="module")
def llm() -> foredraft.LLM:
    return foredraft.load(device="cpu", max_length=256, policy="fixed")


def page(llm: foredraft.LLM, file: Path, **options: Any) -> list[foredraft.Output]:
    common = {"temperature": 0.9, "max_new_tokens": 24, "seed": 3, "ignore_eos": True}
    params = SamplingParams(**common | options)
    outputs = llm.generate(PROMPT, params, n=2, trace=True)
    assert llm.tokenizer is not None
    write_trace(file, outputs, prompt=PROMPT, tokenizer=llm.tokenizer, about="a <b>line</b>")
    return outputs


def data_of(html: str) -> Any:
    return json.loads(html.split('id="data">')[1].split("</script>")[0])


@pytest.mark.parametrize("drafter", ["draft-model", "lookup", "none"])
def test_the_page_holds_every_token_and_round(llm: foredraft.LLM, tmp_path: Path, drafter: str) -> None:
    outputs = page(llm, tmp_path / "t.html", drafter=drafter)
    html = (tmp_path / "t.html").read_text(encoding="utf-8")
    before = html.split('id="data"')[0]
    assert not re.search(r"src|href|url\(|@import|https?:", before), "self-contained"
    assert html.count("<script") == html.count("</script>") == 2, "the prompt is data, not markup"
    samples = data_of(html)["samples"]
    for output, sample in zip(outputs, samples, strict=True):
        assert "".join(token["text"] for token in sample["tokens"]) == output.text
        assert [token["origin"] for token in sample["tokens"]] == output.origins
        assert sum(len(one["draft"]) for one in sample["rounds"]) == output.stats.drafted
        assert sum(one["emitted"] for one in sample["rounds"]) == len(sample["tokens"])
        for one in sample["rounds"]:
            new = [token["id"] for token in [*one["draft"][: one["accepted"]], one["next"]]]
            assert output.token_ids[one["start"] : one["start"] + one["emitted"]] == new[: one["emitted"]]


def test_a_discarded_round_is_marked(llm: foredraft.LLM, tmp_path: Path) -> None:
    [output, _] = page(llm, tmp_path / "t.html")
    assert output.trace is not None and llm.tokenizer is not None
    lost = RoundTrace(0, "draft-model", 3, [5, 6, 7], [], [], 0, 0, 0.0, 0, discarded=True)
    outputs = [replace(output, trace=[lost, *output.trace])]
    write_trace(tmp_path / "t.html", outputs, prompt="", tokenizer=llm.tokenizer)
    [sample] = data_of((tmp_path / "t.html").read_text(encoding="utf-8"))["samples"]
    assert sample["rounds"][0]["discarded"]


def test_what_cannot_be_written_is_refused(llm: foredraft.LLM, tmp_path: Path) -> None:
    (tmp_path / "t.html").mkdir()
    with pytest.raises(ConfigError, match=r"trace is '.*t.html', which cannot be written"):
        page(llm, tmp_path / "t.html")
    untraced = llm.generate(PROMPT, SamplingParams(max_new_tokens=2))
    with pytest.raises(ConfigError, match="generate it with trace=True"):
        write_trace(tmp_path / "t.html", untraced, prompt=PROMPT, tokenizer=llm.tokenizer)  # type: ignore[arg-type]


def test_a_colour_means_the_same_on_the_page_and_on_the_terminal(llm: foredraft.LLM, tmp_path: Path) -> None:
    page(llm, tmp_path / "t.html")
    text = (tmp_path / "t.html").read_text(encoding="utf-8")
    light, dark = text.split("prefers-color-scheme: dark")
    ansi = {"blue": 94, "yellow": 33, "green": 32}
    assert {origin.color: origin.ansi for origin in ORIGINS.values()} == ansi
    for name, origin in ORIGINS.items():
        for shown, (ink, paper) in ((light, origin.light), (dark, origin.dark)):
            assert f"--{name}: {ink}; --{name}-bg: {paper};" in shown
            red, green, blue = (int(ink[at : at + 2], 16) for at in (1, 3, 5))
            seen = {"blue": blue > green > red, "yellow": red > green > blue, "green": green > blue > red}
            assert seen[origin.color], (name, ink)
        assert f"{origin.color}: {origin.meaning}" in legend(color=False)
        assert data_of(text)["origins"][name] == origin.meaning


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium")
def test_every_token_and_round_can_be_selected_in_a_browser(llm: foredraft.LLM, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    outputs = page(llm, tmp_path / "t.html", drafter="draft-model")
    with playwright.sync_playwright() as run:
        browser = run.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": 390, "height": 844})
        errors: list[str] = []
        view.on("pageerror", lambda error: errors.append(str(error)))
        view.goto((tmp_path / "t.html").as_uri())
        assert view.evaluate("document.documentElement.scrollWidth <= innerWidth")
        block = view.locator(".text").first
        tokens = block.locator(".t")
        assert tokens.count() == len(outputs[0].token_ids)
        assert block.inner_text().replace("\xa0", " ").endswith((outputs[0].text or "").rstrip("\n"))
        looks = set()
        for kind in ("target", "bonus", "drafter"):
            style = f"getComputedStyle(document.querySelector('.text .{kind}'))"
            looks.add(view.evaluate(f"{style}.textDecorationLine + {style}.textDecorationStyle"))
        assert len(looks) == 3, "distinguishable without colour"
        assert outputs[0].trace is not None
        for index in (0, len(outputs[0].trace) // 2):
            round_ = outputs[0].trace[index]
            view.locator(".bars").first.locator(".bar").nth(index).click()
            said = view.locator("#detail").inner_text()
            assert f"Round {index + 1}: drafted by draft-model" in said
            assert f"The policy allowed {round_.budget}" in said
            assert said.count("after a rejection") == max(0, len(round_.draft) - round_.accepted - 1)
            assert view.locator("#detail tr").count() == 1 + len(round_.draft) + 1
        tokens.nth(5).focus()
        assert view.locator(".text .t.on").count() > 0
        view.locator("input[type=checkbox]").first.check()
        rejected = sum(len(one.draft) - one.accepted for one in outputs[0].trace)
        assert block.locator(".wrong:visible").count() == rejected
        assert not errors
        browser.close()
