"""The web page in a real browser, with a real server and a scripted engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.serve.running import Running

THOUGHT = "<|channel>thought\nThey want a list.<channel|>"
MARKDOWN = "Here is **bold** and `code`.\n\n- one\n- two\n\n```python\nprint('<b>')\n```\n\n<img src=x onerror=alert(1)>"
CALL = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|><|tool_response>'
TOOLS = json.dumps(
    [{"type": "function", "function": {"name": "get_weather", "parameters": {"properties": {"city": {"type": "string"}}}}}]
)
SLOW = {"step_s": 0.02}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome")
    installed = next((path for path in map(shutil.which, names) if path), None)
    with sync_playwright() as playwright:
        # Chromium's own sandbox may not start inside a container. The pages are ours, so it is not needed.
        browser = playwright.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        expect.set_options(timeout=60_000)  # 5 s is too short on a busy machine
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Provide a function that opens a server's page. Browser errors and requests to other hosts fail the test."""
    faults: list[str] = []
    contexts = []

    def open_(server: Running, **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
        page.on("console", lambda line: faults.append(line.text) if line.type == "error" and "401" not in line.text else None)

        def note(request: Any) -> None:
            if (
                urlparse(request.url).scheme in ("http", "https")
                and urlparse(request.url).netloc != urlparse(server.url).netloc
            ):
                faults.append(f"called {request.url}")

        page.on("request", note)
        page.goto(server.url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not faults


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def last_answer(page: Page) -> Any:
    return page.locator("#messages .assistant").last


@pytest.fixture(scope="module")
def rich(scripted: Callable[..., Running]) -> Iterator[Running]:
    """A server that thinks and then answers in Markdown."""
    with scripted(f"{THOUGHT}{MARKDOWN}<turn|>", step_s=0.003) as server:
        yield server


def test_an_answer_is_shown_as_markdown_and_never_as_markup(rich: Running, open_page: Callable[..., Page]) -> None:
    page = open_page(rich)
    expect(page.locator("#model")).to_have_text("gemma")
    send(page, "A list, please")
    answer = last_answer(page)
    expect(answer.locator(".foot")).to_contain_text("tokens")
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer.locator("li")).to_have_text(["one", "two"])
    expect(answer.locator("pre code")).to_have_text("print('<b>')")
    assert answer.locator("img").count() == 0
    expect(answer.locator(".body")).to_contain_text("<img src=x onerror=alert(1)>")
    expect(page.locator("#messages .user .body")).to_have_text("A list, please")


def test_thoughts_are_folded_until_opened(rich: Running, open_page: Callable[..., Page]) -> None:
    page = open_page(rich)
    send(page, "Think")
    thought = last_answer(page).locator(".thought")
    expect(last_answer(page).locator(".foot")).to_contain_text("tokens")
    expect(thought).to_be_hidden()
    last_answer(page).locator("summary").click()
    expect(thought).to_have_text("They want a list.")
    expect(last_answer(page).locator(".body")).not_to_contain_text("They want a list")


def test_text_appears_as_it_is_written_and_stop_keeps_it(
    scripted: Callable[..., Running], open_page: Callable[..., Page]
) -> None:
    with scripted("word " * 600 + "<turn|>", **SLOW) as server:
        page = open_page(server)
        send(page, "Go on")
        expect(last_answer(page).locator(".body")).to_contain_text("word word")
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        page.keyboard.press("Escape")
        expect(last_answer(page).locator(".foot")).to_contain_text("stopped")
        length = len(last_answer(page).locator(".body").inner_text())
        assert 9 <= length < 2000
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        server.check_well()  # the work was cancelled, not only hidden
        page.reload()  # and the conversation is still there
        assert len(last_answer(page).locator(".body").inner_text()) == length


def test_regenerate_and_edit(scripted: Callable[..., Running], open_page: Callable[..., Page]) -> None:
    with scripted("First.<turn|>", "Second.<turn|>") as server:
        page = open_page(server)
        send(page, "Say something")
        expect(last_answer(page).locator(".body")).to_have_text("First.")
        page.get_by_role("button", name="Regenerate").click()
        expect(last_answer(page).locator(".body")).to_have_text("Second.")
        assert page.locator("#messages .assistant").count() == 1
        page.get_by_role("button", name="Edit").click()
        expect(page.get_by_label("Message", exact=True)).to_have_value("Say something")
        assert page.locator("#messages li").count() == 0


def test_a_tool_call_is_shown_and_its_result_is_sent(scripted: Callable[..., Running], open_page: Callable[..., Page]) -> None:
    with scripted(CALL, "It rains in Paris.<turn|>") as server:
        page = open_page(server)
        page.get_by_role("button", name="Settings").click()
        page.locator("#settings summary").click()
        page.locator("#set-tools").fill(TOOLS)
        page.get_by_role("button", name="Done").click()
        send(page, "How is the weather in Paris?")
        call = page.locator(".call")
        expect(call.locator(".name")).to_have_text("get_weather()")
        expect(call.locator("pre")).to_contain_text('"city": "Paris"')
        with page.expect_request("**/v1/chat/completions") as sent:
            call.get_by_label("Result of get_weather").fill("rain")
            page.keyboard.press("Enter")
        roles = [message["role"] for message in sent.value.post_data_json["messages"]]
        assert roles == ["user", "assistant", "tool"]
        expect(last_answer(page).locator(".body")).to_have_text("It rains in Paris.")


def test_settings_are_sent_and_survive_a_reload(fake: Running, open_page: Callable[..., Page]) -> None:
    page = open_page(fake)
    page.keyboard.press("Alt+s")
    page.locator("#set-system").fill("Be brief.")
    page.locator("#set-temperature").fill("0.5")
    page.locator("#set-top_k").fill("12")
    page.locator("#set-thinking").check()
    page.get_by_role("button", name="Done").click()
    page.reload()
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, "Hello")
    body = sent.value.post_data_json
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["top_k"]) == (0.5, 12)
    assert body["chat_template_kwargs"] == {"enable_thinking": True}
    assert "top_p" not in body


