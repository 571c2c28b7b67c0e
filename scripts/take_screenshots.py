"""Take screenshots of the web page with the built-in model for the docs: `python scripts/take_screenshots.py [FOLDER]`.

Three conversations are real chats with the built-in model. The fourth, which shows code and mathematics, is imported from a
file that this script writes. This needs the extra `test` and Chromium (`scripts/get-chromium .venv`).
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
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

FOLDER = Path(__file__).parent.parent / "docs" / "images"
WIDTHS = {"": (1180, 860), "-tablet": (820, 980), "-phone": (390, 780)}
SHAPES = FOLDER / "shapes.png"
TALK = ("What do you see?", "Where is the heart?")  # about the picture, which comes with the first
LIST = ("Make a list of these: bread, milk and apples.",)
LOAD_S = 60  # the plots show one minute
PROMPTS = (
    "Tell me a story about a brave fox.",
    "Why is the sky blue?",
    "Write two sentences about the sea.",
    "What is a bridge?",
)
QUESTION = "How do I compute a running mean in Python?"
ANSWER = r"""Keep the mean $\bar{x}_n$ and the count. Each new value moves the mean by a part of its distance:

$$
\bar{x}_n = \bar{x}_{n-1} + \frac{x_n - \bar{x}_{n-1}}{n}
$$

```python
class RunningMean:
    "The mean of all values so far."

    def __init__(self) -> None:
        self.count, self.mean = 0, 0.0

    def add(self, value: float) -> float:
        self.count += 1
        self.mean += (value - self.mean) / self.count
        return self.mean
```

| after | mean | memory |
|:------|-----:|:------:|
| 1, 2  | 1.50 | 2 numbers |
| 1, 2, 6 | 3.00 | 2 numbers |

- [x] no list of values
- [ ] weights
"""


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


def written_conversation() -> bytes:
    """Return a file to import, with one conversation and two versions of its answer."""
    now = int(1000 * time.time()) - 3_600_000
    common = {"conversation": "mean", "state": "done"}
    messages: list[dict[str, Any]] = [
        {**common, "id": "q", "parent": None, "role": "user", "content": QUESTION, "created": now},
        {**common, "id": "a1", "parent": "q", "role": "assistant", "content": "Use statistics.mean.", "created": now + 1},
        {**common, "id": "a2", "parent": "q", "role": "assistant", "content": ANSWER, "created": now + 2},
    ]
    conversation = {"id": "mean", "title": QUESTION, "created": now, "updated": now, "head": "a2", "messages": messages}
    return json.dumps({"format": "culet-conversations", "version": 1, "conversations": [conversation]}).encode()


def converse(page: Page, turns: tuple[str, ...]) -> None:
    for number, turn in enumerate(turns, start=1):
        if turn == TALK[0]:
            page.set_input_files("#attach-files", SHAPES)
            expect(page.locator("#tray li")).to_have_count(1)
        page.get_by_label("Message", exact=True).fill(turn)
        page.keyboard.press("Enter")
        expect(page.locator("#messages .assistant:not(.writing)")).to_have_count(number, timeout=60_000)


def prepare(context: BrowserContext, url: str) -> Page:
    """Return a page with four conversations."""
    page = context.new_page()
    page.goto(url)
    expect(page.locator("#examples button")).to_have_count(4, timeout=30_000)
    for turns in (LIST, PROMPTS[:1], TALK):
        page.keyboard.press("Alt+n")
        converse(page, turns)
    file: Any = {"name": "mean.json", "mimeType": "application/json", "buffer": written_conversation()}
    page.set_input_files("#import-file", files=[file])
    page.get_by_role("button", name="Dismiss").click()
    return page


def take_chats(browser: Browser, url: str, folder: Path) -> None:
    for scheme in ("light", "dark"):
        context = browser.new_context(viewport={"width": 1180, "height": 860}, color_scheme=scheme)
        page = prepare(context, url)
        for suffix, (width, height) in WIDTHS.items():
            page.set_viewport_size({"width": width, "height": height})
            is_phone = suffix == "-phone"
            page.evaluate("id => (location.hash = id)", "#/chat/mean" if suffix != "" else "#/")
            if suffix == "":
                page.locator("#conversations a").first.click()  # the talk
            expect(page.locator("#messages .assistant").first).to_be_visible()
            page.mouse.move(width / 2, 10)
            page.wait_for_timeout(1500)
            if is_phone:
                page.locator("#scroller").evaluate("node => (node.scrollTop = 0)")
                page.wait_for_timeout(300)
            save(page, folder / f"page-{scheme}{suffix}.png")
        context.close()


def load(url: str, until: float) -> None:
    """Send chats one after the other, with pauses."""
    while time.monotonic() < until:
        body = {"messages": [{"role": "user", "content": random.choice(PROMPTS)}], "max_tokens": 96}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=60).read()
        time.sleep(random.uniform(0.1, 1.5))


def take_engine(browser: Browser, url: str, folder: Path) -> None:
    until = time.monotonic() + LOAD_S + 15
    users = [threading.Thread(target=load, args=(url, until)) for _ in range(4)]
    for user in users:
        user.start()
    time.sleep(LOAD_S)
    for scheme in ("light", "dark"):
        context = browser.new_context(viewport={"width": 1180, "height": 880}, color_scheme=scheme)
        page = context.new_page()
        page.goto(f"{url}/#/engine")
        expect(page.locator(".plot").first).to_be_visible(timeout=30_000)
        page.wait_for_timeout(2000)
        save(page, folder / f"page-engine-{scheme}.png")
        context.close()
    for user in users:
        user.join()


def save(page: Page, path: Path) -> None:
    page.screenshot(path=path)
    print(path, path.stat().st_size)


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([sys.executable, "-m", "culet.cli.main", "serve", "--port", str(port)])
    try:
        wait_until_ready(url)
        installed = next(
            filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"))), None
        )
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=installed, args=["--no-sandbox"])
            take_chats(browser, url, folder)
            take_engine(browser, url, folder)
            browser.close()
    finally:
        server.terminate()
        server.wait(timeout=30)
    return 0


if __name__ == "__main__":
    sys.exit(main())
