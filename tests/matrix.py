"""Tests with many combinations of parameters, of which the default run takes few."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

Axes = Mapping[str, Sequence[Any] | Mapping[str, Any]]


def default_cases(lengths: Sequence[int]) -> set[tuple[int, ...]]:
    """Return few cases (as indices) in which every value of every axis appears, as many as the longest axis has values.

    Where a shorter axis begins again, it is shifted, so that two short axes do not always meet in the same pairs.
    """
    return {
        tuple((case + bool(axis) * (case // length**axis)) % length for axis, length in enumerate(lengths))
        for case in range(max(lengths))
    }


def matrix(axes: Axes, *, fixtures: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Parametrise a test by all combinations of the axes' values. All but a few default cases are slow.

    An axis has one name, or several ("tokens, size") with tuples as values. The values may have names of their own. Axes in
    `fixtures` are fixtures, which get the values as their parameter.
    """
    values = [list(axis.values()) if isinstance(axis, Mapping) else list(axis) for axis in axes.values()]
    ids = [list(axis) if isinstance(axis, Mapping) else list(map(str, axis)) for axis in axes.values()]
    is_many = ["," in name for name in axes]
    default = default_cases([len(axis) for axis in values])
    cases = []
    for place in itertools.product(*(range(len(axis)) for axis in values)):
        given = [axis[index] if many else (axis[index],) for axis, index, many in zip(values, place, is_many, strict=True)]
        cases.append(
            pytest.param(
                *itertools.chain(*given),
                id="-".join(names[index] for names, index in zip(ids, place, strict=True)),
                marks=() if place in default else pytest.mark.slow,
            )
        )
    return pytest.mark.parametrize(", ".join(axes), cases, indirect=list(fixtures))