def test_invalid_settings_are_explained(fake: Running, open_page: Callable[..., Page]) -> None:
    page = open_page(fake)
    page.get_by_role("button", name="Settings").click()
    page.locator("#settings summary").click()
    page.locator("#set-tools").fill("{")
    page.get_by_role("button", name="Done").click()
    expect(page.locator("#settings-error")).to_contain_text("JSON list")
    expect(page.locator("#settings")).to_be_visible()


def test_the_engine_tab_shows_plots_and_the_plan(tiny: Running, open_page: Callable[..., Page]) -> None:
    tiny.http.post("/v1/completions", json={"model": "gemma", "prompt": "Hello", "max_tokens": 40, "ignore_eos": True})
    page = open_page(tiny)
    page.get_by_role("tab", name="Engine").click()
    expect(page.locator(".plot figcaption")).to_contain_text(
        ["Tokens per second", "Time to first token", "Requests", "KV cache in use"]
    )
    expect(page.locator('path[data-line="sliding"]')).to_have_count(1)
    expect(page.locator('path[data-line="global"]')).to_have_count(1)
    expect(page.locator("#figures div").nth(2).locator("b")).not_to_have_text("0")
    picture = page.locator("#plan-picture")
    expect(picture).to_have_js_property("complete", True)
    page.wait_for_function("document.getElementById('plan-picture').naturalWidth > 100")
    before = page.locator('path[data-line="out"]').get_attribute("d")
    page.wait_for_function("before => document.querySelector('path[data-line=out]').getAttribute('d') !== before", arg=before)


def test_a_key_is_requested_once_and_sent_with_each_call(
    scripted: Callable[..., Running], open_page: Callable[..., Page]
) -> None:
    with scripted(settings={"api_key": "secret"}) as server:
        page = open_page(server)
        expect(page.locator("#settings")).to_be_visible()
        expect(page.locator("#set-key")).to_be_focused()
        page.locator("#set-key").fill("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_text("gemma")
        send(page, "Hello")
        expect(last_answer(page).locator(".foot")).to_contain_text("tokens")
        page.get_by_role("tab", name="Engine").click()
        expect(page.locator(".plot").first).to_be_visible()


@pytest.mark.parametrize("name", ["light", "dark"])
def test_the_theme_follows_the_system_until_it_is_chosen(name: str, fake: Running, open_page: Callable[..., Page]) -> None:
    page = open_page(fake, color_scheme=name)
    expect(page.locator("html")).to_have_attribute("data-theme", name)
    other = {"light": "dark", "dark": "light"}[name]
    page.locator("#theme").click()
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", other)


def test_nothing_is_cut_off_on_a_phone(rich: Running, open_page: Callable[..., Page]) -> None:
    page = open_page(rich, viewport={"width": 360, "height": 640})
    send(page, "A list, please")
    expect(last_answer(page).locator(".foot")).to_contain_text("tokens")
    for tab in ("Chat", "Engine"):
        page.get_by_role("tab", name=tab).click()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_page_is_small_and_self_contained() -> None:
    folder = Path(__file__).parents[2] / "culet/serve/page"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 64_000
