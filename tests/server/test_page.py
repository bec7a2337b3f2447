"""The chat page in a real browser, offline but for the service."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from pyspec.engine import Engine
from pyspec.errors import LogitsError
from pyspec.llama import Model
from pyspec.output import Piece, Source, Token
from tests.server.fakes import FakeEngine, FakeGeneration
from tests.server.service import serving
from tests.server.test_guard import fetch

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
DONE = ".retry"
_PATIENCE = 240_000  # milliseconds; the machine may be busy with something else

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page, of a phone's width if asked for, whose complaints fail the test."""
    context = browser.new_context(**getattr(request, "param", {}))
    context.set_default_timeout(_PATIENCE)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "console",
        lambda message: (
            complaints.append(message.text)
            if message.type == "error" and "Failed to load resource" not in message.text
            else None
        ),
    )
    strangers: list[str] = []
    page.on(
        "request",
        lambda asked: strangers.append(asked.url) if "//127.0.0.1" not in asked.url else None,
    )
    yield page
    context.close()
    assert complaints == []
    assert [url for url in strangers if not url.startswith("data:")] == []


@pytest.fixture
def fake(chat_target: Path) -> Iterator[FakeEngine]:
    engine = FakeEngine(Model(chat_target), lambda _: "Hello <b>you</b>")
    yield engine
    engine.target.close()


def say(page: Page, text: str) -> None:
    page.fill("#text", text)
    page.keyboard.press("Enter")


def shown(page: Page, text: str) -> None:
    """Wait until an answer has this text in it."""
    page.locator("article:not(.mine) .body", has_text=text).wait_for()


def answers(page: Page) -> list[str]:
    return page.locator("article:not(.mine) .body").all_inner_texts()


def test_a_conversation_with_the_tiny_pair(page: Page, url: str) -> None:
    page.goto(url)
    page.locator("#model", has_text="tiny").wait_for()
    assert page.title() == "tiny · pyspec chat"
    page.click("#configure")
    page.fill("#temperature", "0")
    page.fill("#limit", "30")
    say(page, "Where is the inner one?")
    page.wait_for_selector(DONE)
    assert page.locator(".mine .body").all_inner_texts() == ["Where is the inner one?"]
    asked = {
        "messages": [{"role": "user", "content": "Where is the inner one?"}],
        "temperature": 0,
        "max_tokens": 30,
    }
    status, _, body = fetch(url, "/v1/chat/completions", asked)
    assert status == 200
    expected = json.loads(body)["choices"][0]
    shown = page.locator("article:not(.mine) .body").evaluate(
        "body => [...body.children].map(line => line.textContent).join('\\n')"
    )
    assert shown == expected["message"]["content"]
    statistics = expected["pyspec"]["statistics"]
    assert page.locator(".drafted").count() > 0
    figures = page.locator("article:not(.mine) .foot p").inner_text()
    assert figures.startswith("30 tokens · ")
    assert f"{statistics['acceptance_rate']:.0%}".replace("%", " % of drafted") in figures
    assert figures.endswith("cut at the limit")
    say(page, "And then?")
    page.locator("article").nth(3).locator(DONE).wait_for()
    assert len(answers(page)) == 2


def test_text_is_never_read_as_html(page: Page, fake: FakeEngine, fake_url: str) -> None:
    page.goto(fake_url)
    fake.script = lambda _: "<img src=x onerror=alert(1)><script>alert(2)</script> & &amp;"
    say(page, "<b>bold</b>")
    page.wait_for_selector(DONE)
    assert answers(page) == [fake.script([])]
    assert page.locator(".mine .body").inner_text() == "<b>bold</b>"
    assert page.locator("main img, main script, main b").count() == 0


def test_its_policy_lets_no_other_script_run(page: Page, fake_url: str) -> None:
    _, headers, _ = fetch(fake_url, "/")
    policy = headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    stranger = page.context.new_page()
    stranger.goto(fake_url)
    refused = stranger.evaluate(
        """() => new Promise((resolve) => {
          document.addEventListener("securitypolicyviolation", (event) => resolve(event.violatedDirective));
          const image = document.createElement("img");
          image.src = "http://127.0.0.1:1/x.png";
          document.body.append(image);
        })"""
    )
    assert refused == "img-src"


def test_stop_keeps_what_is_there_and_frees_the_slot(
    page: Page, fake: FakeEngine, fake_url: str
) -> None:
    fake.rounds = threading.Semaphore(3)
    page.goto(fake_url)
    say(page, "hi")
    shown(page, "Hel")
    assert page.locator("#turns").get_attribute("aria-busy") == "true"
    page.keyboard.press("Escape")
    page.wait_for_selector(DONE)
    assert page.locator("article:not(.mine) .foot p").inner_text() == "stopped"
    for _ in range(100):
        if not fake.running:
            break
        fake.rounds.release()
        page.wait_for_timeout(10)
    assert not fake.running
    assert fake.started[0].closed
    # What was written so far is part of the conversation.
    fake.rounds.release(1000)
    fake.script = lambda _: "ok"
    say(page, "go on")
    page.locator("article").nth(3).locator(DONE).wait_for()
    pieces = [fake.target.piece(token, special=True) for token in fake.started[1].prompt]
    assert b"assistant\nHel<|im_end|>" in b"".join(pieces)


