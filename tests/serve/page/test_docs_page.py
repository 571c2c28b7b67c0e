"""The page /docs, which shows the OpenAPI document, in a real browser."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import Page, expect

from tests.serve.running import Running


def test_every_path_is_shown(fake: Running, open_page: Callable[..., Page]) -> None:
    page = open_page(fake)
    answer = page.goto(f"{fake.url}/docs")
    assert answer is not None
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    document = fake.http.get("/openapi.json").json()
    operations = [f"{method.upper()}{path}" for path, methods in document["paths"].items() for method in methods]
    expect(page.locator("#paths details")).to_have_count(len(operations))
    shown = page.locator("#paths summary").evaluate_all(
        "all => all.map(each => each.children[0].innerText + each.children[1].innerText)"
    )
    assert shown == operations
    page.get_by_text("/v1/chat/completions", exact=True).click()
    opened = page.locator("#paths details[open]")
    expect(opened).to_contain_text("temperature")
    expect(opened).to_contain_text("from 0 to 100")
    opened.get_by_role("link", name="ChatRequest").click()
    expect(page.locator("#ChatRequest")).to_be_in_viewport()


def test_the_document_needs_a_key(scripted: Callable[..., Running], open_page: Callable[..., Page]) -> None:
    with scripted(settings={"api_key": "secret"}) as server:
        page = open_page(server)
        page.goto(f"{server.url}/docs")
        expect(page.locator("#problem")).to_contain_text("the API key is missing")
        expect(page.locator("#paths details")).to_have_count(0)
        page.get_by_label("API key").fill("secret")
        page.get_by_role("button", name="Show").click()
        page.get_by_text("/v1/chat/completions", exact=True).click()
        expect(page.locator("#paths details[open]")).to_contain_text("temperature")
