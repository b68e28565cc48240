"""The page in a real browser: it answers, stops, asks for the key, and comes back after a restart.

Debian's Chromium, driven by Playwright; the model is the scripted one, which says what the tests
want it to say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from live_models import live_models
from live_server import Live, live_server
from scripted_engine import REPLY

from llmc.server.settings import ServerSettings

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--disable-dev-shm-usage",
)
ATTACKS = (
    '<img src=x onerror="window.hacked=1"> <script>window.hacked=1</script>',
    "[a](javascript:window.hacked=1) [b](  JaVaScRiPt:window.hacked=1)",
    "<svg onload=window.hacked=1>",
    "![x](data:text/html,<script>window.hacked=1</script>) <javascript:window.hacked=1>",
    "| <b>h</b> | x |\n| --- | --- |\n| <iframe src=javascript:window.hacked=1> | `<i>` |",
    '```html"onload=window.hacked=1\n</code></pre><script>window.hacked=1</script>\n```',
    "- <style>*{display:none}</style>\n> <a href=javascript:window.hacked=1>q</a>",
)
MARKDOWN = (
    "# Title\n\nSome **bold**, *thin*, ***both*** and `code`; see https://example.com/x.\n\n"
    "1. one\n   - deep\n2. two\n\n```python\ndef f():\n    return 1\n```\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n> quoted\n\nend *open"
)
WORDS = {
    "attack": "\n\n".join(ATTACKS),
    "markdown": MARKDOWN,
    "endless": "word " * 200,
    "brief": "Yes.",
}
pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if find_spec("playwright") is None:
        pytest.skip("playwright is not installed, which drives the browser")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no browser at {CHROMIUM} (Debian's package chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def spoken() -> Iterator[Live]:
    """A server whose model says what WORDS has for the word in the prompt."""
    with live_server(max_num_seqs=4, num_blocks=400, max_model_len=3000) as live:
        live.scripted.runner.scripts = {**WORDS, "hello": REPLY}
        yield live


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page with a storage of its own, which must not log an error or a violated policy."""
    context = browser.new_context(viewport={"width": 1300, "height": 850})
    context.set_default_timeout(15_000)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
    yield page
    context.close()
    # that a server is away or refuses is the browser's own line, not the page's
    assert [line for line in problems if "Failed to load resource" not in line] == []


def open_page(page: Page, live: Live) -> None:
    page.goto(f"http://127.0.0.1:{live.port}/")
    page.wait_for_selector("#connection[data-state=up]")


def ask(page: Page, text: str, *, wait: bool = True) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    if wait:
        page.wait_for_selector(".message.assistant:not(.running) .meta:not(:empty)")
        page.wait_for_selector("#send:visible")


def test_an_answer_streams_and_is_drawn(page: Page, spoken: Live) -> None:
    open_page(page, spoken)
    ask(page, "markdown")
    body = ".message.assistant .markdown"
    assert page.text_content(f"{body} h3") == "Title"
    assert page.text_content(f"{body} strong") == "bold"
    assert page.text_content(f"{body} em") == "thin"
    assert page.text_content(f"{body} strong em") == "both"
    assert page.get_attribute(f"{body} a", "href") == "https://example.com/x"
    assert page.text_content(f"{body} ol > li ul li p") == "deep"
    assert page.text_content(f"{body} pre code") == "def f():\n    return 1\n"
    assert page.locator(f"{body} td").all_text_contents() == ["1", "2"]
    assert page.text_content(f"{body} blockquote p") == "quoted"
    assert page.locator(f"{body} > p").last.text_content() == "end *open"
    # what was kept is there again, drawn at once to the same nodes
    streamed = page.eval_on_selector(".message.assistant .body", "node => node.outerHTML")
    page.click("#chat-list .open")
    assert page.eval_on_selector(".message.assistant .body", "node => node.outerHTML") == streamed
    page.reload()
    page.click("#chat-list .open")
    assert page.eval_on_selector(".message.assistant .body", "node => node.outerHTML") == streamed


