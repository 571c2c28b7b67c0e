"""Lists of things to talk about."""

from __future__ import annotations

from training.data.material.table import Table

_TABLE = Table("topics")


ANIMALS = _TABLE["animals"]
THINGS = _TABLE["things"]
NATURE = _TABLE["nature"]
FOODS = _TABLE["foods"]
IDEAS = _TABLE["ideas"]
JOBS = _TABLE["jobs"]
ACTIVITIES = _TABLE["activities"]
EVENTS = _TABLE["events"]
HEROES = _TABLE["heroes"]
PLACES = _TABLE["places"]
FINDS = _TABLE["finds"]
GROUPS = _TABLE["groups"]
PAIRS = _TABLE["pairs"]
DIFFERENCES = _TABLE["differences"]
QUESTIONS = _TABLE["questions"]
