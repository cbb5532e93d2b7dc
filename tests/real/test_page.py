"""The page with a model of one's own and no option, in a real Chromium."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")


def test_the_page_of_a_chat_model_waits_runs_and_outlives_its_server(smollm2: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "foredraft.cli", "serve", "--model", str(smollm2), "--port", str(port)]
    with playwright.sync_playwright() as run, subprocess.Popen(command) as server:
        try:
            view = run.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]).new_page()
            view.set_default_timeout(120_000)
            for _ in range(200):  # until it listens, which is before the model is loaded
                try:
                    view.goto(f"http://127.0.0.1:{port}")
                    break
                except playwright.Error:
                    view.wait_for_timeout(100)
            view.locator("#status", has_text="Waiting: the model is being loaded.").wait_for()
            view.wait_for_selector("#run:enabled")
            assert view.input_value("#drafter-right") == "auto"
            view.check("#mode-chat")
            view.fill("#prompt", "Write a Python function that adds two numbers.")
            view.fill("#max_tokens", "48")
            view.fill("#temperature", "0")
            view.click("#run")
            view.locator("#status", has_text=re.compile("^Done")).wait_for()
            assert view.inner_text("#verdict").startswith("✓ Both texts are identical")
            assert re.fullmatch(r"\d+\.\d\d×|no difference", view.inner_text("#speedup"))
            assert view.locator("#rates dt").all_inner_texts() == ["plain", "auto"]
            heights = view.eval_on_selector_all(
                ".text", "all => all.map((x) => x.getBoundingClientRect().top)"
            )
            assert heights[0] == heights[1]
            view.fill("#prompt", "Now one that multiplies them.")
            view.fill("#max_tokens", "400")
            view.click("#run")
            view.wait_for_selector("#text-left .t", state="attached")
            server.kill()
            view.wait_for_selector("#error:visible")
            assert view.inner_text("#error").startswith("The server is gone.")
            assert view.locator("#text-left .t").count() > 0
        finally:
            server.kill()
