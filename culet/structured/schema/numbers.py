"""Write ranges of numbers as bodies of Lark terminals.

Numbers are written without an exponent, and their number of digits is bounded, because a model that is unsure repeats digits
until it runs out of tokens.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

_MAX_WHOLE = 18  # digits before the point, or one more than the bounds have
_MAX_FRACTION = 17  # digits after it, or two more than the bounds have
_MAX_DOUBLE = 10**308  # Open bounds beyond it stay open, because the next double may be infinite.


class Bound(NamedTuple):
    """The least or greatest number of a range, which itself does not belong to an open range."""

    value: Fraction
    is_open: bool = False


def tightest_low(*bounds: Bound | None) -> Bound | None:
    """Return the greatest of several lower bounds, or None if there are none."""
    return max((bound for bound in bounds if bound is not None), default=None)


def tightest_high(*bounds: Bound | None) -> Bound | None:
    """Return the least of several upper bounds, or None if there are none."""
    known = (bound for bound in bounds if bound is not None)
    return min(known, key=lambda bound: (bound.value, not bound.is_open), default=None)


def exact(number: object) -> Fraction | None:
    """Return a number of a schema as it is written there (0.1 is a tenth), or None if it is not a finite number."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    return Fraction(repr(number)) if math.isfinite(number) else None


def least_common_multiple(left: Fraction, right: Fraction) -> Fraction:
    """Return the least number that both numbers divide."""
    scale = math.lcm(left.denominator, right.denominator)
    return Fraction(math.lcm(int(left * scale), int(right * scale)), scale)


def divided(bound: Bound | None, divisor: Fraction) -> Bound | None:
    """Return a bound on the quotients of numbers and a positive divisor."""
    return None if bound is None else Bound(bound.value / divisor, bound.is_open)


def whole_bounds(low: Bound | None, high: Bound | None) -> tuple[int | None, int | None]:
    """Return the least and greatest integer of a range."""
    least = None if low is None else math.floor(low.value) + 1 if low.is_open else math.ceil(low.value)
    most = None if high is None else math.ceil(high.value) - 1 if high.is_open else math.floor(high.value)
    return least, most


def range_body(low: Bound | None, high: Bound | None, *, whole: bool) -> str | None:
    """Return the body of a terminal for the numbers of a range, or None if there are none."""
    if whole:
        least, most = whole_bounds(low, high)
        low = None if least is None else Bound(Fraction(least))
        high = None if most is None else Bound(Fraction(most))
    else:
        low, high = _nearest_inside(low, math.inf), _nearest_inside(high, -math.inf)
    if low is not None and high is not None and (low.value, low.is_open or high.is_open) > (high.value, False):
        return None
    digits = _Digits(low, high, whole)
    zero = Bound(Fraction(0))
    parts = []
    if high is None or high.value > 0 or (high.value == 0 and not high.is_open):
        parts.append(digits.between(max(low, zero) if low is not None and low.value >= 0 else zero, high))
    if low is None or low.value < 0:
        nearest = Bound(-high.value, high.is_open) if high is not None and high.value < 0 else Bound(Fraction(0), True)
        farthest = None if low is None else Bound(-low.value, low.is_open)
        parts.append(f'"-" {digits.between(nearest, farthest)}')
    return " | ".join(parts)


def _nearest_inside(bound: Bound | None, direction: float) -> Bound | None:
    """Replace an open bound by a closed one: the nearest double inside the range.

    JSON parsers round numbers to doubles. 0.99999999999999999 is below 1, but parsers read it as 1. A bound of zero stays open,
    because the doubles next to it have hundreds of digits, and no shorter number is rounded to zero.
    """
    if bound is None or not bound.is_open or not bound.value or abs(bound.value) >= _MAX_DOUBLE:
        return bound
    return Bound(Fraction(repr(math.nextafter(float(bound.value), direction))))


class _Digits:
    """Writes numbers that are not negative."""

    def __init__(self, low: Bound | None, high: Bound | None, whole: bool) -> None:
        lengths = [tuple(map(len, _digits_of(bound.value))) for bound in (low, high) if bound is not None]
        self._whole = whole
        self._num_whole = max([_MAX_WHOLE, *(length[0] + 1 for length in lengths)])
        self._num_fraction = max([_MAX_FRACTION, *(length[1] + 2 for length in lengths)])
        self._rest = "" if whole else rf"(?:\.[0-9]{{1,{self._num_fraction}}})?"

    def between(self, low: Bound, high: Bound | None) -> str:
        """Return an expression for the numbers from `low` to `high`."""
        above = f"/{'|'.join(self._above(low))}/"
        return above if high is None else f"({above} & /{'|'.join(self._below(high))}/)"

    def _above(self, low: Bound) -> list[str]:
        digits, fraction = _digits_of(low.value)
        length = len(digits)
        texts = [f"[1-9][0-9]{{{length},{self._num_whole - 1}}}{self._rest}"]  # more digits
        texts += [
            f"{digits[:place]}[{int(digit) + 1}-9][0-9]{{{length - place - 1}}}{self._rest}"
            for place, digit in enumerate(digits)
            if digit < "9"
        ]
        if self._whole:
            return [*texts, *([] if low.is_open else [digits])]
        any_digits = f"[0-9]{{0,{self._num_fraction}}}"
        texts += [
            rf"{digits}\.{fraction[:place]}[{int(digit) + 1}-9]{any_digits}"
            for place, digit in enumerate(fraction)
            if digit < "9"
        ]
        if low.is_open:
            return [*texts, rf"{digits}\.{fraction}{any_digits}[1-9]{any_digits}"]
        return [*texts, rf"{digits}\.{fraction}{any_digits}" if fraction else digits + self._rest]

    def _below(self, high: Bound) -> list[str]:
        digits, fraction = _digits_of(high.value)
        length = len(digits)
        texts = [f"(?:0|[1-9][0-9]{{0,{length - 2}}}){self._rest}"] if length > 1 else []  # fewer digits
        for place, digit in enumerate(digits):
            least = 1 if place == 0 and length > 1 else 0
            if int(digit) > least:
                texts.append(f"{digits[:place]}[{least}-{int(digit) - 1}][0-9]{{{length - place - 1}}}{self._rest}")
        if self._whole:
            return [*texts, *([] if high.is_open else [digits])]
        any_digits = f"[0-9]{{0,{self._num_fraction}}}"
        for place, digit in enumerate(fraction):
            if digit > "0":
                texts.append(rf"{digits}\.{fraction[:place]}[0-{int(digit) - 1}]{any_digits}")
            texts.append(rf"{digits}\.{fraction[:place]}" if place else digits)
        if not high.is_open:
            zeros = f"0{{1,{self._num_fraction}}}"
            texts.append(rf"{digits}\.{fraction}(?:{zeros})?" if fraction else rf"{digits}(?:\.{zeros})?")
        return texts


def _digits_of(number: Fraction) -> tuple[str, str]:
    """Return the digits of a finite decimal number before and after its point, without its sign."""
    number = abs(number)
    whole = number.numerator // number.denominator
    rest, fraction = number - whole, ""
    while rest:
        rest *= 10
        fraction += str(rest.numerator // rest.denominator)
        rest -= rest.numerator // rest.denominator
    return str(whole), fraction


def decimal_text(number: Fraction) -> str:
    """Return a finite decimal number as JSON."""
    whole, fraction = _digits_of(number)
    return f"{'-' * (number < 0)}{whole}{'.' * bool(fraction)}{fraction}"
