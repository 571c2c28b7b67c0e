"""Conversations on the web page: branches, the list, files, tabs, settings and the engine's view."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.serve.conftest import ANSWER
from tests.serve.page.acts import ask, drop, give_file, last_answer, open_actions, picture, send, titles, wait_for_answer
from tests.serve.page.conftest import OpenPage
from tests.serve.page.test_answers import check_accessible
from tests.serve.running import Running


def shown(page: Page) -> list[str]:
    """Return the user's messages on the page."""
    return page.locator("#messages .user .body").all_inner_texts()


# Branches


def test_an_edited_message_is_a_branch_and_the_old_one_stays(fake: Running, open_page: OpenPage) -> None:
    page = open_page(fake)
    ask(page, "First")
    ask(page, "Second", 2)
    page.locator("#messages .user").first.hover()
    page.get_by_role("button", name="Edit this message").first.click()
    editor = page.get_by_label("Edited message")
    expect(editor).to_have_value("First")
    editor.fill("First, but different")
    page.keyboard.press("Escape")
    assert shown(page) == ["First", "Second"]  # nothing was lost
    page.get_by_role("button", name="Edit this message").first.click()
    expect(editor).to_have_value("First, but different")  # not even the unsent change
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Enter")
    assert [message["content"] for message in sent.value.post_data_json["messages"]] == ["First, but different"]
    wait_for_answer(page, 1)
    assert shown(page) == ["First, but different"]
    expect(page.locator(".branches")).to_have_text("2/2")
    page.get_by_role("button", name="Previous version").click()
    expect(page.locator("#messages .user")).to_have_count(2)
    assert shown(page) == ["First", "Second"]
    page.reload()
    expect(page.locator("#messages .user")).to_have_count(2)
    page.get_by_role("button", name="Next version").click()
    expect(page.locator("#messages .user .body")).to_have_text("First, but different")


def test_a_new_answer_keeps_the_way_back_to_the_old_one(fake: Running, open_page: OpenPage) -> None:
    page = open_page(fake)
    first_id = ask(page, "Say something").get_attribute("data-id")
    page.keyboard.press("Alt+r")
    expect(page.locator(".assistant .branches")).to_have_text("2/2")
    expect(page.locator("#messages .assistant")).to_have_count(1)
    assert last_answer(page).get_attribute("data-id") != first_id
    page.get_by_role("button", name="Previous version").click()
    expect(page.locator(".assistant .branches")).to_have_text("1/2")
    assert last_answer(page).get_attribute("data-id") == first_id
    ask(page, "Go on from here", 2)
    page.reload()
    expect(page.locator("#messages .assistant")).to_have_count(2)
    assert page.locator("#messages .assistant").first.get_attribute("data-id") == first_id


# Haste

SEND = """(text) => {
  const field = document.getElementById("prompt");
  field.value = text;
  field.dispatchEvent(new Event("input"));
  document.getElementById("composer").requestSubmit();
"""


def test_a_hasty_user_loses_nothing(fake: Running, open_page: OpenPage) -> None:
    page = open_page(fake)
    for text in ("New one", "New two"):
        page.evaluate(SEND + "document.getElementById('new-chat').click(); }", text)
    expect(page.locator("#messages > li")).to_have_count(0)
    page.get_by_role("link", name="New one").click()
    wait_for_answer(page)
    assert shown(page) == ["New one"]
    with page.expect_navigation():  # the browser has no time to finish its writes
        page.evaluate(SEND + "location.reload(); }", "Before a reload")
    expect(page.locator("#messages .user .body")).to_have_text(["New one", "Before a reload"])
    page.reload()  # the conversations have to be loaded again
    expect(titles(page)).to_have_text(["New one", "New two"])
    click_all = "nodes => nodes.forEach((node) => node.click())"
    page.locator("#conversations a").evaluate_all(click_all)
    expect(page.locator("#messages .user .body")).to_have_text(["New two"])


def test_a_page_that_comes_back_overwrites_nothing_newer(fake: Running, open_page: OpenPage) -> None:
    page = open_page(fake)
    ask(page, "Back and forth")
    # What a page saves when it is left, while its answer is still being written. It then comes back from the browser's cache.
    page.evaluate(
        """async () => {
          const { messagesOf } = await import("/page/store/conversations.js");
          const found = [...(await messagesOf(location.hash.split("/")[2])).values()];
          const message = { ...found.find(({ role }) => role === "assistant"), content: "The", state: "writing" };
          localStorage.setItem(`culet.unsaved.${message.id}`, JSON.stringify({ message }));
        }"""
    )
    with page.expect_navigation():
        page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', { persisted: true }))")
    expect(last_answer(page).locator(".body")).to_have_text(ANSWER)
    expect(last_answer(page).locator(".note")).to_be_hidden()
    assert not page.evaluate("Object.keys(localStorage).filter((name) => name.startsWith('culet.unsaved'))")


