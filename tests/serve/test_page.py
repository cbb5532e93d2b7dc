"""The page at `/`, in a real Chromium. AXE names the file axe.min.js, which checks accessibility where it is there."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft.llm import LLM
from foredraft.serve.app import create_app
from foredraft.serve.server import listen, make_server
from foredraft.serve.settings import Settings
from tests.support.serving import Served, serving

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
ASSETS = {
    "/": "text/html", "/page/page.css": "text/css", "/page/tokens.css": "text/css",
    "/page/main.js": "text/javascript", "/page/rounds.js": "text/javascript",
    "/page/origins.js": "text/javascript", "/page/icon.svg": "image/svg+xml",
}  # fmt: skip
WORD = re.compile(r"\S")  # a line break cannot be pointed at
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\n"
# Every visible text on a colour: its contrast, by the formula of WCAG 2. A text of SVG is on the card behind it.
CONTRASTS = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((x) => x / 255)
    .map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.getClientRects().length || node.closest("button:disabled, option")) continue;
    const style = getComputedStyle(node);
    const [ink, paper] = [light(parse(node instanceof SVGElement ? style.fill : style.color)), light(behind(node))];
    found.push([(Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05), node.className.baseVal ?? node.className, node.tagName]);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as run:
        started = run.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any, served: Served) -> Iterator[Any]:
    """Return a function that opens the page; at the end no page may have an error on its console."""
    contexts, errors = [], []

    def opened(
        url: str = served.url, *, width: int = 1280, expected: str | None = None, **options: Any
    ) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        view = context.new_page()
        view.set_default_timeout(20_000)

        def note(text: str) -> None:
            if expected is None or expected not in text:
                errors.append(text)

        view.on("console", lambda said: note(said.text) if said.type in ("error", "warning") else None)
        view.on("pageerror", lambda error: note(str(error)))
        view.on("request", lambda asked: None if asked.url.startswith((url, "data:")) else note(asked.url))
        view.goto(url)
        return view

    yield opened
    for context in contexts:
        context.close()
    assert not errors


def fill(view: Any, **fields: object) -> None:
    view.wait_for_selector("#run:enabled")
    for name, value in fields.items():
        view.fill(f"#{name}", str(value))


def finish(view: Any) -> None:
    view.keyboard.press("Control+Enter")
    # the policy of content forbids to wait by script
    view.locator("#status", has_text=re.compile("^Done")).wait_for()


def ran(view: Any, tokens: int = 60, **fields: object) -> Any:
    fill(view, **{"prompt": "def fibonacci(n):\n", "max_tokens": tokens, **fields})
    finish(view)
    return view


def fits(view: Any) -> bool:
    return bool(view.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def test_two_runs_of_a_seed_show_one_text_and_their_charts(open_page: Any, served: Served) -> None:
    view = open_page()
    bodies: list[dict[str, Any]] = []

    def note(request: Any) -> None:
        if request.method == "POST":
            bodies.append(request.post_data_json)

    view.on("request", note)
    ran(view, temperature=1.2)
    turns = ["none", "draft-model", "draft-model", "none"]  # the runs that count
    assert [body["drafter"] for body in bodies] == [*turns[:2], *turns, *turns, *turns[:2]]
    assert len({body["seed"] for body in bodies}) == 1
    bodies, counting = bodies[:2], bodies[2:]
    assert all(body["provenance"] for body in bodies) and not any(body["provenance"] for body in counting)
    whole = [served.client.post("/v1/completions", json={**body, "stream": False}).json() for body in bodies]
    for side, reply in zip(("left", "right"), whole, strict=True):
        [choice] = reply["choices"]
        tokens = f"#text-{side} .t"
        shown = view.eval_on_selector_all(tokens, "all => all.map((x) => x.textContent).join('')")
        assert choice["text"] in (shown, view.inner_text(f"#text-{side}"))
        classes = view.eval_on_selector_all(tokens, "all => all.map((x) => x.className)")
        assert [name.split()[1] for name in classes] == [each["origin"] for each in choice["provenance"]]
    assert {each["origin"] for each in whole[1]["choices"][0]["provenance"]} == {"drafter", "target", "bonus"}
    assert view.inner_text("#verdict").startswith("✓ Both texts are identical, all ")
    assert re.fullmatch(r"\d+\.\d\d×|no difference", view.inner_text("#speedup"))
    assert view.inner_text("#speedup-note").endswith(" in 5 turns")
    figures = whole[1]["metrics"]["speculative_decoding"]
    says = view.get_attribute("#chart-positions svg", "aria-label")
    pairs = [tuple(map(int, pair)) for pair in re.findall(r": (\d+) of (\d+)", says)]
    assert [kept for kept, _ in pairs] == figures["acceptance_histogram"]
    assert sum(drafted for _, drafted in pairs) == figures["num_draft_tokens"]
    assert view.locator("#chart-rounds rect.accepted").count() == figures["num_accepted_tokens"]
    rounds = f"{len(whole[1]['choices'][0]['trace'])} rounds"
    assert rounds in view.get_attribute("#chart-rounds svg", "aria-label")


def test_the_default_of_the_server_is_an_entry_with_a_name(open_page: Any) -> None:
    with foredraft.load(device="cpu", max_length=256) as llm, serving(llm) as own:
        assert llm.default_drafter == "auto"
        view = open_page(own.url)
        ran(view, 40, temperature=0)
        assert view.input_value("#drafter-right") == "auto"
        used = own.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).json()
        assert used["choices"]
        assert view.inner_text("#title-left") == "plain"
        assert re.match(r"auto( by .+)?$", view.inner_text("#title-right"))
        assert view.locator("#rates dt").all_inner_texts() == ["plain", "auto"]
        heights = view.eval_on_selector_all(
            ".columns h2", "all => all.map((x) => x.getBoundingClientRect().height)"
        )
        assert heights[0] == heights[1] > 0


@pytest.mark.parametrize(
    ("ratios", "figure", "note"),
    [
        ([], "–", "speed-up: measured after both texts"),
        ([1.2], "–", "speed-up: measured after both texts"),
        ([0.9, 1.1, 1.0, 1.05, 0.95], "no difference", "right against left: 1.00 (0.95 to 1.05) in 5 turns"),
        ([1.5, 1.7, 1.6, 1.55, 1.65], "1.60×", "right against left: 1.60 (1.55 to 1.65) in 5 turns"),
        ([0.5, 0.6, 0.55], "0.55×", "right against left: 0.55 (0.53 to 0.57) in 3 turns"),
    ],
)
def test_a_speedup_within_its_spread_is_none(
    open_page: Any, ratios: list[float], figure: str, note: str
) -> None:
    found = open_page().evaluate(
        """async (all) => { const { Ratios } = await import('/page/ratios.js'); const made = new Ratios();
          all.forEach((each) => made.add(each)); return [made.figure, made.note]; }""",
        ratios,
    )
    assert found[0] == figure and found[1].endswith(note)


def test_charts_of_long_drafts_and_many_rounds_can_be_read(open_page: Any) -> None:
    view = open_page()
    found = view.evaluate(
        """async () => {
          const { positions, rounds } = await import('/page/charts.js');
          const root = document.createElement('div');
          root.className = 'chart';
          root.style.width = '250px';
          document.body.append(root);
          const boxes = (names) => [...root.querySelectorAll(names)].map((x) => { const b = x.getBoundingClientRect(); return [b.left, b.right, b.top, b.bottom]; });
          const found = {};
          for (const count of [3, 10, 40]) {
            positions(root, { drafted: Array(count).fill(100), accepted: Array(count).fill(100) });
            found[`shares ${count}`] = boxes('text.value');
            found[`places ${count}`] = boxes('text:not(.value)');
          }
          const round = (length, accepted) => ({ draft: Array(length).fill({}), accepted, emitted: accepted + 1 });
          rounds(root, { rounds: Array.from({ length: 150 }, (_, i) => round(48, i % 49)) });
          found.rects = boxes('rect');
          found.scroll = [root.scrollWidth, root.clientWidth, root.scrollLeft + root.clientWidth];
          return found;
        }"""
    )
    for name, boxes in found.items():
        if name.startswith(("shares", "places")):
            assert boxes and all(a[1] <= b[0] for a, b in itertools.pairwise(boxes)), name
    rects = found["rects"]
    assert all(box[1] - box[0] >= 3 and box[3] - box[2] >= 0.8 for box in rects)
    assert len(rects) < 150 * 4  # a bar for each kind, not for each token
    wide, seen, end = found["scroll"]
    assert wide >= 600 > seen and abs(end - wide) <= 1  # the last round is in sight


def test_the_page_waits_for_the_model_and_goes_on_by_itself(open_page: Any, llm: LLM) -> None:
    loaded = threading.Event()

    def load() -> LLM:
        loaded.wait(60)
        return llm

    app = create_app(load, Settings(port=0))
    server, listening = make_server(app, Settings(port=0)), listen(Settings(port=0))
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True)
    thread.start()
    try:
        view = open_page(f"http://127.0.0.1:{listening.getsockname()[1]}", expected="503")
        view.locator("#status", has_text="Waiting: the model is being loaded.").wait_for()
        loaded.set()
        view.locator("#status", has_text="Ready.").wait_for()
        ran(view, 4)
        view.close()
    finally:
        server.should_exit = True
        thread.join(30)


def test_a_server_that_ends_leaves_the_texts_and_one_line(open_page: Any) -> None:
    command = [sys.executable, "-m", "foredraft.cli", "serve", "--port", "0", "--no-access-log"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = next(found[1] for line in server.stderr if (found := re.search(r" at (http://\S+) ", line)))
        view = open_page(url, expected="ERR_")
        fill(view, prompt="def f():\n", max_tokens=480)
        view.keyboard.press("Control+Enter")
        view.wait_for_selector("#text-left .t", state="attached")
        server.kill()
        view.wait_for_selector("#error:visible")
        assert view.inner_text("#error").startswith("The server is gone.")
        assert view.locator("#text-left .t").count() > 0 and view.is_enabled("#run")


def test_details_come_by_pointer_and_by_keys(open_page: Any, served: Served) -> None:
    view = ran(open_page(), temperature=1.2)
    detail = view.locator("#detail")
    view.locator("#text-right .t.target", has_text=WORD).first.hover()
    assert "p (target)" in detail.inner_text() and "q (drafter)" in detail.inner_text()
    assert detail.locator("tr", has_text="rejected").count() == 1, "a correction shows what it replaced"
    view.keyboard.press("Escape")
    assert not detail.is_visible()
    view.focus("#text-right")
    for count, key in enumerate(("Home", "ArrowRight", "ArrowRight", "ArrowLeft")):
        view.keyboard.press(key)
        assert f"Token {(1, 2, 3, 2)[count]}:" in detail.inner_text()
    assert view.evaluate("document.getElementById('detail').ariaLive") == "polite"
    assert view.locator("#text-right .wrong:visible").count() == 0
    view.check("#rejects")
    assert view.locator("#text-right .wrong:visible").count() > 0


def test_stop_ends_the_requests(open_page: Any, served: Served) -> None:
    view = open_page()
    fill(view, prompt="def f():\n", max_tokens=480)
    before = served.metric("foredraft_requests_cancelled_total")
    view.check("#together")
    view.keyboard.press("Control+Enter")
    view.wait_for_selector("#text-right .t", state="attached")
    view.keyboard.press("Escape")
    view.locator("#status", has_text="Stopped.").wait_for()
    served.wait(lambda: served.metric("foredraft_requests_cancelled_total") == before + 2)
    served.wait(served.idle)
    assert view.is_enabled("#run") and not view.is_enabled("#stop-button")


def test_an_error_is_one_line_and_the_next_run_clears_it(open_page: Any) -> None:
    view = open_page(expected="400 (Bad Request)")
    fill(view, prompt="")
    view.click("#run")
    view.wait_for_selector("#error:visible")
    said = view.inner_text("#error")
    assert "prompt is empty" in said and "\n" not in said
    ran(view, 4)
    assert not view.is_visible("#error")


def test_a_server_with_keys_asks_for_one(open_page: Any, llm: LLM, keys: Path) -> None:
    with serving(llm, api_key_file=keys) as locked:
        view = open_page(locked.url, expected="401 (Unauthorized)")
        view.wait_for_selector("#key:focus")
        assert "API key" in view.inner_text("#error") and not view.is_enabled("#run")
        view.fill("#key", "one")
        view.keyboard.press("Enter")
        ran(view, 4)
        view.close()


def test_no_text_becomes_markup(open_page: Any) -> None:
    view = open_page()
    title = view.title()
    view.wait_for_selector("#run:enabled")
    view.check("#mode-chat")
    ran(view, 30, prompt=HOSTILE)
    assert HOSTILE.strip() in view.inner_text("#history")
    # a model that is made to write it
    view.check("#mode-prompt")
    found = view.evaluate(
        """async (text) => {
          const { TokensView } = await import('/page/tokens.js');
          const { Detail } = await import('/page/detail.js');
          const { Run } = await import('/page/run.js');
          const root = document.getElementById('text-left'), run = new Run('none', 0), view = new TokensView(root, new Detail());
          view.begin(run);
          const trace = { start: 0, drafter: text, budget: 1, draft: [1], draft_texts: [text], p: [0.1], q: [0.2], accepted: 0,
            next_token: 2, next_text: text, next_p: 0.5, emitted: 1, rollback: null, legal: null, discarded: false,
            after_sibling: null, after_text: null };
          run.take({ choices: [{ trace: [trace], provenance: [{ token_id: 2, origin: 'target', text }] }] }, 1);
          view.update();
          root.querySelector('.t').click();
          return root.textContent.includes(text) && document.getElementById('detail').textContent.includes('<img');
        }""",
        HOSTILE,
    )
    assert found and view.title() == title and not view.query_selector("img, body script")


def test_the_conversation_goes_on(open_page: Any) -> None:
    view = open_page()
    view.wait_for_selector("#run:enabled")
    view.check("#mode-chat")
    ran(view, 8, prompt="one")
    with view.expect_request("**/v1/chat/completions") as sent:
        ran(view, 8, prompt="two")
    roles = [message["role"] for message in sent.value.post_data_json["messages"]]
    assert roles == ["user", "assistant", "user"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast_in_both_schemes(open_page: Any, scheme: str) -> None:
    view = ran(open_page(color_scheme=scheme), temperature=1.2)
    view.check("#rejects")
    view.locator("#text-right .t.target", has_text=WORD).first.click()
    found = view.evaluate(CONTRASTS)
    assert len(found) > 100
    kinds = {kind for _, names, _ in found for kind in names.split()}
    assert kinds >= {"drafter", "target", "bonus", "wrong"}
    low = [each for each in found if each[0] < 4.5]
    assert not low, low[:5]


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_and_axe_finds_nothing(open_page: Any, width: int) -> None:
    view = open_page(width=width, bypass_csp=True)  # for axe, which is injected
    assert fits(view)
    ran(view, temperature=1.2)
    assert fits(view)
    view.locator("#text-right .t", has_text=WORD).nth(5).click()
    assert fits(view) and view.locator("#detail").is_visible()
    if axe := os.environ.get("AXE"):
        view.add_script_tag(content=Path(axe).read_text(encoding="utf-8"))
        violations = view.evaluate("axe.run()")["violations"]
        assert not violations, [(each["id"], each["nodes"][0]["html"]) for each in violations]


def test_keys_reach_every_control_and_show_where_they_are(open_page: Any) -> None:
    view = ran(open_page(), 8)
    want = view.evaluate(
        """[...document.querySelectorAll('input, textarea, select, button, summary, [tabindex]')]
          .filter((x) => x.checkVisibility() && !x.disabled && !(x.type === 'radio' && !x.checked)).map((x) => x.id || x.tagName)"""
    )
    view.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(len(want) + 3):
        view.keyboard.press("Tab")
        reached.append(view.evaluate("document.activeElement.id || document.activeElement.tagName"))
        if reached[-1] != "BODY":
            style = view.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert style != "none", reached[-1]
    assert set(want) <= set(reached)
    unnamed = view.evaluate(
        "[...document.querySelectorAll('input, textarea, select')].filter((x) => !x.labels.length)"
    )
    assert not unnamed


def test_the_parser_survives_any_cut(open_page: Any) -> None:
    view = open_page()
    wrong = view.evaluate(
        """async () => {
          const { EventParser } = await import('/page/sse.js');
          const text = ': ping\\n\\ndata: {"a":"é€😀"}\\r\\n\\r\\ndata: one\\r\\ndata:two\\r\\n\\r\\nevent: x\\rdata: three\\r\\rdata: [DONE]\\n\\n';
          const bytes = new TextEncoder().encode(text);
          const want = JSON.stringify(['{"a":"é€😀"}', 'one\\ntwo', 'three', '[DONE]']);
          const read = (parts) => { const parser = new EventParser(); return JSON.stringify(parts.flatMap((part) => parser.push(part))); };
          const wrong = [];
          for (let at = 0; at <= bytes.length; at++) {
            const found = read([bytes.slice(0, at), bytes.slice(at)]);
            if (found !== want) wrong.push([at, found]);
          }
          const single = read([...bytes].map((byte) => new Uint8Array([byte])));
          return single === want ? wrong : [...wrong, single];
        }"""
    )
    assert not wrong


def test_the_policy_stops_other_scripts(open_page: Any) -> None:
    view = open_page(expected="requires 'TrustedHTML'")
    policy = view.evaluate("fetch('/').then((found) => found.headers.get('content-security-policy'))")
    assert "default-src 'self'" in policy and "unsafe" not in policy
    blocked = view.evaluate(
        """() => { try { document.body.innerHTML = '<b>x</b>'; return false; } catch (error) { return error.name === 'TypeError'; } }"""
    )
    assert blocked


@pytest.mark.parametrize("path", ASSETS)
def test_files_have_types_and_tags(served: Served, path: str) -> None:
    found = served.client.get(path)
    assert found.status_code == 200 and found.headers["content-type"].startswith(ASSETS[path])
    assert (
        found.headers["x-content-type-options"] == "nosniff" and found.headers["cache-control"] == "no-cache"
    )
    again = served.client.get(path, headers={"if-none-match": f'"x", {found.headers["etag"]}'})
    assert again.status_code == 304 and again.content == b""
    assert served.client.get(path, headers={"if-none-match": '"x"'}).status_code == 200
    assert served.client.head(path).status_code == 200
    assert served.client.get("/page/nothing.js").status_code == 404


def test_nothing_of_the_page_is_elsewhere(served: Served) -> None:
    names = {"/"}
    todo = ["/"]
    while todo:
        text = served.client.get(todo.pop()).text
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|style=|onclick", text)
        found = re.findall(r"""(?:src|href)="(page/[^"]+)"|from "\./([^"]+)\"""", text)
        for path in ("/" + (page or f"page/{module}") for page, module in found):
            if path not in names:
                assert served.client.get(path).status_code == 200, path
                names.add(path)
                todo.append(path)
    assert len(names) > 12
