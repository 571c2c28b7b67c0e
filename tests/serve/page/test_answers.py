"""Answers on the web page: how they arrive, how they look, and what a model cannot do with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, Route, expect

from tests.serve.page.acts import ask, last_answer, send
from tests.serve.page.conftest import OpenPage
from tests.serve.running import Running

THOUGHT = "<|channel>thought\nThey want a list.<channel|>"
MARKDOWN = r"""# Title

Here is **bold** and `code`, mass $E = mc^2$, and $5 or $6.

- one
  - inner
- [x] done
- [ ] open

| name | count |
|:-----|------:|
| a    | 12    |

```python
def f(x): return "<b>"
```

$$
\frac{1}{n} \sum_{i=1}^n x_i
$$
"""
# None of this may become an element, a script or a request.
ATTACKS = r"""<img src=x onerror=alert(1)> <script>alert(2)</script>

[link](javascript:alert(3)) [data](data:text/html,<script>alert(4)</script>) ![picture](http://other.example/x.png)

$\text{<img src=x onerror=alert(5)>}$ $\href{javascript:alert(6)}{x}$

```html"onmouseover="alert(7)
</code></pre><script>alert(8)</script>
```

| <svg onload=alert(9)> |
|---|
| <style>*{display:none}</style> |
"""
CALL = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|><|tool_response>'
TOOLS = json.dumps(
    [{"type": "function", "function": {"name": "get_weather", "parameters": {"properties": {"city": {"type": "string"}}}}}]
)


@pytest.fixture(scope="module")
def rich(scripted: Callable[..., Running]) -> Iterator[Running]:
    """A server that thinks, then answers in Markdown, then attacks the page."""
    with scripted(f"{THOUGHT}{MARKDOWN}{ATTACKS}<turn|>", tokens_per_step=8, step_s=0.002) as server:
        yield server


@pytest.fixture(scope="module")
def endless(scripted: Callable[..., Running]) -> Iterator[Running]:
    """A server whose answers do not end."""
    with scripted("word ", step_s=0.02) as server:
        yield server


def num_letters(answer: Locator) -> int:
    """Count without white space: text that is not rendered yet stands in a paragraph of its own."""
    return len("".join(answer.locator(".body").inner_text().split()))


STORED = """async () => {
  const { messagesOf } = await import("/page/store/conversations.js");
  const found = await messagesOf(location.hash.split("/")[2]);
  return [...found.values()].find(({ role }) => role === "assistant").content;
}"""
SHOWS = r"""count => {
  const answer = [...document.querySelectorAll("#messages .assistant .body")].at(-1);
  return answer?.innerText.replace(/\s/g, "").length === count;
}"""


def check_accessible(page: Page) -> None:
    """Check that axe finds nothing serious."""
    found = Axe().run(page).response["violations"]
    serious = [(entry["id"], entry["nodes"][0]["target"]) for entry in found if entry["impact"] in ("serious", "critical")]
    assert serious == []


def check_format(answer: Locator) -> None:
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer.locator("h1")).to_have_text("Title")
    expect(answer.locator("li li")).to_have_text("inner")
    boxes = answer.locator("li.task input")
    expect(boxes).to_have_count(2)
    assert [boxes.nth(index).is_checked() for index in (0, 1)] == [True, False]
    expect(answer.locator("td").nth(1)).to_have_css("text-align", "right")
    expect(answer.locator("pre code").first).to_have_text('def f(x): return "<b>"\n')
    expect(answer.locator("pre code .k").first).to_have_text("def")
    colours = {
        answer.locator(f"pre code {name}").first.evaluate("node => getComputedStyle(node).color") for name in (".k", ".nf")
    }
    assert len(colours) == 2
    expect(answer.locator("p math msup")).to_have_count(1)
    expect(answer.locator(".formula math[display=block] mfrac")).to_have_count(1)
    assert answer.locator("math mfrac").evaluate("node => node.namespaceURI").endswith("MathML")
    expect(answer.locator(".body")).to_contain_text("$5 or $6")


def check_no_markup(answer: Locator) -> None:
    """Check that nothing which the model wrote became markup."""
    expect(answer.locator(".body")).to_contain_text("<style>*{display:none}</style>")
    expect(answer.locator(".body")).to_contain_text("<img src=x onerror=alert(1)>")
    assert answer.locator("img, script, svg:not(.icon), style, iframe, [onerror], [onmouseover], [style]").count() == 0
    addresses = answer.locator("a").evaluate_all("nodes => nodes.map((node) => node.protocol)")
    assert set(addresses) <= {"http:", "https:", "mailto:"}


def test_an_answer_is_shown_with_its_format_and_never_as_markup(rich: Running, open_page: OpenPage) -> None:
    page = open_page(rich)
    expect(page.locator("#model")).to_have_text("gemma")
    answer = ask(page, "<b>A list</b>, please")
    expect(page.locator("#messages .user .body")).to_have_text("<b>A list</b>, please")
    check_format(answer)
    check_no_markup(answer)
    expect(answer.locator(".stats")).to_be_hidden()
    answer.get_by_role("button", name="Statistics").click()
    expect(answer.locator(".stats")).to_contain_text("Tokens per second")
    expect(answer.locator(".thought")).to_be_hidden()
    answer.locator("summary").click()
    expect(answer.locator(".thought")).to_have_text("They want a list.")
    expect(answer.locator(".body")).not_to_contain_text("They want a list")
    page.reload()
    check_format(last_answer(page))
    check_no_markup(last_answer(page))


GROW = """async (text) => {
  const { MarkdownView } = await import("/page/chat/markdown.js");
  const views = [0, 1].map(() => new MarkdownView(document.body.appendChild(document.createElement("div"))));
  let first = null;
  const seen = new Set();
  const look = async (ms) => {
    await new Promise((resolve) => setTimeout(resolve, ms));
    first ??= views[0].node.querySelector("h1 + p ~ * ~ *") && views[0].node.querySelector("h1");
    seen.add(views[0].node.textContent);
  };
  for (let end = 1; end < text.length; end += 7) {
    views[0].show(text.slice(0, end), true);
    await look(15);
  }
  for (let tries = 0; !first && tries < 300; tries += 1) await look(100);  // the server may be slow
  views[0].show(text, false);
  views[1].show(text, false);
  const isDone = ({ node }) => node.childElementCount > 5 && !node.querySelector(".rest");
  const html = () => views.map(({ node }) => node.innerHTML);
  const isEnd = () => views.every(isDone) && html()[0] === html()[1];
  for (let tries = 0; !isEnd() && tries < 300; tries += 1) await new Promise((resolve) => setTimeout(resolve, 100));
  const [grown, whole] = html();
  return { grown, whole, isKept: first === views[0].node.firstElementChild, numStates: seen.size };
}"""


def test_a_growing_text_keeps_its_elements_and_ends_like_a_complete_one(rich: Running, open_page: OpenPage) -> None:
    result = open_page(rich).evaluate(GROW, MARKDOWN + ATTACKS.replace("<script>", "**late**"))
    assert result["grown"] == result["whole"]
    assert result["isKept"]  # a settled block is not built again
    assert result["numStates"] > 3


def test_text_appears_as_it_is_written_and_stop_keeps_it(endless: Running, open_page: OpenPage) -> None:
    page = open_page(endless)
    send(page, "Go on")
    expect(last_answer(page).locator(".body")).to_contain_text("word word")
    page.get_by_label("Message", exact=True).fill("Not lost")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.keyboard.press("Escape")
    expect(last_answer(page).locator(".note")).to_have_text("Stopped")
    expect(page.get_by_label("Message", exact=True)).to_have_value("Not lost")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    length = len("".join(page.evaluate(STORED).split()))
    assert length >= 8
    page.wait_for_function(SHOWS, arg=length)  # the page shows the newest text a moment later
    page.reload()
    page.wait_for_function(SHOWS, arg=length)
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Continue").click()
    assert sent.value.post_data_json["continue_final_message"] is True
    page.wait_for_function(
        r"length => document.querySelector('#messages .assistant .body').innerText.replace(/\s/g, '').length > length + 20",
        arg=length,
    )
    page.get_by_role("button", name="Stop").click()
    expect(last_answer(page).locator(".note")).to_have_text("Stopped")
    assert page.locator("#messages .assistant").count() == 1


def test_a_reload_in_the_middle_of_an_answer_keeps_what_was_written(endless: Running, open_page: OpenPage) -> None:
    page = open_page(endless)
    page.evaluate("() => (performance.now = () => 0)")  # only what is saved at the last moment is saved
    send(page, "Go on")
    page.wait_for_function("() => document.querySelector('#messages .assistant .body').innerText.length > 60")
    before = num_letters(last_answer(page))
    page.reload()
    expect(last_answer(page).locator(".note")).to_have_text("Interrupted")
    expect(page.get_by_role("button", name="Continue")).to_be_visible()
    expect(last_answer(page).locator(".body")).to_contain_text("word word")
    assert num_letters(last_answer(page)) >= before
    endless.check_well()  # the work was cancelled, not only hidden


def test_an_answer_goes_on_in_the_background(endless: Running, open_page: OpenPage) -> None:
    page = open_page(endless)
    page.evaluate("() => (window.setInterval = () => 0)")  # browsers hardly run timers of hidden tabs
    send(page, "Go on")
    expect(last_answer(page).locator(".body")).to_contain_text("word")
    tab = open_page(endless, page.context, path=f"#{page.url.partition('#')[2]}")
    expect(tab.get_by_role("button", name="Stop")).to_be_visible()
    tab.close()
    page.keyboard.press("Alt+n")
    expect(page.locator("#messages > li")).to_have_count(0)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.get_by_role("link", name="Go on").click()
    page.get_by_role("link", name="Engine").click()
    page.keyboard.press("Escape")  # stops only an answer that is shown
    page.get_by_role("link", name="Go on").click()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.keyboard.press("Escape")
    expect(last_answer(page).locator(".note")).to_have_text("Stopped")


def test_the_text_is_readable_while_it_cannot_be_rendered(rich: Running, open_page: OpenPage) -> None:
    page = open_page(rich)
    held: list[Route] = []
    is_held = True
    page.route("**/markdown", lambda route: held.append(route) if is_held else route.continue_())
    answer = ask(page, "Hello")
    expect(answer.locator(".rest")).to_contain_text("**bold**")
    is_held = False
    for route in held:
        route.continue_()
    expect(answer.locator(".rest")).to_have_count(0)
    expect(answer.locator("strong").first).to_have_text("bold")


def test_keys_and_tools(scripted: Callable[..., Running], open_page: OpenPage) -> None:
    with scripted(CALL, "It **rains** in Paris.<turn|>", settings={"api_key": "secret"}) as server:
        page = open_page(server)
        expect(page.locator("#settings")).to_be_visible()
        expect(page.locator("#set-key")).to_be_focused()
        page.locator("#set-key").fill("secret")
        page.get_by_text("Tools", exact=True).click()
        page.locator("#set-tools").fill(TOOLS)
        page.get_by_role("button", name="Done").click()
        expect(page.locator("#model")).to_have_text("gemma")
        expect(page.locator("#examples button")).to_have_count(4)
        send(page, "How is the weather in Paris?")
        call = page.locator(".call")
        expect(call.locator(".name")).to_have_text("get_weather()")
        expect(call.locator("pre")).to_contain_text('"city": "Paris"')
        with page.expect_request("**/v1/chat/completions") as sent:
            call.get_by_label("Result of get_weather").fill("rain")
            page.keyboard.press("Enter")
        roles = [message["role"] for message in sent.value.post_data_json["messages"]]
        assert roles == ["user", "assistant", "tool"]
        expect(last_answer(page).locator("strong")).to_have_text("rains")
        expect(call.locator(".result")).to_have_text("rain")
        page.get_by_role("link", name="Engine").click()
        expect(page.locator(".plot").first).to_be_visible()
        assert server.http.post("/markdown", json={"texts": ["a"]}, headers={"authorization": "none"}).status_code == 401
        page.close()  # the engine's view polls, and would report a server that is gone


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_everyone_can_use_the_page(scheme: str, rich: Running, open_page: OpenPage) -> None:
    page = open_page(rich, color_scheme=scheme)
    expect(page.locator("#examples button")).to_have_count(4)
    if scheme == "light":
        check_accessible(page)
    answer = ask(page, "A list, please")
    expect(answer.locator("pre code .k").first).to_be_visible()
    answer.get_by_role("button", name="Statistics").click()
    expect(page.locator("#announcer")).to_contain_text("bold")
    check_accessible(page)
    page.keyboard.press("Alt+e")
    expect(page.get_by_label("Edited message")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Edit this message")).to_be_focused()
    page.keyboard.press("Alt+s")
    check_accessible(page)


def test_nothing_is_cut_off_on_a_phone(rich: Running, open_page: OpenPage) -> None:
    page = open_page(rich, viewport={"width": 360, "height": 640}, has_touch=True)
    fits = "document.documentElement.scrollWidth <= innerWidth"
    assert page.evaluate(fits)
    answer = ask(page, "A list, please")
    expect(answer.locator("pre code .k").first).to_be_visible()
    assert page.evaluate(fits)
    page.get_by_role("button", name="Show the sidebar").click()
    expect(page.get_by_role("link", name="A list, please")).to_be_visible()
    page.get_by_role("link", name="Engine").click()
    expect(page.locator("#sidebar")).to_be_hidden()
    expect(page.locator(".plot").first).to_be_visible()
    assert page.evaluate(fits)
    check_accessible(page)
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    check_accessible(page)