# The list


def test_a_row_stays_while_it_is_pressed(fake: Running, open_page: OpenPage) -> None:
    """The list is drawn again whenever an answer ends. A click that takes longer must not get lost."""
    page = open_page(fake)
    ask(page, "Pressed")
    page.keyboard.press("Alt+n")
    page.get_by_role("link", name="Pressed").hover()
    page.mouse.down()
    page.evaluate(
        """async () => {
          const { change, listConversations } = await import("/page/store/conversations.js");
          change(listConversations()[0].id, { title: "Pressed and renamed" });
          await new Promise((resolve) => setTimeout(resolve, 500));
        }"""
    )
    page.mouse.up()
    expect(page.locator("#messages .user .body")).to_have_text(["Pressed"])
    expect(titles(page)).to_have_text(["Pressed and renamed"])


def test_conversations_are_listed_found_renamed_and_restored(fake: Running, open_page: OpenPage) -> None:
    page = open_page(fake)
    ask(page, "About cats")
    page.keyboard.press("Alt+n")
    page.get_by_label("Message", exact=True).fill("An unsent draft")
    page.get_by_role("link", name="About cats").click()
    expect(page.get_by_label("Message", exact=True)).to_have_value("")
    page.keyboard.press("Alt+n")
    expect(page.get_by_label("Message", exact=True)).to_have_value("An unsent draft")
    ask(page, "About dogs\nand their tails")
    expect(titles(page)).to_have_text(["About dogs", "About cats"])
    open_actions(page, "About cats")
    page.get_by_role("menuitem", name="Rename").click()
    page.get_by_label("Title", exact=True).fill("Felines")
    page.keyboard.press("Enter")
    expect(titles(page)).to_have_text(["About dogs", "Felines"])
    page.keyboard.press("Alt+k")
    page.keyboard.type("TAILS")
    expect(titles(page)).to_have_text(["About dogs"])
    expect(page.locator("#conversations small")).to_contain_text("their tails")
    page.get_by_role("link", name="About dogs").press("F2")
    expect(page.get_by_label("Title", exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="About dogs")).to_be_focused()
    page.keyboard.press("Alt+k")
    page.keyboard.press("Escape")
    expect(titles(page)).to_have_count(2)
    open_actions(page, "About dogs")
    page.get_by_role("menuitem", name="Delete").click()
    expect(titles(page)).to_have_text(["Felines"])
    expect(page.locator("#messages > li")).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(titles(page)).to_have_text(["About dogs", "Felines"])
    expect(page.locator("#messages .user .body")).to_have_text("About dogs\nand their tails")
    for name in ("About dogs", "Felines"):
        page.get_by_role("link", name=name).press("Delete")
        expect(page.get_by_role("link", name=name)).to_have_count(0)
    page.get_by_role("button", name="Undo").first.click()
    expect(titles(page)).to_have_text(["About dogs"])
    page.reload()
    expect(titles(page)).to_have_text(["About dogs"])


