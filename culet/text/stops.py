"""Find stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until a stop string is complete. Holds back only text that may still become a stop string.

    The result does not depend on how the text is split. The first stop string to be completed ends the text. If several end at
    the same character, the longest one counts. Knuth-Morris-Pratt keeps the cost per character constant, no matter how long
    the strings are. Stop strings count only after the first `min_tokens` tokens.
    """

    def __init__(self, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._num_ignored = min_tokens  # tokens left in which stop strings do not count
        self._stops = tuple(stops)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # per stop string, the length of its prefix that ends the text
        self._first = {stop[0] for stop in self._stops}
        self._held = ""
        self.matched: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> tuple[str, bool]:
        """Return (text that can no longer change, whether a stop string is complete). Later text is dropped."""
        if self.matched is not None:
            return "", True
        if self._num_ignored:
            return text, False
        if not self._held and self._first.isdisjoint(text):
            return text, False
        text, begin = self._held + text, len(self._held)
        for end in range(begin, len(text)):
            hit = self._advance(text[end])
            if hit is not None:
                self._held, self.matched = "", hit
                return text[: end + 1 - len(hit)], True
        keep = len(text) - max(self._matched)
        self._held = text[keep:]
        return text[:keep], False

    def count_token(self) -> None:
        """Count a token. Call after its text, if any, was pushed."""
        if self._num_ignored:
            self._num_ignored -= 1

    def flush(self) -> str:
        """Return the text that was held back. Call at the end of the text."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        """Read one character and return the longest stop string that it completes, if any."""
        hit: str | None = None
        for index, stop in enumerate(self._stops):
            borders, length = self._borders[index], self._matched[index]
            while length and (length == len(stop) or stop[length] != character):
                length = borders[length - 1]
            length += stop[length] == character
            self._matched[index] = length
            if length == len(stop) and (hit is None or length > len(hit)):
                hit = stop
        return hit


def _borders(word: str) -> list[int]:
    """Return, for each prefix of `word`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(word)
    length = 0
    for index in range(1, len(word)):
        while length and word[index] != word[length]:
            length = borders[length - 1]
        length += word[index] == word[length]
        borders[index] = length
    return borders
