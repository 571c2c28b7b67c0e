"""Find the rules of a grammar that never end. An object that must contain another object of the same kind has such a rule.

A rule can end if one of its alternatives consists only of literals, terminals and rules that can end. Optional parts do not
matter. This module reads only the notation that `rules` writes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Mapping
from typing import TypeAlias

# A special token, a literal, an expression, a rule's or terminal's name, a bound on repetitions, or a sign.
_TOKEN = re.compile(
    r"""<\|?[^>]*>|"[^"\\]*(?:\\.[^"\\]*)*"|/[^/\\]*(?:\\.[^/\\]*)*/|(?P<name>\w+)|(?P<repeat>[?*]|\{\d+,\d*\})|[()|]"""
)
_EMBEDDED = "%json"  # A schema inside a rule is the whole rule. It is a number.
_NEVER = "NEVER"
_LITERAL = ""  # stands for a part that can always end

# A list of alternatives. Each is a list of the names and groups that it requires, and a group is again a list of alternatives.
_Body: TypeAlias = "list[list[str | _Body]]"


def endless_rules(rules: Mapping[str, str]) -> frozenset[str]:
    """Return the names of the rules that cannot end. A name without a rule of its own is taken to end, except NEVER."""
    bodies: dict[str, _Body] = {}
    users = defaultdict[str, list[str]](list)  # the rules in which a name occurs
    for name, text in rules.items():
        if name[0].islower() and not text.startswith(_EMBEDDED):  # names of terminals are upper case
            bodies[name] = _parse(text)
            for match in _TOKEN.finditer(text):
                if match["name"]:
                    users[match["name"]].append(name)
    endless = {*bodies, _NEVER}
    waiting = list(bodies)
    while waiting:
        name = waiting.pop()
        if name in endless and _can_end(bodies[name], endless):
            endless.discard(name)
            waiting += users[name]
    return frozenset(endless - {_NEVER})


def _can_end(body: _Body, endless: Container[str]) -> bool:
    def is_fine(part: str | _Body) -> bool:
        return part not in endless if isinstance(part, str) else _can_end(part, endless)

    return any(all(map(is_fine, parts)) for parts in body)


def _parse(text: str) -> _Body:
    groups: list[_Body] = [[[]]]  # the open ones, the innermost last
    for match in _TOKEN.finditer(text):
        token, body = match.group(), groups[-1]
        if token == "(":
            groups.append([[]])
        elif token == ")":
            groups.pop()
            groups[-1][-1].append(body)
        elif token == "|":
            body.append([])
        elif match["repeat"] is None:
            body[-1].append(match["name"] or _LITERAL)
        elif token in "?*" or token.startswith("{0,"):
            body[-1].pop()
    return groups[0]
