"""Prompts: placeholders become the tokens that transformers' processor writes."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest

import culet
from culet.errors import BadRequest
from culet.media.items import MediaItem, MediaKind, Medium
from culet.media.prompt import expand_prompt, timestamp
from culet.media.spec import MediaSpec, MediaTokens, num_mel_frames, num_mel_tokens
from culet.text.tokenizer import Tokenizer
from tests.media.make_golden import CLIPS, VIDEO_RATE

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text(encoding="utf-8"))
PROMPT = GOLDEN["prompt"]
FOLDER = Path(culet.__file__).parent / "embedded/target"
SPEC = MediaSpec(frozenset(MediaKind), is_whole=True, tokens=MediaTokens(**PROMPT["tokens"]))


def item(kind: MediaKind, num_tokens: int, key: bytes = b"k") -> MediaItem:
    return MediaItem(kind, key, num_tokens, (), b"")


def image(num_tokens: int, key: bytes = b"k") -> Medium:
    return Medium(MediaKind.IMAGE, (item(MediaKind.IMAGE, num_tokens, key),))


def encode(text: str) -> list[int]:
    return [PROMPT["characters"][letter] for letter in text]


def no_text(text: str) -> list[int]:
    raise AssertionError("nothing is tokenized without a video")


def runs(token_ids: tuple[int, ...]) -> list[list[int]]:
    return [[token_id, len(list(group))] for token_id, group in groupby(token_ids)]


def test_prompts_are_those_of_transformers():
    indices = GOLDEN["video"]["indices"]
    audio = Medium(MediaKind.AUDIO, (item(MediaKind.AUDIO, num_mel_tokens(num_mel_frames(CLIPS[2])), b"a"),))
    frames = tuple(item(MediaKind.VIDEO, 66, b"%d" % index) for index in indices)
    video = Medium(MediaKind.VIDEO, frames, tuple(index / VIDEO_RATE for index in indices))
    media = [image(63, b"1"), video, image(64, b"2"), audio]  # each kind in its own order
    expanded = expand_prompt(PROMPT["before"], media, SPEC, encode)
    assert runs(expanded.token_ids) == PROMPT["after"]
    # The spans are the runs of soft tokens, in transformers' numbering: 1 image, 2 video, 3 audio.
    kinds = {MediaKind.IMAGE: 1, MediaKind.VIDEO: 2, MediaKind.AUDIO: 3}
    types = [0] * len(expanded.token_ids)
    for span, filled in zip(expanded.spans, expanded.items, strict=True):
        assert span.length == filled.num_tokens
        assert span.key == filled.key
        assert span.is_whole == (filled.kind != MediaKind.AUDIO)
        types[span.start : span.end] = [kinds[filled.kind]] * span.length
    assert runs(tuple(types)) == PROMPT["types"]
    assert [span.key for span in expanded.spans[:3]] == [b"1", b"a", b"2"]
    split = expand_prompt(PROMPT["before"], media, MediaSpec(tokens=SPEC.tokens), encode)
    assert not any(span.is_whole for span in split.spans)


def test_split_audio_has_marks_around_each_part():
    tokens = MediaTokens()
    parts = Medium(MediaKind.AUDIO, (item(MediaKind.AUDIO, 3), item(MediaKind.AUDIO, 2)))
    expanded = expand_prompt([5, tokens.audio, 6], [parts], MediaSpec(), no_text)
    begin, soft, end = tokens.audio_begin, tokens.audio, tokens.audio_end
    assert expanded.token_ids == (5, begin, soft, soft, soft, end, begin, soft, soft, end, 6)
    assert [(span.start, span.length) for span in expanded.spans] == [(2, 3), (7, 2)]


def test_times():
    assert [timestamp(seconds) for seconds in (0, 59.99, 60, 3599, 6000.5)] == ["00:00", "00:59", "01:00", "59:59", "100:00"]


def test_placeholders_in_text_do_not_become_media():
    """Trap 13: without media they stay tokens. With media the numbers must agree."""
    tokens = MediaTokens()
    prompt = [5, tokens.image, 6, tokens.audio]
    assert expand_prompt(prompt, [], MediaSpec(), no_text).token_ids == tuple(prompt)
    with pytest.raises(BadRequest, match="got 1 placeholders for 0 media of kind audio"):
        expand_prompt(prompt, [image(4)], MediaSpec(), no_text)
    with pytest.raises(BadRequest, match="got 2 placeholders for 1 media of kind image"):
        expand_prompt([tokens.image, tokens.image], [image(4)], MediaSpec(), no_text)
    with pytest.raises(BadRequest, match="got 0 placeholders for 1 media of kind image"):
        expand_prompt([5], [image(4)], MediaSpec(), no_text)


def test_times_are_tokenized_alone_as_in_their_text():
    """Digits are tokens of their own, so the time after a text gives the same tokens as within it."""
    tokenizer = Tokenizer(FOLDER)
    for text in ("Describe", "Describe ", "1", "user\n", "a:"):
        assert tokenizer.encode(text + "00:07 ") == tokenizer.encode(text) + tokenizer.encode("00:07 ")
