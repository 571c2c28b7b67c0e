"""The estimate of what it costs to decode JSON counts values outside strings, however the text is cut into pieces."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from culet.serve.http.json_cost import JsonCost


def cost_of(value: Any) -> int:
    """Return the cost of a decoded value: its commas, and eight for each container."""
    if isinstance(value, dict):
        return 8 + max(0, len(value) - 1) + sum(map(cost_of, value.values()))
    if isinstance(value, list):
        return 8 + max(0, len(value) - 1) + sum(map(cost_of, value))
    return 0


def random_value(random: Random, depth: int = 0) -> Any:
    kind = random.randrange(3 if depth < 4 else 1)
    if kind == 0:
        return random.choice([1, None, 'a"b', "\\", '\\"', "[,{", '{"x": [1, 2]}', "é,\n", '\\\\",'])
    if kind == 1:
        return [random_value(random, depth + 1) for _ in range(random.randrange(5))]
    return {random.choice(['k"', "\\", "a,"]) + str(at): random_value(random, depth + 1) for at in range(random.randrange(5))}


@pytest.mark.parametrize("seed", range(50))
def test_any_cut_gives_the_same_cost(seed: int) -> None:
    random = Random(seed)
    value = [random_value(random) for _ in range(10)]
    text = json.dumps(value, ensure_ascii=False).encode()
    for max_piece in (1, 2, 3, 7, len(text)):
        cost, begin = JsonCost(), 0
        while begin < len(text):
            end = begin + random.randint(0, max_piece)
            cost.push(text[begin:end])
            begin = end
        assert cost.cost == cost_of(value)
