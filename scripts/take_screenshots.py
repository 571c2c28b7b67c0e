"""Take screenshots of the web page with the built-in model for the docs: `python scripts/take_screenshots.py [FOLDER]`.

This needs the extra `test` and Chromium (`scripts/get-chromium .venv`).
"""

from __future__ import annotations

import json
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

FOLDER = Path(__file__).parent.parent / "docs" / "images"
WIDE, PHONE = {"width": 1000, "height": 720}, {"width": 390, "height": 760}
TALK = ("Hi! My name is Oliver.", "What is a volcano?", "Is it dangerous?", "What is my name?")
LOAD_S = 60  # the plots show one minute
PROMPTS = (
    "Tell me a story about a brave fox.",
    "Why is the sky blue?",
    "Write two sentences about the sea.",
    "What is a bridge?",
)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until_ready(url: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=2).close()
            return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"{url} did not answer within {seconds:g} s")


def converse(page: Page, turns: tuple[str, ...]) -> None:
    for number, turn in enumerate(turns, start=1):
        page.get_by_label("Message", exact=True).fill(turn)
        page.keyboard.press("Enter")
        answer = page.locator("#messages .assistant").nth(number - 1)
        expect(answer.locator(".foot")).to_contain_text("tokens", timeout=30_000)


def load(url: str, until: float) -> None:
    """Send chats one after the other, with pauses."""
    while time.monotonic() < until:
        body = {"messages": [{"role": "user", "content": random.choice(PROMPTS)}], "max_tokens": 96}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=60).read()
        time.sleep(random.uniform(0.1, 1.5))


def picture(browser: Browser, url: str, path: Path, *, scheme: str, size: dict[str, int], is_engine: bool) -> None:
    context = browser.new_context(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(url)
    if is_engine:
        page.get_by_text("Engine", exact=True).first.click()
        page.wait_for_timeout(LOAD_S * 1000)
    else:
        converse(page, TALK)
    page.screenshot(path=path)
    context.close()
    print(path)


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([str(Path(sys.executable).parent / "culet"), "serve", "--port", str(port)])
    try:
        wait_until_ready(url)
        installed = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=installed, args=["--no-sandbox"])
            for name, scheme, size in (
                ("page-light", "light", WIDE),
                ("page-dark", "dark", WIDE),
                ("page-phone", "light", PHONE),
            ):
                picture(browser, url, folder / f"{name}.png", scheme=scheme, size=size, is_engine=False)
            for scheme in ("light", "dark"):
                until = time.monotonic() + LOAD_S + 5
                users = [threading.Thread(target=load, args=(url, until)) for _ in range(4)]
                for user in users:
                    user.start()
                picture(browser, url, folder / f"page-engine-{scheme}.png", scheme=scheme, size=WIDE, is_engine=True)
                for user in users:
                    user.join()
            browser.close()
    finally:
        server.terminate()
        server.wait(timeout=30)
    return 0


if __name__ == "__main__":
    sys.exit(main())
