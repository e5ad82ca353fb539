"""How copying tables share a batch, and how the chunks of a batch share tasks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tailrace.source.split import Split

Id = TypeVar("Id", int, str)

LEAST_SHARE = 64
"""A small table counts as at least this fraction of a chunk: it costs a commit, whatever its size."""


@dataclass(frozen=True)
class CopyNeed:
    """What a table still has to copy: so many chunks, each of so many bytes (or rows)."""

    chunks: int
    size: int


def share_chunks(needs: Mapping[Id, CopyNeed], budget: int) -> dict[Id, int]:
    """How many chunks each table copies in a batch of about `budget` bytes (or rows).

    One chunk each in turn, the table with least to copy first. So one large table never keeps small ones waiting, and
    gets what they leave. A batch with any budget takes at least one chunk: it must make progress.
    """
    order = sorted(needs, key=lambda name: (needs[name].chunks * needs[name].size, name))
    taken = dict.fromkeys(order, 0)
    while budget > 0 and order:
        for name in order:
            if budget <= 0:
                break
            if needs[name].chunks > taken[name]:
                taken[name] += 1
                budget -= needs[name].size
        order = [name for name in order if needs[name].chunks > taken[name]]
    return taken


def least_size(size: int, chunk: int) -> int:
    """What a chunk of `size` counts in a budget in which a full one counts `chunk`."""
    return min(max(size, chunk // LEAST_SHARE, 1), chunk)


def group_copies(splits: Sequence[Split], cores: int, most: int | None = None) -> list[list[Split]]:
    """The splits of a copy by task. Splits of small tables share tasks, as many as there are cores; each of the others
    has its own. With `most`, no more tasks than that."""
    small = [split for split in splits if split.size is not None]
    large = [split for split in splits if split.size is None]
    if most is not None and len(large) + min(len(small), cores) > most:
        full = max((split.size for split in small if split.size is not None), default=0) + 1
        return _dealt([(full, split) for split in large] + [(split.size or 0, split) for split in small], most)
    return [[split] for split in large] + _dealt([(split.size or 0, split) for split in small], cores)


def _dealt(weighed: Sequence[tuple[int, Split]], tasks: int) -> list[list[Split]]:
    """The heaviest first, each to the task with least to do."""
    found: list[list[Split]] = [[] for _ in range(min(max(tasks, 1), len(weighed)))]
    load = [0] * len(found)
    for weight, split in sorted(weighed, key=lambda one: -one[0]):
        task = load.index(min(load))
        load[task] += weight + 1
        found[task].append(split)
    return found
