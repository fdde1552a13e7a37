"""The chat page in a real browser, against a real server."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Request, Route, expect

from stages.decoding import DrafterChoice, EagleModel, Emission, TreeConfig
from stages.serve.app import Access
from stages.targets import Target
from tests.serve.browser import headless_browser
from tests.serve.running_server import RunningServer, running_server, soon

CHAT = "/v1/chat/completions"
FOCUSED = "(({id, value, localName}) => id || value || localName)(document.activeElement)"
# Of WCAG 2: the luminance of two colours, as a ratio.
CONTRAST = """(selector) => {
  const element = document.querySelector(selector);
  const light = (colour) => colour.match(/[0-9.]+/g).slice(0, 3)
    .map((x) => x / 255).map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  let behind = element;
  while (/, 0\\)$|transparent/.test(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
  const [a, b] = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map(light);
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""


@pytest.fixture(scope="module")
def server(target: Target, tiny_folder: Path) -> Iterator[RunningServer]:
    """The draft model is the target itself: all drafts are right."""
    drafter = DrafterChoice.parse(f"draft:{tiny_folder}")
    model = EagleModel(target, tree=TreeConfig.parse("chain:depth=3"), drafter=drafter, max_batch=4)
    with running_server(model) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with headless_browser() as found:
        yield found


@contextmanager
def opened(browser: Browser, server: RunningServer, width: int = 1280, **options: Any) -> Iterator[Page]:
    """The page, in which nothing may go wrong and which may ask nothing of anyone but the server."""
    context = browser.new_context(viewport={"width": width, "height": 740}, **options)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if "Refused to" in message.text else None)
    page.on("request", lambda sent: None if sent.url.startswith(server.url) else wrong.append(sent.url))
    page.set_default_timeout(20_000)
    expect.set_options(timeout=20_000)
    try:
        page.goto(server.url)
        yield page
        assert wrong == []
    finally:
        context.close()


def set_up(page: Page, limit: int) -> None:
    page.get_by_text("Settings").click()
    page.get_by_label("Most tokens").fill(str(limit))


def ask(page: Page, question: str) -> None:
    page.get_by_label("Message", exact=True).fill(question)
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def ask_for_more(page: Page, **fields: Any) -> None:
    """Has the page's requests bring fields that it has no control for."""

    def more(route: Route) -> None:
        route.continue_(post_data=json.dumps({**route.request.post_data_json, **fields}))

    page.route("**" + CHAT, more)


def counts(page: Page, place: int = 0) -> dict[str, str]:
    """The numbers below an answer, by name."""
    pairs = page.locator(".answer").nth(place).locator(".counts div")
    return {pair.locator("dt").inner_text(): pair.locator("dd").inner_text() for pair in pairs.all()}


def streamed(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    """The steps of the answer that the page asks for, as the API tells them."""
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "stream": True, "return_speculation": True, **fields}
    text = server.client.post(server.url + CHAT, json=body).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [part["speculation"] for event in events for part in event["choices"] if "speculation" in part]


def test_an_answer_is_shown_with_its_drafted_tokens_marked_and_counted(
    browser: Browser, server: RunningServer
) -> None:
    steps = streamed(server, temperature=0, max_tokens=60)
    drafted = [text for step in steps for text in step["texts"][: step["accepted"]] if text]
    assert drafted
    with opened(browser, server) as page:
        expect(page.locator("#model")).to_have_text("tiny, 512 tokens of context")
        set_up(page, 60)
        ask(page, "hello")
        text = page.locator(".answer .text")
        assert text.text_content() == "".join("".join(step["texts"]) for step in steps)
        assert "".join(page.locator(".answer .drafted").all_text_contents()) == "".join(drafted)
        shown = counts(page)
        accepted = sum(step["accepted"] for step in steps)
        assert shown["tokens"] == str(sum(len(step["texts"]) for step in steps))
        assert shown["accepted/step"] == f"{accepted / (len(steps) - 1):.2f}"
        assert float(shown["tokens/s"]) > 0
        assert page.locator("#spoken").text_content() == text.text_content()  # for who cannot see it


def test_the_conversation_goes_on_and_a_new_one_forgets_it(browser: Browser, server: RunningServer) -> None:
    bodies: list[dict[str, Any]] = []

    def note(request: Request) -> None:
        if request.url.endswith(CHAT):
            bodies.append(request.post_data_json)

    with opened(browser, server) as page:
        page.on("request", note)
        set_up(page, 5)
        page.get_by_label("System message").fill("Be brief.")
        ask(page, "one")
        ask(page, "two")
        page.get_by_role("button", name="New chat").click()
        ask(page, "three")
    system = {"role": "system", "content": "Be brief."}
    assert bodies[0]["messages"] == [system, {"role": "user", "content": "one"}]
    assert [message["role"] for message in bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert bodies[2]["messages"] == [system, {"role": "user", "content": "three"}]


def test_side_by_side_runs_one_after_the_other_and_compares_the_texts(
    browser: Browser, server: RunningServer
) -> None:
    seen: list[tuple[str, bool]] = []

    def watch(kind: str, request: Request) -> None:
        if request.url.endswith(CHAT):
            seen.append((kind, request.post_data_json["speculative"]))

    with opened(browser, server) as page:
        page.on("request", lambda request: watch("begins", request))
        page.on("requestfinished", lambda request: watch("ends", request))
        set_up(page, 40)
        page.get_by_label("side by side").check()
        ask(page, "hello")
        ask(page, "and again")
        texts = page.locator(".answer .text").all_text_contents()
        assert texts[0] == texts[1] != ""
        assert texts[2] == texts[3] != ""
        assert page.locator(".answer").nth(1).locator(".drafted").count() == 0
        assert "accepted/step" in counts(page, 0)
        assert "accepted/step" not in counts(page, 1)
        for verdict in page.locator(".verdict").all_text_contents():
            assert re.match(r"Same text\. (With drafts \d+\.\d\d times as fast: |Too short)", verdict)
    order = [(kind, on) for on in (True, False, False, True) for kind in ("begins", "ends")]
    assert seen == order


def test_what_people_and_models_write_is_text_and_never_markup(
    browser: Browser, server: RunningServer
) -> None:
    markup = "<img src=x onerror=alert(1)><b>&amp;"

    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": markup}}}
    with opened(browser, server) as page:
        ask_for_more(page, response_format=schema)
        set_up(page, 100)
        ask(page, markup)
        assert page.locator(".question").text_content() == markup
        assert page.locator(".answer .text").text_content() == json.dumps(markup)
        assert page.locator("#conversation img, #conversation b").count() == 0


def test_everything_can_be_done_by_keyboard(
    browser: Browser, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, taken, pressed = server.engine._engine.step, itertools.count(), threading.Event()

    def held() -> list[Emission]:
        if next(taken) >= 8:
            pressed.wait(60)  # else a slow browser finds nothing left to be stopped
        return step()

    with opened(browser, server) as page:
        expect(page.get_by_label("Message", exact=True)).to_be_focused()
        page.keyboard.type("first line")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("second line")
        reached = []
        for _ in range(3):
            page.keyboard.press("Tab")
            reached.append(page.evaluate(FOCUSED))
        assert reached == ["on", "send", "summary"]
        page.get_by_label("Message", exact=True).focus()
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowRight")
        expect(page.get_by_label("off")).to_be_checked()
        page.get_by_text("Settings").focus()
        page.keyboard.press("Enter")
        page.get_by_label("Temperature").fill("1")
        page.get_by_label("Seed").fill("6")
        page.get_by_label("Most tokens").fill("")
        page.get_by_label("Message", exact=True).focus()
        monkeypatch.setattr(server.engine._engine, "step", held)
        page.keyboard.press("Enter")
        expect(page.locator(".answer .text")).not_to_be_empty()
        page.keyboard.press("Escape")
        pressed.set()
        expect(page.get_by_text("Stopped.")).to_be_visible()
        assert page.locator(".question").text_content() == "first line\nsecond line"
        assert soon(lambda: server.engine.running == 0)
        expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(browser: Browser, plain: EagleModel) -> None:
    with (
        running_server(plain, access=Access(api_keys=("sk-right",))) as server,
        opened(browser, server) as page,
    ):
        field = page.get_by_label("This server wants its API key")
        expect(field).to_be_focused()
        field.fill("sk-wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_text("The server does not know this key.")).to_be_visible()
        field.fill("sk-right")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_contain_text("tiny")
        expect(field).to_be_hidden()
        page.reload()
        expect(page.locator("#model")).to_contain_text("tiny")
        set_up(page, 5)
        ask(page, "hello")
        expect(page.locator(".answer .text")).not_to_be_empty()
        expect(page.get_by_text("Nothing was drafted")).to_be_visible()
        assert page.evaluate("[document.cookie, localStorage.length, location.search]") == ["", 0, ""]


def test_an_answer_that_cannot_be_given_says_why_and_gives_the_question_back(
    browser: Browser, plain: EagleModel
) -> None:
    with running_server(plain) as server, opened(browser, server) as page:
        set_up(page, 5)
        question = "long " * 600
        ask(page, question)
        expect(page.get_by_role("alert")).to_contain_text("the context is 512 tokens")
        expect(page.get_by_label("Message", exact=True)).to_have_value(question)
        page.route("**" + CHAT, lambda route: route.abort())
        ask(page, "hello")
        expect(page.get_by_role("alert").last).to_contain_text("cannot be reached")


def test_an_answer_that_breaks_off_says_why_and_stays(browser: Browser, plain: EagleModel) -> None:
    with running_server(plain) as server, opened(browser, server) as page:
        set_up(page, 450)
        ask_for_more(page, ignore_eos=True)
        page.get_by_label("side by side").check()
        page.get_by_label("Message", exact=True).fill("hello")
        page.keyboard.press("Enter")
        expect(page.locator(".answer .text").first).not_to_be_empty()
        server.engine.hurry()
        expect(page.get_by_role("alert")).to_have_text("the server is stopping")
        expect(page.get_by_text("Not asked.")).to_be_visible()
        expect(page.locator(".answer .text").first).not_to_be_empty()
        assert page.locator("[aria-busy=true]").count() == 0


def test_it_can_be_read_and_used_on_a_phone(browser: Browser, server: RunningServer) -> None:
    with opened(browser, server, width=360, has_touch=True, is_mobile=True) as page:
        set_up(page, 60)
        page.get_by_label("side by side").tap()
        page.get_by_label("Message", exact=True).fill("word" * 60)
        page.get_by_role("button", name="Send").tap()
        expect(page.locator(".verdict")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        for selector in ("textarea#message", "input#limit"):
            assert (
                page.evaluate(f"parseFloat(getComputedStyle(document.querySelector('{selector}')).fontSize)")
                >= 16
            )
        for control in page.locator("button:visible, summary, fieldset label").all():
            box = control.bounding_box()
            assert box is not None
            assert box["height"] >= 24
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            for selector in ("body", ".drafted", ".counts dt", ".question", "#send", "#model", "summary"):
                assert page.evaluate(CONTRAST, selector) >= 4.5, (scheme, selector)


def test_every_control_has_a_name(browser: Browser, server: RunningServer) -> None:
    with opened(browser, server) as page:
        set_up(page, 5)
        for control in page.locator("input:visible, textarea:visible, button:visible").all():
            assert control.evaluate("e => (e.labels?.[0]?.textContent ?? e.textContent).trim()")
        assert page.get_by_role("region", name="Conversation").count() == 1
        assert page.get_by_role("group", name="Speculation").count() == 1


def test_the_files_are_a_fixed_few_and_the_page_may_load_nothing_else(server: RunningServer) -> None:
    index = httpx.get(server.url)
    policy = index.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    for name in re.findall(r'(?:src|href)="(page/[^"]+)"', index.text):
        assert httpx.get(f"{server.url}/{name}").status_code == 200
    for name in ("routes.py", "__init__.py", "..%2fapp.py", "%2e%2e/app.py", "../app.py", "nothing.js"):
        assert httpx.get(f"{server.url}/page/{name}").status_code == 404
    assert "/" not in httpx.get(f"{server.url}/openapi.json").json()["paths"]
