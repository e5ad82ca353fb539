"""The changes of a batch as one stream, in the order of the upstream's commits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from tailrace.destination import BeginEvent, CommitEvent, CopyBeginEvent, CopyEndEvent, Event, RelationEvent
from tailrace.model.change import Changes
from tailrace.model.schema import TableSchema


def event_stream(
    copied: Iterable[Changes],
    log: Sequence[Changes],
    completed: Sequence[TableSchema] = (),
    begun: Sequence[TableSchema] = (),
) -> Iterator[Event]:
    """Copied rows first, then the log: its transactions one after the other, and their changes in order.

    `completed` are the tables whose last copied rows are among these, `begun` those whose first are.

    The whole log is held in memory. A relation comes before the first changes of a table, and again whenever the
    table's columns change.
    """
    known: dict[str, TableSchema] = {}

    def with_relation(chunk: Changes) -> Iterator[Event]:
        name = str(chunk.table.table)
        if known.get(name) != chunk.table:
            known[name] = chunk.table
            yield RelationEvent(chunk.table)
        yield chunk

    yield from map(CopyBeginEvent, begun)
    for chunk in copied:
        if len(chunk):
            yield from with_relation(chunk)
    yield from map(CopyEndEvent, completed)
    current: int | None = None
    for chunk in _in_order([chunk for chunk in log if len(chunk)]):
        commit = chunk.first.commit
        if commit != current:
            if current is not None:
                yield CommitEvent(current)
            current = commit
            yield BeginEvent(
                commit, chunk.batch.column("txn")[0].as_py(), chunk.batch.column("committed_at")[0].as_py()
            )
        yield from with_relation(chunk)
    if current is not None:
        yield CommitEvent(current)


def _in_order(chunks: Sequence[Changes]) -> Iterator[Changes]:
    """The chunks cut into pieces of one table and one transaction, in order."""
    if not chunks:
        return
    commit = np.concatenate([chunk.numpy("commit") for chunk in chunks])
    ordinal = np.concatenate([chunk.numpy("ordinal") for chunk in chunks])
    number = np.repeat(np.arange(len(chunks)), [len(chunk) for chunk in chunks])
    row = np.concatenate([np.arange(len(chunk)) for chunk in chunks])
    order = np.lexsort((row, number, ordinal, commit))
    commit, number, row = commit[order], number[order], row[order]
    cuts = (commit[1:] != commit[:-1]) | (number[1:] != number[:-1]) | (row[1:] != row[:-1] + 1)
    starts = [0, *(np.flatnonzero(cuts) + 1).tolist(), len(order)]
    for start, end in pairwise(starts):
        chunk = chunks[int(number[start])]
        yield Changes(chunk.table, chunk.batch.slice(int(row[start]), end - start))
