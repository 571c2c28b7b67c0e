"""What a user does on the page."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Locator, Page, expect


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