def test_conversations_survive_export_and_import(fake: Running, open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(fake)
    ask(page, "First")
    page.keyboard.press("Alt+r")
    expect(page.locator(".branches")).to_have_text("2/2")
    page.get_by_role("button", name="Import and export").click()
    with page.expect_download() as download:
        page.get_by_role("menuitem", name="Export all").click()
    content = Path(download.value.path()).read_bytes()
    assert len(json.loads(content)["conversations"][0]["messages"]) == 3
    data = json.loads(content)  # a branch more, which open tabs show at once
    [conversation] = data["conversations"]
    [question] = [message for message in conversation["messages"] if message["role"] == "user"]
    conversation["messages"].append({**question, "id": "other", "content": "Imported", "created": question["created"] + 1})
    stranger = {**question, "conversation": "stranger", "content": "With the id of another message"}
    data["conversations"].append({**conversation, "id": "stranger", "messages": [stranger]})
    tab = open_page(fake, page.context, path=f"#{page.url.partition('#')[2]}")
    give_file(page, "more.json", json.dumps(data).encode())
    for opened in (page, tab):
        expect(opened.locator(".user .branches")).to_have_text("1/2")
    expect(titles(tab)).to_have_count(2)
    tab.reload()
    expect(tab.locator("#messages .user .body")).to_have_text("First")
    other = open_page(fake)  # another browser
    for _ in range(2):  # the second time changes nothing
        give_file(other, "all.json", content)
        expect(titles(other)).to_have_text(["First"])
    other.get_by_role("link", name="First").click()
    expect(other.locator(".branches")).to_have_text("2/2")
    expect(last_answer(other).locator(".body")).to_have_text(ANSWER)
    for bad in (b"{", b'{"format": "other"}', content.replace(b'"user"', b'"system"')):
        give_file(other, "bad.json", bad)
        expect(other.locator(".toast")).to_contain_text("Cannot import bad.json")
    expect(titles(other)).to_have_count(1)


# Tabs


def test_two_tabs_see_each_other_and_overwrite_nothing(fake: Running, open_page: OpenPage) -> None:
    first = open_page(fake)
    ask(first, "From the first tab")
    second = open_page(fake, first.context, path=f"#{first.url.partition('#')[2]}")
    expect(second.locator("#messages .user .body")).to_have_text("From the first tab")
    ask(second, "From the second tab", 2)
    wait_for_answer(first, 2)
    assert shown(first) == ["From the first tab", "From the second tab"]
    # Both write to the same conversation at the same time, after the same message.
    for page, text in ((first, "One"), (second, "Two")):
        page.get_by_label("Message", exact=True).fill(text)
    first.evaluate("document.getElementById('composer').requestSubmit()")
    second.evaluate("document.getElementById('composer').requestSubmit()")
    # The second tab may have seen the first one's whole turn before it sent its own. Then there are four answers.
    expect(first.locator("#messages .assistant:not(.writing)").nth(2)).to_be_visible()
    if second.get_by_label("Message", exact=True).input_value():  # it saw the first tab's answer, and kept the text
        second.get_by_role("button", name="Send").click()
    expect(second.get_by_label("Message", exact=True)).to_have_value("")
    expect(second.locator("#messages .assistant.writing")).to_have_count(0)
    open_actions(second, "From the first tab")
    second.get_by_role("menuitem", name="Rename").click()
    second.get_by_label("Title", exact=True).fill("Shared")
    second.keyboard.press("Enter")
    expect(titles(first)).to_have_text(["Shared"])
    third = open_page(fake, first.context, path=f"#{first.url.partition('#')[2]}")
    expect(titles(third)).to_have_text(["Shared"])
    texts = third.evaluate(
        """async () => {
          const { messagesOf } = await import("/page/store/conversations.js");
          const found = await messagesOf(location.hash.split("/")[2]);
          return [...found.values()].filter(({ role }) => role === "user").map(({ content }) => content).sort();
        }"""
    )
    assert texts == ["From the first tab", "From the second tab", "One", "Two"]


def test_a_conversation_that_another_tab_deletes_can_be_restored(fake: Running, open_page: OpenPage) -> None:
    first = open_page(fake)
    ask(first, "Keep me")
    second = open_page(fake, first.context)
    second.get_by_role("link", name="Keep me").press("Delete")
    expect(first.locator(".toast")).to_contain_text("deleted in another tab")
    first.get_by_role("button", name="Restore").click()
    expect(titles(second)).to_have_text(["Keep me"])
    assert shown(first) == ["Keep me"]


# Settings


def test_settings_are_sent_and_survive_a_reload(fake: Running, open_page: OpenPage) -> None:
    page = open_page(fake)
    page.keyboard.press("Alt+s")
    page.locator("#set-system").fill("Be brief.")
    page.locator("#set-temperature").fill("0.5")
    page.locator("#set-top_k").fill("12")
    page.get_by_text("More sampling").click()
    for name, value in (("min_p", "0.1"), ("seed", "7"), ("presence_penalty", "0.5"), ("repetition_penalty", "1.1")):
        page.locator(f"#set-{name}").fill(value)
    page.locator("#set-stop").fill("END\n\\nUser:")
    page.get_by_role("button", name="Done").click()
    page.reload()
    page.get_by_role("button", name="Think").click()
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, "Hello")
    body = sent.value.post_data_json
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["top_k"], body["min_p"], body["seed"]) == (0.5, 12, 0.1, 7)
    assert (body["presence_penalty"], body["repetition_penalty"]) == (0.5, 1.1)
    assert body["stop"] == ["END", "\nUser:"]
    assert body["chat_template_kwargs"] == {"enable_thinking": True}
    assert "top_p" not in body
    assert "frequency_penalty" not in body


