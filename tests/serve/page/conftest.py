"""A browser, and pages of real servers in it. Browser errors and requests to other hosts fail the test."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlparse

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.serve.running import Running

OpenPage = Callable[..., Page]


@pytest.fixture(scope="module")  # while it is open, no other test of this process can run an event loop
def browser() -> Iterator[Browser]:
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    installed = next((path for path in map(shutil.which, names) if path), None)
    with sync_playwright() as playwright:
        # Chromium's own sandbox may not start inside a container. The pages are ours, so it is not needed.
        microphone = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
        browser = playwright.chromium.launch(executable_path=installed, args=["--no-sandbox", *microphone])
        expect.set_options(timeout=60_000)  # 5 s is too short on a busy machine
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Provide a function that opens a server's page, in a new browser profile or as another tab of `context`."""
    faults: list[str] = []
    contexts = []

    def open_(server: Running, context: BrowserContext | None = None, *, path: str = "", **options: Any) -> Page:
        if context is None:
            context = browser.new_context(**options)
            contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
        page.on("console", lambda line: faults.append(line.text) if line.type == "error" and "401" not in line.text else None)

        def note(request: Any) -> None:
            address = urlparse(request.url)
            if address.scheme in ("http", "https") and address.netloc != urlparse(server.url).netloc:
                faults.append(f"called {request.url}")

        page.on("request", note)
        page.goto(f"{server.url}/{path}")
        expect(page.locator("html[data-ready]")).to_be_attached()
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not faults
