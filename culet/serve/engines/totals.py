"""Add up the reports of several engines, for those who show only totals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import Any

from culet.scheduler.stats import Counters, SchedulerStats
from culet.serve.process.wire import Stats


def total(reports: Sequence[Stats]) -> Stats | None:
    """Return the sum of all reports, or None if there are none."""
    if len(reports) < 2:
        return reports[0] if reports else None
    return Stats(
        scheduler=_sum_fields(SchedulerStats, [report.scheduler for report in reports]),
        num_prompt_tokens=sum(report.num_prompt_tokens for report in reports),
        num_generated_tokens=sum(report.num_generated_tokens for report in reports),
        memory_bytes=sum(report.memory_bytes for report in reports),
        num_dropped_lines=sum(report.num_dropped_lines for report in reports),
    )


def _sum_fields(kind: type[Any], parts: Sequence[Any]) -> Any:
    return kind(**{entry.name: _sum([getattr(part, entry.name) for part in parts]) for entry in fields(kind)})


def _sum(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Counters):
        return _sum_fields(Counters, values)
    if isinstance(values[0], Mapping):
        return {name: sum(value.get(name, 0) for value in values) for name in dict.fromkeys(k for v in values for k in v)}
    if isinstance(values[0], list):
        return [sum(places) for places in zip_longest(*values, fillvalue=0)]
    return sum(values)
