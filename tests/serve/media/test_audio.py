"""OpenAI's audio API, with the official client: transcriptions, translations, streams, and what is refused."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile

from culet.testing.tiny import write_checkpoint
from culet.text.tokenizer import Tokenizer
from tests.serve.running import Running

SAID = "The gem has a small facet."


def recording(seconds: float = 1.0) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.sin(np.arange(int(16000 * seconds)) / 10), 16000, format="WAV")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"), "E4B", towers=True)
    script = {"answers": [Tokenizer(folder).encode(f"{SAID}<turn|>")]}
    with Running(folder, script=script, settings={"allowed_origins": "https://good.example"}) as running:
        yield running


def test_a_transcription(server: Running) -> None:
    client = server.openai()
    answer = client.audio.transcriptions.create(
        model="gemma", file=("speech.wav", recording()), language="en", prompt="Culet", temperature=0.2
    )
    assert answer.text == SAID
    assert answer.usage is not None
    assert answer.usage.type == "tokens"
    details = answer.usage.input_token_details
    assert (details.audio_tokens, answer.usage.input_tokens) == (25 + 2, details.audio_tokens + details.text_tokens)
    short = client.audio.transcriptions.create(model="gemma", file=recording())
    assert short.usage.input_tokens < answer.usage.input_tokens  # the language and the prompt are in the request
    text: Any = client.audio.transcriptions.create(model="gemma", file=recording(), response_format="text")
    assert text == SAID


def test_a_stream(server: Running) -> None:
    events = list(server.openai().audio.transcriptions.create(model="gemma", file=recording(), stream=True))
    assert {event.type for event in events[:-1]} == {"transcript.text.delta"}
    assert "".join(event.delta for event in events[:-1]) == SAID
    last = events[-1]
    assert (last.type, last.text, last.usage.output_tokens > 3) == ("transcript.text.done", SAID, True)


def test_a_translation(server: Running) -> None:
    assert server.openai().audio.translations.create(model="gemma", file=recording()).text == SAID


def test_a_long_recording_is_split(server: Running) -> None:
    answer = server.openai().audio.transcriptions.create(model="gemma", file=recording(31))
    assert answer.usage.input_token_details.audio_tokens == (750 + 2) + (25 + 2)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"response_format": "verbose_json"}, "response_format"),
        ({"response_format": "srt"}, "response_format"),
        ({"timestamp_granularities": ["word"], "response_format": "json"}, "timestamp_granularities"),
        ({"include": ["logprobs"]}, "include"),
        ({"chunking_strategy": "auto"}, "chunking_strategy"),
        ({"language": "<|turn>"}, "language"),
        ({"temperature": 1000}, "temperature"),
        ({"stream": True, "response_format": "text"}, "response_format"),
        ({"file": b"not audio"}, "file"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(server: Running, fields: dict[str, Any], problem: str) -> None:
    given: dict[str, Any] = {"model": "gemma", "file": recording(), **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai().audio.transcriptions.create(**given)
    assert caught.value.response.json()["error"]["message"].startswith(f"{problem}: ")


def test_a_model_that_does_not_hear(fake: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="reads only text"):
        fake.openai().audio.transcriptions.create(model="gemma", file=recording())


def test_forms_are_read_within_bounds(server: Running) -> None:
    def post(body: bytes, **headers: str) -> httpx.Response:
        given = {"content-type": "multipart/form-data; boundary=b", **headers}
        return server.http.post("/v1/audio/transcriptions", content=body, headers=given)

    part = b'--b\r\ncontent-disposition: form-data; name="%s"\r\n\r\nx\r\n'
    broken = (b"", b"--b", b"--b\r\n\r\n\r\n--b--", part % b"file", (part % b"a") * 2 + b"--b--")
    many = b"".join(part % b"a%d" % number for number in range(100)) + b"--b--"
    for body in (*broken, many):
        assert post(body).status_code == 400
    assert post(b"--b--", **{"content-type": "application/json"}).status_code == 415
    assert post(b"--b--", **{"content-type": "multipart/form-data"}).status_code == 400
    assert post(b"x" * (17 << 20)).status_code == 413
    assert server.chat().status_code == 200


def test_pages_of_other_origins_cannot_send_forms(server: Running) -> None:
    """A browser sends a form of any page without asking first, so the server looks where it comes from."""
    files = {"file": recording(), "model": (None, "gemma")}
    origins = {"https://evil.example": 403, "null": 403, "https://good.example": 200, server.url: 200}
    for origin, status in origins.items():
        reply = server.http.post("/v1/audio/transcriptions", files=files, headers={"origin": origin})
        assert reply.status_code == status, origin
