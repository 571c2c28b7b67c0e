"""Stop strings and stop tokens end to end: where text and tokens end in results and in streams."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest

from culet import LLM, SamplingParams
from culet.testing.tiny import write_checkpoint


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = write_checkpoint(tmp_path_factory.mktemp("tiny"), "E4B")
    return LLM(str(folder), device="cpu", max_model_len=512)


PROMPT = "Tell me a story about a diamond."
PARAMS = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module")
def text(llm: LLM) -> str:
    """A text without stops, long and varied enough to cut in many places."""
    [result] = llm.generate(PROMPT, SamplingParams(**PARAMS))
    assert len(result.text) > 60
    assert len(set(result.token_ids)) > 15
    return result.text


def run(llm: LLM, **changes: object) -> tuple[str, str, int]:
    """Return (text, finish reason, number of tokens), after checking that generate and a stream agree."""
    params = SamplingParams(**{**PARAMS, **changes})
    [result] = llm.generate(PROMPT, params)
    deltas = list(llm.stream(PROMPT, params))
    assert "".join(delta.text for delta in deltas) == result.text
    assert deltas[-1].finish_reason == result.finish_reason
    assert sum(len(delta.token_ids) for delta in deltas) == len(result.token_ids)
    return result.text, result.finish_reason, len(result.token_ids)


def check_stops(llm: LLM, text: str, places: Iterable[tuple[int, int]]) -> None:
    """Check that any part of the text used as a stop string ends the text before its first occurrence."""
    for begin, length in places:
        stop = text[begin : begin + length]
        got, reason, num_tokens = run(llm, stop=stop)
        assert got == text[: text.index(stop)], stop
        assert reason == "stop"
        assert num_tokens <= 60


def test_stop_strings_anywhere(llm: LLM, text: str) -> None:
    """The strings are aligned with tokens or not."""
    step = len(text) // 9
    check_stops(llm, text, zip(range(0, len(text) - 8, step), itertools.cycle((7, 2, 1)), strict=False))


@pytest.mark.slow
def test_stop_strings_at_every_position(llm: LLM, text: str) -> None:
    check_stops(llm, text, itertools.product(range(0, len(text) - 8, 13), (1, 2, 7)))


def test_the_first_of_several(llm: LLM, text: str) -> None:
    stops = [text[40:44], text[20:24], text[30:33]]
    got, reason, _ = run(llm, stop=stops)
    assert got == text[: min(text.index(stop) for stop in stops)]
    assert reason == "stop"


def test_a_stop_string_that_never_completes_holds_nothing_back(llm: LLM, text: str) -> None:
    assert run(llm, stop=text[-3:] + "\u0000never") == (text, "length", 60)


def test_stop_token_ids(llm: LLM, text: str) -> None:
    [plain] = llm.generate(PROMPT, SamplingParams(**PARAMS))
    wanted = plain.token_ids[20]
    first = plain.token_ids.index(wanted)
    got, reason, num_tokens = run(llm, stop_token_ids=[wanted])
    assert num_tokens == first + 1
    assert got == llm.engine.tokenizer.decode(plain.token_ids[:first])
    assert reason == "stop"


def test_none_means_no_stops(llm: LLM, text: str) -> None:
    assert run(llm, stop=None, stop_token_ids=None)[0] == text
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()


def test_one_sample_stops_and_the_others_continue(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=5, max_tokens=40, ignore_eos=True)
    [plain] = llm.generate(PROMPT, params)
    stop = plain.samples[2].text[10:16]
    assert all(stop not in sample.text for index, sample in enumerate(plain.samples) if index != 2)
    [result] = llm.generate(PROMPT, SamplingParams(n=4, seed=5, max_tokens=40, ignore_eos=True, stop=[stop]))
    for index, (got, whole) in enumerate(zip(result.samples, plain.samples, strict=True)):
        if index == 2:
            assert (got.text, got.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
        else:
            assert (got.text, got.token_ids, got.finish_reason) == (whole.text, whole.token_ids, "length")


def test_pages_come_back_after_stops(llm: LLM, text: str) -> None:
    run(llm, stop=text[15:18])
    stats = llm.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_pages + stats.num_resume_point_pages == stats.num_pages
