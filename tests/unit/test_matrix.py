"""The default cases of a matrix have every value, and the others are slow."""

from __future__ import annotations

import itertools

import pytest

from tests.matrix import default_cases, matrix


@pytest.mark.parametrize("lengths", [(1,), (3,), (2, 2), (2, 3, 4), (4, 7), (5, 3, 4), (2, 6, 2)], ids=str)
def test_every_value_is_in_a_default_case(lengths: tuple[int, ...]) -> None:
    cases = default_cases(lengths)
    assert len(cases) <= max(lengths)
    for axis, length in enumerate(lengths):
        assert {case[axis] for case in cases} == set(range(length))


def test_short_axes_meet_in_all_pairs() -> None:
    assert {(first, last) for first, _, last in default_cases((2, 6, 2))} == set(itertools.product(range(2), range(2)))


def test_the_whole_matrix_is_there() -> None:
    mark = matrix({"a, b": [(1, 2), (3, 4)], "kind": {"plain": 0.5, "odd": None}, "c": [7, 8, 9]}).mark
    names, cases = mark.args
    assert names == "a, b, kind, c"
    assert [case.values for case in cases][:2] == [(1, 2, 0.5, 7), (1, 2, 0.5, 8)]
    assert len({case.values for case in cases}) == len({case.id for case in cases}) == 12
    is_slow = [bool(case.marks) for case in cases]
    assert is_slow.count(False) == 3
    assert {mark.name for case in cases for mark in case.marks} == {"slow"}