def test_retry_asks_again_in_the_same_place(page: Page, fake: FakeEngine, fake_url: str) -> None:
    page.goto(fake_url)
    say(page, "hi")
    page.wait_for_selector(DONE)
    fake.script = lambda _: "Another"
    page.click(DONE)
    shown(page, "Another")
    page.wait_for_selector(DONE)
    assert answers(page) == ["Another"]
    assert fake.started[0].prompt == fake.started[1].prompt


def test_an_error_is_said_and_can_be_retried(page: Page, fake: FakeEngine, fake_url: str) -> None:
    fake.failure = LogitsError("the target's logits are NaN")
    page.goto(fake_url)
    say(page, "hi")
    page.wait_for_selector(DONE)
    assert page.get_by_role("alert").inner_text() == "Error: the target's logits are NaN"
    page.click(DONE)
    shown(page, "Hello")


def test_a_wrong_key_asks_for_one(page: Page, fake: FakeEngine) -> None:
    with serving(cast(Engine, fake), api_keys=("open",)) as url:
        page.goto(url)
        say(page, "hi")
        page.wait_for_selector(DONE)
        assert "API key" in page.get_by_role("alert").inner_text()
        assert page.evaluate("document.activeElement.id") == "key"
        page.keyboard.type("open")
        page.click(DONE)
        shown(page, "Hello")


def test_code_between_fences_looks_like_code(page: Page, fake: FakeEngine, fake_url: str) -> None:
    text = "So:\n```python\nx = 1\n\n```\nDone."
    fake.script = lambda _: text
    page.goto(fake_url)
    say(page, "hi")
    page.wait_for_selector(DONE)
    lines = page.locator("article:not(.mine) .body > div")
    assert lines.all_text_contents() == text.split("\n")
    classes = [line.get_attribute("class") for line in lines.all()]
    assert classes == ["", "fence", "code", "code", "code fence", ""]


def test_drafted_tokens_are_shaded_until_told_otherwise(
    page: Page, fake: FakeEngine, fake_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def round_(self: FakeGeneration) -> Piece:
        piece = whole_round(self)
        tokens = tuple(Token(0, token.text, Source.DRAFT) for token in piece.tokens)
        return Piece(tokens if self._at % 2 else piece.tokens, piece.statistics)

    whole_round = FakeGeneration.round
    monkeypatch.setattr(FakeGeneration, "round", round_)
    fake.script = lambda _: "abcd"
    page.goto(fake_url)
    say(page, "hi")
    page.wait_for_selector(DONE)
    drafted = page.locator("article .drafted")
    assert drafted.all_text_contents() == ["a", "c"]
    shade = "element => getComputedStyle(element).backgroundColor"
    shaded = drafted.first.evaluate(shade)
    page.click("#configure")
    page.uncheck("#shade")
    assert drafted.first.evaluate(shade) == "rgba(0, 0, 0, 0)" != shaded


def test_everything_can_be_reached_by_keyboard_and_has_a_name(page: Page, fake_url: str) -> None:
    page.goto(fake_url)
    page.click("#configure")
    named = page.evaluate(
        """() => [...document.querySelectorAll("input, textarea, button:not([hidden])")]
          .map((element) => [element.id, element.labels?.[0]?.textContent.trim() || element.textContent])"""
    )
    assert all(name for _, name in named)
    reached = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    assert {element for element, _ in named} <= reached


@pytest.mark.parametrize(
    "page",
    [
        {"viewport": {"width": width, "height": 700}, "color_scheme": scheme}
        for width in (375, 1100)
        for scheme in ("light", "dark")
    ],
    indirect=True,
    ids=lambda fields: f"{fields['color_scheme']}-{fields['viewport']['width']}",
)
def test_it_fits_and_can_be_read_in_both_schemes(
    page: Page, fake: FakeEngine, fake_url: str
) -> None:
    fake.script = lambda _: "averylongwordwithoutanyplacetobreak" * 5 + " and more\n" * 40
    page.goto(fake_url)
    page.click("#configure")
    say(page, "x" * 200)
    page.wait_for_selector(DONE)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.getElementById('log').scrollWidth <= innerWidth")
    # The end of the answer is in view, and so is the place to write in.
    assert page.locator(DONE).is_visible()
    assert page.evaluate(
        "document.getElementById('send').getBoundingClientRect().bottom <= innerHeight"
    )
    for selector in ("#text", ".mine .body", "article:not(.mine) .body", ".foot p", "#model"):
        assert contrast(page, selector) >= 4.5, selector


def contrast(page: Page, selector: str) -> float:
    """The ratio of luminances of a text and what is behind it (WCAG 2, 1.4.3)."""
    ratio: float = page.evaluate(
        """(selector) => {
          const rgba = (text) => text.match(/[0-9.]+/g).map(Number);
          const luminance = (colour) => colour.slice(0, 3)
            .map((part) => part / 255)
            .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
            .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
          let element = document.querySelector(selector);
          const text = luminance(rgba(getComputedStyle(element).color));
          let behind = rgba(getComputedStyle(element).backgroundColor);
          while (behind[3] === 0) {
            element = element.parentElement;
            behind = rgba(getComputedStyle(element).backgroundColor);
          }
          const back = luminance(behind);
          return (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05);
        }""",
        selector,
    )
    return ratio


def test_the_description_lists_every_endpoint_and_field(page: Page, fake_url: str) -> None:
    page.goto(f"{fake_url}/docs")
    text = page.inner_text("main")
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"):
        assert path in text
    for field in ("messages", "response_format", "speculative", "logit_bias", "repeat_last_n"):
        assert field in text
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
