"""Tokens and text: the tokenizer, incremental decoding, and stop strings."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, trainers

from culet.errors import BadRequest, CheckpointError
from culet.text.stops import StopMatcher
from culet.text.tokenizer import IncrementalDecoder, Tokenizer, check_token_ids

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", '<|"|>', "<|think|>"]
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "model", "said", "hello", "world", "café", "naïve"]


def write_tokenizer(folder, decoder=None):
    """Write a small BPE tokenizer like Gemma's: spaces as U+2581, unknown characters as byte tokens, and special tokens."""
    learner = tokenizers.Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "\u2581")
    learner.train_from_iterator(
        [" " + word for word in WORDS] + WORDS, trainers.BpeTrainer(vocab_size=120, show_progress=False)
    )
    learnt = learner.get_vocab()
    merges = [tuple(merge) for merge in json.loads(learner.to_str())["model"]["merges"]]
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(learnt, key=learnt.__getitem__), "\n"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoder or decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(our tokenizer, the library's)"""
    folder = tmp_path_factory.mktemp("tokenizer")
    theirs = write_tokenizer(folder)
    return Tokenizer(folder), theirs


# The tokenizer


def test_encode_adds_no_special_tokens(both):
    ours, _ = both
    bos = ours.token_id("<bos>")
    ids = ours.encode("hello world")
    assert bos not in ids
    assert ours.encode("hello world", add_bos=True) == [bos, *ids]
    assert ours.encode("<bos>hello world", add_bos=True) == [bos, *ids]
    assert ours.encode("", add_bos=True) == [bos]


def test_special_tokens(both):
    ours, theirs = both
    ids = ours.encode("<|turn>user\nhello<turn|>\n")
    assert ids[0] == ours.token_id("<|turn>")
    assert ours.token_id("<turn|>") in ids
    assert ours.decode(ids) == "user\nhello\n"
    assert ours.decode(ids, skip_special=False) == "<|turn>user\nhello<turn|>\n"
    assert ours.token_id("<no such token>") is None
    assert ours.special_ids == {ours.token_id(name) for name in SPECIAL}
    assert ours.vocab_size == theirs.get_vocab_size()


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_round_trip(both, text):
    ours, theirs = both
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False).ids
    expected = text.replace("\u2581", " ")  # such a tokenizer cannot represent this character
    assert ours.decode(ids, skip_special=False) == expected
    assert theirs.decode(ids, skip_special_tokens=False) == expected


def test_ids_beyond_the_vocabulary_have_no_text(both):
    ours, _ = both
    ids = ours.encode("the fox")
    assert ours.decode([*ids, ours.vocab_size + 5, 10**6]) == "the fox"


