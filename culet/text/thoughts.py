"""Find thoughts by the tokens around them, and count their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from culet.text.tokenizer import Tokenizer

OPENS, CLOSES, OPENS_CALL = "<|channel>", "<channel|>", "<|tool_call>"
END_TOKENS = ("<|tool_response>", "<turn|>", "<eos>")
_CLOSERS = (CLOSES, OPENS_CALL, *END_TOKENS)


class ThoughtCounter:
    """Counts the tokens in the thoughts of an output, as a thinking budget does. The marks around thoughts do not count."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self.num_tokens = 0
        self._opener, self._closers = _marks_of(tokenizer)
        # Few prompts have a thought, and this is found much sooner than where it ends.
        self._is_open = self._opener in prompt_ids and thought_start(tokenizer, prompt_ids) is not None

    def push(self, token_id: int) -> None:
        """Read the next token of the output."""
        if not self._is_open:
            self._is_open = token_id == self._opener
        elif token_id in self._closers:
            self._is_open = False
        else:
            self.num_tokens += 1


def thought_start(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> int | None:
    """Return the index of the first token inside the prompt's unclosed thought. Return None if no thought is open."""
    opener, closers = _marks_of(tokenizer)
    turn = tokenizer.token_id("<|turn>")
    for index in range(len(prompt_ids) - 1, -1, -1):
        if prompt_ids[index] in closers or prompt_ids[index] == turn:
            return None
        if prompt_ids[index] == opener:
            return index + 1
    return None


@lru_cache(maxsize=4)  # for every sample, looking the names up would take longer than a token
def _marks_of(tokenizer: Tokenizer) -> tuple[int | None, frozenset[int | None]]:
    """Return the ids of the token that opens a thought and of those that end it."""
    return tokenizer.token_id(OPENS), frozenset(map(tokenizer.token_id, _CLOSERS))
