"""The recorded samples as columns, for charts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tailrace.state.activity import Sample

POINTS = 360
"""How many points a series has at most: as many as a chart has pixels to show, more or less."""

_LARGEST: dict[str, Callable[[Sample], float | None]] = {
    "lag_seconds": lambda one: one.lag_seconds,
    "lag_bytes": lambda one: one.lag_bytes,
    "journal_bytes": lambda one: one.journal_bytes,
    "slot_bytes": lambda one: one.slot_bytes,
    "pending": lambda one: one.pending,
}

COLUMNS = ("at", "copied_per_second", "changes_per_second", *_LARGEST)


def series_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """Columns of equal length, oldest first: `at` in seconds since 1970, rates, lags and sizes.

    Neighbours are joined where there are more than `POINTS`: rates are the average of them, of a lag or a size the
    largest is kept, so that no peak is lost.
    """
    step = -(-len(samples) // POINTS) or 1
    groups = [samples[start : start + step] for start in range(0, len(samples), step)]
    columns: dict[str, Any] = {"at": [round(group[-1].at.timestamp(), 1) for group in groups]}
    columns["copied_per_second"] = [_rate(group, lambda one: one.counts.copied) for group in groups]
    columns["changes_per_second"] = [_rate(group, lambda one: one.counts.changes) for group in groups]
    for name, value in _LARGEST.items():
        columns[name] = [_largest(group, value) for group in groups]
    return columns


def _rate(group: Sequence[Sample], count: Callable[[Sample], int]) -> float:
    return round(sum(map(count, group)) / max(sum(one.seconds for one in group), 1e-3), 1)


def _largest(group: Sequence[Sample], value: Callable[[Sample], float | None]) -> float | None:
    largest = max((known for one in group if (known := value(one)) is not None), default=None)
    return round(largest, 1) if isinstance(largest, float) else largest
