"""Short chats by the teacher, appended to a JSONL file as they end. A second run skips prompts already in the file.

python -m training.data.distill [--device cuda --slots 1024] [--seed N] [--minutes M] [--out out/distilled/chats.jsonl]

A line is {"kind": ..., "turns": [user, answer, ...]}. `filters.py` decides what to keep when the chats are packed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from training.data.filters import good_answer
from training.data.questions import Prompt, prompts
from training.data.sources import OUT, fetch_teacher
from training.data.teacher import Teacher, chat_text


@dataclass
class Chat:
    """A chat in progress."""

    prompt: Prompt
    turns: list[str] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        roles = ("user", "assistant")
        return [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(self.turns)]


class Interview:
    """Feeds the teacher with open chats first, then new prompts, until the time is up."""

    def __init__(self, waiting: list[Prompt], deadline: float) -> None:
        self._waiting, self._open, self._deadline = iter(waiting), deque[Chat](), deadline

    def ask(self) -> Iterator[tuple[Chat, str, str]]:
        while time.monotonic() < self._deadline:
            if self._open:
                chat = self._open.popleft()
            else:
                prompt = next(self._waiting, None)
                if prompt is None:
                    return
                chat = Chat(prompt, [prompt.first])
            yield chat, chat.prompt.system, chat_text(chat.messages)

    def take(self, chat: Chat, answer: str | None) -> Chat | None:
        """Add an answer. Return the chat if this ends it, because it was the last turn or the answer is bad."""
        is_good = answer is not None and good_answer(chat.turns[-1], answer.strip(), chat.prompt.kind)
        if is_good:
            assert answer is not None
            chat.turns.append(answer.strip())
            asked = len(chat.turns) // 2 - 1
            if asked < len(chat.prompt.follow_ups):
                chat.turns.append(chat.prompt.follow_ups[asked])
                self._open.append(chat)
                return None
        else:
            chat.turns.pop()
        return chat if chat.turns else None


def done_firsts(path: Path) -> set[str]:
    """Return the first turns already asked."""
    return {json.loads(line)["turns"][0] for line in path.read_text().splitlines()} if path.exists() else set()


def main() -> None:
    """Distil until the prompts or the minutes run out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--teacher", type=Path, default=OUT / "teacher.gguf")
    parser.add_argument("--out", type=Path, default=OUT / "distilled" / "chats.jsonl")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--slots", type=int, default=192)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=600)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.device == "cpu":
        torch.set_num_threads(1)
    done = done_firsts(options.out)
    waiting = [prompt for prompt in prompts(options.seed) if prompt.first not in done]
    print(f"{len(done)} chats done, {len(waiting)} prompts to ask", flush=True)
    teacher = Teacher(fetch_teacher(options.teacher), device=options.device, num_slots=options.slots)
    start = time.monotonic()
    interview = Interview(waiting, start + 60 * options.minutes)
    num_answers = num_written = 0
    with options.out.open("a") as out:
        for chat, answer in teacher.answers(interview.ask(), seed=options.seed + len(done)):
            num_answers += 1
            finished = interview.take(chat, answer)
            if finished is not None:
                out.write(json.dumps({"kind": finished.prompt.kind, "turns": finished.turns}) + "\n")
                out.flush()
                num_written += 1
            if num_answers % 200 == 0:
                print(
                    f"{num_answers} answers, {num_written} chats, {num_answers / (time.monotonic() - start):.2f} answers/s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
