"""Messages between processes: any split of the bytes gives the same messages, and invalid bytes raise."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.config import ScheduleConfig, build_config
from culet.engine.requests import resolve_sampling
from culet.errors import InternalError, QueueFull
from culet.frames import FrameReader, frame
from culet.serve.process.wire import (
    Cancel,
    Deltas,
    Script,
    Start,
    Stop,
    Submit,
    command_decoder,
    report_decoder,
)
from culet.testing.fake_engine import FakeEngine
from culet.types import FinishReason, ModelDefaults, Request, SamplingParams, TokenDelta


def make_request(name: str = "0", max_tokens: int = 4, n: int = 1, deadline: float | None = None) -> Request:
    sampling = resolve_sampling(SamplingParams(seed=1, logit_bias={3: -1.5}), ModelDefaults(suppress_token_ids=(7,)), 512)
    rest = {"priority": -3, "deadline": deadline, "resume_lengths": (1, 2)}
    return Request(name, (2, 5, 9), sampling, n, max_tokens, frozenset({1, 106}), **rest)


COMMANDS = [
    Start(build_config({"model": "x", "max_num_seqs": 3}), script=Script(((1, 2), (3,)))),
    Submit(make_request()),
    Cancel("0", 1, FinishReason.STOP),
    Stop(),
]


@given(st.lists(st.integers(0, 2000), max_size=12))
def test_any_split(cuts: list[int]) -> None:
    data = b"".join(bytes(frame(command)) for command in COMMANDS)
    reader, messages = FrameReader(command_decoder), []
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for begin, end in itertools.pairwise(edges):
        messages += reader.push(data[begin:end])
    assert messages == COMMANDS


def test_a_request_arrives_as_it_was() -> None:
    request = make_request(deadline=12.5)
    (message,) = FrameReader(command_decoder).push(bytes(frame(Submit(request))))
    assert message.request == request
    assert message.request.sampling.logit_bias[-1] == (7, float("-inf"))


def test_deltas() -> None:
    plain = TokenDelta("7", 0, (5,))
    last = TokenDelta("7", 1, (5, 6), ({5: -0.5, 8: float("-inf")}, {6: -1.0}), ({2: -3.0},), FinishReason.LENGTH, 3)
    failed = TokenDelta("8", 0, (), finish_reason=FinishReason.ERROR, error="broken", queue_s=0.5)
    drafted = TokenDelta("9", 0, (1, 2), (), (), FinishReason.STOP, 0, 2, "", 0.0, 1, 3)
    sent = Deltas([plain, last, failed, drafted])
    assert FrameReader(report_decoder).push(bytes(frame(sent))) == [sent]


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x02\x93\x01", b"\x00\x00\x00\x01\xc0"])
def test_invalid_bytes_are_refused(data: bytes) -> None:
    with pytest.raises((InternalError, msgspec.MsgspecError)):
        FrameReader(command_decoder).push(data)


def drive(engine: FakeEngine) -> dict[int, tuple[list[int], FinishReason | None]]:
    outputs: dict[int, tuple[list[int], FinishReason | None]] = {}
    while engine.has_work:
        for delta in engine.step():
            tokens, _ = outputs.get(delta.sample, ([], None))
            outputs[delta.sample] = ([*tokens, *delta.token_ids], delta.finish_reason)
    return outputs


def test_the_fake_engine_follows_the_rules() -> None:
    schedule = ScheduleConfig(max_num_seqs=2, max_queue_len=3)
    engine = FakeEngine(Script(((10, 11), (20, 1, 21)), tokens_per_step=2), schedule)
    engine.add(make_request("a", max_tokens=5, n=3))
    assert drive(engine) == {sample: ([10, 11, 10, 11, 10], FinishReason.LENGTH) for sample in range(3)}
    engine.add(make_request("b"))
    assert drive(engine) == {0: ([20, 1], FinishReason.STOP)}
    engine.add(make_request("c", n=5))
    with pytest.raises(QueueFull):
        engine.add(make_request("d"))
    engine.step()
    assert engine.stats().num_held_pages == {"fake": 2}
    engine.cancel("c", 0, FinishReason.STOP)
    engine.cancel("c")
    assert {delta.finish_reason for delta in engine.step()} == {FinishReason.STOP, FinishReason.CANCEL}
    assert not engine.has_work
    stats = engine.stats()
    assert (stats.num_free_pages, stats.counters.cancelled) == (stats.num_pages, 4)
    engine.add(make_request("late", deadline=0.0))
    assert drive(engine) == {0: ([], FinishReason.TIMEOUT)}
