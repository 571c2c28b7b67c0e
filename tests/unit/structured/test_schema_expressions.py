"""Patterns, formats and ranges of numbers of JSON schemas, as expressions of a grammar."""

from __future__ import annotations

import datetime
import ipaddress
import math
import random
from fractions import Fraction

import pytest

from culet.structured.schema.numbers import Bound, decimal_text, exact, range_body
from culet.structured.schema.patterns import FORMATS, Expression, expression, search_expression


def compiled(body: str) -> Expression:
    known = expression(body)
    assert known is not None, body
    return known


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        ("^a+$", ["a", "aaa"], ["", "ba", "a\n"]),
        ("b", ["abc", "b\n"], ["", "ac"]),
        (r"^\d{3}-\d{4}$", ["123-4567"], ["\N{ARABIC-INDIC DIGIT THREE}23-4567", "1123-4567"]),
        ("^(a|b$)", ["axx", "b"], ["bx", "xb"]),
        ("^a|b$", ["ax", "xb"], ["xa", "bx"]),
        ("(?:^a|b)c", ["acx", "xbcx"], ["xac"]),
        ("(?<year>[0-9])x", ["1x"], ["x"]),
        (r"[^\s/]\/", ["a/"], [" /"]),
        (r"^[\w.-]+@x\.com$", ["a.b@x.com"], ["@x.com", "a@xbcom"]),
        ("", ["", "a\n"], []),
        ("^$", [""], ["a"]),
        ("a{2}{", ["aa{"], ["a{"]),
        (r"\u{1F600}|\uD83D\uDE01", ["\U0001f600", "\U0001f601"], ["x"]),
        ("^.{2}$", ["ab", "日本"], ["\na"]),
        (r"[\]\-a]", ["]", "-"], ["b"]),
        (r"^[^\d\W]$", ["a"], ["1", "-", "\N{ARABIC-INDIC DIGIT THREE}"]),
        (r"\p{Lu}", ["É"], ["é"]),
    ],
)
def test_patterns(pattern: str, fitting: list[str], others: list[str]) -> None:
    known = compiled(f"/{search_expression(pattern)}/")
    assert all(map(known.matches, fitting))
    assert not any(map(known.matches, others))


@pytest.mark.parametrize(
    "pattern",
    [
        "(?=a)",
        "(?!a)b",
        r"\bfoo",
        r"(a)\1",
        "a**",
        "(",
        "[",
        "[]",
        "x)",
        "a^b",
        "(?i)a",
        r"\p{Nope}",
        "(^a)+",
        "(" * 50,
        "a{9999}",
    ],
)
def test_patterns_that_are_not_translated(pattern: str) -> None:
    assert search_expression(pattern) is None


def test_an_expression_knows_whether_it_is_empty() -> None:
    assert compiled("/(.|\\n)*x/ & /[a-w]*/").is_empty
    assert not compiled("/(.|\\n)*x/ & /[a-x]*/").is_empty


def test_dates_are_in_the_calendar() -> None:
    known = compiled(f"/{FORMATS['date']}/")
    day = datetime.date(1896, 1, 1)
    while day.year < 1905:
        assert known.matches(day.isoformat())
        day += datetime.timedelta(days=1)
    for text in ("1900-02-29", "2023-02-29", "0000-01-01", "2024-13-01", "2024-04-31", "2024-1-1"):
        assert not known.matches(text)
    assert known.matches("2000-02-29")


def test_addresses() -> None:
    known = compiled(f"/{FORMATS['ipv6']}/")
    for text in ("::", "::1", "1::", "1:2:3:4:5:6:7:8", "1:2::8", "fe80::1:2", "1:2:3:4:5:6:7::"):
        assert ipaddress.ip_address(text)
        assert known.matches(text)
    assert not any(map(known.matches, ("1:2:3", "1::2::3", ":::", "1:2:3:4:5:6:7:8:9", "12345::")))


def test_ranges() -> None:
    chance = random.Random(1)
    values = [0, 1, -1, 0.5, 3.14, -3.14, 7.25, 99, 100, -999, 12345, 10, 9, 1e-7, 2.5]
    texts = "0 1 -1 9 10 11 99 100 101 5 0.5 -0.5 0.05 3.14 3.1 3.15 3.2 3 -3.14 -3.13 -3.15 999 -999 12345 1.0 7.250 7.2500001"
    for _ in range(100):
        low, high = (Bound(exact(chance.choice(values)) or Fraction(), chance.random() < 0.3) for _ in range(2))
        is_whole = chance.random() < 0.4
        body = range_body(low, high, whole=is_whole)
        for text in texts.split():
            number = Fraction(text)
            is_inside = (low.value, low.is_open) <= (number, False) and (number, high.is_open) <= (high.value, False)
            is_inside = is_inside and not (is_whole and "." in text)
            assert (body is not None and compiled(body).matches(text)) == is_inside, (low, high, is_whole, text)
    many = "9" * 400
    assert not compiled(range_body(None, Bound(Fraction(10**6)), whole=True) or "").matches(f"-{many}"), "digits are bounded"


@pytest.mark.parametrize("value", [1, 100, 0.1, 0.25, 7, 1e-7, 123456789, 0.30000000000000004, 10**19, 1e300, 2**53 + 1])
@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_are_still_in_their_range_when_they_are_read(value: float, sign: int) -> None:
    """Numbers are read in double precision. 0.99999999999999999 is then 1."""
    bound = Bound(exact(sign * value) or Fraction(), is_open=True)
    below, above = (compiled(range_body(*ends, whole=False) or "") for ends in ((None, bound), (bound, None)))
    num_below = num_above = 0
    for num_digits in range(1, 22):
        unit = Fraction(1, 10**num_digits) * 10 ** len(str(int(value)))
        for steps in (-9, -2, -1, 1, 2, 9):
            text = decimal_text(bound.value + steps * unit)
            num_below += below.matches(text)
            num_above += above.matches(text)
            assert not below.matches(text) or float(text) < float(bound.value)
            assert not above.matches(text) or float(text) > float(bound.value)
    assert min(num_below, num_above) > 10, "most numbers can still be written"


def test_adjacent_doubles_have_nothing_between_them() -> None:
    low, high = (Bound(Fraction(repr(value)), is_open=True) for value in (1.0, math.nextafter(1.0, 2)))
    assert range_body(low, high, whole=False) is None
    assert range_body(Bound(Fraction(0), True), Bound(Fraction("0.1"), True), whole=False) is not None