def test_no_text_of_a_model_does_anything(page: Page, spoken: Live) -> None:
    open_page(page, spoken)
    ask(page, "attack")
    body = page.locator(".message.assistant .markdown >> nth=1")
    text = body.inner_text()
    for words in ("<img src=x onerror=", "<svg onload=", "<iframe src=", "<style>", "<i>"):
        assert words in text
    made = page.eval_on_selector(
        ".message.assistant",
        """root => [...root.querySelectorAll("*")].map(node => [node.tagName,
            ...[...node.attributes].map(one => one.name + "=" + one.value)].join(" "))""",
    )
    tags = {one.split()[0] for one in made}
    assert not tags & {"SCRIPT", "IMG", "IFRAME", "SVG", "STYLE", "OBJECT", "FORM", "I", "B"}
    bad = ("javascript", " on", "data:")
    assert not [one for one in made if any(word in one.lower() for word in bad)]
    assert page.evaluate("window.hacked") is None


def test_the_policy_stops_what_code_might_do_one_day(browser: Browser, spoken: Live) -> None:
    with browser.new_page() as page:
        open_page(page, spoken)
        with pytest.raises(Exception, match="TrustedHTML"):
            page.evaluate("document.body.innerHTML = '<i>x</i>'")
        assert page.locator("#prompt").count() == 1


def test_stop_and_branches(page: Page, spoken: Live) -> None:
    open_page(page, spoken)
    spoken.scripted.runner.delay_s = 0.01
    try:
        ask(page, "endless", wait=False)
        page.wait_for_selector(".assistant .body >> text=word word")
        page.keyboard.press("Escape")
        page.wait_for_selector("#send:visible")
    finally:
        spoken.scripted.runner.delay_s = 0.0
    assert page.text_content(".assistant .note") == "Stopped."
    spoken.wait_idle()
    page.click("[data-do=retry]")
    page.wait_for_selector(".branches >> text=2/2")
    page.wait_for_selector("#send:visible")
    page.click(".assistant [data-do=previous]")
    assert page.text_content(".assistant .note") == "Stopped."
    # editing makes a branch of the question
    page.click("[data-do=edit]")
    page.fill(".edit textarea", "brief")
    page.press(".edit textarea", "Enter")
    page.wait_for_selector(".assistant .body >> text=Yes.")
    page.wait_for_selector("#send:visible")
    page.click(".user [data-do=previous]")
    assert page.text_content(".user .body") == "endless"
    assert page.text_content(".assistant .note") == "Stopped."


def test_answers_with_settings_and_probabilities(page: Page, spoken: Live) -> None:
    open_page(page, spoken)
    page.click("#tab-settings")
    page.fill("#set-system", "Be kind.")
    page.fill("#set-n", "2")
    page.fill("#set-max_tokens", "7")
    page.fill("#set-schema", "{")
    assert page.is_visible("#schema-error")
    page.fill("#prompt", "kept")
    page.press("#prompt", "Enter")
    page.wait_for_selector("#notice >> text=The schema is not JSON")
    assert page.input_value("#prompt") == "kept" and page.locator(".message").count() == 0
    page.fill("#set-schema", "")
    page.check("#set-logprobs")
    sent: list[Any] = []
    page.on("request", lambda one: sent.append(one.post_data_json) if one.post_data else None)
    ask(page, "hello")
    assert sent[0]["messages"][0] == {"role": "system", "content": "Be kind."}
    assert (sent[0]["n"], sent[0]["max_tokens"], sent[0]["logprobs"]) == (2, 7, True)
    page.wait_for_selector(".branches >> text=1/2")
    page.hover(".token >> nth=0")
    shown = page.text_content("#tip tr.drawn")
    assert shown is not None and "%" in shown
    assert json.loads(shown[: shown.index('"', 1) + 1]) in REPLY


def test_the_engine_is_drawn(page: Page, spoken: Live) -> None:
    open_page(page, spoken)
    spoken.scripted.runner.delay_s = 0.02
    try:
        ask(page, "endless", wait=False)
        page.wait_for_selector("#rows li.running >> text=row 0")
        page.wait_for_selector("#rows .doing >> text=tokens/s")
        assert "1 of 4 rows" in (page.text_content("#figures") or "")
        page.wait_for_selector("#plot-rate polyline")
        counts = page.locator("[data-count]").all_text_contents()
        assert sum(map(int, counts[:3])) == 400 and int(counts[2]) > 0
    finally:
        spoken.scripted.runner.delay_s = 0.0
    page.wait_for_selector("#send:visible")
    page.wait_for_selector("#rows >> text=No requests.")


