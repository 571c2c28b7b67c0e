"""Stop strings over a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on until a stop string is complete, and holds back only what may still become one.

    The result does not depend on how the text is cut into pieces: the stop string that is complete first ends the text,
    and of several that end at the same character the one that began first. Each is followed by the method of Knuth,
    Morris and Pratt, so that the cost per character is constant, however long the strings are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how many characters of each stop string the text ends with
        self._first = {stop[0] for stop in self._stops}
        self._held = ""
        self.matched: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is certain now, whether a stop string was met). After one is met nothing comes any more."""
        if self.matched is not None:
            return "", True
        if not self._held and self._first.isdisjoint(text):
            return text, False
        text, begin = self._held + text, len(self._held)
        for end in range(begin, len(text)):
            met = self._advance(text[end])
            if met is not None:
                self._held, self.matched = "", met
                return text[: end + 1 - len(met)], True
        keep = len(text) - max(self._matched)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        """What was held back, once the text has ended."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        """Take one character; the longest stop string that it completes."""
        met: str | None = None
        for index, stop in enumerate(self._stops):
            borders, length = self._borders[index], self._matched[index]
            while length and (length == len(stop) or stop[length] != character):
                length = borders[length - 1]
            length += stop[length] == character
            self._matched[index] = length
            if length == len(stop) and (met is None or length > len(met)):
                met = stop
        return met


def _borders(word: str) -> list[int]:
    """For each prefix of `word`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(word)
    length = 0
    for index in range(1, len(word)):
        while length and word[index] != word[length]:
            length = borders[length - 1]
        length += word[index] == word[length]
        borders[index] = length
    return borders