@pytest.mark.parametrize("prompt", ["half \ud800 pair", 3, None, b"bytes"])
def test_invalid_text_is_refused(both, prompt):
    with pytest.raises(BadRequest, match="prompt"):
        both[0].encode(prompt)


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(CheckpointError, match="file not found") as caught:
        Tokenizer(tmp_path)
    assert "tokenizer.json" in caught.value.hint
    for content in ("", "{", "[]", '{"model": 3}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(CheckpointError, match="cannot read the tokenizer"):
            Tokenizer(tmp_path)


def test_other_decoders_are_refused(tmp_path):
    write_tokenizer(tmp_path, decoders.WordPiece())
    with pytest.raises(CheckpointError, match="WordPiece"):
        Tokenizer(tmp_path)


def test_check_token_ids():
    import numpy as np

    assert check_token_ids([1, np.int64(5), 9], 10) == (1, 5, 9)
    for bad in ([10], [-1], [1, "2"], [1.0], [True], [None]):
        with pytest.raises(BadRequest, match=r"prompt\[\d\]: got .* expected a token id from 0 to 9"):
            check_token_ids(bad, 10)
    with pytest.raises(BadRequest, match="no tokens"):
        check_token_ids([], 10)


# Decoding token by token


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_pieces_add_up_and_hold_no_half_characters(both, data):
    ours, _ = both
    text = data.draw(st.text(st.sampled_from("the fox 你好🎉é\n👩\u200d👩\u200d👧"), max_size=30))
    ids = ours.encode(text)
    decoder = IncrementalDecoder(ours, skip_special=False)
    given_out, index = "", 0
    while index < len(ids):
        step = data.draw(st.integers(1, 4))
        piece = decoder.push(ids[index : index + step])
        index += step
        assert "\ufffd" not in piece
        given_out += piece
        assert text.startswith(given_out)
    assert decoder.flush() == ""
    assert given_out == text


def test_a_character_appears_with_its_last_byte(both):
    ours, _ = both
    ids = ours.encode("🎉")
    assert len(ids) == 4
    decoder = IncrementalDecoder(ours)
    assert [decoder.push([token_id]) for token_id in ids] == ["", "", "", "🎉"]


def test_bytes_that_never_become_a_character(both):
    ours, _ = both
    byte = {value: ours.token_id(f"<0x{value:02X}>") for value in range(256)}
    decoder = IncrementalDecoder(ours)
    assert decoder.push([byte[0xF0], byte[0x9F]]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.push(ours.encode("fox")) == "fox"  # the decoder can be used again
    # A bad byte does not affect its neighbours.
    assert ours.decode([byte[0xE4], byte[0xBD], byte[0xA0], byte[0xFF], *ours.encode("the")]) == "你\ufffdthe"


def test_special_tokens_are_hidden_or_kept(both):
    ours, _ = both
    ids = ours.encode("the<turn|>")
    for skip_special, expected in ((True, "the"), (False, "the<turn|>")):
        decoder = IncrementalDecoder(ours, skip_special=skip_special)
        assert "".join(decoder.push([token_id]) for token_id in ids) + decoder.flush() == expected


def test_cost_per_token_does_not_grow(both):
    """Each token is looked up once, and at most the start of one character is kept, even if no character is ever completed."""
    ours, _ = both
    token_ids = [ours.token_id(name) for name in ("<0x80>", "<0xF0>", "<0x9F>", "<0x98>")] * 500
    lookups = []
    counting = SimpleNamespace(
        special_ids=ours.special_ids, piece=lambda token_id: lookups.append(token_id) or ours.piece(token_id)
    )
    decoder = IncrementalDecoder(counting)
    for token_id in token_ids:
        decoder.push([token_id])
        kept, _ = decoder._utf8.getstate()
        assert len(kept) <= 3
    assert lookups == token_ids


# Stop strings


def stop_by_definition(text: str, stops: list[str]) -> tuple[str, bool]:
    """Return (text before the first complete stop string, whether there is one)."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return (text[: min(found)[1]], True) if found else (text, False)


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("ab\n", max_size=24),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=6), max_size=4),
    cuts=st.lists(st.integers(0, 24), max_size=8),
)
def test_stops_at_every_split(text, stops, cuts):
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    matcher = StopMatcher(stops)
    given_out, is_met = "", False
    for begin, end in pairwise(borders):
        piece, is_met = matcher.push(text[begin:end])
        given_out += piece
        if not is_met:
            seen = text[:end]
            held = seen[len(given_out) :]
            # Only the longest suffix that may start a stop string is held back.
            longest = max((k for stop in stops for k in range(len(stop)) if seen.endswith(stop[:k])), default=0)
            assert len(held) == longest
    if not is_met:
        given_out += matcher.flush()
    assert (given_out, is_met) == stop_by_definition(text, stops)


def test_every_split_of_one_text():
    text, stops = "Once upon a time. User: and then\nUser", ["\nUser:", "User:"]
    for first in range(len(text)):
        for second in range(first, len(text)):
            matcher = StopMatcher(stops)
            parts = [matcher.push(part) for part in (text[:first], text[first:second], text[second:])]
            assert "".join(piece for piece, _ in parts) == "Once upon a time. "
            assert parts[-1][1]
            assert matcher.matched == "User:"


def test_nothing_follows_a_stop():
    matcher = StopMatcher(["END"])
    assert matcher.push("text EN") == ("text ", False)
    assert matcher.push("D more") == ("", True)
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ""


def test_without_stop_strings_everything_passes():
    matcher = StopMatcher([])
    assert matcher.push("anything") == ("anything", False)
    assert matcher.flush() == ""


def lines_run(call: Callable[[], object]) -> int:
    """Return the number of Python lines that a call runs. Unlike time, this cost does not depend on the machine's load."""
    count = 0

    def trace(frame: object, event: str, _: object) -> Callable[..., object]:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_long_stop_strings_cost_no_more():
    def push_all(length: int) -> int:
        matcher = StopMatcher(["a" * length + "b", "a" * (length - 1) + "c"])
        texts: list[str] = []
        cost = lines_run(lambda: texts.extend(matcher.push("a")[0] for _ in range(3000)))
        assert len("".join(texts)) == 3000 - length
        return cost

    assert push_all(1000) < 1.5 * push_all(10)