def test_invalid_settings_are_explained(fake: Running, open_page: OpenPage) -> None:
    page = open_page(fake)
    page.get_by_role("button", name="Settings").click()
    page.get_by_text("Tools", exact=True).click()
    page.locator("#set-tools").fill("{")
    page.get_by_role("button", name="Done").click()
    expect(page.locator("#settings-error")).to_contain_text("JSON list")
    expect(page.locator("#settings")).to_be_visible()
    page.locator("#set-tools").fill("")
    page.locator("#set-min_p").evaluate("node => (node.value = '3')")
    page.get_by_role("button", name="Done").click()
    expect(page.locator("#settings-error")).to_contain_text("Min-p")


def test_the_theme_follows_the_system_until_it_is_chosen(fake: Running, open_page: OpenPage) -> None:
    page = open_page(fake, color_scheme="light")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.emulate_media(color_scheme="dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.get_by_role("button", name="Light theme").click()
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")


def test_an_example_fills_the_message_field(fake: Running, open_page: OpenPage) -> None:
    page = open_page(fake)
    example = page.locator("#examples button").first
    prompt = example.locator("span").inner_text()
    example.click()
    expect(page.get_by_label("Message", exact=True)).to_have_value(prompt)
    page.reload()  # a text that was not sent survives
    expect(page.get_by_label("Message", exact=True)).to_have_value(prompt)


def test_a_model_that_reads_only_text_offers_nothing_else(fake: Running, open_page: OpenPage) -> None:
    page = open_page(fake)
    expect(page.locator("#model")).to_have_text("gemma")
    for name in ("attach", "record", "attach-files", "budget-field"):
        expect(page.locator(f"#{name}")).to_be_hidden()
    page.keyboard.press("Alt+a")
    assert drop(page, "a.png", picture(8, 8))  # the browser must not open the file in place of the page
    expect(page.locator("#notice")).to_have_text("a.png: this model reads only text.")
    expect(page.locator("#tray li")).to_have_count(0)


# The engine's view


@pytest.mark.slow  # loads a model
def test_the_engine_view_shows_plots_and_the_plan(tiny: Running, open_page: OpenPage) -> None:
    tiny.http.post("/v1/completions", json={"model": "gemma", "prompt": "Hello", "max_tokens": 40, "ignore_eos": True})
    page = open_page(tiny, path="#/engine")
    expect(page.locator(".plot figcaption")).to_contain_text(
        ["Output tokens per second", "Prompt tokens per second", "Time to first token", "Requests", "KV cache in use"]
    )
    expect(page.locator('path[data-line="sliding"]')).to_have_count(1)
    expect(page.locator('path[data-line="global"]')).to_have_count(1)
    expect(page.locator("#figures div").nth(2).locator("dd")).not_to_have_text("0")
    expect(page.locator("#plan-picture")).to_have_js_property("complete", True)
    page.wait_for_function("() => document.getElementById('plan-picture').naturalWidth > 100")
    check_accessible(page)
    before = page.locator('path[data-line="output"]').get_attribute("d")
    page.wait_for_function(
        "before => document.querySelector('path[data-line=output]').getAttribute('d') !== before", arg=before
    )


def test_a_single_sample_is_a_dot_and_a_prompt_does_not_flatten_the_output(fake: Running, open_page: OpenPage) -> None:
    page = open_page(fake)
    drawn = page.evaluate(
        """async () => {
          const { drawPlot } = await import("/page/engine/plot.js");
          const draw = (values, isSparse) => {
            const node = document.createElement("figure");
            const samples = values.map((value, index) => ({ time: index, value }));
            drawPlot(node, samples, { title: "T", text: String, isSparse, lines: [["a", (sample) => sample.value]] });
            return { dots: node.querySelectorAll(".dot").length, path: node.querySelector(".line").getAttribute("d") };
          };
          return [draw([null, 5, null, null], false), draw([null, 5, null, 7, null], true), draw([1, 2, 3], false)];
        }"""
    )
    assert [plot["dots"] for plot in drawn] == [1, 2, 0]
    assert [plot["path"].count("L") for plot in drawn] == [0, 1, 2]
    specs = page.evaluate("fetch('/page/engine/engine.js').then((response) => response.text())")
    assert specs.count("output_tokens_per_s]]") == 1  # output and prompt have their own plots and scales
