"""Conversations of several turns, which find out how often a later turn finds its prefix in a cache."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

OPENING_LEN = 16  # tokens that open the model's turn, at most


@dataclass(frozen=True)
class Turn:
    """One answer of a conversation."""

    conversation: int
    turn: int  # from 0
    num_prompt: int
    num_cached: int
    error: str = ""


def talk(
    post: Callable[[dict[str, Any]], httpx.Response], num_conversations: int = 40, num_turns: int = 5, num_threads: int = 6
) -> list[Turn]:
    """Hold conversations, several at once, and return all turns. `post` sends a chat request."""
    turns: list[Turn] = []
    lock = threading.Lock()

    def hold(conversation: int) -> None:
        messages: list[dict[str, str]] = []
        for number in range(num_turns):
            question = f"Conversation {conversation}: what is {conversation} plus {number}? Please answer at some length."
            messages.append({"role": "user", "content": question})
            answer = post({"messages": messages, "max_tokens": 6, "temperature": 0})
            if answer.status_code != 200:
                with lock:
                    turns.append(Turn(conversation, number, 0, 0, answer.text))
                return
            body = answer.json()
            usage = body["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            with lock:
                turns.append(Turn(conversation, number, usage["prompt_tokens"], cached))
            messages.append({"role": "assistant", "content": body["choices"][0]["message"]["content"] or "Yes."})

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(hold, range(num_conversations)))
    return turns


def hit_share(turns: list[Turn]) -> float:
    """Return the share of later turns that found the prompt of the turn before, except for what opens the model's turn."""
    lengths = {(turn.conversation, turn.turn): turn.num_prompt for turn in turns}
    later = [turn for turn in turns if turn.turn]
    hits = [turn.num_cached >= lengths[turn.conversation, turn.turn - 1] - OPENING_LEN for turn in later]
    return sum(hits) / max(1, len(hits))
