"""A repeatable piece of a batch, read by one task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from tailrace.model.change import Changes
from tailrace.model.schema import TableSchema

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Split:
    """A repeatable piece of a micro-batch, read by one task. Sources subclass it; it is pickled to executors.

    `copies` is set when the split reads rows of one table for its initial copy (every change is `Op.READ`);
    `starts` when it belongs to a batch with the first chunk of that copy, `completes` to one with the last.
    `weights` is how many bytes of log it holds per table, so that tables can be spread over tasks. `schemas` holds
    those tables at the version they have at the end of the batch, which may be a version without changes.
    `size` is set when it copies so few bytes that it should share a task with others.
    """

    copies: TableSchema | None = None
    starts: bool = False
    completes: bool = False
    weights: Mapping[str, int] = field(default_factory=dict)
    schemas: Mapping[str, TableSchema] = field(default_factory=dict)
    size: int | None = None

    def only(self, tables: Collection[str]) -> Self:
        """The split for some of its tables, so that several tasks can share it. Sources override it to read less."""
        return replace(self, weights={name: weight for name, weight in self.weights.items() if name in tables})


def weigh(splits: Iterable[Split]) -> Mapping[str, int]:
    """How many bytes of log there are per table. Pure."""
    weights: Counter[str] = Counter()
    for split in splits:
        weights.update(split.weights)
    return weights


@dataclass(frozen=True)
class ScanSplit(Split, ABC):
    """A split that reads a lot to find few changes, such as a comparison of a range of keys.

    A pipeline runs each in its own task, and the task that writes the table reads what all of them found. Reading the
    split itself gives the same changes.
    """

    @abstractmethod
    def run(self, read: Callable[[Split], Iterator[Changes]]) -> Split:
        """The split from which its changes are read afterwards; `read` is the source's. Called on executors.

        A repeat reads again, and finds the changes of that time. An error of the table is raised when the returned
        split is read; every other error is raised here.
        """
