"""The page at /, in a real browser: type, stream, stop, errors, keys; text is only ever text."""

from __future__ import annotations

import re
import shutil

import pytest
from playwright.sync_api import Page, expect, sync_playwright
from serving import Scripted, chat_model, served, until

from engine.llm import LLM

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync"
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

LONG = "It was the best of times, it was the worst of times. " * 4


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    return LLM(chat_model(tmp_path_factory.mktemp("serve") / "tiny"), kv_cache="paged")


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A page on which no script fails and which asks no other server."""
    page = browser.new_page()
    page.set_default_timeout(20_000)
    failures, asked = [], []
    page.on("pageerror", lambda error: failures.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    yield page
    own = page.url.rstrip("/")
    page.close()
    assert failures == []
    assert [url for url in asked if not url.startswith((own, "data:"))] == []


def say(page: Page, text: str) -> None:
    """Type and send, as with the keyboard alone."""
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def test_type_and_stream(llm, page):
    """Text that appears only at its end; thoughts in the answer; figures that are not there."""
    script = Scripted("<think>\nHm, hm.\n</think>\n\n" + LONG, hold=24)
    with served(llm, script) as address:
        page.goto(address)
        expect(page.get_by_role("heading", name="tiny")).to_be_visible()
        expect(page.get_by_label("Message")).to_be_focused()
        say(page, "How was it?")
        answer = page.locator(".answer")
        expect(answer).to_contain_text("It was the best")
        assert len(answer.inner_text()) < len(LONG)  # it waits: and what has come is shown
        expect(page.get_by_text("Hm, hm.")).to_be_visible()
        expect(page.locator("#figures")).to_contain_text("1 running")
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        script.go.set()
        expect(answer).to_have_text(LONG.strip())
        expect(page.locator(".user")).to_have_text("How was it?")
        expect(page.locator(".note")).to_contain_text("tokens/s")
        expect(page.locator(".note")).to_contain_text("1 of ")
        expect(page.locator("#figures")).to_contain_text("1 cached tokens")
        expect(page.get_by_text("Hm, hm.")).to_be_hidden()
        page.get_by_text("Thoughts").click()
        expect(page.get_by_text("Hm, hm.")).to_be_visible()
        say(page, "And then?")
        until(lambda: len(script.requests) == 2)
        prompt = llm.tokenizer.decode(script.requests[1].ids)
        assert prompt.startswith(f"user: How was it?\nassistant: {LONG}\nuser: And then?\n")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        page.get_by_role("button", name="New").click()
        expect(page.locator(".user")).to_have_count(0)


def test_stop(llm, page):
    """A button that only hides what goes on; text thrown away with it."""
    script = Scripted(LONG, hold=10)
    with served(llm, script) as address:
        page.goto(address)
        for n, stop in enumerate(("button", "Escape")):
            say(page, "How was it?")
            expect(page.locator(".answer").nth(n)).to_contain_text("It was the best of times")
            if stop == "button":
                page.get_by_role("button", name="Stop").click()
            else:
                page.keyboard.press("Escape")
            expect(page.locator(".note").nth(n)).to_have_text("stopped")
            until(lambda n=n: script.requests[n].cancelled.is_set())
            expect(page.locator(".answer").nth(n)).to_contain_text("It was the best of times")
            expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_new_while_it_streams(llm, page):
    """An old answer that goes on in a new conversation."""
    script = Scripted(LONG, hold=10)
    with served(llm, script) as address:
        page.goto(address)
        say(page, "How was it?")
        expect(page.locator(".answer")).to_contain_text("It was")
        page.get_by_role("button", name="New").click()
        until(lambda: script.requests[0].cancelled.is_set())
        script.go.set()
        say(page, "Again?")
        expect(page.locator(".answer")).to_have_text(LONG.strip())
        assert llm.tokenizer.decode(script.requests[1].ids).startswith("user: Again?")
        expect(page.locator(".user")).to_have_count(1)


def test_errors_are_shown(llm, page):
    """A page that waits for ever, or that loses what was typed."""
    script = Scripted("Once upon a time")
    with served(llm, script) as address:
        page.goto(address)
        script.full = True
        say(page, "Tell me.")
        expect(page.get_by_role("alert")).to_have_text("3 requests wait already")
        expect(page.get_by_label("Message")).to_have_value("Tell me.")
        script.full, script.ends, script.error = False, "error", ValueError("no more paper")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("no more paper")
        expect(page.locator(".answer")).to_have_text("Once upon a time")
    say(page, "Still there?")  # the server has gone
    expect(page.get_by_role("alert").nth(1)).to_be_visible()
    expect(page.locator("#figures")).to_contain_text("does not answer")


def test_a_key(llm, page):
    """A page that cannot be used where a key is needed."""
    with served(llm, Scripted("Welcome."), api_key="k") as address:
        page.goto(address)
        expect(page.get_by_role("alert")).to_contain_text("API key")
        field = page.get_by_label("API key")
        expect(field).to_be_focused()
        field.fill("k")
        field.press("Tab")
        expect(page.get_by_role("heading", name="tiny")).to_be_visible()
        say(page, "Hi")
        expect(page.locator(".answer")).to_have_text("Welcome.")


def test_markup_is_text(llm, page):
    """What a model writes, run as a part of the page."""
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    with served(llm, Scripted(f"<think>{evil}</think>{evil}")) as address:
        page.goto(address)
        say(page, evil)
        expect(page.locator(".answer")).to_have_text(evil)
        expect(page.locator(".user")).to_have_text(evil)
        expect(page.locator("details.thoughts .text")).to_have_text(evil)
        expect(page.locator("#log img, #log script")).to_have_count(0)
        assert page.title() == "tiny"


def test_a_model_that_continues_text(page):
    """A chat with a model that has no chat template, where only errors come back."""
    script = Scripted(" upon a time")
    llm = LLM()
    with served(llm, script) as address:
        page.goto(address)
        say(page, "Once")
        expect(page.locator(".answer")).to_have_text("Once upon a time")
        page.get_by_role("button", name="Continue").click()
        expect(page.locator(".answer").nth(1)).to_have_text(re.compile("upon a time"))
        assert llm.tokenizer.decode(script.requests[1].ids) == "Once upon a time"


def test_settings(llm, page):
    """A setting that is shown and not sent."""
    script = Scripted("Yes.")
    with served(llm, script) as address:
        page.goto(address)
        page.get_by_text("Settings").click()
        page.get_by_label("Temperature").fill("0.5")
        page.get_by_label("Most tokens").fill("7")
        page.get_by_label("Think first").uncheck()
        say(page, "Hi")
        expect(page.locator(".answer")).to_have_text("Yes.")
        params = script.requests[0].params
        assert (params.temperature, params.max_tokens) == (0.5, 7)
        assert llm.tokenizer.decode(script.requests[0].ids).endswith("assistant:<think></think>")
