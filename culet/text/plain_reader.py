"""Read the output of a plain completion token by token."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from culet.text.output_pieces import Output, OutputPiece, TextPiece, ThoughtCounter
from culet.text.stops import StopMatcher
from culet.text.tokenizer import IncrementalDecoder, Tokenizer


class PlainReader:
    """Reads the output of a plain completion. All of it is text, thoughts too, but special tokens produce no text.

    The tokens in thoughts are counted. `prompt_ids` show whether the output starts inside one.
    """

    in_reasoning = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int] = (),
        end_ids: Collection[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = StopMatcher(stop, min_tokens)
        self._thoughts = ThoughtCounter(tokenizer, prompt_ids)
        self._end_ids = frozenset(end_ids)
        self._texts: list[str] = []
        self.has_ended = False

    def push(self, token_ids: Iterable[int]) -> list[OutputPiece]:
        """Read the next tokens and return the text that can no longer change."""
        texts = []
        for token_id in token_ids:
            if self.has_ended:
                break
            if token_id in self._end_ids:
                texts.append(self._flush())
                self.has_ended = True
            else:
                text, self.has_ended = self._stops.push(self._decoder.push((token_id,)))
                self._stops.count_token()
                self._thoughts.push(token_id)
                texts.append(text)
        return self._pieces("".join(texts))

    def finish(self) -> list[OutputPiece]:
        """Return the text that was held back. Call at the end of the output."""
        if self.has_ended:
            return []
        text = self._flush()
        self.has_ended = self._stops.matched is not None
        return self._pieces(text)

    def output(self) -> Output:
        """Return everything read so far."""
        return Output(
            "".join(self._texts),
            num_thought_tokens=self._thoughts.num_tokens,
            has_ended=self.has_ended,
            stop=self._stops.matched,
        )

    def _flush(self) -> str:
        text, is_hit = self._stops.push(self._decoder.flush())
        return text if is_hit else text + self._stops.flush()

    def _pieces(self, text: str) -> list[OutputPiece]:
        if not text:
            return []
        self._texts.append(text)
        return [TextPiece(text)]
