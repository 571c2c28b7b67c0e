"""Media on the web page: attached, pasted, dropped and recorded, their sizes in soft tokens, and what becomes of them."""

from __future__ import annotations

import base64
import io
import json
import random
import wave
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from playwright.sync_api import Page, Request, expect

from culet.media.spec import BUDGETS, SAMPLES_PER_TOKEN, num_image_tokens, num_mel_frames, num_mel_tokens, target_size
from tests.serve.page.acts import ask, drag, drop, give_file, last_answer, open_actions, paste, picture, send, wait_for_answer
from tests.serve.page.conftest import OpenPage
from tests.serve.page.test_answers import check_accessible
from tests.serve.running import Running

SETTINGS = {"max_tokens": "3", "temperature": "0"}
MARKS = 2  # tokens around each medium, besides its soft tokens


@pytest.fixture
def open_seeing(seeing: Running, open_page: OpenPage) -> Any:
    """Provide a function that opens the page of a model that sees, with settings that keep answers short."""

    kept = [{"name": "culet.settings", "value": json.dumps(SETTINGS)}]

    def open_() -> Page:
        page = open_page(seeing, storage_state={"origins": [{"origin": seeing.url, "localStorage": kept}]})
        expect(page.locator("#attach")).to_be_visible()
        return page

    return open_


def wav(seconds: float, rate: int = 16_000) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(np.zeros(int(seconds * rate), dtype=np.int16).tobytes())
    return buffer.getvalue()


def webm(num_frames: int) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="webm") as container:
        stream: Any = container.add_stream("libvpx", rate=10)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for index in range(num_frames):
            frame = av.VideoFrame.from_ndarray(np.full((64, 96, 3), 5 * index, dtype=np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def attach(page: Page, name: str, data: bytes) -> None:
    file: Any = {"name": name, "mimeType": "application/octet-stream", "buffer": data}
    page.set_input_files("#attach-files", files=[file])


def sizes(page: Page) -> list[int]:
    """Return the soft tokens that the page shows for each attached medium."""
    texts = page.locator("#tray .facts span").all_inner_texts()
    return [int(text.split(" soft")[0].split()[-1].replace(",", "")) for text in texts]


def parts_of(request: Request, index: int = 0) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = request.post_data_json["messages"][index]["content"]
    return parts


def prompt_tokens(page: Page) -> int:
    """Return the number of prompt tokens that the server counted for the last answer."""
    answer = last_answer(page)
    answer.get_by_role("button", name="Statistics").click()
    return int(answer.locator(".stats dd").nth(-2).inner_text().split()[0].replace(",", ""))


def text_tokens(server: Running, text: str) -> int:
    messages = [{"role": "user", "content": text}]
    count: int = server.http.post("/tokenize", json={"messages": messages}).json()["count"]
    return count


def test_the_server_says_what_it_takes(seeing: Running) -> None:
    media = seeing.http.get("/v1/models").json()["data"][0]["media"]
    assert media["max_body_bytes"] == 16 << 20
    image, video, audio = media["image"], media["video"], media["audio"]
    assert (image["max_count"], image["budget"], image["budgets"]) == (3, 280, list(BUDGETS))
    assert (video["max_count"], video["budget"], video["budgets"], video["num_frames"]) == (None, 70, [70, 140, 280], 32)
    assert (audio["max_s"], audio["features"], audio["max_bytes"]) == (30, "mel", 25 << 20)
    assert "image/png" in image["types"]


def test_pictures_are_attached_pasted_dropped_sent_and_kept(seeing: Running, open_seeing: Any) -> None:
    page = open_seeing()
    pictures = {"a.png": picture(60, 40, 1), "b.png": picture(30, 90, 2), "c.png": picture(16, 9, 3)}
    attach(page, "a.png", pictures["a.png"])
    expect(page.locator("#tray li")).to_have_count(1)
    assert paste(page, "b.png", pictures["b.png"])
    expect(page.locator("#tray li")).to_have_count(2)
    drag(page, "c.png", pictures["c.png"])
    expect(page.locator("#drop")).to_have_text("Drop images, audio or videos here")
    assert drop(page, "c.png", pictures["c.png"])
    expect(page.locator("#tray li")).to_have_count(3)
    expect(page.locator("#drop")).to_be_hidden()
    shown = sizes(page)
    assert shown == [num_image_tokens(*target_size(height, width, 280)) for width, height in ((60, 40), (30, 90), (16, 9))]
    expect(page.locator("#tray-size")).to_have_text(f"Together {sum(shown)} soft tokens")
    expect(page.locator("#announcer")).to_have_text(f"Attached c.png, {shown[2]} soft tokens")
    page.keyboard.press("Alt+s")
    page.locator("#set-budget").select_option("70")
    page.get_by_role("button", name="Done").click()
    smaller = [num_image_tokens(*target_size(height, width, 70)) for width, height in ((60, 40), (30, 90), (16, 9))]
    expect(page.locator("#tray-size")).to_have_text(f"Together {sum(smaller)} soft tokens")
    attach(page, "fourth.png", picture(8, 8))
    expect(page.locator("#notice")).to_contain_text("fourth.png: this server takes at most 3 images")

    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, "What is it?")
    parts = parts_of(sent.value)
    assert [base64.b64decode(part["image_url"]["url"].partition(",")[2]) for part in parts[:3]] == list(pictures.values())
    assert parts[3:] == [{"type": "text", "text": "What is it?"}]
    assert sent.value.post_data_json["mm_processor_kwargs"] == {"max_soft_tokens": 70}
    wait_for_answer(page)
    expect(page.locator("#tray")).to_be_hidden()
    assert prompt_tokens(page) == text_tokens(seeing, "What is it?") + sum(smaller) + 3 * MARKS
    thumbnails = page.locator("#messages .user .picture img")
    expect(thumbnails).to_have_count(3)

    page.reload()
    expect(thumbnails).to_have_count(3)
    page.wait_for_function("() => [...document.querySelectorAll('.picture img')].every(({ naturalWidth }) => naturalWidth > 0)")
    page.get_by_role("button", name="Show b.png").click()
    expect(page.get_by_role("dialog", name="b.png").locator("img")).to_have_js_property("naturalHeight", 90)
    page.keyboard.press("Escape")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "And now?", 2)
    assert parts_of(sent.value) == parts


