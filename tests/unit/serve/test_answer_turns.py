"""Long work takes turns with everything else, answers are counted, and large messages between processes are divided."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from culet.errors import BadRequest, QueueFull
from culet.limits import Limits
from culet.models.embedded import embedded_folder
from culet.serve.answers.limits import AnswerLimits
from culet.serve.answers.parts import MESSAGE_BYTES, BigAnswer, in_messages
from culet.serve.answers.turns import Turns, json_size
from culet.serve.api.openai.answers import TextColumns, TextLogprobs, write_columns
from culet.serve.process.wire import MAX_SCORES, in_parts
from culet.text.tokenizer import BorrowedTokenizer
from culet.types import FinishReason, TokenDelta

MEGABYTE = 1 << 20


def test_other_tasks_run_between_turns() -> None:
    """However many tasks have long work, one turn is taken between two runs of any other task."""
    taken: list[int] = []

    def steps(number: int) -> Iterator[int]:
        for step in range(200):
            taken.append(number)
            yield step

    async def main() -> None:
        turns = Turns(turn_s=0.0)  # one step per turn
        most, seen = 0, 0
        work = [asyncio.create_task(turns.finish(steps(number))) for number in range(10)]
        while not all(task.done() for task in work):
            await asyncio.sleep(0)
            most, seen = max(most, len(taken) - seen), len(taken)
        assert most <= 2
        assert len(taken) == 2000
        assert set(taken[:40]) == set(range(10)), "turns are shared"

    asyncio.run(main())


class Counted(dict[str, Any]):
    """Counts how many of its keys and values are read."""

    num_read = 0

    def _count(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.num_read += 1
            yield item

    def __iter__(self) -> Iterator[str]:
        return self._count(super().__iter__())

    def values(self) -> Any:
        return self._count(super().values())


def test_the_size_of_json_is_measured_up_to_a_limit() -> None:
    value = {"a": ["x" * 100, 5, None, {"b": True}], "c" * 50: {}}
    *_, size = json_size(value, 1 << 20)
    assert 150 < size < 300
    wide = Counted({f"k{index}": {"type": "string"} for index in range(100_000)})
    *_, size = json_size(wide, 10_000)
    assert size < 11_000
    assert 0 < wide.num_read <= 10_000 / 2 + 1  # each adds 2 or more, and no other is read


def test_answers_are_counted() -> None:
    limits = AnswerLimits(Limits(answer_mb=2, answers_mb=3))
    limits.check(2 * MEGABYTE, "n")
    with pytest.raises(BadRequest, match=r"3 MB.*maximum is 2 MB") as caught:
        limits.check(3 * MEGABYTE, "n")
    assert "answer_mb" in caught.value.hint
    first, second = limits.open(), limits.open()
    first.add(2 * MEGABYTE)
    with pytest.raises(BadRequest):
        first.add(1)
    second.add(MEGABYTE)
    with pytest.raises(QueueFull, match="3 MB"):
        second.add(1)
    first.close()
    second.add(MEGABYTE)
    second.close()
    assert limits.num_bytes == 0


def test_messages_have_a_moderate_size() -> None:
    parts = [b"a" * 10, bytearray(b"b" * (3 * MESSAGE_BYTES)), b"", b"c" * 100]
    messages = list(in_messages(parts))
    assert b"".join(messages) == b"".join(parts)
    assert max(map(len, messages)) <= MESSAGE_BYTES
    assert len(messages) == 4


def test_columns_are_the_json_of_text_logprobs() -> None:
    import msgspec

    tokenizer = BorrowedTokenizer(embedded_folder("built-in"), 10_000)
    prompt = TextColumns(tokenizer, 2)
    prompt.add(9005, None)
    prompt.add(9017, {9017: -0.5, 9003: -1.0, 9004: -2.0})
    answer = TextColumns(tokenizer, 2, prompt.offset)
    answer.add(9008, {9008: float("-inf")})
    decoded = msgspec.json.decode(b"".join(write_columns([prompt, answer])), type=TextLogprobs)
    assert decoded.tokens == [" 9005", " 9017", " 9008"]
    assert decoded.token_logprobs == [None, -0.5, -9999.0]
    assert decoded.top_logprobs == [None, {" 9017": -0.5, " 9003": -1.0}, {" 9008": -9999.0}]
    assert decoded.text_offset == [0, 5, 10]
    empty = msgspec.json.decode(b"".join(write_columns([])), type=TextLogprobs)
    assert empty.tokens == []


def test_the_scores_of_a_long_prompt_cross_in_several_messages() -> None:
    scores = tuple({index: -1.0, index + 1: -2.0} for index in range(10_000))
    delta = TokenDelta("1", 0, (7,), ({7: -0.1},), scores, FinishReason.LENGTH, num_cached_tokens=3)
    other = TokenDelta("2", 0, (8,))
    parts = [part.deltas for part in in_parts([other, delta, other])]
    assert len(parts) >= 5
    assert all(sum(map(len, (score for delta in part for score in delta.prompt_logprobs))) <= MAX_SCORES + 2 for part in parts)
    pieces = [delta for part in parts for delta in part if delta.request_id == "1"]
    assert tuple(score for piece in pieces for score in piece.prompt_logprobs) == scores
    assert [piece.token_ids for piece in pieces] == [()] * (len(pieces) - 1) + [(7,)]
    assert pieces[-1].finish_reason is FinishReason.LENGTH
    assert pieces[-1].num_cached_tokens == 3
    assert [part.deltas for part in in_parts([other, other])] == [[other, other]], "usually there is one message"


@pytest.mark.parametrize("size", [1, MESSAGE_BYTES - 1, MESSAGE_BYTES, 2 * MESSAGE_BYTES, 3 * MESSAGE_BYTES + 7])
def test_the_last_byte_of_an_answer_ends_the_response(size: int) -> None:
    """A client may send its next request as soon as it has read the answer. The response must have ended by then."""
    sent: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    asyncio.run(BigAnswer([b"x" * size])({"type": "http"}, None, send))  # type: ignore[arg-type]
    assert sum(len(message["body"]) for message in sent[1:]) == size  # type: ignore[arg-type]
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    assert sent[-1]["body"]
