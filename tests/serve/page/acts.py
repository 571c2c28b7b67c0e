"""What a user does on the page."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image
from playwright.sync_api import Locator, Page, expect

# Gives a file to the page as the browser does after a paste or a drop. Zeros at its end make it large.
GIVE = """([event, name, data, numBytes]) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes, new Uint8Array(Math.max(0, numBytes - bytes.length))], name));
  const options = { clipboardData: transfer, dataTransfer: transfer, bubbles: true, cancelable: true };
  const isPaste = event === "paste";
  const target = document.getElementById(isPaste ? "prompt" : "messages");
  return !target.dispatchEvent(isPaste ? new ClipboardEvent(event, options) : new DragEvent(event, options));
}"""


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def last_answer(page: Page) -> Locator:
    return page.locator("#messages .assistant").last


def wait_for_answer(page: Page, num_answers: int = 1) -> Locator:
    """Wait until the page shows this many answers, of which none is being written, and return the last one."""
    expect(page.locator("#messages .assistant:not(.writing)")).to_have_count(num_answers)
    answer = last_answer(page)
    expect(answer.get_by_role("button", name="Regenerate")).to_be_visible()
    return answer


def ask(page: Page, text: str, num_answers: int = 1) -> Locator:
    send(page, text)
    return wait_for_answer(page, num_answers)


def titles(page: Page) -> Locator:
    return page.locator("#conversations .row a > span")


def open_actions(page: Page, title: str) -> None:
    page.locator("#conversations .row", has_text=title).hover()
    page.get_by_role("button", name=f"Actions for {title}").click()


def give_file(page: Page, name: str, content: bytes) -> None:
    file: Any = {"name": name, "mimeType": "application/json", "buffer": content}
    page.set_input_files("#import-file", files=[file])


def picture(width: int, height: int, seed: int = 0) -> bytes:
    """Return a PNG."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def paste(page: Page, name: str, data: bytes) -> bool:
    """Paste a file. Return whether the page took it, and left nothing to the browser."""
    return bool(page.evaluate(GIVE, ["paste", name, base64.b64encode(data).decode(), 0]))


def drag(page: Page, name: str, data: bytes) -> None:
    """Move a file over the conversation."""
    page.evaluate(GIVE, ["dragover", name, base64.b64encode(data).decode(), 0])


def drop(page: Page, name: str, data: bytes, num_bytes: int = 0) -> bool:
    """Drop a file on the conversation. Return whether the page took it, and left nothing to the browser."""
    return bool(page.evaluate(GIVE, ["drop", name, base64.b64encode(data).decode(), num_bytes]))