def test_conversations_are_exported_imported_and_deleted(page: Page, spoken: Live) -> None:
    open_page(page, spoken)
    ask(page, "brief")
    with page.expect_download() as download:
        page.click("#export")
    kept = Path(download.value.path()).read_bytes()
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("#delete-all")
    assert page.locator("#chat-list li").count() == 0
    page.set_input_files("#import-file", {"name": "a", "mimeType": "", "buffer": b'{"format": 1}'})
    page.wait_for_selector("#notice >> text=be imported")
    page.set_input_files("#import-file", {"name": "a", "mimeType": "", "buffer": kept})
    page.click("#chat-list .open")
    assert page.text_content(".assistant .body") == "Yes."


def test_the_key_is_asked_for(page: Page) -> None:
    with live_server(ServerSettings(api_keys=("sesame",))) as live:
        live.scripted.runner.scripts = WORDS
        page.goto(f"http://127.0.0.1:{live.port}/")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.wait_for_selector("#key-wrong:visible")
        page.fill("#key", "sesame")
        page.press("#key", "Enter")
        page.wait_for_selector("#connection[data-state=up]")
        page.wait_for_selector("#figures >> text=of 4 rows")
        ask(page, "brief")
        assert page.text_content(".assistant .body") == "Yes."
        assert page.evaluate("JSON.stringify(localStorage)").find("sesame") == -1


def test_the_page_comes_back_after_a_restart(page: Page) -> None:
    with live_server() as live:
        port = live.port
        open_page(page, live)
        page.wait_for_selector("#figures >> text=of 4 rows")
    page.wait_for_selector("#connection[data-state=down]")
    with live_server(port=port, max_num_seqs=3) as live:
        page.wait_for_selector("#connection[data-state=up]")
        page.click("#tab-settings")  # the engine is not watched now
    page.fill("#prompt", "brief")
    page.press("#prompt", "Enter")
    page.wait_for_selector("#connection[data-state=down]")
    with live_server(port=port, max_num_seqs=3) as live:
        live.scripted.runner.scripts = WORDS
        page.wait_for_selector("#connection[data-state=up]")
        page.click("#tab-engine")
        page.wait_for_selector("#figures >> text=of 3 rows")
        ask(page, "brief")
        assert page.locator(".assistant .body").last.text_content() == "Yes."


def test_a_narrow_page_has_no_sideways_scrolling(page: Page, spoken: Live) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    open_page(page, spoken)
    ask(page, "markdown")
    width = "document.documentElement.scrollWidth"
    assert page.evaluate(width) == 360
    page.click("#show-side")
    assert page.is_visible("#engine")
    assert page.evaluate(width) == 360
    page.keyboard.press("Escape")
    assert not page.is_visible("#engine")


def test_the_api_is_described(page: Page, spoken: Live) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    page.goto(f"http://127.0.0.1:{spoken.port}/docs")
    page.wait_for_selector(".operation")
    described = spoken.client.get("/openapi.json").json()["paths"]
    assert page.locator(".operation").count() == sum(map(len, described.values()))
    page.fill("#find", "guided_regex")
    shown = page.locator(".operation:visible")
    assert shown.count() == 2
    shown.nth(0).locator("summary").click()
    inside = page.locator(".operation[open]")
    assert "temperature" in inside.inner_text() and "curl http" in inside.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_an_example_of_the_description_works(page: Page) -> None:
    with live_server(ServerSettings(api_keys=("sesame",)), max_model_len=600) as live:
        page.goto(f"http://127.0.0.1:{live.port}/docs")
        page.fill("#key", "sesame")
        page.press("#key", "Enter")
        page.wait_for_selector(".operation")
        page.fill("#find", "/v1/chat/completions")
        page.locator(".operation:visible summary").click()
        command = page.locator(".operation[open] pre").inner_text()
        body = command[command.index("{") : command.rindex("}") + 1]
        assert live.post("/v1/chat/completions", json.loads(body)).status_code == 200


def test_one_of_several_models_is_chosen(page: Page) -> None:
    with live_models({"a": "scripted:0.005", "b": "scripted:0.005"}) as live:
        page.goto(str(live.client.base_url))
        page.wait_for_selector("#connection[data-state=up]")
        assert page.locator("#model-name option").all_text_contents() == ["a", "b"]
        page.select_option("#model-name select", "b")
        page.fill("#prompt", "hello")
        page.press("#prompt", "Enter")
        live.wait_state("b", "loaded")
        page.wait_for_selector("text=tokenizer")  # which these models have none of
        assert live.states()["a"] == "unloaded"