FORMULAS = """async ([pictures, lengths]) => {
  const { audioTokens, imageTokens } = await import("/page/media/tokens.js");
  const sounds = lengths.map((length) => ["mel", "samples"].map((features) => audioTokens(length / 16000, features)));
  return [pictures.map((size) => imageTokens(...size)), sounds];
}"""


def check_formulas(page: Page) -> None:
    """Check that the page counts soft tokens as the server does."""
    chooser = random.Random(0)
    pictures = [
        (round(2 ** chooser.uniform(0, 13)), round(2 ** chooser.uniform(0, 13)), chooser.choice(BUDGETS)) for _ in range(3000)
    ]
    for budget in BUDGETS:  # these fill a budget exactly, so the last bit decides
        rows = [count for count in range(1, budget + 1) if budget % count == 0]
        pictures += [(scale * budget // row, scale * row, budget) for row in rows for scale in range(1, 40)]
    lengths = [1, 161, 640, 641, 12_345, 16_000, 480_000, *(chooser.randrange(161, 480_000) for _ in range(500))]
    images, sounds = page.evaluate(FORMULAS, [pictures, lengths])
    assert images == [num_image_tokens(*target_size(height, width, budget)) for width, height, budget in pictures]
    assert sounds == [[num_mel_tokens(num_mel_frames(length)), -(-length // SAMPLES_PER_TOKEN)] for length in lengths]


SMALL_BUDGETS = """async () => {
  const { setAccepted, whatIsAccepted } = await import("/page/media/accepted.js");
  const { budgetFields } = await import("/page/media/tokens.js");
  const usual = whatIsAccepted();
  const fieldsOf = (kind) => budgetFields([{ kind }]).mm_processor_kwargs?.max_soft_tokens ?? null;
  const before = ["image", "video", "audio"].map(fieldsOf);
  setAccepted({ ...usual, image: { ...usual.image, budgets: [70, 140] } });
  const after = fieldsOf("image");
  setAccepted(usual);
  return [before, after];
}"""


def check_budgets(page: Page) -> None:
    """Check that a budget that was chosen for another server is lowered to what this one allows."""
    page.keyboard.press("Alt+s")
    page.locator("#set-budget").select_option("1120")
    page.get_by_role("button", name="Done").click()
    assert page.evaluate(SMALL_BUDGETS) == [[1120, 280, None], 140]
    page.keyboard.press("Alt+s")
    page.locator("#set-budget").select_option("")
    page.get_by_role("button", name="Done").click()
    expect(page.locator("dialog[open]")).to_have_count(0)  # a drop on a dialog is ignored


def test_sizes_are_those_of_the_server_and_what_it_refuses_is_not_sent(open_seeing: Any) -> None:
    page = open_seeing()
    check_formulas(page)
    check_budgets(page)
    megabyte = 1 << 20
    heic = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"
    for name, data, num_bytes, problem in (
        ("notes.txt", b"Some text", 0, "notes.txt: this cannot be attached. Possible are JPEG, PNG, WebP, GIF, WAV"),
        ("photo.jpg", heic, 0, "photo.jpg: this cannot be attached"),
        ("empty.png", b"", 0, "empty.png is empty"),
        ("broken.png", picture(9, 9)[:30], 0, "broken.png: the picture is damaged"),
        ("large.png", picture(9, 9), 21 * megabyte, "large.png has 21.0 MB, but an image may have at most 20.0 MB"),
        ("long.wav", wav(31.0), 0, "long.wav is 31.0 s long, but this model hears at most 30 s at once"),
        ("big.png", picture(9, 9), 13 * megabyte, "13.0 MB of media, but a request holds at most 12.0 MB"),
    ):
        drop(page, name, data, num_bytes)
        expect(page.locator("#notice")).to_contain_text(problem)
    expect(page.locator("#tray li")).to_have_count(0)
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    attach(page, "good.png", picture(9, 9))
    expect(page.locator("#notice")).to_be_hidden()
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_a_recording_is_sent(seeing: Running, open_seeing: Any) -> None:
    page = open_seeing()
    page.get_by_role("button", name="Record from the microphone").click()
    expect(page.locator("#recorded")).to_contain_text("of 0:30")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    page.get_by_role("button", name="Discard").click()
    expect(page.locator("#recording")).to_be_hidden()
    expect(page.locator("#tray li")).to_have_count(0)
    page.get_by_role("button", name="Record from the microphone").click()
    expect(page.locator("#recorded")).to_contain_text("0:01")
    page.get_by_role("button", name="Finish the recording").click()
    expect(page.locator("#tray audio")).to_have_count(1)
    [shown] = sizes(page)
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, "")
    [part] = parts_of(sent.value)
    assert (part["type"], part["input_audio"]["format"]) == ("input_audio", "wav")
    with wave.open(io.BytesIO(base64.b64decode(part["input_audio"]["data"]))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16_000, 1, 2)
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype=np.int16)
    assert np.abs(samples).max() > 300  # the fake microphone beeps
    assert shown == num_mel_tokens(num_mel_frames(samples.size)) > 20
    wait_for_answer(page)
    assert prompt_tokens(page) == text_tokens(seeing, "") + shown + MARKS
    expect(page.locator("#conversations .row a")).to_have_text("recording.wav")


@pytest.mark.slow
def test_a_video_is_sent(seeing: Running, open_seeing: Any) -> None:
    page = open_seeing()
    attach(page, "clip.webm", webm(40))
    expect(page.locator("#tray .facts")).to_contain_text("0:04, about 1,920 soft tokens")
    page.get_by_role("button", name="Remove clip.webm").click()
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    attach(page, "clip.webm", webm(5))
    expect(page.locator("#tray video")).to_have_count(1)
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "What happens?")
    assert [part["type"] for part in parts_of(sent.value)] == ["video_url", "text"]
    expect(page.locator("#messages .user video")).to_have_js_property("videoWidth", 96)
    assert prompt_tokens(page) > text_tokens(seeing, "What happens?") + 5 * (60 + MARKS)


@pytest.mark.slow
def test_everyone_can_attach_and_remove(open_seeing: Any) -> None:
    page = open_seeing()
    attach(page, "a.png", picture(60, 40))
    expect(page.locator("#tray li")).to_have_count(1)
    ask(page, "What is it?")
    for name, data in (("b.png", picture(9, 9)), ("c.wav", wav(1.0))):
        attach(page, name, data)
    expect(page.locator("#tray li")).to_have_count(2)
    check_accessible(page)
    page.get_by_role("button", name="Remove b.png").press("Enter")
    expect(page.get_by_role("button", name="Remove c.wav")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.press("Alt+e")  # an edited message may lose its picture
    page.get_by_role("button", name="Remove a.png").press("Enter")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Enter")
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "What is it?"}]
    assert "mm_processor_kwargs" not in sent.value.post_data_json
    expect(page.locator(".user .branches")).to_have_text("2/2")


# What is kept


FULL_STORAGE = """() => {
  const { put } = IDBObjectStore.prototype;
  IDBObjectStore.prototype.put = function (record) {
    if (record.media?.some(({ blob }) => blob)) throw new DOMException("full", "QuotaExceededError");
    return put.call(this, record);
  };
}"""


@pytest.mark.slow
def test_media_survive_a_reload_and_a_file(open_seeing: Any) -> None:
    page = open_seeing()
    data = picture(60, 40)
    attach(page, "kept.png", data)
    expect(page.locator("#tray li")).to_have_count(1)
    page.reload()
    expect(page.locator("#tray .facts")).to_contain_text("kept.png")  # not sent yet, and not lost
    expect(page.locator("#tray .facts")).to_contain_text("260 soft tokens")
    ask(page, "Hello")
    page.reload()
    expect(page.locator("#tray li")).to_have_count(0)
    open_actions(page, "Hello")
    with page.expect_download() as download:
        page.get_by_role("menuitem", name="Export").click()
    content = Path(download.value.path()).read_bytes()
    other = open_seeing()
    for bad in (content.replace(b"image/png;base64,", b"image/png;base64,AAAA"), content.replace(b'"image"', b'"script"')):
        give_file(other, "bad.json", bad)
        expect(other.locator(".toast")).to_contain_text("Cannot import bad.json")
    give_file(other, "chat.json", content)
    other.get_by_role("link", name="Hello").click()
    expect(other.locator(".picture img")).to_have_js_property("naturalWidth", 60)
    with other.expect_request("**/v1/chat/completions") as sent:
        other.keyboard.press("Alt+r")
    assert base64.b64decode(parts_of(sent.value)[0]["image_url"]["url"].partition(",")[2]) == data


@pytest.mark.slow
def test_media_that_a_full_browser_cannot_keep_are_named(open_seeing: Any) -> None:
    page = open_seeing()
    page.evaluate(FULL_STORAGE)
    attach(page, "lost.png", picture(60, 40))
    expect(page.locator("#tray li")).to_have_count(1)
    ask(page, "Hello")
    expect(page.locator(".toast")).to_contain_text("lost.png will be lost when this tab is closed")
    expect(page.locator(".picture img")).to_have_count(1)
    page.reload()
    expect(page.locator(".lost")).to_have_text("lost.png is not kept in this browser. The model no longer sees it.")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "And now?", 2)
    assert [message["content"] for message in sent.value.post_data_json["messages"]][::2] == ["Hello", "And now?"]


FIRST_VERSION = """() => new Promise((resolve) => {
  indexedDB.deleteDatabase("culet");
  const request = indexedDB.open("culet", 1);
  request.onupgradeneeded = () => {
    request.result.createObjectStore("conversations", { keyPath: "id" });
    request.result.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
  };
  request.onsuccess = () => {
    const transaction = request.result.transaction(["conversations", "messages"], "readwrite");
    transaction.objectStore("conversations").put({ id: "old", title: "Old chat", created: 1, updated: 1, head: "m" });
    const message = { id: "m", conversation: "old", parent: null, role: "user", content: "Hi", created: 1 };
    transaction.objectStore("messages").put(message);
    transaction.oncomplete = () => resolve(request.result.close());
  };
})"""


@pytest.mark.slow
def test_conversations_of_an_older_page_are_kept(seeing: Running, open_page: OpenPage) -> None:
    page = open_page(seeing)
    page.evaluate(FIRST_VERSION)
    page.reload()
    page.get_by_role("link", name="Old chat").click()
    expect(page.locator("#messages .user .body")).to_have_text("Hi")
