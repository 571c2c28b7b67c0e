"""Define Rank, which says what part of the model a process holds."""

from __future__ import annotations

from dataclasses import dataclass

from culet.errors import ConfigError


@dataclass(frozen=True)
class Rank:
    """One of `size` processes that share a model. The default rank holds all of it."""

    index: int = 0
    size: int = 1

    def share(self, count: int, unit: int = 1, *, may_repeat: bool = False) -> slice:
        """Return this rank's part of `count` rows or columns. A unit, such as the rows of a head, is never cut.

        With `may_repeat`, there may be more ranks than units, and neighbouring ranks hold the same unit. KV heads are
        replicated this way. Parts that ranks add up must not repeat.
        """
        units = count // unit
        if units * unit == count and units % self.size == 0:
            each = units // self.size
            first = self.index * each
        elif may_repeat and units * unit == count and self.size % units == 0:
            each = 1
            first = self.index * units // self.size
        else:
            raise ConfigError(f"{count} rows or columns in units of {unit} cannot be divided among {self.size} ranks")
        return slice(first * unit, (first + each) * unit)


ONLY_RANK = Rank()
